"""Loading a base by learnt copies: the same bits as the model's own loader, or no plan."""

from __future__ import annotations

import pytest
import torch

from rollout_side.vllm_engine.loading.copy_plan import learn
from tests.unit.rollout.vllm_engine.loading.toy_model import (
    CHANGES,
    F32,
    HIDDEN,
    MANIFEST,
    VOCAB,
    Change,
    Layer,
    Model,
    digest,
    learnt,
    load_own_way,
    refuse,
    rename,
    staged,
)


@pytest.mark.parametrize("any_bits", [False, True])
def test_another_version_lands_as_by_the_models_own_loader(any_bits: bool) -> None:
    first, second = (staged(seed, any_bits=any_bits) for seed in (1, 2))
    model = load_own_way(Model(), first)
    places = {name: p.data_ptr() for name, p in model.named_parameters()}
    plan = learnt(model, first)
    assert plan.layout_digest == MANIFEST.layout_digest
    on_the_wire = digest(second.segment.data)
    plan.load(second.segment.data)
    assert model.digests() == load_own_way(Model(), second).digests()
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == places
    assert digest(second.segment.data) == on_the_wire
    plan.load(first.segment.data)
    assert model.digests() == load_own_way(Model(), first).digests()


@pytest.mark.parametrize("any_bits", [False, True])
def test_learning_changes_nothing(any_bits: bool) -> None:
    version = staged(1, any_bits=any_bits)
    model = load_own_way(Model(), version)
    before, on_the_wire = model.digests(), digest(version.segment.data)
    learnt(model, version)
    assert model.digests() == before
    assert digest(version.segment.data) == on_the_wire


def test_every_write_is_held_back_while_learning() -> None:
    model = load_own_way(Model(), staged(1))
    with torch.no_grad():
        model.embed.weight[VOCAB:] = 3  # a leaked fill would show
    before = model.digests()
    assert learn(model, staged(2), rename) is None  # it holds other values than these
    assert model.digests() == before


def test_a_plan_tells_which_version_the_model_holds() -> None:
    first, second = staged(1, any_bits=True), staged(2, any_bits=True)
    model = load_own_way(Model(), first)
    plan = learnt(model, first)
    assert (plan.holds(first.segment.data), plan.holds(second.segment.data)) == (True, False)
    plan.load(second.segment.data)
    assert (plan.holds(first.segment.data), plan.holds(second.segment.data)) == (False, True)


@pytest.mark.parametrize("layer", ["embed", "qkv", "down", "up", "norm", "scale"])
def test_one_bit_of_any_parameter_disproves_it(layer: str) -> None:
    version = staged(1)
    model = load_own_way(Model(), version)
    plan = learnt(model, version)
    model.get_parameter(f"{layer}.weight").data.view(-1)[0:1].view(torch.uint8)[0] ^= 1
    assert not plan.holds(version.segment.data)
    assert learn(model, version, rename) is None


def test_a_plan_is_of_the_layout_and_not_of_the_place() -> None:
    first, second = staged(1), staged(2)
    model = load_own_way(Model(), first)
    plan = learnt(model, first)
    within = torch.zeros(256 + second.segment.num_bytes, dtype=torch.uint8)[256:]
    plan.load(within.copy_(second.segment.data))
    assert model.digests() == load_own_way(Model(), second).digests()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_no_plan_where_loading_is_more_than_copying(change: Change) -> None:
    version = staged(1)
    model = Model()
    change(model)
    before = load_own_way(model, version).digests()
    assert learn(model, version, rename) is None
    assert model.digests() == before


def test_no_plan_where_the_loader_refuses() -> None:
    version = staged(1)
    model = load_own_way(Model(), version)
    model.loaders["norm"] = refuse
    before = model.digests()
    assert learn(model, version, rename) is None
    assert model.digests() == before
    del model.loaders["norm"]
    assert learn(model, version, rename) is not None


def _fill_in(model: Model) -> None:
    model.loaders["scale"] = lambda p, w: p.data.fill_(w.item())


def _hold_in_buffer(model: Model) -> None:
    model.norm = Layer(F32, HIDDEN)
    del model.norm.weight
    model.norm.register_buffer("weight", torch.zeros(HIDDEN))


@pytest.mark.parametrize("change", [_fill_in, _hold_in_buffer])
def test_nothing_that_is_loaded_is_left_out(change: Change) -> None:
    first, second = staged(1), staged(2)
    ours, theirs = Model(), Model()
    for model in (ours, theirs):
        change(model)
        load_own_way(model, first)
    plan = learn(ours, first, rename)
    if plan is not None:
        plan.load(second.segment.data)
        assert ours.digests() == load_own_way(theirs, second).digests()
