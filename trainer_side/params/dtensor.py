"""FSDP2, HSDP and other uses of DTensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainer_side.params.sharded import Gathered, Run, Sharded
from trainer_side.ranks import SENDER
from weft.contract.errors import UnsupportedError


def reshard(modules: Iterable[torch.nn.Module]) -> None:
    """Free what a forward left unsharded, so that parameters are DTensors again.

    After a forward without gradients the root module keeps whole parameters in the
    compute dtype in place of its shards. No communication.
    """
    for module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()


class DTensorPlaces:
    """Where the elements of a model's DTensors are.

    Args:
        rank_of: The application's rank to the trainer's.
    """

    def __init__(self, rank_of: Mapping[int, int]) -> None:
        self._rank_of = rank_of
        # Asking a mesh for its ranks costs more than gathering a small tensor.
        self._holders: dict[tuple[DeviceMesh, int | None], list[int]] = {}

    def of(self, param: DTensor) -> Sharded | Gathered:
        """Where the elements of a DTensor are.

        Raises:
            UnsupportedError: Its mesh has ranks that do not push together.
        """
        placements = param.placements
        sharded = [dim for dim, p in enumerate(placements) if not isinstance(p, Replicate)]
        dim = sharded[0] if len(sharded) == 1 else None
        holders = self._holders_of(param.device_mesh, dim)
        if not sharded:
            run = Run(SENDER, 0, param.numel())
            return Sharded(param.shape, param.dtype, (run,), param.to_local())
        if dim is None or type(placements[dim]) is not Shard or placements[dim] != Shard(0):
            return Gathered(param.shape, param.dtype, param.full_tensor, param.to_local())
        return Sharded(param.shape, param.dtype, _rows(param.shape, holders), param.to_local())

    def _holders_of(self, mesh: DeviceMesh, dim: int | None) -> list[int]:
        """The trainer's ranks along a dim of the mesh, of the replica (HSDP) that the
        sender belongs to."""
        key = (mesh, dim)
        if key not in self._holders:
            members = mesh.mesh
            ours = members.clone().apply_(lambda rank: self._rank_of.get(rank, -1))
            if not bool((ours == SENDER).any()) or bool((ours < 0).any()):
                raise UnsupportedError(
                    "a parameter is sharded over ranks that do not push together: make the "
                    "Publisher with ranks='all', or with the group of all of them"
                )
            where: list[int | slice] = (ours == SENDER).nonzero()[0].tolist()
            if dim is not None:
                where[dim] = slice(None)
            self._holders[key] = [int(rank) for rank in ours[tuple(where)].flatten()]
        return self._holders[key]


def _rows(shape: torch.Size, ranks: list[int]) -> tuple[Run, ...]:
    """Rows as ``torch.chunk`` deals them out: the last ones may have fewer or none."""
    row = shape[1:].numel()
    size = -(-shape[0] // len(ranks))
    runs = []
    for index, rank in enumerate(ranks):
        begin = min(index * size, shape[0])
        count = min(size, shape[0] - begin)
        if count:
            runs.append(Run(rank, begin * row, count * row))
    return tuple(runs)
