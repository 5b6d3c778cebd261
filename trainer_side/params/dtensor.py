"""FSDP2, HSDP and other uses of DTensor."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor as DTensor
from torch.distributed.tensor import Replicate, Shard

from trainer_side.params.sharded import Gathered, Run, Sharded
from trainer_side.ranks import SENDER
from weft.contract.errors import UnsupportedError


def reshard(model: torch.nn.Module) -> None:
    """Free what a forward left unsharded, so that parameters are DTensors again.

    After a forward without gradients the root module keeps whole parameters in the
    compute dtype in place of its shards. No communication.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def of_dtensor(param: DTensor, rank_of: Mapping[int, int]) -> Sharded | Gathered:
    """Where a DTensor's elements are.

    Args:
        rank_of: The application's rank to the trainer's.
    """
    local = param.to_local()
    mesh, placements = param.device_mesh, param.placements
    sharded = [dim for dim, p in enumerate(placements) if not isinstance(p, Replicate)]
    coordinate = _coordinate(mesh.mesh, SENDER, rank_of)
    is_rows = [p for p in placements if type(p) is Shard and p.dim == 0]
    if coordinate is None:
        raise UnsupportedError(
            "a parameter is sharded over ranks that do not push together: make the Publisher "
            "with ranks='all', or with the group of all of them"
        )
    if len(sharded) > 1 or len(is_rows) != len(sharded):
        return Gathered(param.shape, param.dtype, param.full_tensor, local)
    if not sharded:
        run = Run(SENDER, 0, param.numel())
        return Sharded(param.shape, param.dtype, (run,), local)
    # Of the replicas of this row (HSDP), the one that the sender belongs to.
    where: list[int | slice] = list(coordinate)
    where[sharded[0]] = slice(None)
    holders = [int(rank) for rank in mesh.mesh[tuple(where)]]
    runs = _rows(param.shape, [rank_of[rank] for rank in holders])
    return Sharded(param.shape, param.dtype, runs, local)


def _coordinate(
    mesh: torch.Tensor, rank: int, rank_of: Mapping[int, int]
) -> tuple[int, ...] | None:
    """Where in the mesh a rank of the trainer is; None if the mesh is not all ours."""
    members = [int(member) for member in mesh.flatten()]
    if not all(member in rank_of for member in members):
        return None
    for index, member in enumerate(members):
        if rank_of[member] == rank:
            return tuple(int(i) for i in torch.unravel_index(torch.tensor(index), mesh.shape))
    return None


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
