"""Replicas on a trainer's GPU sleep and wake: real coordinator, real agents and Publisher; the
engine double has no GPU, and notes what it is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_side.engine import SleepOrder
from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool, running_pool
from tests.integration.models import Model, peft_of, until, weights
from tests.integration.test_drain import weft
from trainer_side import Publisher, rollout_sleep
from weft_rl.contract.errors import (
    InvalidRequestError,
    NotReadyError,
    PeerUnavailableError,
    RequestConflictError,
    StaleEpochError,
    TransferTimeoutError,
    WeftError,
)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    # What ends with a lease is to end within a test.
    with running_pool(tmp_path / "weft.db", lease_seconds=2.0) as running:
        yield running


@pytest.fixture
def engines(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> list[EngineDouble]:
    """Of replica-0, on the trainer's GPU, and replica-1, which cannot sleep, elsewhere."""
    monkeypatch.setattr(rollout_sleep, "used_gpus", lambda: ["GPU-a"])
    doubles = [
        EngineDouble(weights(Model()), gpu_uuids=("GPU-a",), can_sleep=True, base_copies=1),
        EngineDouble(weights(Model()), gpu_uuids=("GPU-b",), base_copies=1),
    ]
    for i, engine in enumerate(doubles):
        pool.add_replica(f"replica-{i}", engine)
    until(lambda: pool.agents["replica-0"].is_ready)
    return doubles


def _why(pool: Pool) -> str:
    """Why replica-0 sleeps, as the command line says; empty where it does not."""
    for replica in json.loads(weft(pool, "status", "--json")).get("replicas", ()):
        if replica["replica_id"] == "replica-0" and replica["state"] == "REPLICA_STATE_ASLEEP":
            return str(replica["state_reason"])
    return ""


def _sleep(publisher: Publisher, **how: Any) -> tuple[str, ...]:
    """Begin a sleep that the trainer does not end."""
    return publisher.rollouts_asleep(**how).__enter__()


def test_sleep_push_wake(pool: Pool, engines: list[EngineDouble], publisher: Publisher) -> None:
    model, agent = Model(), pool.agents["replica-0"]
    with publisher.rollouts_asleep() as names:
        assert names == ("replica-0",)
        assert not agent.is_ready
        assert _why(pool) == "for trainer trainer-a"
        assert "replica-0" not in weft(pool, "routes")
        assert _sleep(publisher) == ("replica-0",)  # again

        version, report = publisher.push_base(model)
        assert (str(version), report.num_replicas) == ("base@1", 2)
        assert [engine.base_version for engine in engines] == [1, 1]
        assert engines[0].sleeps == ["sleep", "sleep", "weights"]
        until(lambda: "its weights awake" in _why(pool))
        assert str(publisher.push_adapter(peft_of(model), "math").version) == "math@1"
        assert engines[0].sleeps[-1] == "weights"
        assert not agent.is_ready

    assert engines[0].sleeps[-1] == "kv_cache"
    until(lambda: agent.is_ready)
    assert "replica-0" in weft(pool, "routes")
    assert engines[1].sleeps == []


def test_an_error_inside_the_with_wakes_them_too_and_is_raised(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    with pytest.raises(RuntimeError, match="out of memory"), publisher.rollouts_asleep():
        raise RuntimeError("out of memory")
    assert engines[0].asleep is None
    until(lambda: pool.agents["replica-0"].is_ready)


def test_running_requests_finish_or_are_aborted(
    engines: list[EngineDouble], publisher: Publisher
) -> None:
    engines[0].running = 2
    with pytest.raises(TransferTimeoutError, match="have not ended in time"):
        _sleep(publisher, timeout_seconds=0.3)
    assert engines[0].asleep is None
    assert _sleep(publisher, when_running="abort") == ("replica-0",)
    assert engines[0].running == 0


def test_a_commit_of_another_trainer_does_not_wait_for_requests_that_a_sleep_waits_for(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    model = Model()
    publisher.push_base(model)
    engines[0].running = 1
    with ThreadPoolExecutor(1) as calls:
        sleeping = calls.submit(_sleep, publisher, timeout_seconds=60.0)
        until(lambda: engines[0].is_to_sleep)
        assert not pool.agents["replica-0"].is_ready
        with Publisher(pool.target, trainer_id="trainer-b", timeout_seconds=20) as other:
            assert str(other.push_adapter(peft_of(model), "math").version) == "math@1"
        assert engines[0].aliases == {"math": 1}
        assert not sleeping.done()
        engines[0].running = 0
        assert sleeping.result(20) == ("replica-0",)
    assert engines[0].sleeps == ["sleep"]


def test_an_operator_wakes_a_replica_that_still_waits_for_its_requests(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    engines[0].running = 1
    with ThreadPoolExecutor(1) as calls:
        sleeping = calls.submit(_sleep, publisher, timeout_seconds=600.0)
        until(lambda: engines[0].is_to_sleep)
        weft(pool, "wake", "replica-0")
        with pytest.raises(RequestConflictError, match="ordered to wake"):
            sleeping.result(20)
    assert not engines[0].is_to_sleep
    until(lambda: pool.agents["replica-0"].is_ready)
    assert engines[0].sleeps == []


def test_the_end_of_the_lease_wakes_a_replica_that_still_waits_for_its_requests(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    engines[0].running = 1
    with ThreadPoolExecutor(1) as calls:
        sleeping = calls.submit(_sleep, publisher, timeout_seconds=600.0)
        until(lambda: engines[0].is_to_sleep)
        with Publisher(
            pool.target, trainer_id="trainer-a", timeout_seconds=20, takeover=True
        ) as successor:
            successor.push_base(Model())
            until(lambda: not engines[0].is_to_sleep)
            until(lambda: pool.agents["replica-0"].is_ready)
            with pytest.raises(WeftError):
                sleeping.result(20)
    assert engines[0].sleeps == []


def test_what_waits_for_its_requests_is_woken_by_a_coordinator_that_has_not_ordered_it(
    pool: Pool, engines: list[EngineDouble]
) -> None:
    """One that was restarted, say: it would route requests to who refuses them."""
    engines[0].running = 1
    agent = pool.agents["replica-0"]
    order = SleepOrder(trainer_id="trainer-a", aborts=False, timeout_seconds=600.0)
    former = pool.start(agent.fall_asleep(order))
    until(lambda: engines[0].is_to_sleep)
    with pytest.raises(StaleEpochError, match="ordered to wake"):
        former.result(20)
    until(lambda: agent.is_ready)
    assert not engines[0].is_to_sleep


def test_one_that_does_not_sleep_has_the_others_woken_and_the_error_names_them(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    other = EngineDouble(weights(Model()), gpu_uuids=("GPU-a",), can_sleep=True)
    pool.add_replica("replica-2", other)
    engines[0].running = 1
    with pytest.raises(TransferTimeoutError, match="until they are woken: replica-2") as caught:
        _sleep(publisher, timeout_seconds=0.3)
    assert caught.value.metadata == {"member": "replica-0", "asleep": "replica-2"}
    assert other.sleeps == ["sleep", "weights", "kv_cache"]
    until(lambda: pool.agents["replica-2"].is_ready)


def test_the_end_of_the_lease_wakes_the_replica(pool: Pool, engines: list[EngineDouble]) -> None:
    with Publisher(pool.target, trainer_id="trainer-a", timeout_seconds=20) as publisher:
        _sleep(publisher)
    until(lambda: engines[0].asleep is None)
    until(lambda: pool.agents["replica-0"].is_ready)


def test_a_sleeping_replica_outlives_the_coordinator_and_is_woken_by_the_next(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    with publisher.rollouts_asleep():
        pool.stop_coordinator()
        pool.start_coordinator()
        until(lambda: _why(pool) == "for trainer trainer-a")
        assert _sleep(publisher) == ("replica-0",)
    assert engines[0].asleep is None


def test_a_new_process_of_a_sleeping_replica_is_put_to_sleep(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    _sleep(publisher)
    pool.remove_replica("replica-0")
    again = EngineDouble(weights(Model()), gpu_uuids=("GPU-a",), can_sleep=True)
    pool.add_replica("replica-0", again)
    assert _sleep(publisher) == ("replica-0",)
    until(lambda: again.asleep is not None)


def test_an_operator_puts_a_replica_to_sleep_and_wakes_it(
    pool: Pool, engines: list[EngineDouble]
) -> None:
    assert "sleeps until it is woken" in weft(pool, "sleep", "replica-0", "--abort")
    assert _why(pool) == "by an operator"
    assert "is awake" in weft(pool, "wake", "replica-0")
    assert engines[0].sleeps == ["sleep", "weights", "kv_cache"]
    with pytest.raises(NotReadyError, match="--enable-sleep"):
        weft(pool, "sleep", "replica-1")


def test_what_it_missed_asleep_is_brought_before_it_is_routed_to(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    """One that registers asleep, after a push, is brought nothing and nobody is asked for it."""
    publisher.push_base(Model())
    with publisher.rollouts_asleep():
        held = pool.agents["replica-0"].serving.vector
        assert held.base == 1
        pool.remove_replica("replica-0")
        late = EngineDouble(weights(Model()), gpu_uuids=("GPU-a",), can_sleep=True)
        pool.add_replica("replica-0", late)
        _sleep(publisher)
        assert publisher.wanted == frozenset()
    until(lambda: pool.agents["replica-0"].is_ready)
    assert late.base_version == 1


def test_a_drained_replica_leaves_asleep(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    with publisher.rollouts_asleep():
        gone = pool.leave_when_drained("replica-0")
        pool.call(lambda: pool.agents["replica-0"].drain(30.0, "told to stop"))
        assert gone.result(60).startswith("drained")
    assert engines[0].sleeps == ["sleep"]


def test_a_sleeping_engine_takes_no_requests(
    engines: list[EngineDouble], publisher: Publisher
) -> None:
    _sleep(publisher)
    with pytest.raises(PeerUnavailableError, match="sleeps"):
        engines[0].generate(None)  # type: ignore[arg-type]


def test_discarded_weights_come_back_with_a_push(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    model, agent = Model(), pool.agents["replica-0"]
    with publisher.rollouts_asleep(level=2) as names:
        assert names == ("replica-0",)
        publisher.push_base(model)
        assert engines[0].sleeps == ["sleep 2", "weights"]
    until(lambda: agent.is_ready)
    expected = weights(model)
    assert all(torch.equal(engines[0].base[name], expected[name]) for name in expected)


@pytest.mark.parametrize("pushed", [False, True])
def test_discarded_weights_come_back_from_what_the_replica_has(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher, pushed: bool
) -> None:
    """From its own copy, or from what it was started with; an adapter brings none."""
    model, agent = Model(), pool.agents["replica-0"]
    if pushed:
        publisher.push_base(model)
    expected = {name: tensor.clone() for name, tensor in engines[0].base.items()}
    with publisher.rollouts_asleep(level=2):
        assert not torch.equal(*(e[next(iter(expected))] for e in (engines[0].base, expected)))
        publisher.push_adapter(peft_of(model), "math")
    until(lambda: agent.is_ready)
    assert engines[0].dirty_reason == ""
    assert all(torch.equal(engines[0].base[name], expected[name]) for name in expected)


def test_discarded_weights_that_a_delta_made_come_back_from_a_copy_of_them(
    pool: Pool, engines: list[EngineDouble]
) -> None:
    """No other replica has what was served."""
    for number in range(2):
        pool.remove_replica(f"replica-{number}")
    engine = EngineDouble(
        weights(Model()), gpu_uuids=("GPU-a",), can_sleep=True, base_copies=1, is_readable=True
    )
    pool.add_replica("replica-0", engine)
    until(lambda: pool.agents["replica-0"].is_ready)
    model = Model()
    with Publisher(pool.target, trainer_id="trainer-a", delta="always") as publisher:
        publisher.push_base(model)
        with torch.no_grad():
            model.embed.weight[0] += 1
        assert publisher.push_base(model).report.delta.is_delta
        with publisher.rollouts_asleep(level=2):
            pass
    until(lambda: pool.agents["replica-0"].is_ready)
    assert all(torch.equal(engine.base[name], own) for name, own in weights(model).items())


def test_without_a_copy_it_is_sent_one_before_it_is_routed_to(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    pool.remove_replica("replica-0")
    forgetful = EngineDouble(weights(Model()), gpu_uuids=("GPU-a",), can_sleep=True)
    pool.add_replica("replica-0", forgetful)
    until(lambda: pool.agents["replica-0"].is_ready)
    publisher.push_base(Model())
    with publisher.rollouts_asleep(level=2):
        pass
    until(lambda: pool.agents["replica-0"].is_ready)
    expected = engines[1].base
    assert all(torch.equal(forgetful.base[name], expected[name]) for name in expected)
    assert forgetful.dirty_reason == ""


def test_no_level_but_vllm_s_is_taken(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    with pytest.raises(InvalidRequestError, match="level=3"):
        publisher.rollouts_asleep(level=3)  # type: ignore[arg-type]
    weft(pool, "sleep", "replica-0", "--level", "2")
    assert engines[0].sleeps == ["sleep 2"]
