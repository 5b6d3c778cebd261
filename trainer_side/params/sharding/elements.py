"""A parameter where its elements lie, some of them at this rank: nothing is brought together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from trainer_side.params.params import Params
from trainer_side.params.sharding.sharded import Run, Sharded, ShardedParams


class Elements(Protocol):
    """One parameter, as the ranks hold it."""

    @property
    def runs(self) -> Sequence[Run]:
        """Every element once, whoever holds it; the same on every rank."""

    def held(self, number: int) -> torch.Tensor | None:
        """This rank's run ``number`` (of its own, from 0), 1-D, by reference; None where it is
        computed."""

    def fill(self, number: int, out: torch.Tensor) -> None:
        """Compute it, rounded once, to the dtype of ``out``: 1-D, contiguous, anywhere."""


class HeldElements:
    """Elements that are sent as they are; see ``Elements``.

    Args:
        param: Where they lie; by reference.
        rank: This one.
    """

    def __init__(self, param: Sharded, rank: int) -> None:
        self.runs, self._local = param.runs, param.local
        sizes = [run.size for run in param.runs if run.rank == rank]
        self._ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]

    def held(self, number: int) -> torch.Tensor:
        """See ``Elements``."""
        assert self._local is not None
        begin = self._ends[number - 1] if number else 0
        return self._local.detach().reshape(-1)[begin : self._ends[number]]

    def fill(self, number: int, out: torch.Tensor) -> None:
        """See ``Elements``."""
        out.copy_(self.held(number))


def held_elements(params: Params, name: str) -> HeldElements | None:
    """A parameter as the ranks hold it; None where only its framework can put it together."""
    if not isinstance(params, ShardedParams):
        return None
    param = params.placed[name]
    return HeldElements(param, params.ranks.rank) if isinstance(param, Sharded) else None
