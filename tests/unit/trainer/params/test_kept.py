"""A model of FSDP2, or a plain one, is looked at once, and again when its parameters are others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel

from trainer_side.params import choose
from trainer_side.params.choose import open_model
from trainer_side.params.sharded import Sharded, ShardedParams
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


def _other_values(model: nn.Sequential) -> None:
    model[0].weight.data = torch.full((6, 4), 7.0)


def _other_shape(model: nn.Sequential) -> None:
    model[0].weight.data = torch.full((6, 8), 7.0)


def _other_dtype(model: nn.Sequential) -> None:
    model[0].weight.data = torch.full((6, 4), 7.0, dtype=torch.bfloat16)


def _other_device(model: nn.Sequential) -> None:
    model.to("meta")


def _other_parameter(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.full((6, 4), 7.0))


def _other_class(model: nn.Sequential) -> None:
    class Packed(nn.Parameter):
        pass

    model[0].weight.__class__ = Packed


@pytest.mark.parametrize(
    ("change", "is_seen"),
    [
        (_other_values, False),
        (_other_shape, True),
        (_other_dtype, True),
        (_other_device, True),
        (_other_parameter, True),
        (_other_class, True),
    ],
)
def test_a_plain_model_is_looked_at_again_when_it_is_held_otherwise(
    change: Callable[[nn.Sequential], None], is_seen: bool
) -> None:
    ranks, model = OneRank(), nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    before = open_model(model, ranks)
    assert open_model(model, ranks) is before
    change(model)
    after = open_model(model, ranks)
    assert (after is before) is not is_seen
    weight = model[0].weight
    assert (after.params.metas["0.weight"].shape, after.params.whole("0.weight").dtype) == (
        weight.shape,
        weight.dtype,
    )
    if not weight.is_meta:
        assert torch.equal(after.params.whole("0.weight"), weight)


def test_a_plain_model_in_another_wrapper_is_another() -> None:
    ranks, model = OneRank(), nn.Sequential(nn.Linear(4, 6))
    plain = open_model(model, ranks)
    assert open_model(DataParallel(model), ranks).params.kind == "DataParallel"
    assert open_model(model, ranks).params.kind == plain.params.kind == "plain"


def test_parameters_that_zero3_has_taken_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes their elements away, and leaves the objects."""
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    ranks, model = OneRank(), nn.Sequential(nn.Linear(4, 6))
    assert open_model(model, ranks) is open_model(model, ranks)
    taken: Any = model[0].weight
    taken.ds_id = 0
    held = Sharded(taken.shape, taken.dtype, (), None)
    monkeypatch.setattr(choose, "of_zero3", lambda param, rank_of: held)
    assert "ZeRO-3" in open_model(model, ranks).params.kind
