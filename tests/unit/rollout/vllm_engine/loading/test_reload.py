"""What vLLM's own reload says of layers without weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout_side.memory.versions import StagedVersion, bucket_starts
from rollout_side.vllm_engine.loading.copy_plan import CopyPlan
from rollout_side.vllm_engine.loading.plan_proof import PlanProof
from rollout_side.vllm_engine.loading.reload import load_in_place, quiet_about_idle_layers
from tests.unit.rollout.vllm_engine.loading.toy_model import (
    MANIFEST,
    PADDED,
    VOCAB,
    Change,
    Model,
    digest,
    learnt,
    load_own_way,
    load_vocab,
    staged,
)
from weft_rl.contract.errors import InvalidManifestError, LoadFailedError, PeerUnavailableError
from weft_rl.contract.manifest import plan_buckets
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import Reference


def test_layers_that_have_no_weights_are_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    with quiet_about_idle_layers():
        logger.warning("%s: Failed to load weights", "Attention")
        logger.warning("something else")
    assert [record.getMessage() for record in caplog.records] == ["something else"]
    logger.warning("%s: Failed to load weights", "Attention")
    assert len(caplog.records) == 2


REFERENCE = Reference("Toy", tuple(slot.meta for slot in MANIFEST.tensors))
NUM_BUCKETS = len(MANIFEST.buckets)


class ReusedMemory:
    """An ``Arriving`` whose buckets come into the same memory, one after the other."""

    def __init__(self, source: StagedVersion, *, fail_at: int = -1, num: int = NUM_BUCKETS) -> None:
        self.version, self.manifest = source.version, source.manifest
        self.num_given = 0
        self.wires = wires(source)[:num]
        self._fail_at = fail_at

    def buckets(self) -> Iterator[tuple[int, torch.Tensor]]:
        memory = torch.empty(max(map(len, self.wires), default=0) + 256, dtype=torch.uint8)[256:]
        for index, wire in enumerate(self.wires):
            if index == self._fail_at:
                raise PeerUnavailableError("the trainer has gone")
            memory.fill_(0x7F)
            memory[: len(wire)].copy_(wire)
            self.num_given += 1
            yield index, memory[: len(wire)]
        memory.fill_(0x7F)


def wires(source: StagedVersion) -> list[torch.Tensor]:
    """The bytes of each bucket; views of the segment."""
    starts, data = bucket_starts(source.manifest), source.segment.data
    return [
        data[s : s + b.wire_bytes] for s, b in zip(starts, source.manifest.buckets, strict=True)
    ]


def learnt_in_place(
    model: Model, source: StagedVersion, then: Change = lambda model: None
) -> CopyPlan | None:
    """As the model loads a version by itself, bucket by bucket; ``then`` something happens."""
    proof = PlanProof(model, source.manifest)
    for index, wire in enumerate(wires(source)):
        proof.pass_bucket(index, wire)
    load_own_way(model, source)
    then(model)
    return proof.plan()


def worker(model: Model) -> Any:
    return SimpleNamespace(
        model_runner=SimpleNamespace(get_model=lambda: model), device=torch.device("cpu")
    )


@pytest.mark.parametrize("any_bits", [False, True])
def test_a_version_lands_bucket_by_bucket(any_bits: bool) -> None:
    first, second = staged(1), staged(2, any_bits=any_bits)
    model = load_own_way(Model(), first)
    plan = learnt(model, first)
    arriving = ReusedMemory(second)
    assert load_in_place(worker(model), arriving, REFERENCE, [plan]) == (plan,)
    assert model.digests() == load_own_way(Model(), second).digests()
    assert arriving.num_given == NUM_BUCKETS


def test_a_bucket_changes_its_own_parameters_only() -> None:
    first, second = staged(1), staged(2)
    model = load_own_way(Model(), first)
    plan = learnt(model, first)
    before = model.digests()
    index = next(s.bucket for s in MANIFEST.tensors if s.meta.name == "wire.layers.0.down.weight")
    plan.load_bucket(index, wires(second)[index])
    changed = {name for name, now in model.digests().items() if now != before[name]}
    assert "down.weight" in changed
    assert not changed & {"up.weight", "norm.weight", "embed.weight"}
    assert plan.target_digests(index) == plan.source_digests(index, wires(second)[index])
    assert plan.target_digests(index) != plan.source_digests(index, wires(first)[index])


def test_a_bucket_that_is_too_short_is_refused() -> None:
    version = staged(1)
    plan = learnt(load_own_way(Model(), version), version)
    with pytest.raises(ValueError, match="bucket 0"):
        plan.load_bucket(0, wires(version)[0][:256])


# -- reading back, and a plan that is proven as buckets pass ------------------------------------


def whole_columns(model: Model) -> Model:
    """Let ``down`` hold all its columns, as at a tensor parallel size of 1."""
    model.down.weight = torch.nn.Parameter(torch.zeros(6, 8, dtype=torch.bfloat16))
    del model.loaders["down"]
    return model


@pytest.mark.parametrize("any_bits", [False, True])
def test_what_is_read_back_is_what_was_on_the_wire(any_bits: bool) -> None:
    version = without_gaps(staged(1, any_bits=any_bits))
    plan = learnt(load_own_way(whole_columns(Model()), version), version)
    assert plan.is_readable
    out = torch.empty(max(b.wire_bytes for b in MANIFEST.buckets), dtype=torch.uint8)
    for index, wire in enumerate(wires(version)):
        size = MANIFEST.buckets[index].payload_bytes
        payload = plan.read_bucket(index, out.fill_(0x7F))
        assert payload.data_ptr() == out.data_ptr()
        assert digest(payload) == digest(wire[:size])
        assert (out[size:] == 0x7F).all()


def without_gaps(version: StagedVersion) -> StagedVersion:
    """With zeros between tensors, as packers send it."""
    tensors = {name: tensor.clone() for name, tensor in version.tensors()}
    version.segment.data.zero_()
    for name, tensor in version.tensors():
        tensor.copy_(tensors[name])
    return version


def in_another_way(version: StagedVersion) -> StagedVersion:
    """The same tensors, digested as on an accelerator."""
    metas = [slot.meta for slot in MANIFEST.tensors]
    manifest = plan_buckets(metas, 512)
    return StagedVersion("t", version.version, manifest, version.segment, b"")


@pytest.mark.parametrize("whole", [whole_columns, lambda model: model])
@pytest.mark.parametrize("same", [lambda v: v, in_another_way])
def test_a_plan_is_proven_by_digests_of_what_passes(
    same: Callable[[StagedVersion], StagedVersion], whole: Callable[[Model], Model]
) -> None:
    """Of a model that holds all, and of a rank that holds some of the columns."""
    first, second = (same(staged(seed, any_bits=True)) for seed in (1, 2))
    model = load_own_way(whole(Model()), second)
    plan = learnt_in_place(model, first)
    assert plan is not None
    assert plan.is_readable == (whole is whole_columns)
    before = load_own_way(whole(Model()), first).digests()
    assert model.digests() == before
    assert load_in_place(worker(model), ReusedMemory(second), REFERENCE, [plan]) == (plan,)
    assert model.digests() == load_own_way(whole(Model()), second).digests()
    plan.load(first.segment.data)
    assert model.digests() == before


def test_what_a_rank_holds_in_part_cannot_be_read_back() -> None:
    version = staged(1)
    plan = learnt(load_own_way(Model(), version), version)
    assert not plan.is_readable
    with pytest.raises(ValueError, match="hold parts of tensors"):
        plan.read_bucket(0, torch.empty(MANIFEST.buckets[0].wire_bytes, dtype=torch.uint8))


def test_no_plan_from_some_of_the_buckets() -> None:
    version = staged(1)
    model = load_own_way(Model(), version)
    proof = PlanProof(model, MANIFEST)
    for index, wire in enumerate(wires(version)[:-1]):
        proof.pass_bucket(index, wire)
    assert proof.plan() is None


def test_no_plan_where_a_reload_moves_parameters() -> None:
    """The old ones hold the right bits, too."""

    def move(model: Model) -> None:
        model.norm.weight = torch.nn.Parameter(model.norm.weight.detach().clone())

    version = staged(1)
    assert learnt_in_place(load_own_way(Model(), version), version, move) is None


def test_a_bucket_that_cannot_be_digested_costs_the_plan_alone() -> None:
    version = staged(1)
    model = load_own_way(Model(), version)
    proof = PlanProof(model, MANIFEST)
    proof.pass_bucket(0, wires(version)[0][:8])
    proof.pass_bucket(1, wires(version)[1])
    assert proof.plan() is None


class TwoHeads(Model):
    """Loads the embedding to a second parameter, too; the second is read back last."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = torch.nn.Parameter(torch.zeros_like(self.embed.weight))
        self.loaders["embed"] = self._load_both

    def _load_both(self, param: torch.Tensor, weight: torch.Tensor) -> None:
        load_vocab(param, weight)
        load_vocab(self.head.weight, weight)


def test_a_tensor_that_goes_to_two_parameters_proves_both() -> None:
    version = without_gaps(staged(1))
    model = load_own_way(whole_columns(TwoHeads()), version)
    plan = learnt_in_place(model, version)
    assert plan is not None
    assert plan.is_readable

    def change(model: Model) -> None:
        model.embed.weight.data[0, 0] += 1

    assert learnt_in_place(model, version, change) is None


def test_an_expanded_parameter_cannot_be_read_back() -> None:
    version = without_gaps(staged(1))
    model = whole_columns(Model())
    model.scale.weight = torch.nn.Parameter(torch.zeros(3))
    load_own_way(model, version)
    plan = learnt(model, version)
    assert not plan.is_readable
    with pytest.raises(ValueError, match="expanded"):
        plan.read_bucket(0, torch.empty(MANIFEST.buckets[0].wire_bytes, dtype=torch.uint8))
    assert learnt_in_place(model, version) is not None


def test_no_plan_where_contents_decide() -> None:
    """Nothing lies where the copies are watched from."""
    version = without_gaps(staged(1))
    model = whole_columns(Model())
    model.loaders["norm"] = lambda p, w: p.data.copy_(w) if w.abs().sum() > 0 else None
    load_own_way(model, version)
    assert learnt_in_place(model, version) is None


def test_padding_of_a_parameter_is_no_part_of_the_wire() -> None:
    version = without_gaps(staged(1))
    model = load_own_way(whole_columns(Model()), version)
    assert model.embed.weight.shape[0] == PADDED > VOCAB
    plan = learnt_in_place(model, version)
    assert plan is not None
    assert plan.holds(version.segment.data)


# -- failures ---------------------------------------------------------------------


def test_a_transfer_that_never_begins_changes_nothing() -> None:
    first, second = staged(1), staged(2)
    model = load_own_way(Model(), first)
    before = model.digests()
    for plans in ([learnt(model, first)], []):
        with pytest.raises(PeerUnavailableError, match="the trainer has gone"):
            load_in_place(worker(model), ReusedMemory(second, fail_at=0), REFERENCE, plans)
        with pytest.raises(LoadFailedError, match="no bucket of base@2") as failed:
            load_in_place(worker(model), ReusedMemory(second, num=0), REFERENCE, plans)
        assert "dirty" not in failed.value.metadata
    assert model.digests() == before


def test_another_model_is_refused_before_it_arrives() -> None:
    first, second = staged(1), staged(2)
    model = load_own_way(Model(), first)
    before = model.digests()
    less = Reference("Toy", REFERENCE.tensors[1:])
    arriving = ReusedMemory(second)
    with pytest.raises(InvalidManifestError, match=r"'wire\.embed\.weight' is not"):
        load_in_place(worker(model), arriving, less, [learnt(model, first)])
    assert arriving.num_given == 0
    assert model.digests() == before


@pytest.mark.parametrize(
    "arriving", [{"fail_at": 1}, {"fail_at": NUM_BUCKETS - 1}, {"num": NUM_BUCKETS - 1}]
)
def test_a_transfer_that_ends_midway_leaves_mixed_weights(arriving: dict[str, int]) -> None:
    first, second = staged(1), staged(2)
    model = load_own_way(Model(), first)
    plan = learnt(model, first)
    with pytest.raises(LoadFailedError, match="loading base@2 failed midway") as failed:
        load_in_place(worker(model), ReusedMemory(second, **arriving), REFERENCE, [plan])
    assert failed.value.metadata["dirty"] == "true"
    assert isinstance(failed.value.__cause__, PeerUnavailableError | LoadFailedError)
    assert "the weights are mixed" in failed.value.message
    load_in_place(worker(model), ReusedMemory(second), REFERENCE, [plan])
    assert model.digests() == load_own_way(Model(), second).digests()


def test_a_bucket_out_of_order_is_refused() -> None:
    first, second = staged(1), staged(2)
    model = load_own_way(Model(), first)
    arriving = ReusedMemory(second)
    both = list(enumerate(wires(second)))[:2]
    arriving.buckets = lambda: iter([both[0], both[0]])  # type: ignore[method-assign]
    with pytest.raises(LoadFailedError, match="bucket 0 arrived in place of bucket 1"):
        load_in_place(worker(model), arriving, REFERENCE, [learnt(model, first)])
    assert arriving.version == PolicyVersion("base", 2)
