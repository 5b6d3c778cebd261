"""Locations of DTensor elements: FSDP2, HSDP, tensor and expert parallelism, and other uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from trainer_side.params.elements import HeldRun
from trainer_side.params.sharded import GatheredParam, Sharded
from trainer_side.ranks.ranks import SENDER
from weft_rl.contract.errors import UnsupportedError

#: Of one tensor, over all places: what lies in more pieces is quicker gathered whole.
MAX_SLICES = 4096


class MeshSplit(NamedTuple):
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
    shape: Sequence[int], mesh_shape: Sequence[int], splits: Sequence[MeshSplit | None]
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


_Key = tuple[DeviceMesh, tuple[Placement, ...], torch.Size]
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def reshard(modules: Iterable[torch.nn.Module]) -> None:
    """Free whole parameters that a forward left, so that they are DTensors again.

    After a forward without gradients the root module keeps whole parameters in the
    compute dtype in place of its shards. No communication.
    """
    for module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()


def local_of(param: DTensor) -> torch.Tensor:
    """Return a DTensor's elements at this rank, by reference. This is what ``to_local`` returns
    without its way through autograd, which is ten times as long."""
    local: torch.Tensor | None = getattr(param, "_local_tensor", None)
    # A subclass may be values that are still on their way here.
    return local if local is not None and type(local) in _PLAIN else param.to_local()


@dataclass(frozen=True)
class _Layout:
    """Locations of the elements of all DTensors of one shape and placement."""

    parts: tuple[tuple[tuple[int, ...], Cell], ...]
    """Cells of elements, each with the trainer's ranks that hold it; several ranks are replicas."""
    runs: tuple[HeldRun, ...] | None
    """Runs of all cells, made once since they are many; None if there are replicas to choose
    from."""
    own_numel: int
    """Number of elements at this rank."""


class DTensorPlaces:
    """Locations of the elements of a model's DTensors.

    Each part is given by one of its replicas: the one with the fewest bytes to give so far. So
    every rank must ask for the same parameters in the same order.

    Args:
        rank_of: Map from the application's ranks to the trainer's.
    """

    def __init__(self, rank_of: Mapping[int, int]) -> None:
        self._rank_of = rank_of
        # Asking a mesh for its ranks costs more than gathering a small tensor.
        self._layouts: dict[_Key, _Layout | None] = {}
        self._given: Counter[int] = Counter()

    def of(self, param: DTensor) -> Sharded | GatheredParam:
        """Return the location of a DTensor's elements.

        Raises:
            UnsupportedError: Its mesh has ranks that do not push together, or it holds other
                elements here than its placements say.
        """
        key = (param.device_mesh, param.placements, param.shape)
        if key not in self._layouts:
            self._layouts[key] = self._layout(*key)
        layout, local = self._layouts[key], local_of(param)
        if layout is None:
            is_known = _splits(param.placements) is not None
            lies = "in too many pieces" if is_known else f"as {param.placements}"
            why = f"it lies {lies}, which only DTensor can put together"
            return GatheredParam(param.shape, param.dtype, param.full_tensor, local, why)
        if local.numel() != layout.own_numel:
            # Whoever makes DTensors may cut them as placements cannot say.
            raise UnsupportedError(
                f"a DTensor of shape {tuple(param.shape)} and placements {param.placements} has "
                f"{local.numel()} elements at this rank; by its placements it has "
                f"{layout.own_numel}"
            )
        if layout.runs is not None:
            return Sharded(param.shape, param.dtype, layout.runs, local)
        runs: list[HeldRun] = []
        nearest: list[HeldRun] = []
        for ranks, cell in layout.parts:
            giver = min(ranks, key=lambda rank: (self._given[rank], rank))
            self._given[giver] += cell.numel * param.dtype.itemsize
            near = SENDER if SENDER in ranks else giver
            runs += [HeldRun(giver, *part) for part in cell.slices]
            nearest += [HeldRun(near, *part) for part in cell.slices]
        return Sharded(param.shape, param.dtype, tuple(runs), local, tuple(nearest))

    def _layout(
        self, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size
    ) -> _Layout | None:
        """Return the layout of DTensors; None where only their framework can put them together."""
        members: list[int] = mesh.mesh.flatten().tolist()
        givers = self._likes_of_sender(mesh, members)
        if not all(rank in self._rank_of for rank in (*members, *givers)) or not givers:
            raise UnsupportedError(
                "a parameter is sharded over ranks that do not push together: make the "
                "Publisher with ranks='all', or with the group of all of them"
            )
        ranks = [self._rank_of[rank] for rank in givers]
        splits = _splits(placements)
        cells = None if splits is None else cells_of(shape, mesh.shape, splits)
        if cells is None:
            return None
        parts = tuple((tuple(ranks[place] for place in c.places), c) for c in cells)
        own = members.index(dist.get_rank()) if dist.get_rank() in members else -1
        runs = None
        if all(len(holders) == 1 for holders, _ in parts):
            runs = tuple(HeldRun(rank, *each) for (rank,), cell in parts for each in cell.slices)
        return _Layout(parts, runs, sum(cell.numel for cell in cells if own in cell.places))

    def _likes_of_sender(self, mesh: DeviceMesh, members: list[int]) -> list[int]:
        """Return the application's ranks that give a mesh's elements, row-major.

        These are the mesh's own ranks if the sender is one of them. Else, in a larger mesh, they
        are those of the corresponding part that the sender is in; empty if there is none.

        Parameters that tensor parallelism leaves whole within FSDP2 are sharded over such parts.
        Each part holds the same, but nothing declares them replicas, so they are not mixed.
        """
        sender = next(rank for rank, own in self._rank_of.items() if own == SENDER)
        if sender in members:
            return members
        whole = mesh._get_root_mesh().mesh
        found = (whole == sender).nonzero()
        if not len(found):
            return []
        places = torch.stack([(whole == rank).nonzero()[0] for rank in members])
        is_shared = (places == places[0]).all(0)
        like: list[int] = whole[tuple(torch.where(is_shared, found[0], places).T)].tolist()
        return like


def _splits(placements: Iterable[Placement]) -> list[MeshSplit | None] | None:
    splits: list[MeshSplit | None] = []
    for placement in placements:
        # A subclass may mean something else.
        if type(placement) is _StridedShard:
            splits.append(MeshSplit(placement.dim, int(placement.split_factor)))
        elif type(placement) is Shard:
            splits.append(MeshSplit(placement.dim))
        elif type(placement) is Replicate:
            splits.append(None)
        else:
            return None
    return splits
