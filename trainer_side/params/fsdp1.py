"""FSDP1 (``FullyShardedDataParallel``): the parameters of a unit in one flat parameter.

They lie end to end in it, and each rank has an equal run of it.

The flat parameter's attributes are not public, but the same from torch 2.1 to 2.13;
the alternative, ``summon_full_params``, makes every rank hold every unit whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

from trainer_side.params.elements import HeldRun
from trainer_side.params.sharded import Sharded
from trainer_side.ranks.ranks import SENDER
from weft_rl.contract.errors import UnsupportedError


def units_of(model: torch.nn.Module, rank_of: Mapping[int, int]) -> Iterator[tuple[str, Sharded]]:
    """Yield raw name and place of each parameter that FSDP1 manages.

    Args:
        rank_of: Map from the application's ranks to the trainer's.

    Raises:
        UnsupportedError: A unit's ranks are not all this trainer's.
    """
    for prefix, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._has_params:
            for name, sharded in _unit(module, rank_of):
                yield f"{prefix}.{name}" if prefix else name, sharded


def _unit(unit: Any, rank_of: Mapping[int, int]) -> Iterator[tuple[str, Sharded]]:
    handle = unit._handle
    flat = handle.flat_param
    is_sharded = handle.uses_sharded_strategy
    # Before the first forward the shard is where the whole will be.
    local = getattr(flat, "_local_shard", flat.data) if is_sharded else flat.data
    holders = dist.get_process_group_ranks(handle.process_group) if is_sharded else [_own_rank()]
    # The same on every rank, so of those that the sender is of.
    givers = _replica_of_sender(unit, holders, rank_of) if is_sharded else []
    if not all(rank in rank_of for rank in (*holders, *givers)):
        raise UnsupportedError(
            "an FSDP unit is sharded over ranks that do not push together: make the Publisher "
            "with ranks='all', or with the group of all of them"
        )
    ranks = [rank_of[rank] for rank in givers] if is_sharded else [SENDER]
    own, size = holders.index(_own_rank()), local.numel()
    begin = position = 0
    for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not is_padding:
            runs = tuple(_runs(begin, numel, size, ranks))
            first, last = max(begin, own * size), min(begin + numel, (own + 1) * size)
            piece = local.detach()[first - own * size : last - own * size]
            yield (
                flat._fqns[position],
                Sharded(
                    torch.Size(flat._shapes[position]),
                    flat.dtype,
                    runs,
                    piece if first < last else None,
                ),
            )
            position += 1
        begin += numel


def _replica_of_sender(
    unit: Any, holders: Sequence[int], rank_of: Mapping[int, int]
) -> Sequence[int]:
    """Return the ranks with the elements of ``holders`` in the sender's replica (HYBRID_SHARD).

    A rank knows its own replica and its counterparts in the others. Replicas are as far apart as
    the counterparts, for they are those of a mesh, or nodes of equal size.
    """
    among = getattr(unit, "_inter_node_pg", None)
    likes = [_own_rank()] if among is None else dist.get_process_group_ranks(among)
    for like in likes:
        replica = [rank + like - _own_rank() for rank in holders]
        if any(rank_of.get(rank) == SENDER for rank in replica):
            return replica
    raise UnsupportedError(
        "rank 0 of this trainer is in no replica of an FSDP unit: make the Publisher "
        "with ranks='all'"
    )


def _own_rank() -> int:
    return int(dist.get_rank())


def _runs(begin: int, numel: int, size: int, ranks: list[int]) -> Iterator[HeldRun]:
    """Yield the runs of [begin, begin + numel) of a flat parameter, ``size`` elements a rank."""
    position = begin
    while position < begin + numel:
        index = position // size
        end = min(begin + numel, (index + 1) * size)
        yield HeldRun(ranks[index], position - begin, end - position)
        position = end
