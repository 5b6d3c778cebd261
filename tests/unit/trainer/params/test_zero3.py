"""DeepSpeed's equal shards, the last ones padded, as runs: every element once."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer_side.params.sharded import GatheredParam, Sharded, of_zero3
from weft_rl.contract.errors import UnsupportedError


def param(shape: list[int], size: int, **further: Any) -> Any:
    """As ZeRO-3 leaves a parameter on each of ``size`` ranks: padded to equal shards."""
    numel = torch.Size(shape).numel()
    shard = torch.zeros(-(-numel // size), dtype=torch.bfloat16)
    return SimpleNamespace(ds_shape=shape, ds_tensor=shard, ds_process_group=size, **further)


@pytest.fixture(autouse=True, scope="module")
def groups():
    """A group is known by its size; its ranks are those of a larger job."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.get_process_group_ranks", lambda n: list(range(4, 4 + n)))
        yield


@given(st.lists(st.integers(1, 9), max_size=3), st.integers(1, 12))
def test_runs_cover_every_element_once(shape, size):
    placed = of_zero3(param(shape, size), {4 + rank: rank for rank in range(size)})
    assert isinstance(placed, Sharded)
    shard = -(-placed.shape.numel() // size)
    end = 0
    for run in placed.runs:
        assert (run.begin, run.repeats) == (end, 1)
        assert run.begin == run.rank * shard, "at the beginning of its rank's shard"
        assert 0 < run.numel <= shard
        end += run.numel
    assert end == placed.shape.numel()


def test_second_copies_are_left_to_deepspeed():
    """hpZ keeps them beside the shards."""
    ranks = {4: 0, 5: 1}
    assert isinstance(
        of_zero3(param([4], 2, ds_secondary_tensor=torch.zeros(2)), ranks), GatheredParam
    )
    assert isinstance(of_zero3(param([4], 2, ds_secondary_tensor=None), ranks), Sharded)


def test_shards_of_others_are_refused():
    with pytest.raises(UnsupportedError, match="do not push together"):
        of_zero3(param([4], 3), {4: 0, 5: 1})
