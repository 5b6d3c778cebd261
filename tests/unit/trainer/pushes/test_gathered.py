"""What is read in step: where it fails at one rank, all have its error."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.doubles.linked_ranks import linked_ranks
from trainer_side.packing.packer import whole_packing
from trainer_side.pushes.rank_push import GatheredPush
from trainer_side.ranks.torch_ranks import TorchRanks
from trainer_side.sources.source import CastRule, Source, tensor_source
from weft_rl.contract.errors import CapacityError
from weft_rl.contract.manifest import plan_buckets

_SIZE = 3


class _Source(Source):
    """Gathers from all ranks, one of which has no room for the second tensor."""

    description, is_collective = "test", True

    def __init__(self, ranks: TorchRanks, fails: int) -> None:
        tensors = {name: torch.zeros(64) for name in "abc"}
        self.metas = tensor_source(tensors, CastRule(), "test").metas
        self._ranks, self._fails = ranks, fails
        self.has_ended = False

    def read(self, first: int, count: int, views: Sequence[torch.Tensor] | None) -> None:
        if first == 1 and self._ranks.rank == self._fails:
            raise CapacityError("no room")
        outs = {rank: torch.zeros(64, dtype=torch.uint8) for rank in range(1, _SIZE)}
        mine = None if self._ranks.rank == 0 else outs[1]
        self._ranks.collect(mine, outs if self._ranks.rank == 0 else {})

    def end_reading(self) -> None:
        self.has_ended = True


@pytest.mark.parametrize("fails", range(_SIZE))
def test_an_error_in_a_gather_is_everybodys_though_they_wait_in_it(fails: int) -> None:
    with linked_ranks(_SIZE) as ranks, ThreadPoolExecutor(_SIZE) as pool:
        sources = [_Source(each, fails) for each in ranks]
        packing = whole_packing(plan_buckets(sources[0].metas, 256))

        def push(rank: int) -> None:
            own = GatheredPush(sources[rank], ranks[rank], packing)
            if rank:
                own.assist(is_under_way=True)
            for runs in packing.runs or ():
                own.fill(runs, [torch.zeros(64)])

        found = [future.exception(20) for future in [pool.submit(push, r) for r in range(_SIZE)]]
        assert [type(error) for error in found] == [CapacityError] * _SIZE
        assert all(source.has_ended for source in sources[1:])
