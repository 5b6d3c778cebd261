"""Locations of DTensor elements: FSDP2, HSDP, tensor and expert parallelism, and other uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from trainer_side.params.sharded import Gathered, HeldRun, Sharded
from trainer_side.params.slices import Cell, Split, cells_of
from trainer_side.ranks.ranks import SENDER
from weft_rl.contract.errors import UnsupportedError

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

    def of(self, param: DTensor) -> Sharded | Gathered:
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
            return Gathered(param.shape, param.dtype, param.full_tensor, local, why)
        if local.numel() != layout.own_numel:
            # Whoever makes DTensors may cut them as placements cannot say.
            raise UnsupportedError(
                f"a DTensor of shape {tuple(param.shape)} and placements {param.placements} has "
                f"{local.numel()} elements here, where these say {layout.own_numel}"
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


def _splits(placements: Iterable[Placement]) -> list[Split | None] | None:
    splits: list[Split | None] = []
    for placement in placements:
        # A subclass may mean something else.
        if type(placement) is _StridedShard:
            splits.append(Split(placement.dim, int(placement.split_factor)))
        elif type(placement) is Shard:
            splits.append(Split(placement.dim))
        elif type(placement) is Replicate:
            splits.append(None)
        else:
            return None
    return splits
