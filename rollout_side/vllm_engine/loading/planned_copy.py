"""Copies of a plan, and fewer ones that do the same.

A model of many experts takes thousands of copies of some MiB each, and a launch takes longer than
the GPU needs for one. They lie at equal distances, on the wire and in the parameters, so that one
copy of one more dimension does the work of many: 9.7 GB of experts in 3,072 copies took an H100
47 ms, and in 2 copies 6.6, as long as one copy of all its bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from rollout_side.vllm_engine.loading.processed_modules import storage_of

_WORD = torch.int64
#: A launch takes as long as a copy of so many bytes.
_LARGE_BYTES = 16 * 2**20
#: A parameter, or a part of it, and the view of the wire that belongs to it.
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class PlannedCopy:
    """A copy: part of a bucket's bytes to part of a parameter."""

    target: torch.Tensor
    """The part of the parameter; on the meta device if it is one of a loading form."""
    offset: int
    """Start of the source in its bucket, in elements of its dtype."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def source(self, wire: torch.Tensor) -> torch.Tensor:
        """Return the view of a bucket's bytes that is copied from (or, to read it back, to)."""
        typed = wire.view(self.target.dtype)
        return typed.as_strided(self.shape, self.stride, typed.storage_offset() + self.offset)

    def is_all_of(self, shape: Sequence[int]) -> bool:
        """Return whether the source is a whole tensor of that shape, its elements in order."""
        is_first = self.offset == 0 and prod(self.shape) == prod(shape)
        return is_first and self.is_row_major

    @property
    def is_row_major(self) -> bool:
        """True if the source's elements lie one behind the other, in order."""
        return self.stride == tuple(_row_major(self.shape))

    @property
    def is_expanded(self) -> bool:
        """True if several elements of the parameter come from one of the wire."""
        return any(s == 0 and n > 1 for n, s in zip(self.shape, self.stride, strict=True))


def _row_major(shape: Sequence[int]) -> list[int]:
    return [prod(shape[dim + 1 :]) for dim in range(len(shape))]


def joined(pieces: Iterable[PlannedCopy]) -> list[PlannedCopy]:
    """Return fewer copies that do the same, in elements of 8 bytes where that is possible.

    Copies of one shape are one copy where they lie at equal distances, both in the parameter and on
    the wire: the experts of a layer, say.
    """
    found = list(pieces)
    while True:
        alike: dict[object, list[PlannedCopy]] = {}
        for piece in found:
            target = piece.target
            key = (storage_of(target), target.dtype, piece.shape, target.stride(), piece.stride)
            alike.setdefault(key, []).append(piece)
        fewer = [run for own in alike.values() for run in _runs(own)]
        if len(fewer) == len(found):
            return [_in_words(piece) for piece in found]
        found = [_one(run) for run in fewer]


def _runs(pieces: list[PlannedCopy]) -> list[list[PlannedCopy]]:
    """Return copies that differ by their places alone, those at equal distances together."""
    pieces.sort(key=lambda piece: piece.target.storage_offset())
    runs = [[pieces[0]]]
    for piece in pieces[1:]:
        last = runs[-1]
        step = _distance(last[-1], piece)
        # A stride of a tensor is never below zero.
        if step[0] > 0 and step[1] >= 0 and (len(last) == 1 or step == _distance(*last[:2])):
            last.append(piece)
        else:
            runs.append([piece])
    return runs


def _distance(first: PlannedCopy, second: PlannedCopy) -> tuple[int, int]:
    """Return how far apart two copies lie in their parameter and on the wire, in elements."""
    begin, end = first.target.storage_offset(), second.target.storage_offset()
    return int(end) - int(begin), second.offset - first.offset


def _one(run: Sequence[PlannedCopy]) -> PlannedCopy:
    """Return the copy that does the work of those at equal distances."""
    first = run[0]
    if len(run) == 1:
        return first
    there, here = _distance(*run[:2])
    shape = (len(run), *first.shape)
    target = first.target.detach()
    target = target.as_strided(shape, (there, *target.stride()), target.storage_offset())
    return PlannedCopy(target, first.offset, shape, (here, *first.stride))


def _in_words(piece: PlannedCopy) -> PlannedCopy:
    """Return the same copy in elements of 8 bytes, if rows and distances are multiples of them."""
    target = piece.target.detach()
    ratio = _WORD.itemsize // target.element_size()
    if ratio == 1 or not piece.shape or target.stride(-1) != 1 or piece.stride[-1] != 1:
        return piece
    numbers = (piece.offset, target.storage_offset(), piece.shape[-1])
    strides = (*target.stride()[:-1], *piece.stride[:-1])
    if any(number % ratio for number in (*numbers, *strides)) or target.data_ptr() % _WORD.itemsize:
        return piece
    return PlannedCopy(
        target.view(_WORD),
        piece.offset // ratio,
        (*piece.shape[:-1], piece.shape[-1] // ratio),
        (*(stride // ratio for stride in piece.stride[:-1]), 1),
    )


def launch(pairs: Iterable[Pair]) -> None:
    """Launch copies: large ones one by one, others in one go for each dtype."""
    together: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in pairs:
        # One that is not contiguous would have all of its call copied one by one.
        if target.nbytes < _LARGE_BYTES and target.is_contiguous() and source.is_contiguous():
            targets, sources = together.setdefault(target.dtype, ([], []))
            targets.append(target)
            sources.append(source)
        else:
            target.copy_(source, non_blocking=True)
    for targets, sources in together.values():
        torch._foreach_copy_(targets, sources, non_blocking=True)
