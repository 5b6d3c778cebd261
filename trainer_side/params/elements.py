"""Elements of a parameter where they lie, some at this rank; nothing is brought together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class HeldRun:
    """Elements of a parameter that one rank holds: contiguous, or a regular slice.

    Counterpart of ``weft_rl.contract.manifest.Run``, which has no holder.
    """

    rank: int
    """Rank that holds the elements, as the trainer counts its ranks."""
    begin: int
    """First element in the row-major order of the whole parameter."""
    numel: int
    """Elements of each row."""
    stride: int = 0
    """Elements from the beginning of one row to that of the next, more than a row has. It is 0
    where there is only one row."""
    repeats: int = 1
    """Number of rows."""

    @property
    def size(self) -> int:
        """Elements of all rows."""
        return self.numel * self.repeats

    @property
    def end(self) -> int:
        """Index of the element behind the last one."""
        return self.begin + self.stride * (self.repeats - 1) + self.numel

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows, and elements of each."""
        return self.repeats, self.numel

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the run's elements in a contiguous parameter, as a view of its rows."""
        begin = whole.storage_offset() + self.begin
        return whole.as_strided(self.shape, (self.stride, 1), begin)


class Elements(Protocol):
    """Elements of one parameter, as the ranks hold it."""

    @property
    def runs(self) -> Sequence[HeldRun]:
        """Runs that hold every element once, at any rank; the same on every rank."""

    def held(self, number: int) -> torch.Tensor | None:
        """Return this rank's run ``number`` (of its own, from 0), by reference, 1-D or in the shape
        of the whole; None if computed."""

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
        assert self._local is not None
        # What does not lie in a row is copied, and not kept.
        return (self._views or self._views_of(self._local))[number]

    def _views_of(self, local: torch.Tensor) -> list[torch.Tensor]:
        flat = local.detach().reshape(-1)
        return [flat[begin:end] for begin, end in self._spans]

    def fill(self, number: int, out: torch.Tensor) -> None:
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
