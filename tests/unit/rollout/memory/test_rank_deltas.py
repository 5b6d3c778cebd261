"""Parts of a base at the ranks of a replica, and whether they are all of it."""

from __future__ import annotations

import pytest
import torch

from rollout_side.memory.messages import Follow
from rollout_side.memory.rank_deltas import covers, shards_of
from rollout_side.memory.versions import ElementPlace, ElementShard

WHOLE = ElementShard(0, 24, 0, 0)
#: Of 6 rows of 4 elements.
LEFT, RIGHT = ElementShard(0, 22, 2, 4), ElementShard(2, 24, 2, 4)


@pytest.mark.parametrize(
    ("shards", "is_all"),
    [
        ([WHOLE, WHOLE], True),
        ([ElementShard(0, 8, 0, 0), ElementShard(8, 24, 0, 0), ElementShard(8, 24, 0, 0)], True),
        ([ElementShard(0, 8, 0, 0), ElementShard(9, 24, 0, 0)], False),
        ([ElementShard(0, 9, 0, 0), ElementShard(8, 24, 0, 0)], False),
        ([ElementShard(0, 8, 0, 0)], False),
        ([], False),
        ([LEFT, RIGHT], True),
        ([RIGHT, LEFT, LEFT], True),
        ([LEFT], False),
        ([LEFT, ElementShard(3, 24, 1, 4)], False),
        ([LEFT, ElementShard(2, 20, 2, 4)], False),
        ([ElementShard(0, 21, 1, 4), ElementShard(1, 24, 3, 4)], True),
        ([LEFT, WHOLE], False),
        ([ElementShard(0, 22, 2, 4), ElementShard(2, 24, 2, 5)], False),
    ],
)
def test_shards_have_each_element_once(shards: list[ElementShard], is_all: bool) -> None:
    assert covers(shards, 24) is is_all


def test_shards_are_told_as_numbers() -> None:
    shards = [[WHOLE], [], [LEFT, RIGHT]]
    numbers = tuple(number for own in shards for shard in own for number in shard)
    assert shards_of(Follow(1, b"", (1, 0, 2), numbers)) == shards


def test_a_part_of_each_row_is_read_and_written() -> None:
    tensor = torch.arange(24, dtype=torch.int32).view(6, 4)
    part = tensor[:, 2:].contiguous()
    place = ElementPlace(*RIGHT[:2], part.view(-1), *RIGHT[2:])
    assert place.shard == RIGHT
    elements = torch.tensor([1, 2, 5, 7, 12, 22, 23])
    here, found = place.read(elements)
    assert elements[here].tolist() == found.tolist() == [2, 7, 22, 23]
    place.write(elements, -elements.to(torch.int32))
    tensor.view(-1)[[2, 7, 22, 23]] *= -1
    assert part.equal(tensor[:, 2:])
