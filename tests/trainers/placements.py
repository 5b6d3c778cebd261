"""One rank of models that lie over a mesh in many ways: ``python -m tests.trainers.placements
RANK SIZE STORE``.

Each line of its standard input is JSON and names a function of ``CASES``, which every rank is
told at once; it answers with where the parameters lie, and whether all is as it should be.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from trainer_side.params.choose import open_model
from trainer_side.params.sharded import Sharded, ShardedParams
from trainer_side.ranks.ranks import SENDER, Ranks
from trainer_side.ranks.torch_ranks import ranks_of

#: A model, and its whole parameters by name.
Case = tuple[nn.Module, dict[str, torch.Tensor]]


class Block(nn.Module):
    """A tied weight, a frozen one, biases, and sizes that 4 does not divide."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.up = nn.Linear(24, width)
        self.down = nn.Linear(width, 24)
        self.norm = nn.LayerNorm(24)
        self.embed = nn.Embedding(13, 24)
        self.head = nn.Linear(24, 13, bias=False)
        self.head.weight = self.embed.weight
        self.norm.weight.requires_grad_(False)


class Experts(nn.Module):
    """Stacked experts, and a router."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(6, 8, 10))
        self.down = nn.Parameter(torch.randn(6, 10, 8))
        self.router = nn.Linear(10, 6)


class Table(nn.Module):
    """One parameter."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))


def _mesh(*shape: int) -> DeviceMesh:
    names = ("a", "b", "c")[: len(shape)]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def fsdp2(*shape: int) -> Case:
    """FSDP2, or HSDP."""
    model = Block()
    whole = _whole(model)
    fully_shard(model.up, mesh=(mesh := _mesh(*shape)))
    fully_shard(model, mesh=mesh)
    return model, whole


def tensor_parallel(*shape: int, width: int = 48) -> Case:
    """Tensor parallelism, within FSDP2 if the mesh has two dims."""
    model: Any = Block(width)
    mesh, whole = _mesh(*shape), _whole(model)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["b"] if len(shape) > 1 else mesh, plan)
    if len(shape) > 1:
        for part in (model.up, model.down, model):  # embed and norm over "a" alone
            fully_shard(part, mesh=mesh["a"])
    return model, whole


def experts() -> Case:
    """Expert parallelism within FSDP2, which cuts each expert."""
    model: Any = Experts()
    mesh, whole = _mesh(2, 2), _whole(model)
    for name in ("up", "down"):
        held = distribute_tensor(getattr(model, name).detach(), mesh["b"], [Shard(0)])
        setattr(model, name, nn.Parameter(held))
    fully_shard(model.router, mesh=mesh["a"])
    fully_shard(model, mesh=mesh["a"], shard_placement_fn=lambda param: Shard(1))
    return model, whole


def table(shape: list[int], mesh: list[int], placements: list[int | None]) -> Case:
    """A tensor cut in any way; None replicates."""
    model = Table(*shape)
    whole = _whole(model)
    where = [Replicate() if dim is None else Shard(dim) for dim in placements]
    held = distribute_tensor(model.weight.detach(), _mesh(*mesh), where)
    model.weight = nn.Parameter(held)
    return model, whole


def partial_sums() -> Case:
    """Each rank has a summand."""
    model = Table(8, 6)
    whole = {"weight": model.weight.detach() * dist.get_world_size()}
    summand = DTensor.from_local(model.weight.detach(), _mesh(4), [Partial()])
    model.weight = nn.Parameter(summand)
    return model, whole


def fsdp1(strategy: str, *, flat: bool = False, nested: bool = True) -> Case:
    """FSDP1; flat parameters are of one kind, trained or frozen."""
    model = Block()
    whole = _whole(model)
    model.norm.weight.requires_grad_(flat)
    kind = ShardingStrategy[strategy]
    mesh = _mesh(2, 2) if "HYBRID" in strategy else None
    wrap = partial(
        Fsdp, sharding_strategy=kind, device_mesh=mesh, use_orig_params=not flat,
        device_id=torch.device("cpu"),
    )  # fmt: skip
    if nested:
        model.up = wrap(model.up)
    return wrap(model), whole


CASES: dict[str, Callable[..., Case]] = {
    each.__name__: each for each in (fsdp2, tensor_parallel, experts, table, partial_sums, fsdp1)
}


def examine(model: nn.Module, whole: dict[str, torch.Tensor], ranks: Ranks) -> dict[str, Any]:
    """What is found of a model, what is wrong with it, and what the sender is brought."""
    params = open_model(model, ranks).params
    assert isinstance(params, ShardedParams)
    wrong = [] if sorted(params.metas) == sorted(whole) else [f"names {list(params.metas)}"]
    names = list(params.metas)
    places: dict[str, Any] = {}
    for name, param in params.placed.items():
        places[name] = None
        if isinstance(param, Sharded):
            places[name] = [(run.rank, run.begin, *run.shape, run.stride) for run in param.runs]
            wrong += _own_wrong(name, param, whole[name], ranks.rank)
    for dtype in (torch.float32, torch.bfloat16):
        outs = [torch.zeros(params.metas[name].shape, dtype=dtype) for name in names]
        params.fetch(names, [dtype] * len(names), outs if ranks.rank == SENDER else None)
        if ranks.rank == SENDER:
            wrong += [
                f"{name} as brought in {dtype}"
                for name, out in zip(names, outs, strict=True)
                if not torch.equal(out, whole[name].to(dtype))
            ]
    shapes = {name: list(meta.shape) for name, meta in params.metas.items()}
    return {"places": places, "shapes": shapes, "wrong": wrong}


def _own_wrong(name: str, param: Sharded, whole: torch.Tensor, rank: int) -> list[str]:
    """Whether this rank's own elements are what its runs say."""
    wrong, first = [], 0
    for run in param.runs:
        if run.rank == rank:
            assert param.local is not None
            held = param.local.detach().reshape(-1)[first : first + run.size].view(run.shape)
            if not torch.equal(held, run.of(whole)):
                wrong.append(f"{name} {run}")
            first += run.size
    return wrong


def main(rank: int, size: int, store: str) -> None:
    """Answer until the standard input ends."""
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    ranks = ranks_of("all")
    print("ready", flush=True)
    for line in sys.stdin:
        said = json.loads(line)
        try:
            ranks.open(time.monotonic() + 60)
            torch.manual_seed(5)
            answer = examine(*CASES[said["case"]](*said["args"], **said["options"]), ranks)
        except Exception:
            answer = {"crash": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
