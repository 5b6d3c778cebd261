"""Loading a base by learnt copies: the same bits as the model's own loader, or no plan."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout_side.memory.segment import HostSegment
from rollout_side.memory.versions import StagedVersion, tensors_in
from rollout_side.vllm_engine.compat import bridges
from rollout_side.vllm_engine.loading import reload
from rollout_side.vllm_engine.loading.copy_plan import CopyPlan, bits
from rollout_side.vllm_engine.loading.drafted_model import DraftedModel
from rollout_side.vllm_engine.loading.plan_proof import learn, learn_from_files
from rollout_side.vllm_engine.loading.reload import apply_base, load_in_place
from tests.unit.rollout.vllm_engine.loading.test_reload import (
    REFERENCE,
    ReusedMemory,
    learnt_in_place,
    whole_columns,
    without_gaps,
    worker,
)
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
    staged,
)
from weft_rl.contract.checkpoint import StoredTensor
from weft_rl.contract.manifest import plan_buckets
from weft_rl.contract.tensors import DataType, Reference, TensorMeta
from weft_rl.transport.digests.wsum64 import tensor_digest


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
    assert learn(model, staged(2)) is None  # it holds other values than these
    assert model.digests() == before


def test_a_plan_tells_which_version_the_model_holds() -> None:
    first, second = staged(1, any_bits=True), staged(2, any_bits=True)
    model = load_own_way(Model(), first)
    plan = learnt(model, first)
    assert (plan.holds(first.segment.data), plan.holds(second.segment.data)) == (True, False)
    plan.load(second.segment.data)
    assert (plan.holds(first.segment.data), plan.holds(second.segment.data)) == (False, True)


def test_a_plan_is_of_the_layout_and_not_of_the_place() -> None:
    first, second = staged(1), staged(2)
    model = load_own_way(Model(), first)
    plan = learnt(model, first)
    within = torch.zeros(256 + second.segment.num_bytes, dtype=torch.uint8)[256:]
    plan.load(within.copy_(second.segment.data))
    assert model.digests() == load_own_way(Model(), second).digests()


def test_a_method_that_lora_has_put_around_another_is_that_one() -> None:
    version = staged(1)
    model = load_own_way(Model(), version)
    wrapped = SimpleNamespace(old_quant_method=model.down.quant_method)
    model.down.quant_method = wrapped
    assert learn(model, version) is not None
    wrapped.old_quant_method = SimpleNamespace()  # of a class that is not in the plan's list
    assert learn(model, version) is None


def test_no_plan_where_the_loader_refuses() -> None:
    version = staged(1)
    model = load_own_way(Model(), version)
    model.loaders["norm"] = refuse
    before = model.digests()
    assert learn(model, version) is None
    assert model.digests() == before
    del model.loaders["norm"]
    assert learn(model, version) is not None


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
    plan = learn(ours, first)
    if plan is not None:
        plan.load(second.segment.data)
        assert ours.digests() == load_own_way(theirs, second).digests()


METAS = [slot.meta for slot in MANIFEST.tensors]
#: As a trainer may lay it out that has other buckets, and another order.
OTHER = plan_buckets(METAS[::-1], 2**22)


def files(version: StagedVersion) -> list[StoredTensor]:
    """The tensors of a version as a checkpoint's files hold them, and one that nobody serves."""
    found = [
        StoredTensor(
            name,
            DataType[str(tensor.dtype).removeprefix("torch.").upper()].safetensors_name,
            tuple(tensor.shape),
            tensor_digest(tensor.reshape(-1).view(torch.uint8)),
        )
        for name, tensor in version.tensors()
    ]
    return [*found, StoredTensor("rotary_emb.inv_freq", "F32", (4,), 7)]


def started(version: StagedVersion, change: Change = lambda model: None) -> Model:
    """A model that was started with a version, and holds all columns."""
    model = whole_columns(Model())
    change(model)
    return load_own_way(model, version)


def learnt_from_files(model: Model, stored: list[StoredTensor]) -> CopyPlan | None:
    return learn_from_files(model, REFERENCE, stored)


def _nothing(model: Model) -> None:
    """Between a load and the proof."""


def _from_staged(model: Model, version: StagedVersion, then: Change = _nothing) -> CopyPlan | None:
    then(model)
    return learn(model, version)


def _from_files(model: Model, version: StagedVersion, then: Change = _nothing) -> CopyPlan | None:
    then(model)
    plan = learnt_from_files(model, files(version))
    return plan and plan.for_layout(version.manifest)


LEARN = pytest.mark.parametrize(
    "learns",
    [_from_staged, _from_files, learnt_in_place],
    ids=["a staged version", "files", "buckets that pass"],
)


@LEARN
@pytest.mark.parametrize("layer", ["embed", "qkv", "down", "up", "norm", "scale"])
def test_one_bit_of_any_parameter_disproves_it(
    layer: str, learns: Callable[..., CopyPlan | None]
) -> None:
    def flip(model: Model) -> None:
        model.get_parameter(f"{layer}.weight").data.view(-1)[0:1].view(torch.uint8)[0] ^= 1

    version = without_gaps(staged(1))
    model = started(version)
    plan = learns(model, version)
    assert plan is not None
    assert plan.holds(version.segment.data)
    assert learns(model, version, flip) is None
    assert not plan.holds(version.segment.data)


@LEARN
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_no_plan_where_loading_is_more_than_copying(
    change: Change, learns: Callable[..., CopyPlan | None]
) -> None:
    version = without_gaps(staged(1))
    model = started(version, change)
    before = model.digests()
    assert learns(model, version) is None
    assert model.digests() == before


def test_files_of_another_checkpoint_prove_nothing() -> None:
    assert learnt_from_files(started(staged(1)), files(staged(2))) is None


def in_other_layout(version: StagedVersion) -> StagedVersion:
    """The same tensors, laid out otherwise."""
    values = dict(version.tensors())
    segment = HostSegment.allocate(OTHER.wire_bytes)
    for name, tensor in tensors_in(OTHER, segment.data):
        tensor.copy_(values[name])
    return dataclasses.replace(version, manifest=OTHER, segment=segment)


@pytest.mark.parametrize("any_bits", [False, True])
@pytest.mark.parametrize("layout", [lambda version: version, in_other_layout])
def test_the_first_base_is_copied_whatever_its_layout(
    layout: Callable[[StagedVersion], StagedVersion], any_bits: bool
) -> None:
    first, second = staged(1, any_bits=any_bits), staged(2, any_bits=any_bits)
    expected = started(second).digests()
    for in_place in (False, True):
        model = started(first)
        before = model.digests()
        plan = learnt_from_files(model, files(first))
        assert plan is not None
        assert model.digests() == before
        pushed = layout(second)
        if in_place:
            (used,) = load_in_place(worker(model), ReusedMemory(pushed), REFERENCE, [plan])
        else:
            (used,) = apply_base(worker(model), pushed, REFERENCE, [plan])
        assert used.layout_digest == pushed.manifest.layout_digest
        assert used.is_readable
        assert model.digests() == expected


def test_a_plan_of_one_layout_is_one_of_each() -> None:
    model = started(staged(1))
    plan = learnt_from_files(model, files(staged(1)))
    assert plan is not None
    other = plan.for_layout(OTHER)
    assert other is not None
    assert other.for_layout(OTHER) is other
    again = other.for_layout(MANIFEST)
    assert again is not None
    assert (again.num_copies, again.layout_digest) == (plan.num_copies, MANIFEST.layout_digest)
    version = in_other_layout(staged(1))
    assert other.holds(version.segment.data)
    assert again.holds(staged(1).segment.data)


def test_a_tensor_of_another_dtype_is_not_copied() -> None:
    plan = learnt_from_files(started(staged(1)), files(staged(1)))
    assert plan is not None
    wider = [dataclasses.replace(meta, dtype=DataType.FLOAT32) for meta in METAS]
    assert plan.for_layout(plan_buckets(wider)) is None


def test_a_rank_that_holds_a_part_of_a_tensor_proves_nothing() -> None:
    model = load_own_way(Model(), staged(1))  # which holds some columns
    assert learnt_from_files(model, files(staged(1))) is None


def _two_places(model: Model) -> None:
    model.head.weight = torch.nn.Parameter(torch.zeros_like(model.embed.weight))

    def load_both(param: torch.Tensor, weight: torch.Tensor) -> None:
        for own in (model.embed.weight, model.head.weight):
            own[: weight.shape[0]].data.copy_(weight)
            own[weight.shape[0] :].data.fill_(0)

    model.loaders["embed"] = load_both


def test_every_place_of_a_tensor_is_looked_at() -> None:
    model = started(staged(1), _two_places)
    assert learnt_from_files(model, files(staged(1))) is not None
    model.head.weight.data[0, 0] += 1
    assert learnt_from_files(model, files(staged(1))) is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda t: dataclasses.replace(t, dtype="F16"), "in another dtype"),
        (lambda t: dataclasses.replace(t, dims=(1, *t.dims)), "in another"),
        (lambda t: dataclasses.replace(t, name="other"), "have no 'wire.embed.weight'"),
    ],
)
def test_files_that_hold_something_else_say_so(
    change: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, *others = files(staged(1))
    with caplog.at_level("INFO"):
        assert learnt_from_files(started(staged(1)), [change(first), *others]) is None
    assert why in caplog.text


def test_whatever_goes_wrong_is_no_plan(caplog: pytest.LogCaptureFixture) -> None:
    model = started(staged(1))
    model.load_weights = None  # type: ignore[method-assign,assignment]
    with caplog.at_level("INFO"):
        assert learnt_from_files(model, files(staged(1))) is None
    assert "vLLM's own reload" in caplog.text
    reference = Reference("Toy", (SimpleNamespace(name="x"),))  # type: ignore[arg-type]
    assert learn_from_files(model, reference, []) is None


# -- of a model that is drafted for ------------------------------------------------


class Drafter(torch.nn.Module):
    """Drafts with the served model's output layer and one of its own."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.fc, self.down = torch.nn.Linear(HIDDEN, 3, bias=False), model.down

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            self.get_parameter(name).data.copy_(weight)


FC = TensorMeta("draft_model.fc.weight", DataType.FLOAT32, (3, HIDDEN))


def with_draft(version: StagedVersion, seed: int, meta: TensorMeta = FC) -> StagedVersion:
    """The same tensors, then one of a draft."""
    values = dict(version.tensors())
    manifest = plan_buckets([*METAS, meta], 2**22)
    segment = HostSegment.allocate(manifest.wire_bytes)
    drawn = torch.rand(meta.shape, generator=torch.Generator().manual_seed(seed))
    for name, tensor in tensors_in(manifest, segment.data):
        tensor.copy_(values.get(name, drawn))
    return dataclasses.replace(version, manifest=manifest, segment=segment)


@torch.no_grad()
def test_a_draft_is_copied_with_its_model() -> None:
    model = load_own_way(Model(), staged(1))
    drafted = DraftedModel(model, Drafter(model), REFERENCE, [FC])
    first, second = with_draft(staged(1), 1), with_draft(staged(2), 2)
    drafted.load_weights(first.tensors())
    plan = learn(drafted, first)
    assert plan is not None

    load = partial(apply_base, worker(model), reference=REFERENCE, drafted=drafted)
    assert load(staged=second, plans=[plan]) == (plan,)
    fc = dict(second.tensors())[FC.name]
    assert torch.equal(drafted.draft.fc.weight, fc)
    assert model.digests() == load_own_way(Model(), staged(2)).digests()

    alone, whole = load(staged=staged(1), plans=[plan])  # the draft stays
    assert whole is plan
    assert torch.equal(drafted.draft.fc.weight, fc)
    assert model.digests() == load_own_way(Model(), staged(1)).digests()
    assert alone.for_layout(first.manifest) is None, "it does not know the draft's tensors"
    # In turn, each finds its own plan.
    assert load(staged=second, plans=[alone, whole]) == (whole, alone)
    assert load(staged=staged(1), plans=[whole, alone]) == (alone, whole)


@torch.no_grad()
@pytest.mark.parametrize("moves", [False, True])
def test_a_plan_outlives_a_reload_that_moves_nothing(
    moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft is loaded by vLLM's reload each time: its model keeps the plan that it has."""

    def reload_layers(worker: Any, own: Any, version: Any, tensors: Any, number: int) -> None:
        own.load_weights(tensors)
        if moves:
            model.norm.weight = torch.nn.Parameter(model.norm.weight.clone())

    monkeypatch.setattr(reload, "reload_layers", reload_layers)
    monkeypatch.setattr(reload, "can_learn", lambda worker: True)
    monkeypatch.setattr(bridges, "vllm_config_context", lambda config: contextlib.nullcontext())
    model = load_own_way(Model(), staged(1))
    plan = learnt(model, staged(1))
    drafted = DraftedModel(model, Drafter(model), REFERENCE, [FC])
    monkeypatch.setattr(
        Drafter, "load_weights", lambda self, weights: [self.fc.weight.copy_(w) for _, w in weights]
    )
    monkeypatch.setattr(drafted.draft.fc, "quant_method", object(), raising=False)  # no plan
    runner = worker(model)
    runner.vllm_config = None
    load = partial(apply_base, runner, reference=REFERENCE, drafted=drafted)
    assert load(staged=with_draft(staged(2), 2), plans=[plan]) == (() if moves else (plan,))
    if not moves:
        assert load(staged=staged(3), plans=[plan]) == (plan,)
        assert model.digests() == load_own_way(Model(), staged(3)).digests()


@torch.no_grad()
def test_another_draft_is_passed_over() -> None:
    model = load_own_way(Model(), staged(1))
    other = dataclasses.replace(FC, name="draft_model.other.weight")
    pushed = with_draft(staged(2), 2, other)
    plan = learn(model, staged(1))
    assert plan is not None
    (used,) = apply_base(worker(model), pushed, REFERENCE, [plan])
    assert not used.is_readable, "it does not hold all of that version"
    assert model.digests() == load_own_way(Model(), staged(2)).digests()
    assert learn(model, pushed, {other.name}) is not None
    assert learn(model, pushed) is None


def test_elements_are_found_where_the_plan_copies_them() -> None:
    first, second = staged(1, any_bits=True), staged(2, any_bits=True)
    assert not learnt(load_own_way(Model(), first), first).is_contiguous, "it has a rank's columns"
    model = load_own_way(whole_columns(Model()), first)
    plan = learnt(model, first)
    assert plan.is_contiguous
    assert plan.has_shards
    for index, ((_, old), (_, new)) in enumerate(
        zip(first.tensors(), second.tensors(), strict=True)
    ):
        found, new_bits = bits(old).reshape(-1), bits(new).reshape(-1)
        places = plan.places(index)
        assert sorted({*(p.begin for p in places)})[0] == 0
        assert max(p.end for p in places) == len(found)
        every = torch.arange(len(found))
        for place in places:
            here, values = place.read(every)
            assert here == slice(place.begin, place.end)
            assert values.equal(found[here])
            place.write(every[::2].clone(), new_bits[::2])
            place.write(every[1::2].clone(), new_bits[1::2])
    assert model.digests() == load_own_way(whole_columns(Model()), second).digests()


def test_a_rank_finds_what_it_has_of_each_row() -> None:
    first, second = staged(1, any_bits=True), staged(2, any_bits=True)
    model = load_own_way(Model(), first)
    plan = learnt(model, first)
    assert plan.has_shards
    assert not plan.is_readable
    num_in_rows = 0
    for index, ((_, old), (_, new)) in enumerate(
        zip(first.tensors(), second.tensors(), strict=True)
    ):
        found, new_bits = bits(old).reshape(-1), bits(new).reshape(-1)
        every = torch.arange(len(found))
        for place in plan.places(index):
            here, values = place.read(every)
            assert values.equal(found[here])
            assert values.numel() == place.bits.numel()
            num_in_rows += bool(place.row)
            place.write(every[::2].clone(), new_bits[::2])
            place.write(every[1::2].clone(), new_bits[1::2])
    assert num_in_rows
    assert model.digests() == load_own_way(Model(), second).digests()
