"""Tensors of a sharded trainer, each rank reading what it holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from trainer_side.params.elements import Elements
from trainer_side.params.params import copy_into
from trainer_side.params.sharded import HeldRun
from trainer_side.ranks.ranks import SENDER, Ranks
from trainer_side.sources.source import Source, torch_dtypes
from weft_rl.contract.manifest import Run, why_not

#: Tensors that must be brought together are brought to one rank before anything is sent: more
#: of them than this, and all are gathered bucket by bucket.
MAX_GATHERED_BYTES = 2 * 2**30


@runtime_checkable
class HeldSource(Source, Protocol):
    """Source that knows where the elements of its tensors lie."""

    shards: tuple[Ranks, Any] | None
    """Result of ``shard_source`` for this source, and the ranks it was made for."""

    def elements(self, index: int) -> Elements | None:
        """Return tensor ``index`` as the ranks hold it; None where it must be gathered."""

    def why_gathered(self, index: int) -> str:
        """Return the reason why ``elements`` is None, for messages."""

    def prepare(self) -> None:
        """Bring inputs of the computation to every rank, before any of ``elements`` is read.
        Collective, blocks."""

    def release(self) -> None:
        """Free what ``prepare`` brought, after a push."""


class ShardSource:
    """Tensors of one push; the same plan on every rank, each with its own elements.

    Args:
        source: The same tensors, whole; collective.
        elements: Elements of each tensor; None for one that must be gathered.
        rank: Number of this rank.
    """

    def __init__(self, source: HeldSource, elements: Sequence[Elements | None], rank: int) -> None:
        self.description, self.metas = source.description, source.metas
        self._source, self._elements, self._rank = source, elements, rank
        self._dtypes = torch_dtypes(source.metas)
        self._whole: dict[int, torch.Tensor] = {}
        #: Which tensors are brought together first.
        self.gathered = [i for i, each in enumerate(elements) if each is None]
        #: For each tensor, who holds which elements of it.
        self.held = [
            _held(i, each, meta.num_bytes // meta.dtype.itemsize_bytes)
            for i, (each, meta) in enumerate(zip(elements, self.metas, strict=True))
        ]
        self._numbers = _numbers(self.held, rank)

    @property
    def num_holders(self) -> int:
        """Number of ranks that hold some of it."""
        return len({rank for tensor in self.held for rank, _ in tensor})

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks that the push's success does not show."""
        if not self.gathered:
            return ()
        names = [self.metas[i].name for i in self.gathered[:3]]
        more = f" and {len(self.gathered) - 3} more" if len(self.gathered) > 3 else ""
        return (
            f"{', '.join(names)}{more} could not be sent as the ranks hold them, and were brought "
            "together at rank 0 first",
        )

    def gather(self) -> None:
        """Gather the tensors that must be gathered; collective, blocks. They are kept at the
        sender, on the host."""
        self._source.prepare()
        try:
            for index in self.gathered:
                meta = self.metas[index]
                out = None
                if self._rank == SENDER:
                    out = [torch.empty(meta.shape, dtype=self._dtypes[index])]
                    self._whole[index] = out[0]
                self._source.read(index, 1, out)
        finally:
            self._source.end_reading()

    def release(self) -> None:
        """Free gathered tensors, once a push has ended."""
        self._whole.clear()
        self._source.release()

    def fill(self, runs: Sequence[Run], outs: Sequence[torch.Tensor]) -> None:
        """Copy or compute elements that this rank holds; not collective.

        Args:
            runs: Runs of ``held``.
            outs: A view for each, 1-D, contiguous, of the dtype that travels; overwritten.
        """
        views: list[torch.Tensor] = []
        tensors: list[torch.Tensor] = []
        for run, out, held in zip(runs, outs, self.by_reference(runs), strict=True):
            if held is not None:
                views.append(out)
                tensors.append(held)
            elif (each := self._elements[run.tensor]) is not None:
                each.fill(self._numbers[run], out)
        if views:
            copy_into(views, tensors)

    def by_reference(self, runs: Sequence[Run]) -> list[torch.Tensor | None]:
        """Return elements that this rank holds, where they lie. They are 1-D, in their own dtypes;
        None for those that are computed."""
        return [self._held(run) for run in runs]

    def _held(self, run: Run) -> torch.Tensor | None:
        each = self._elements[run.tensor]
        return self._whole[run.tensor].view(-1) if each is None else each.held(self._numbers[run])


@dataclass(frozen=True)
class GatheredTensors:
    """Tensors of one push that rank 0 gathers bucket by bucket, since most must be gathered
    anyhow."""

    num_gathered: int
    """Number of tensors that must be gathered."""
    num_tensors: int
    first: str
    """Name of the first tensor that must be gathered."""
    why: str
    """Reason why that tensor must be gathered."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks that the push's success does not show."""
        return (
            f"rank 0 gathered all: {self.num_gathered} of {self.num_tensors} tensors could not be "
            f"sent by the ranks that hold them, {self.first!r} first: {self.why}",
        )


def shard_source(source: Source, ranks: Ranks) -> ShardSource | GatheredTensors | None:
    """Return the tensors of ``source`` as the ranks hold them, or why rank 0 gathers all.

    None where rank 0 has all: in a trainer of one rank, or of whole parameters. The same on every
    rank.
    """
    if ranks.size == 1 or not source.is_collective:
        return None
    if not isinstance(source, HeldSource):
        return None
    # Of a source that is kept, parameters have not moved.
    if source.shards is None or source.shards[0] is not ranks:
        source.shards = ranks, _shards_of(source, ranks)
    found: ShardSource | GatheredTensors = source.shards[1]
    return found


def _shards_of(source: HeldSource, ranks: Ranks) -> ShardSource | GatheredTensors:
    found = [_sendable(i, source.elements(i), source) for i in range(len(source.metas))]
    left = sum(m.num_bytes for m, each in zip(source.metas, found, strict=True) if each is None)
    total = sum(meta.num_bytes for meta in source.metas)
    if left > MAX_GATHERED_BYTES or 2 * left > total:
        missing = [i for i, each in enumerate(found) if each is None]
        first = source.metas[missing[0]].name
        why = _why_gathered(missing[0], source)
        return GatheredTensors(len(missing), len(found), first, why)
    return ShardSource(source, found, ranks.rank)


def _why_gathered(index: int, source: HeldSource) -> str:
    elements, meta = source.elements(index), source.metas[index]
    if elements is None:
        return source.why_gathered(index)
    found = (why_not(_run(index, run), meta) for run in elements.runs)
    return f"it cannot travel as it is cut: {next(filter(None, found), 'into nothing')}"


def _sendable(index: int, elements: Elements | None, source: Source) -> Elements | None:
    """Return the elements if their runs can travel as they are; else None."""
    if elements is None:
        return None
    meta = source.metas[index]
    is_wrong = any(why_not(_run(index, run), meta) for run in elements.runs)
    return None if is_wrong or not elements.runs else elements


def _held(index: int, elements: Elements | None, numel: int) -> list[tuple[int, Run]]:
    if elements is None:
        return [(SENDER, Run(index, 0, numel))]
    return [(run.rank, _run(index, run)) for run in elements.runs]


def _run(index: int, run: HeldRun) -> Run:
    return Run(index, run.begin, run.numel, run.stride, run.repeats)


def _numbers(held: Sequence[Sequence[tuple[int, Run]]], rank: int) -> Mapping[Run, int]:
    """Map each run of this rank to its number among its tensor's own runs."""
    numbers: dict[Run, int] = {}
    for tensor in held:
        own = defaultdict[int, int](int)
        for holder, run in tensor:
            if holder == rank:
                numbers[run] = own[run.tensor]
                own[run.tensor] += 1
    return numbers
