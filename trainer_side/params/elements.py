"""Elements of a parameter where they lie, some at this rank; nothing is brought together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Protocol

import torch

from trainer_side.params.params import Params
from trainer_side.params.sharded import GatheredParam, HeldRun, Sharded, ShardedParams


class Elements(Protocol):
    """Elements of one parameter, as the ranks hold it."""

    @property
    def runs(self) -> Sequence[HeldRun]:
        """Runs that hold every element once, at any rank; the same on every rank."""

    def held(self, number: int) -> torch.Tensor | None:
        """Return this rank's run ``number`` (of its own, from 0), 1-D, by reference; None if
        computed."""

    def fill(self, number: int, out: torch.Tensor) -> None:
        """Compute run ``number``, rounded once to the dtype of ``out``: 1-D, contiguous,
        anywhere."""


class HeldElements:
    """Elements that are sent as they are; see ``Elements``.

    Args:
        runs: Runs of all ranks.
        rank: Number of this rank.
        local: This rank's elements, any shape; None if it has none. By reference.
        spans: First element in ``local``, and the one behind the last, of each own run.
    """

    def __init__(
        self,
        runs: Sequence[HeldRun],
        rank: int,
        local: torch.Tensor | None,
        spans: Sequence[tuple[int, int]],
    ) -> None:
        self.runs = runs
        #: Number of this rank.
        self.rank = rank
        self._local, self._spans = local, spans
        self._views = [] if local is None or not local.is_contiguous() else self._views_of(local)

    def held(self, number: int) -> torch.Tensor:
        """See ``Elements``."""
        assert self._local is not None
        # What does not lie in a row is copied, and not kept.
        return (self._views or self._views_of(self._local))[number]

    def _views_of(self, local: torch.Tensor) -> list[torch.Tensor]:
        flat = local.detach().reshape(-1)
        return [flat[begin:end] for begin, end in self._spans]

    def fill(self, number: int, out: torch.Tensor) -> None:
        """See ``Elements``."""
        out.copy_(self.held(number))

    def cut(self, blocks: Sequence[tuple[int, int]]) -> list[HeldElements]:
        """Return parts of the parameter, each a tensor of its own.

        Args:
            blocks: First element and the one behind the last of each; ascending, disjoint.
        """
        runs: list[list[HeldRun]] = [[] for _ in blocks]
        spans: list[list[tuple[int, int]]] = [[] for _ in blocks]
        ends = [end for _, end in blocks]
        own = iter(self._spans)
        for run in self.runs:
            first = next(own)[0] if run.rank == self.rank else 0
            for index in range(bisect_right(ends, run.begin), len(blocks)):
                if blocks[index][0] >= run.end:
                    break
                for part, at in _within(run, *blocks[index]):
                    runs[index].append(part)
                    if run.rank == self.rank:
                        spans[index].append((first + at, first + at + part.size))
        return [
            HeldElements(each, self.rank, self._local, of)
            for each, of in zip(runs, spans, strict=True)
        ]


def held_by(param: Sharded, rank: int) -> HeldElements:
    """Return a parameter's elements as the ranks hold it, at one of them."""
    ends = list(accumulate(run.size for run in param.runs if run.rank == rank))
    return HeldElements(param.runs, rank, param.local, list(pairwise([0, *ends])))


def _within(run: HeldRun, begin: int, end: int) -> Iterator[tuple[HeldRun, int]]:
    """Yield the parts of a run inside a block, with begins counted from the block's first element.
    With each comes the number of the run's elements before it."""
    stride = run.stride or run.numel
    row = max(0, (begin - run.begin - run.numel) // stride + 1)
    last = min(run.repeats, -(-(end - run.begin) // stride))
    while row < last:
        first = run.begin + row * stride
        low, high = max(first, begin), min(first + run.numel, end)
        at = row * run.numel + low - first
        rows = (end - first - run.numel) // stride + 1  # that end in the block
        rows = min(rows, run.repeats - row) if low == first else 1
        if rows > 1:
            yield HeldRun(run.rank, low - begin, run.numel, run.stride, rows), at
        else:
            yield HeldRun(run.rank, low - begin, high - low), at
        row += max(1, rows)


def held_elements(params: Params, name: str) -> HeldElements | None:
    """Return a parameter's elements where the ranks hold them; None if only its framework can
    gather."""
    if not isinstance(params, ShardedParams):
        return None
    param = params.placed[name]
    return held_by(param, params.ranks.rank) if isinstance(param, Sharded) else None


def why_not_held(params: Params, name: str) -> str:
    """Return the reason why ``held_elements`` is None, for messages; empty if it is not."""
    if not isinstance(params, ShardedParams):
        return "it is not sharded"
    param = params.placed[name]
    return param.why if isinstance(param, GatheredParam) else ""
