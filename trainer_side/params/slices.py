"""Elements of a tensor that each place of a device mesh holds.

Pure functions of numbers; ``trainer_side.params.dtensor`` applies them to DTensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

#: Of one tensor, over all places: what lies in more pieces is quicker gathered whole.
MAX_SLICES = 4096


class Split(NamedTuple):
    """Cut of a tensor by one dim of a mesh."""

    dim: int
    """Dim of the tensor; cut as ``torch.chunk`` does: the last parts may be smaller or empty."""
    factor: int = 1
    """Number of pieces that it is cut into first: each place gets its part of every piece."""


class Slice(NamedTuple):
    """Row-major elements of a tensor: see ``trainer_side.params.sharded.HeldRun``."""

    begin: int
    numel: int
    stride: int = 0
    repeats: int = 1


@dataclass(frozen=True)
class Cell:
    """Elements that each of some places holds in full."""

    places: tuple[int, ...]
    """Places of the mesh that are replicas of the cell, row-major."""
    slices: tuple[Slice, ...]
    """Slices, in the row-major order of those elements alone."""
    numel: int


class _Span(NamedTuple):
    """Indices along one dim of a tensor."""

    begin: int
    end: int


def cells_of(
    shape: Sequence[int], mesh_shape: Sequence[int], splits: Sequence[Split | None]
) -> list[Cell] | None:
    """Return the cells of a tensor, which together hold each of its elements once.

    Args:
        shape: Shape of the whole tensor.
        mesh_shape: Shape of the mesh.
        splits: One for each dim of the mesh, applied in this order; None replicates.

    Returns:
        None if there would be more than ``MAX_SLICES``. A cell of no elements is left out.
    """
    cutting = [dim for dim, split in enumerate(splits) if split is not None]
    places: dict[tuple[int, ...], list[int]] = {}
    for place, coordinate in enumerate(product(*map(range, mesh_shape))):
        places.setdefault(tuple(coordinate[dim] for dim in cutting), []).append(place)
    cells, left = [], MAX_SLICES
    for parts, holders in places.items():
        spans = [[_Span(0, size)] for size in shape]
        for dim, part in zip(cutting, parts, strict=True):
            split = splits[dim]
            assert split is not None
            spans[split.dim] = _part(spans[split.dim], split.factor, mesh_shape[dim], part)
        numel = prod(map(_length, spans))
        if not numel:
            continue
        rows = _rows(shape, spans)
        left -= rows.num_slices
        if left < 0:
            return None
        cells.append(Cell(tuple(holders), tuple(_slices(shape, spans, rows)), numel))
    return cells


def _length(spans: Iterable[_Span]) -> int:
    return sum(end - begin for begin, end in spans)


def _part(spans: list[_Span], factor: int, count: int, part: int) -> list[_Span]:
    """Return one of ``count`` parts from each of ``factor`` pieces."""
    found: list[_Span] = []
    for piece in range(factor) if factor > 1 else ():
        for span in _chunk(_chunk(spans, factor, piece), count, part):
            if found and found[-1].end == span.begin:
                found[-1] = _Span(found[-1].begin, span.end)
            else:
                found.append(span)
    return found if factor > 1 else _chunk(spans, count, part)


def _chunk(spans: Iterable[_Span], count: int, part: int) -> list[_Span]:
    """Return part number ``part`` of ``torch.chunk`` of these indices."""
    spans = list(spans)
    size = -(-_length(spans) // count)
    first, end = part * size, (part + 1) * size
    found, position = [], 0
    for span in spans:
        begin = span.begin + max(0, first - position)
        stop = min(span.end, span.begin + end - position)
        if begin < stop:
            found.append(_Span(begin, stop))
        position += span.end - span.begin
    return found


def _is_all(spans: Sequence[_Span], size: int) -> bool:
    return len(spans) == 1 and spans[0] == (0, size)


class _Rows(NamedTuple):
    """Rows that elements lie in, cut from the last dim that is not held in full."""

    outer: int
    """Number of leading dims that are gone through index by index, each index with its own
    slices."""
    last: int
    """Dim that rows are cut from; those behind it are held in full."""
    num_slices: int


def _rows(shape: Sequence[int], spans: Sequence[Sequence[_Span]]) -> _Rows:
    cut = [dim for dim, size in enumerate(shape) if not _is_all(spans[dim], size)]
    if not cut:
        return _Rows(0, 0, 1)
    last = outer = cut[-1]
    if len(spans[last]) == 1:  # else one row's spans lie side by side
        outer = cut[-2] if len(cut) > 1 else 0
    return _Rows(outer, last, prod(map(_length, spans[:outer])) * len(spans[outer]))


def _slices(shape: Sequence[int], spans: Sequence[Sequence[_Span]], rows: _Rows) -> Iterator[Slice]:
    outer, last, _ = rows
    sizes = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if not shape:
        yield Slice(0, 1)
        return
    stride = shape[last] * sizes[last]
    indices = [[i for span in dim for i in range(*span)] for dim in spans[:outer]]
    for index in product(*indices):
        base = sum(i * size for i, size in zip(index, sizes, strict=False))
        for begin, end in spans[outer]:
            if outer == last:
                yield Slice(base + begin * sizes[last], (end - begin) * sizes[last])
                continue
            repeats = (end - begin) * sizes[outer] // stride
            (within,) = spans[last]
            first = base + begin * sizes[outer] + within.begin * sizes[last]
            numel = (within.end - within.begin) * sizes[last]
            yield Slice(first, numel, stride, repeats) if repeats > 1 else Slice(first, numel)
