"""DeepSpeed ZeRO-3: each rank has an equal run of each parameter's elements.

The last run is padded. Attribute names are DeepSpeed's (0.14 to 0.19).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from trainer_side.params.sharded import Gathered, HeldRun, Sharded
from weft_rl.contract.errors import UnsupportedError


def of_zero3(param: Any, rank_of: Mapping[int, int]) -> Sharded | Gathered:
    """Return the location of a parameter's elements.

    Args:
        param: Parameter that ZeRO-3 manages.
        rank_of: Map from the application's ranks to the trainer's.
    """
    shape, shard = torch.Size(param.ds_shape), param.ds_tensor
    holders = dist.get_process_group_ranks(param.ds_process_group)
    if not all(rank in rank_of for rank in holders):
        raise UnsupportedError(
            "a parameter is sharded over ranks that do not push together: make the Publisher "
            "with ranks='all', or with the group of all of them"
        )
    if _is_special(param):
        why = "only DeepSpeed can put it together (NVMe offload, hpZ, MiCS or quantised shards)"
        return Gathered(shape, shard.dtype, lambda: _gather(param), shard, why)
    numel, size = shape.numel(), shard.numel()
    runs = tuple(
        HeldRun(rank_of[rank], begin, min(size, numel - begin))
        for rank, begin in zip(holders, range(0, size * len(holders), size), strict=True)
        if begin < numel
    )
    return Sharded(shape, shard.dtype, runs, shard)


def _is_special(param: Any) -> bool:
    """Return whether shards are elsewhere, quantised, or cut in another way."""
    shard = param.ds_tensor
    return (
        getattr(getattr(shard, "status", None), "name", "AVAILABLE") != "AVAILABLE"
        or hasattr(shard, "ds_quant_scale")
        or getattr(param, "ds_secondary_tensor", None) is not None
        or hasattr(param, "comm")
    )


def _gather(param: Any) -> torch.Tensor:
    import deepspeed

    with deepspeed.zero.GatheredParameters([param]):
        whole: torch.Tensor = param.data.clone()
    return whole
