"""A model of FSDP2 is looked at once, and again when its parameters are others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trainer_side.params.choose import open_model
from trainer_side.params.sharding.sharded import Sharded, ShardedParams
from trainer_side.ranks.ranks import OneRank


@pytest.fixture
def model() -> Iterator[nn.Module]:
    """Of one rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        module = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
        fully_shard(module, mesh=mesh)
        yield module
    finally:
        dist.destroy_process_group()


def _replace(model: nn.Module) -> None:
    from torch.distributed.tensor import DTensor

    old = model[0].weight  # type: ignore[index]
    local = torch.full((4, 4), 7.0)
    new = DTensor.from_local(local, old.device_mesh, old.placements, run_check=False)
    model[0].weight = nn.Parameter(new)  # type: ignore[index]


def _move(model: nn.Module) -> None:
    """As FSDP2 does when its module was moved or cast: another local tensor, the same DTensor."""
    param = model[0].weight  # type: ignore[index]
    param._local_tensor = torch.full((6, 4), 7.0)


def _swap(model: nn.Module) -> None:
    """The same local tensor, with other memory and dtype."""
    param = model[0].weight  # type: ignore[index]
    param._local_tensor.data = torch.full((6, 4), 7.0)


def _reshard(model: nn.Module) -> None:
    from torch.distributed.tensor import Replicate

    param = model[0].weight  # type: ignore[index]
    with torch.no_grad():
        param.fill_(7.0)
    new = param.detach().redistribute(placements=[Replicate()])
    model[0].register_parameter("weight", nn.Parameter(new))  # type: ignore[index]


def _held(model: nn.Module, ranks: OneRank) -> torch.Tensor:
    params = open_model(model, ranks).params
    assert isinstance(params, ShardedParams)
    placed = params.placed["0.weight"]
    assert isinstance(placed, Sharded)
    assert placed.local is not None
    return placed.local.detach()


@pytest.mark.parametrize("change", [_replace, _move, _swap, _reshard])
def test_other_parameters_are_seen(model: nn.Module, change: Callable[[nn.Module], None]) -> None:
    ranks = OneRank()
    before = open_model(model, ranks)
    assert not torch.equal(_held(model, ranks), torch.full((6, 4), 7.0))
    change(model)
    after = open_model(model, ranks)
    assert after is not before
    held = _held(model, ranks)
    assert torch.equal(held, torch.full_like(held, 7.0))
    assert held.shape == model[0].weight.to_local().shape  # type: ignore[index]


def test_values_that_changed_in_place_are_read_by_reference(model: nn.Module) -> None:
    ranks = OneRank()
    before = open_model(model, ranks)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(3.0)
    assert open_model(model, ranks) is before
    assert torch.equal(_held(model, ranks), torch.full((6, 4), 3.0))


def test_other_ranks_look_for_themselves(model: nn.Module) -> None:
    first, second = OneRank(), OneRank()
    assert open_model(model, first) is not open_model(model, second)
    opened = open_model(model, second).params
    assert isinstance(opened, ShardedParams)
    assert opened.ranks is second
