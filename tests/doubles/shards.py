"""Parameters as the ranks of a trainer hold them, in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainer_side.params.dtensor import MeshSplit, cells_of
from trainer_side.params.elements import Elements, HeldRun
from trainer_side.params.sharded import GatheredParam, Sharded, ShardedParams
from trainer_side.pushes.rank_push import HeldPush
from trainer_side.ranks.ranks import OneRank, Ranks
from trainer_side.sharding.plan import plan_shards
from trainer_side.sources.source import HeldTensors
from weft_rl.contract.manifest import Manifest


class OneOfSeveral(OneRank):
    """A rank, whose messages are what the others gave before.

    Args:
        given: By rank, what each gave last; filled.
    """

    def __init__(self, rank: int, size: int, given: dict[int, torch.Tensor] | None = None) -> None:
        self.rank, self.size = rank, size
        self._given = {} if given is None else given

    def exchange(self, messages: Sequence[torch.Tensor]) -> None:
        """See ``Ranks.exchange``: of those that have not given yet, nothing comes."""
        for rank, message in enumerate(messages):
            if rank == self.rank:
                self._given[rank] = message.clone()
            elif rank in self._given:
                message.copy_(self._given[rank])


def held_push(
    source: Any, elements: Sequence[Elements | None], ranks: Ranks, manifest: Manifest
) -> HeldPush:
    """Of tensors that ranks hold so, or are gathered at the first."""
    tensors = HeldTensors.of(elements, source.metas, ranks.rank)
    return HeldPush(source, tensors, manifest, plan_shards(manifest, tensors.held), ranks)


def sharded(
    whole: Mapping[str, torch.Tensor],
    dim: int,
    rank: int,
    num_ranks: int,
    given: dict[int, torch.Tensor] | None = None,
) -> ShardedParams:
    """Cut along ``dim``, or along the last there is; as one of the ranks has them."""
    placed: dict[str, Sharded | GatheredParam] = {}
    for name, tensor in whole.items():
        cells = cells_of(tensor.shape, [num_ranks], [MeshSplit(min(dim, tensor.dim() - 1))])
        assert cells is not None
        runs = tuple(HeldRun(cell.places[0], *each) for cell in cells for each in cell.slices)
        own = [run.of(tensor).reshape(-1) for run in runs if run.rank == rank]
        local = torch.cat(own) if own else None
        placed[name] = Sharded(tensor.shape, tensor.dtype, runs, local)
    return ShardedParams(placed, "test", OneOfSeveral(rank, num_ranks, given))
