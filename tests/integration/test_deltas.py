"""Pushes of what has changed: real coordinator, gRPC and gloo, engine doubles that hold copies.

One file: its cases differ in what is pushed and in which replicas take it, over the same pools.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from rollout_side.receive import delta_transfer
from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool
from tests.integration.models import Model, peft_of, same, step, until, weights
from tests.integration.replicas import is_ready
from trainer_side import Publisher
from trainer_side.deltas import choice
from trainer_side.deltas.committed_copy import CommittedCopy
from trainer_side.push_request import DeltaUsage, PushReport
from weft_rl import host_memory
from weft_rl.cli.orders import pin, rollback
from weft_rl.contract.errors import InvalidManifestError, NotFoundError, NotReadyError
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
    assert (usage.retained_bases, usage.undo_bases) == ((4,), (3, 2, 1))
    assert 0 < usage.staging_bytes < report.total_bytes
    for version in (3, 1, 4, 2, 1):
        rollback("base", version, coordinator=pool.target, timeout=20)
        assert same(in_place.base, made[version - 1])
    usage = in_place.store.usage()
    assert (usage.retained_bases, usage.undo_bases) == ((1,), (2, 3, 4))
    # From there a push goes on; and what is served now can be cloned.
    assert not publisher.push_base(model).report.delta.is_delta
    step(model)
    assert publisher.push_base(model).report.delta.is_delta
    late = EngineDouble(weights(Model()), base_copies=1)
    pool.add_replica("replica-9", late)
    until(lambda: is_ready(pool, "replica-9"))
    assert same(late.base, weights(model))


@pytest.fixture
def readable(pool: Pool) -> EngineDouble:
    """Engine of a replica that stages bases, holds a copy of one, and whose weights can be read."""
    engine = EngineDouble(weights(Model()), base_copies=1, is_readable=True)
    pool.add_replica("replica-0", engine)
    return engine


def holds_copy(engine: EngineDouble, version: int) -> bool:
    """Return whether an engine's replica holds a copy of a version of the base."""
    with suppress(NotFoundError):
        return bool(engine.store.held(PolicyVersion("base", version)))
    return False


def test_replicas_that_stage_apply_deltas_where_they_serve_too(
    pool: Pool, readable: EngineDouble, publisher: Publisher
) -> None:
    """A delta takes no memory for another copy; the last copy is kept until a push needs it."""
    model, made = Model(seed=1), list[dict[str, torch.Tensor]]()
    for number in range(4):
        report = publisher.push_base(model).report
        assert same(readable.base, weights(model))
        assert report.delta.is_delta is (number > 0), report.delta
        made.append(weights(model))
        step(model)
    usage = readable.store.usage()
    assert (usage.retained_bases, usage.undo_bases) == ((4, 1), (3, 2))
    assert not holds_copy(readable, 4)
    assert usage.staging_bytes < 2 * report.total_bytes
    late = EngineDouble(weights(Model()), base_copies=1)
    pool.add_replica("replica-9", late)
    until(lambda: is_ready(pool, "replica-9"))
    assert same(late.base, made[3])
    pool.remove_replica("replica-9")
    for version in (3, 1, 4):
        rollback("base", version, coordinator=pool.target, timeout=20)
        assert same(readable.base, made[version - 1])
    # What is pinned is copied; so all that was pushed since leaves it.
    pin("base@4", coordinator=pool.target)
    until(lambda: holds_copy(readable, 4))
    for _ in range(2):
        publisher.push_base(model)
        step(model)
    publisher.close()
    with Publisher(pool.target, trainer_id="trainer-a", bucket_bytes=2048, delta="never") as other:
        other.push_base(model)
    rollback("base", 4, coordinator=pool.target, timeout=20)
    assert same(readable.base, made[3])


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


def test_a_pinned_version_that_was_gone_back_from_stays_within_reach_until_a_push(
    pool: Pool, in_place: EngineDouble, publisher: Publisher
) -> None:
    """Where one replica keeps a copy of it, and another what deltas have changed."""
    staged = EngineDouble(weights(Model()), base_copies=3)
    pool.add_replica("replica-1", staged)
    model, made = Model(seed=1), list[dict[str, torch.Tensor]]()
    for _ in range(3):
        publisher.push_base(model)
        made.append(weights(model))
        step(model)
    pin("base@3", coordinator=pool.target)
    for version in (1, 3, 1):
        rollback("base", version, coordinator=pool.target, timeout=20)
        assert same(in_place.base, made[version - 1])
        assert same(staged.base, made[version - 1])
    assert publisher.push_base(model).report.delta.whole_reason
    assert (in_place.store.usage().undo_bases, 3 in staged.store.retained_bases()) == ((), True)
    with pytest.raises(NotReadyError, match="cannot go back to base@3: replica-0 retains no copy"):
        rollback("base", 3, coordinator=pool.target, timeout=20)
    assert same(in_place.base, weights(model))
    assert same(staged.base, weights(model))


def test_replicas_that_load_in_place_keep_no_copy_that_could_be_pinned(
    pool: Pool, in_place: EngineDouble, publisher: Publisher
) -> None:
    model = Model(seed=1)
    for _ in range(2):
        publisher.push_base(model)
        step(model)
    for number in (1, 2):
        with pytest.raises(NotReadyError, match="those that load in place keep none"):
            pin(f"base@{number}", coordinator=pool.target)


def test_a_late_replica_is_sent_what_the_pool_went_back_to(
    pool: Pool, in_place: EngineDouble, publisher: Publisher
) -> None:
    model, made = Model(seed=1), list[dict[str, torch.Tensor]]()
    for _ in range(3):
        publisher.push_base(model)
        made.append(weights(model))
        step(model)
    rollback("base", 2, coordinator=pool.target, timeout=20)
    late = EngineDouble(weights(Model()), in_place=True, is_readable=True)
    pool.add_replica("replica-9", late)
    until(lambda: is_ready(pool, "replica-9"))
    assert same(late.base, made[1])
    # It has nothing to go back by, and the pool does not.
    with pytest.raises(NotReadyError, match="replica-9 retains no copy"):
        rollback("base", 1, coordinator=pool.target, timeout=20)
    assert same(in_place.base, made[1])


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


@pytest.mark.parametrize("collect", [dict, list, tuple])
def test_named_tensors_in_a_collection_are_compared(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher, collect: Callable[[Any], Any]
) -> None:
    model, reports = Model(seed=1), list[PushReport]()
    for order in (1, -1, 1):
        given = collect([*weights(model).items()][::order])
        reports.append(publisher.push_tensors(given).report)
        assert all(same(engine.base, weights(model)) for engine in engines)
        step(model)
    assert [report.delta.is_delta for report in reports] == [False, True, True]
    # It is the layout that the model itself is pushed in.
    assert publisher.push_base(model).report.delta.is_delta
    assert all(same(engine.base, weights(model)) for engine in engines)


def arriving(model: Model, seed: int, ends_after: int = -1) -> Iterator[tuple[str, torch.Tensor]]:
    """Give named tensors in the order of a seed, each in memory that is used again for the next
    one, as frameworks do that gather."""
    named = in_order(model, seed)
    memory = torch.empty(max(tensor.numel() for _, tensor in named), dtype=torch.float64)
    for name, tensor in named[:ends_after] if ends_after >= 0 else named:
        given = memory[: tensor.numel()].view(tensor.shape).copy_(tensor)
        yield name, given
        memory.zero_()


def in_order(model: Model, seed: int) -> list[tuple[str, torch.Tensor]]:
    named = [*weights(model).items()]
    random.Random(seed).shuffle(named)
    return named


@pytest.mark.parametrize("is_ordered", [False, True])
def test_named_tensors_of_an_iterator_are_compared_as_they_come(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher, is_ordered: bool
) -> None:
    """In another order each time, unless it is said beforehand: then it is the layout's."""
    model, reports = Model(seed=1), list[PushReport]()
    for number in range(4):
        seed = 1 if is_ordered else number
        metadata = in_order(model, seed) if is_ordered else None
        version, report = publisher.push_tensors(arriving(model, seed), metadata=metadata)
        reports.append(report)
        assert all(same(engine.base, weights(model)) for engine in engines)
        if number < 3:
            step(model)
    assert [report.delta.is_delta for report in reports] == [False, True, True, True]
    assert reports[0].delta.whole_reason == "there is no copy yet of what the pool committed"
    assert 0 < reports[1].delta.changed_share < 1
    assert reports[1].sent_bytes < reports[1].total_bytes
    if not is_ordered:  # it is the version, and the layout, that the model itself is pushed as
        again = publisher.push_base(model)
        assert again.report.delta.is_delta
        assert again.report.delta.changed_share == 0
        assert content_of(pool, str(again.version)) == content_of(pool, str(version))


def test_an_iterator_is_not_asked_again_where_its_delta_is_refused(
    pool: Pool, in_place: EngineDouble, publisher: Publisher
) -> None:
    """All elements come from the copy then, and it follows."""
    model = Model(seed=1)
    publisher.push_tensors(arriving(model, 1))
    step(model)
    with torch.no_grad():
        model.layers[1]["q_proj"].weight.view(-1)[100] += 1
    in_place.base["layers.1.q_proj.weight"].view(-1).view(torch.int32)[100] ^= 1 << 12
    report = publisher.push_tensors(arriving(model, 2)).report
    assert "layers.1.q_proj.weight" in report.delta.whole_reason
    assert "the pool refused a delta" in report.delta.whole_reason
    assert same(in_place.base, weights(model))
    for is_delta in (False, True):  # a pause after one of no use
        step(model)
        assert publisher.push_tensors(arriving(model, 3)).report.delta.is_delta is is_delta
        assert same(in_place.base, weights(model))


def test_an_iterator_of_which_most_has_changed_is_sent_from_the_copy(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    publisher.push_tensors(arriving(Model(seed=1), 1))
    report = publisher.push_tensors(arriving(Model(seed=2), 2)).report
    assert "of all bytes" in report.delta.whole_reason
    assert all(same(engine.base, weights(Model(seed=2))) for engine in engines)


def test_an_iterator_that_ends_early_leaves_no_copy_that_is_trusted(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    model = Model(seed=1)
    publisher.push_tensors(arriving(model, 1))
    step(model)
    with pytest.raises(InvalidManifestError, match="is missing"):
        publisher.push_tensors(arriving(model, 2, ends_after=5))
    report = publisher.push_tensors(arriving(model, 3)).report
    assert report.delta.whole_reason == "there is no copy yet of what the pool committed"
    assert all(same(engine.base, weights(model)) for engine in engines)


def test_an_iterator_is_sent_to_those_too_that_take_no_delta(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    other = EngineDouble(weights(Model()))
    pool.add_replica("replica-9", other)
    model = Model(seed=1)
    publisher.push_tensors(arriving(model, 1))
    step(model)
    report = publisher.push_tensors(arriving(model, 2)).report
    assert report.delta.is_delta
    assert report.delta.num_whole_replicas == 1
    assert all(same(engine.base, weights(model)) for engine in (*engines, other))


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
    assert "a delta would take as long" in why[3]
    assert "no copy yet" in why[4]


@pytest.mark.parametrize("is_iterator", [False, True])
def test_a_copy_that_the_host_has_no_room_for_is_not_made(
    pool: Pool,
    engines: list[EngineDouble],
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
    is_iterator: bool,
) -> None:
    """Linux would give the memory, and end a process for it later."""
    model = Model(seed=1)
    monkeypatch.setattr(host_memory, "available_memory", lambda: (2**30, "memory of this machine"))
    for _ in range(2):
        if is_iterator:
            report = publisher.push_tensors(arriving(model, 1)).report
        else:
            report = publisher.push_base(model).report
        assert "no memory for a copy" in report.delta.whole_reason
        assert report.delta.memory_bytes == 0
        assert all(same(engine.base, weights(model)) for engine in engines)
        step(model)


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
