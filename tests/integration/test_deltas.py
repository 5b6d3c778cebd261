"""Pushes of what has changed: real coordinator, gRPC and gloo, engine doubles that hold copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from rollout_side.receive import delta_transfer
from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool
from tests.integration.models import Model, peft_of, same, until, weights
from tests.integration.replicas import is_ready
from trainer_side import Publisher, delta_selection
from trainer_side.deltas import choice
from trainer_side.deltas.committed_copy import CommittedCopy
from trainer_side.push_request import DeltaUsage, PushReport
from weft_rl.cli.orders import rollback
from weft_rl.contract.manifest import Run, make_send_plan
from weft_rl.contract.names import PolicyVersion
from weft_rl.rpc.channel import open_channel
from weft_rl.v1 import inspect_pb2, publish_pb2
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub


@pytest.fixture
def engines(pool: Pool) -> list[EngineDouble]:
    """Engines of replica-0 and replica-1, each with copies of the last two bases."""
    doubles = [EngineDouble(weights(Model()), base_copies=2) for _ in range(2)]
    for number, engine in enumerate(doubles):
        pool.add_replica(f"replica-{number}", engine)
    return doubles


@pytest.fixture
def publisher(pool: Pool) -> Iterator[Publisher]:
    with Publisher(
        pool.target, trainer_id="trainer-a", timeout_seconds=20, delta="always", bucket_bytes=2048
    ) as running:
        yield running


def step(model: nn.Module, share: float = 0.02) -> None:
    """Change a share of the elements, some by a unit in the last place and some by more."""
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(-1)
            at = torch.rand(len(flat)) < share
            flat.view(torch.int32)[at] += torch.randint(1, 3, (int(at.sum()),), dtype=torch.int32)


def content_of(pool: Pool, version: str) -> tuple[str, str]:
    """Return the digests of a version's layout and content, as the catalog has them."""
    with open_channel(pool.target) as channel:
        request = inspect_pb2.ListVersionsRequest(policy="base")
        versions = InspectServiceStub(channel).ListVersions(request).versions
    (found,) = [v for v in versions if f"base@{v.version.version}" == version]
    return found.layout_digest_hex, found.content_digest_hex


def transfer_of(pool: Pool, version: str) -> publish_pb2.Transfer:
    """Return the newest transfer of a version."""
    with open_channel(pool.target) as channel:
        listed = InspectServiceStub(channel).ListTransfers(inspect_pb2.ListTransfersRequest())
    found = [t for t in listed.transfers if f"base@{t.version.version}" == version]
    return max(found, key=lambda each: each.begin_time.ToNanoseconds())


def test_what_has_changed_makes_the_version_that_all_elements_would(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    model, reports = Model(seed=1), list[PushReport]()
    for number in range(5):
        version, report = publisher.push_base(model)
        assert str(version) == f"base@{number + 1}"
        assert all(same(engine.base, weights(model)) for engine in engines)
        reports.append(report)
        sent = content_of(pool, str(version)), weights(model)
        step(model)
    first, *others = reports
    assert not first.delta.is_delta
    assert "no copy yet" in first.delta.whole_reason
    assert first.sent_bytes == first.total_bytes
    for report in others:
        assert report.delta.is_delta
        assert 0.01 < report.delta.changed_share < 0.04
        assert report.sent_bytes < report.total_bytes / 4
        assert report.delta.memory_bytes >= report.total_bytes
        assert report.delta.whole_reason == ""
        assert "a delta of" in repr(report)
    seen = transfer_of(pool, "base@5")
    assert seen.sent_bytes == others[-1].sent_bytes
    assert seen.delta_from.hex() == content_of(pool, "base@4")[1]
    publisher.close()
    # All elements of the same weights, by somebody else, are the same content.
    whole = Model(seed=3)
    whole.load_state_dict(sent[1])
    with Publisher(pool.target, trainer_id="trainer-a", bucket_bytes=2048, delta="never") as other:
        version, report = other.push_base(whole)
    assert content_of(pool, str(version)) == sent[0]
    assert report.delta == DeltaUsage()


def test_a_copy_of_another_content_than_the_pools_is_not_used(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    """Whoever changed what the pool serves: the next push sends all, and the one after a delta."""
    model = Model(seed=1)
    publisher.push_base(model)
    step(model)
    assert publisher.push_base(model).report.delta.is_delta
    rollback("base", 1, coordinator=pool.target, timeout=20)
    step(model)
    report = publisher.push_base(model).report
    assert "another version than this trainer committed" in report.delta.whole_reason
    assert all(same(engine.base, weights(model)) for engine in engines)
    step(model)
    assert publisher.push_base(model).report.delta.is_delta
    assert all(same(engine.base, weights(model)) for engine in engines)


def test_a_late_replica_clones_what_a_delta_made(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    model = Model(seed=1)
    publisher.push_base(model)
    step(model)
    assert publisher.push_base(model).report.delta.is_delta
    late = EngineDouble(weights(Model()), base_copies=1)
    pool.add_replica("replica-9", late)
    until(lambda: is_ready(pool, "replica-9"))
    assert same(late.base, weights(model))
    step(model)
    report = publisher.push_base(model).report
    assert report.delta.is_delta
    assert report.num_replicas == 3
    assert same(late.base, weights(model))


def test_replicas_without_a_copy_are_sent_all_elements(pool: Pool, publisher: Publisher) -> None:
    engine = EngineDouble(weights(Model()), base_copies=0)
    pool.add_replica("replica-0", engine)
    model = Model(seed=1)
    for _ in range(2):
        report = publisher.push_base(model).report
        assert same(engine.base, weights(model))
        step(model)
    assert not report.delta.is_delta
    assert "replica-0" in report.delta.whole_reason


@pytest.fixture
def in_place(pool: Pool) -> EngineDouble:
    """Engine of a replica that loads in place, and whose weights can be read."""
    engine = EngineDouble(weights(Model()), in_place=True, is_readable=True)
    pool.add_replica("replica-0", engine)
    return engine


def test_replicas_that_load_in_place_apply_deltas_where_they_serve_and_go_back(
    pool: Pool, in_place: EngineDouble, publisher: Publisher
) -> None:
    model, made = Model(seed=1), list[dict[str, torch.Tensor]]()
    for number in range(4):
        report = publisher.push_base(model).report
        assert same(in_place.base, weights(model))
        assert report.delta.is_delta is (number > 0), report.delta
        assert in_place.load is None
        made.append(weights(model))
        step(model)
    usage = in_place.store.usage()
    assert usage.retained_bases == (4, 3, 2, 1)
    assert 0 < usage.staging_bytes < report.total_bytes
    for version in (3, 1):
        rollback("base", version, coordinator=pool.target, timeout=20)
        assert same(in_place.base, made[version - 1])
    assert in_place.store.usage().retained_bases == (1,)
    # From there a push goes on; and what is served now can be cloned.
    assert not publisher.push_base(model).report.delta.is_delta
    step(model)
    assert publisher.push_base(model).report.delta.is_delta
    late = EngineDouble(weights(Model()), base_copies=1)
    pool.add_replica("replica-9", late)
    until(lambda: is_ready(pool, "replica-9"))
    assert same(late.base, weights(model))


def test_a_delta_to_replicas_of_both_kinds_is_one_version(
    pool: Pool, in_place: EngineDouble, publisher: Publisher
) -> None:
    staged = EngineDouble(weights(Model()), base_copies=1)
    pool.add_replica("replica-1", staged)
    model = Model(seed=1)
    publisher.push_base(model)
    step(model)
    report = publisher.push_base(model).report
    assert report.delta.is_delta
    assert report.num_replicas == 2
    assert same(in_place.base, weights(model))
    assert same(staged.base, weights(model))


def test_weights_that_changed_behind_the_replicas_back_are_found_where_they_are_changed(
    pool: Pool, in_place: EngineDouble, publisher: Publisher
) -> None:
    model = Model(seed=1)
    publisher.push_base(model)
    step(model)
    with torch.no_grad():
        model.layers[1]["q_proj"].weight.view(-1)[100] += 1
    in_place.base["layers.1.q_proj.weight"].view(-1).view(torch.int32)[100] ^= 1 << 12
    report = publisher.push_base(model).report
    assert "layers.1.q_proj.weight" in report.delta.whole_reason
    assert same(in_place.base, weights(model))


def spoil(engine: EngineDouble, element: int) -> None:
    """Change an element of an engine's copy of the last base, as a faulty memory would."""
    copy = engine.store.held(PolicyVersion("base", engine.store.retained_bases()[0]))
    tensor = next(t for name, t in copy.tensors() if name == "layers.1.q_proj.weight")
    tensor.view(-1).view(torch.int32)[element] ^= 1 << 12


@pytest.mark.parametrize("is_changed", [True, False])
def test_a_copy_that_was_spoilt_is_found_before_the_commit_and_healed(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher, is_changed: bool
) -> None:
    """At an element that the delta changes, and at another."""
    model = Model(seed=1)
    publisher.push_base(model)
    step(model)
    with torch.no_grad():
        model.layers[1]["q_proj"].weight.view(-1)[100] += 1
    spoil(engines[1], 100 if is_changed else 101)
    version, report = publisher.push_base(model)
    assert not report.delta.is_delta
    assert "the pool refused a delta" in report.delta.whole_reason
    assert "replica-1" in report.delta.whole_reason
    assert report.num_replicas == 2
    assert all(same(engine.base, weights(model)) for engine in engines)
    # The version that the delta would have made was served nowhere.
    assert str(version) == "base@3"
    step(model)
    assert not publisher.push_base(model).report.delta.is_delta  # a pause after one of no use
    step(model)
    assert publisher.push_base(model).report.delta.is_delta
    assert all(same(engine.base, weights(model)) for engine in engines)


def test_a_delta_of_most_elements_is_sent_whole(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    model = Model(seed=1)
    publisher.push_base(model)
    model = Model(seed=2)
    report = publisher.push_base(model).report
    assert "of all bytes" in report.delta.whole_reason
    assert all(same(engine.base, weights(model)) for engine in engines)


def test_async_pushes_send_what_had_changed_at_their_call(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    model = Model(seed=1)
    publisher.push_base(model)
    step(model)
    wanted = weights(model)
    future = publisher.push_base_async(model)
    step(model)
    assert future.result(timeout=20).report.delta.is_delta
    assert all(same(engine.base, wanted) for engine in engines)
    assert publisher.push_base(model).report.delta.is_delta
    assert all(same(engine.base, weights(model)) for engine in engines)


def test_merged_adapters_are_compared_as_they_are_merged(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    model = peft_of(Model(seed=1), scale=0.01)
    publisher.push_merged(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers.2.v_proj.lora_B" in name:
                parameter[3] += 0.5
    report = publisher.push_merged(model).report
    assert report.delta.is_delta
    assert 0 < report.delta.changed_share < 0.1
    merged = weights(model.merge_and_unload())
    assert all(
        torch.allclose(engine.base[name], tensor, rtol=0, atol=1e-6)
        for engine in engines
        for name, tensor in merged.items()
    )


def test_auto_leaves_a_fast_backend_alone_and_keeps_no_copy(
    pool: Pool, engines: list[EngineDouble]
) -> None:
    model = Model(seed=1)
    with Publisher(pool.target, trainer_id="trainer-a") as publisher:
        first, second = (publisher.push_base(model).report for _ in range(2))
    assert "not measured yet" in first.delta.whole_reason
    assert "all elements are sent in 0.0" in second.delta.whole_reason
    assert first.delta.memory_bytes == second.delta.memory_bytes == 0


def test_auto_sends_deltas_where_they_are_faster(
    pool: Pool, engines: list[EngineDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is slow enough within a host: times are taken as those of a slow network."""
    monkeypatch.setattr(choice, "_MIN_SECONDS", 0.0)
    monkeypatch.setattr(choice, "_HOST_RATE", 1e15)
    model = Model(seed=1)
    with Publisher(pool.target, trainer_id="trainer-a", timeout_seconds=20) as publisher:
        reports = []
        for pays in (True, True, True, False, True):
            if not pays:
                monkeypatch.setattr(choice, "_MIN_GAIN", 1e9)
            reports.append(publisher.push_base(model).report)
            monkeypatch.setattr(choice, "_MIN_GAIN", 0.0)
            assert all(same(engine.base, weights(model)) for engine in engines)
            step(model)
    why = [report.delta.whole_reason for report in reports]
    assert "not measured yet" in why[0]
    assert "no copy yet" in why[1]
    assert [report.delta.is_delta for report in reports] == [False, False, True, False, False]
    assert "comparing would take as long" in why[3]
    assert "no copy yet" in why[4]


def test_a_copy_that_cannot_follow_a_committed_delta_fails_no_push(
    pool: Pool,
    engines: list[EngineDouble],
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model(seed=1)
    publisher.push_base(model)
    step(model)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(CommittedCopy, "apply", full)
        assert publisher.push_base(model).report.delta.is_delta
    step(model)
    assert "no copy yet" in publisher.push_base(model).report.delta.whole_reason
    step(model)
    assert publisher.push_base(model).report.delta.is_delta
    assert all(same(engine.base, weights(model)) for engine in engines)


@pytest.mark.parametrize("room_bytes", [None, 100])
def test_a_replica_without_room_for_what_a_delta_changes_is_sent_all_elements(
    pool: Pool,
    in_place: EngineDouble,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
    room_bytes: int | None,
) -> None:
    """Because its accelerator has none, or its operator gave it none."""
    model = Model(seed=1)
    publisher.push_base(model)
    step(model)
    if room_bytes is not None:
        monkeypatch.setattr(in_place.store, "staging_capacity_bytes", room_bytes)
    else:

        def full(*_: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(delta_transfer, "stage_delta", full)
    report = publisher.push_base(model).report
    assert "STAGING_FULL" in report.delta.whole_reason
    assert same(in_place.base, weights(model))


# -- planted faults ---------------------------------------------------------------------


@pytest.fixture
def served(
    engines: list[EngineDouble], in_place_too: EngineDouble, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, torch.Tensor]]:
    """What engines of both kinds have served, each time that one has switched."""
    found: list[dict[str, torch.Tensor]] = []
    apply_base = EngineDouble._apply_base

    def note(engine: EngineDouble, *order: Any) -> Any:
        done = apply_base(engine, *order)
        found.append({name: tensor.clone() for name, tensor in engine.base.items()})
        return done

    monkeypatch.setattr(EngineDouble, "_apply_base", note)
    return found


@pytest.fixture
def in_place_too(pool: Pool, engines: list[EngineDouble]) -> EngineDouble:
    """Engine of a further replica, which loads in place."""
    engine = EngineDouble(weights(Model()), in_place=True, is_readable=True)
    pool.add_replica("replica-2", engine)
    engines.append(engine)
    return engine


def alter_runs(
    monkeypatch: pytest.MonkeyPatch, alter: Callable[[tuple[Run, ...]], tuple[Run, ...]]
) -> None:
    """Have the trainer list other runs in a bucket of each delta than it compared."""
    pack = delta_selection.delta_packing

    def altered(*arguments: Any) -> Any:
        packing = pack(*arguments)
        runs = [alter(own) for own in packing.runs]
        wires = [
            replace(wire, num_runs=len(own))
            for wire, own in zip(packing.plan.buckets, runs, strict=True)
        ]
        plan = make_send_plan(packing.plan.num_senders, wires, packing.plan.delta_from)
        return replace(packing, plan=plan, runs=tuple(runs))

    monkeypatch.setattr(delta_selection, "delta_packing", altered)


@pytest.mark.parametrize(
    ("alter", "match"),
    [
        (lambda runs: runs[:-1], "did not come"),
        (lambda runs: (*runs[:-1], runs[0]), "came twice"),
    ],
)
def test_a_run_that_is_lost_or_comes_twice_is_found_and_all_is_sent(
    pool: Pool,
    engines: list[EngineDouble],
    served: list[dict[str, torch.Tensor]],
    alter: Callable[[tuple[Run, ...]], tuple[Run, ...]],
    match: str,
) -> None:
    model = Model(seed=1)
    with Publisher(
        pool.target, trainer_id="trainer-a", delta="always", timeout_seconds=20
    ) as publisher:
        publisher.push_base(model)
        step(model)
        num_served = len(served)
        with pytest.MonkeyPatch.context() as planted:
            alter_runs(planted, alter)
            report = publisher.push_base(model).report
        assert match in report.delta.whole_reason
        assert report.num_replicas == len(engines)
        assert all(same(base, weights(model)) for base in served[num_served:])
        for _ in range(2):  # one whole, for a pause
            step(model)
            report = publisher.push_base(model).report
        assert report.delta.is_delta
        assert all(same(engine.base, weights(model)) for engine in engines)


def flip(tensor: torch.Tensor, element: int) -> None:
    tensor.view(-1).view(torch.int32)[element] ^= 1 << 12


def copy_of(publisher: Publisher) -> CommittedCopy:
    copy = publisher._pushing._deltas._copy
    assert copy is not None
    return copy


def other_base(engines: list[EngineDouble], planted: pytest.MonkeyPatch) -> None:
    """A replica that stages takes its copy of an older base, and takes it for the wanted one."""
    store = engines[1].store
    older = store.held(PolicyVersion("base", store.retained_bases()[-1]))
    planted.setattr(store, "base_of_content", lambda *_: older)


def flip_in_place(engines: list[EngineDouble], planted: pytest.MonkeyPatch) -> None:
    """An old element of the weights that are served is another."""
    flip(engines[2].base["layers.1.q_proj.weight"], 100)


@pytest.mark.parametrize("plant", [other_base, flip_in_place])
def test_a_replica_with_another_base_than_it_says_is_found_and_healed(
    pool: Pool,
    engines: list[EngineDouble],
    publisher: Publisher,
    served: list[dict[str, torch.Tensor]],
    plant: Callable[[list[EngineDouble], pytest.MonkeyPatch], None],
) -> None:
    model = Model(seed=1)
    for _ in range(2):
        publisher.push_base(model)
        step(model)
    with torch.no_grad():
        model.layers[1]["q_proj"].weight.view(-1)[100] += 1
    num_served = len(served)
    with pytest.MonkeyPatch.context() as planted:
        plant(engines, planted)
        report = publisher.push_base(model).report
    assert "the pool refused a delta: replica-" in report.delta.whole_reason
    assert all(same(base, weights(model)) for base in served[num_served:])
    assert all(same(engine.base, weights(model)) for engine in engines)


@pytest.mark.parametrize("fault", ["never written", "at an element", "of another version"])
def test_a_copy_of_the_trainers_that_is_not_what_it_says_is_found_and_made_anew(
    pool: Pool,
    engines: list[EngineDouble],
    publisher: Publisher,
    served: list[dict[str, torch.Tensor]],
    fault: str,
) -> None:
    model = Model(seed=1)
    with pytest.MonkeyPatch.context() as planted:
        if fault == "never written":
            put = CommittedCopy.put

            def skip(copy: CommittedCopy, nth: int, *packed: Any) -> None:
                former = copy._payloads[nth].clone()
                put(copy, nth, *packed)
                if nth == 1:
                    copy._payloads[nth].copy_(former)

            planted.setattr(CommittedCopy, "put", skip)
        publisher.push_base(model)
    if fault == "at an element":
        flip(copy_of(publisher).payload(1), 100)
    elif fault == "of another version":
        step(model)
        with pytest.MonkeyPatch.context() as planted:
            planted.setattr(CommittedCopy, "apply", lambda *_: None)
            publisher.push_base(model)
        now = engines[2].store.served.base
        assert now is not None
        copy_of(publisher).content_digest = now.content_digest
    num_served = len(served)
    step(model)
    report = publisher.push_base(model).report
    assert "the pool refused a delta: replica-" in report.delta.whole_reason
    assert all(same(base, weights(model)) for base in served[num_served:])
    assert all(same(engine.base, weights(model)) for engine in engines)
    for _ in range(2):  # one whole, for a pause, and one that is a delta of the new copy
        step(model)
        report = publisher.push_base(model).report
    assert report.delta.is_delta
    assert all(same(engine.base, weights(model)) for engine in engines)
