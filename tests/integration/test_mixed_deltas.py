"""One push that is a delta to replicas that can take it, and whole to those that cannot: real
coordinator, gRPC and side groups, engine doubles of both kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rollout_side.receive import delta_transfer
from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool
from tests.doubles.trainer_copy import deltas_of
from tests.integration.models import Model, peft_of, same, step, until, weights
from tests.integration.replicas import is_ready
from tests.integration.test_deltas import content_of, spoil, transfer_of
from trainer_side import Publisher
from trainer_side.deltas import choice
from trainer_side.push_request import PushReport
from weft_rl.cli.orders import rollback

#: Takers and others by what they do: stage copies, or load in place.
TAKERS: dict[str, dict[str, Any]] = {
    "holds a copy": {"base_copies": 2},
    "loads in place, is read": {"in_place": True, "is_readable": True},
}
OTHERS: dict[str, dict[str, Any]] = {
    "holds no copy": {"base_copies": 0},
    "loads in place": {"in_place": True},
}


def add(pool: Pool, name: str, settings: dict[str, Any]) -> EngineDouble:
    engine = EngineDouble(weights(Model()), **settings)
    pool.add_replica(name, engine)
    return engine


@pytest.fixture(params=[(a, b) for a in TAKERS for b in OTHERS], ids=lambda kinds: ", ".join(kinds))
def engines(pool: Pool, request: pytest.FixtureRequest) -> list[EngineDouble]:
    """Engines of replica-0, which takes deltas, and of replica-1, which does not."""
    taker, other = request.param
    return [add(pool, "replica-0", TAKERS[taker]), add(pool, "replica-1", OTHERS[other])]


@pytest.fixture
def staging(pool: Pool) -> list[EngineDouble]:
    """Engines, as ``engines``, that both stage."""
    return [
        add(pool, "replica-0", TAKERS["holds a copy"]),
        add(pool, "replica-1", OTHERS["holds no copy"]),
    ]


@pytest.fixture(params=["one-sided", "gloo"])
def publisher(pool: Pool, request: pytest.FixtureRequest) -> Iterator[Publisher]:
    with Publisher(
        pool.target,
        trainer_id="trainer-a",
        timeout_seconds=20,
        delta="always",
        bucket_bytes=2048,
        backend=request.param,
    ) as running:
        yield running


def test_each_is_sent_what_it_can_take_and_all_serve_one_version(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    model, contents = Model(seed=1), list[tuple[str, str]]()
    for number in range(4):
        version, report = publisher.push_base(model)
        assert str(version) == f"base@{number + 1}"
        assert all(same(engine.base, weights(model)) for engine in engines)
        assert report.num_replicas == 2
        contents.append(content_of(pool, str(version)))
        if number:
            assert report.delta.is_delta, report.delta
            assert report.delta.num_whole_replicas == 1
            assert "replica-1" in report.delta.whole_reason
            assert report.sent_bytes < report.total_bytes / 4
            assert "(whole to 1) to 2 replicas" in repr(report)
            seen = transfer_of(pool, str(version))
            assert seen.delta_from.hex() == contents[-2][1]
            assert list(seen.whole_replica_ids) == ["replica-1"]
        step(model)
    # As little is kept, and as far can be gone back, as if all had taken it.
    assert engines[0].store.usage().staging_bytes < 3 * report.total_bytes
    assert not engines[1].store.usage().undo_bases


def test_all_can_or_none_can_and_nothing_is_mixed(
    pool: Pool, staging: list[EngineDouble], publisher: Publisher
) -> None:
    model = Model(seed=1)
    publisher.push_base(model)
    pool.remove_replica("replica-1")
    step(model)
    report = publisher.push_base(model).report
    assert report.delta.is_delta
    assert (report.delta.num_whole_replicas, report.delta.whole_reason) == (0, "")
    assert not transfer_of(pool, "base@2").whole_replica_ids
    other = add(pool, "replica-1", OTHERS["holds no copy"])
    until(lambda: is_ready(pool, "replica-1"))
    pool.remove_replica("replica-0")
    step(model)
    report = publisher.push_base(model).report
    assert not report.delta.is_delta
    assert "replica-1 holds no copy of base@2" in report.delta.whole_reason
    assert same(other.base, weights(model))


def test_a_late_replica_without_the_base_is_sent_all_elements(
    pool: Pool, staging: list[EngineDouble], publisher: Publisher
) -> None:
    """A delta alone would pass it over."""
    model = Model(seed=1)
    publisher.push_base(model)
    late = EngineDouble(weights(Model()), in_place=True)
    pool.add_replica("replica-9", late)
    step(model)
    report = publisher.push_base(model).report
    assert report.delta.is_delta
    until(lambda: is_ready(pool, "replica-9"))
    assert same(late.base, weights(model))


def test_going_back_is_by_copies_and_the_next_push_is_mixed_again(
    pool: Pool, publisher: Publisher
) -> None:
    taker = add(pool, "replica-0", {"base_copies": 2})
    other = add(pool, "replica-1", {"base_copies": 2})
    model, made = Model(seed=1), list[dict[str, torch.Tensor]]()
    for _ in range(3):
        publisher.push_base(model)
        made.append(weights(model))
        step(model)
    rollback("base", 2, coordinator=pool.target, timeout=20)
    assert same(taker.base, made[1])
    assert same(other.base, made[1])
    pool.remove_replica("replica-1")
    other = add(pool, "replica-1", OTHERS["holds no copy"])
    until(lambda: is_ready(pool, "replica-1"))
    for is_delta in (False, True):
        report = publisher.push_base(model).report
        assert report.delta.is_delta is is_delta
        assert same(taker.base, weights(model))
        assert same(other.base, weights(model))
        step(model)


def test_async_pushes_and_named_tensors_go_the_same_way(
    pool: Pool, staging: list[EngineDouble], publisher: Publisher
) -> None:
    model = Model(seed=1)
    publisher.push_base(model)
    step(model)
    wanted = weights(model)
    future = publisher.push_base_async(model)
    step(model)
    assert future.result(timeout=20).report.delta.num_whole_replicas == 1
    assert all(same(engine.base, wanted) for engine in staging)
    report = publisher.push_tensors(weights(model)).report
    assert report.delta.num_whole_replicas == 1
    assert all(same(engine.base, weights(model)) for engine in staging)


def test_merged_adapters_are_read_again_for_those_that_are_sent_all(
    pool: Pool, staging: list[EngineDouble], publisher: Publisher
) -> None:
    model = peft_of(Model(seed=1), scale=0.01)
    publisher.push_merged(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers.2.v_proj.lora_B" in name:
                parameter[3] += 0.5
    report = publisher.push_merged(model).report
    assert report.delta.num_whole_replicas == 1
    assert report.sent_bytes < report.total_bytes / 4
    assert same(*(engine.base for engine in staging))


# -- what goes wrong ------------------------------------------------------------------


def flip(tensor: torch.Tensor, element: int) -> None:
    tensor.view(-1).view(torch.int32)[element] ^= 1 << 12


def spoil_taker(publisher: Publisher, engines: list[EngineDouble]) -> None:
    """The copy that the taker's delta is applied to is another."""
    spoil(engines[0], 100)


def spoil_trainer(publisher: Publisher, engines: list[EngineDouble]) -> None:
    """The trainer's copy is not what was committed."""
    copy = deltas_of(publisher).copy
    assert copy is not None
    flip(copy.payload(1), 100)


@pytest.mark.parametrize("plant", [spoil_taker, spoil_trainer])
def test_a_delta_that_cannot_be_applied_is_found_and_all_is_sent_to_all(
    pool: Pool,
    staging: list[EngineDouble],
    publisher: Publisher,
    plant: Callable[[Publisher, list[EngineDouble]], None],
) -> None:
    model = Model(seed=1)
    publisher.push_base(model)
    step(model)
    plant(publisher, staging)
    version, report = publisher.push_base(model)
    assert str(version) == "base@3"
    assert not report.delta.is_delta
    assert "the pool refused a delta: replica-0" in report.delta.whole_reason
    assert report.num_replicas == 2
    assert all(same(engine.base, weights(model)) for engine in staging)
    for _ in range(2):  # one whole, for a pause
        step(model)
        report = publisher.push_base(model).report
    assert report.delta.num_whole_replicas == 1
    assert all(same(engine.base, weights(model)) for engine in staging)


@pytest.fixture
def in_place(pool: Pool) -> list[EngineDouble]:
    """Engines, as ``engines``, that both load in place."""
    return [
        add(pool, "replica-0", TAKERS["loads in place, is read"]),
        add(pool, "replica-1", OTHERS["loads in place"]),
    ]


def test_while_others_load_in_place_one_that_cannot_apply_the_delta_is_left_behind(
    pool: Pool, in_place: list[EngineDouble], publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their weights would stay mixed if the push ended: it goes on, and the next one heals all."""
    model = Model(seed=1)
    publisher.push_base(model)
    step(model)
    with torch.no_grad():
        model.layers[1]["q_proj"].weight.view(-1)[100] += 1
    stage = delta_transfer.stage_delta

    def late(*arguments: Any) -> Any:
        until(lambda: in_place[1].load is not None)
        flip(in_place[0].base["layers.1.q_proj.weight"], 100)
        return stage(*arguments)

    with monkeypatch.context() as planted:
        planted.setattr(delta_transfer, "stage_delta", late)
        version, report = publisher.push_base(model)
    assert str(version) == "base@2"
    assert report.num_replicas == 1
    (remark,) = report.remarks
    assert remark.startswith("replica-0 does not serve it: it was lost before the commit")
    assert same(in_place[1].base, weights(model))
    step(model)
    report = publisher.push_base(model).report
    assert report.num_replicas == 2
    assert all(same(engine.base, weights(model)) for engine in in_place)


def test_auto_sends_both_where_it_is_worth_it(
    pool: Pool, staging: list[EngineDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is slow enough within a host: times are taken as those of a slow network."""
    monkeypatch.setattr(choice, "_MIN_SECONDS", 0.0)
    monkeypatch.setattr(choice, "_HOST_RATE", 1e15)
    monkeypatch.setattr(choice, "_MIN_GAIN", 0.0)
    model, reports = Model(seed=1), list[PushReport]()
    with Publisher(pool.target, trainer_id="trainer-a", timeout_seconds=20) as publisher:
        for most in (0.5, 0.5, 1e9, 0.0, 1e9, 1e9):
            monkeypatch.setattr(choice, "_MOST_MORE_TIME", most)
            reports.append(publisher.push_base(model).report)
            assert all(same(engine.base, weights(model)) for engine in staging)
            step(model)
    assert [r.delta.num_whole_replicas for r in reports] == [0, 0, 1, 0, 0, 1]
    assert "would take" in reports[3].delta.whole_reason
    assert reports[3].delta.memory_bytes == 0


@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("backend", ["one-sided", "gloo"])
def test_the_push_goes_on_without_either_kind_lost_midway(
    pool: Pool, engines: list[EngineDouble], backend: str, lost: int, *, is_behind: bool
) -> None:
    """While the delta comes, and while all elements do."""
    others = [
        add(pool, "replica-2", TAKERS["holds a copy"]),
        add(pool, "replica-3", OTHERS["holds no copy"]),
    ]
    struck = list[int]()

    def strike(version: str, done: int, total: int) -> None:
        if version == "base@2" and done >= (total - 2 if is_behind else 1) and not struck:
            struck.append(done)
            engines[lost].receiver.close()

    model = Model(seed=1)
    with Publisher(
        pool.target,
        trainer_id="trainer-a",
        timeout_seconds=20,
        delta="always",
        bucket_bytes=2048,
        backend=backend,
        progress=strike,
    ) as publisher:
        publisher.push_base(model)
        step(model)
        report = publisher.push_base(model).report
        assert struck
        assert report.delta.is_delta, report.delta
        assert report.num_replicas >= 3
        assert all(same(engine.base, weights(model)) for engine in (engines[1 - lost], *others))
