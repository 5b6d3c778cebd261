"""What a trainer owns outlives the coordinator: real coordinator, agents and Publisher; the engine
double has no GPU, and notes what it is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool, running_pool
from tests.integration.models import Model, peft_of, same, until, weights
from tests.integration.test_restart import policy
from tests.waits import stays
from trainer_side import Publisher, rollout_sleep
from trainer_side.packing.packer import Packer
from weft_rl.contract.errors import PolicyOwnedError, WeftError

LEASE_SECONDS = 1.5
#: A lease that a trainer renews in time on a busy machine, too: gRPC may wait for 2 s before it
#: connects again.
LONG_LEASE_SECONDS = 4.0
#: Of a push, and what its end may take beyond.
PUSH_SECONDS, SLACK_SECONDS = 3.0, 5.0


@pytest.fixture
def pool(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pool]:
    lease_seconds = getattr(request, "param", LEASE_SECONDS)
    settings = {"publish_again_after_seconds": 0.3, "lease_seconds": lease_seconds}
    with running_pool(tmp_path / "weft.db", **settings) as running:
        yield running


def _engine() -> EngineDouble:
    return EngineDouble(weights(Model()), gpu_uuids=("GPU-a",), can_sleep=True)


@pytest.fixture
def engine(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> EngineDouble:
    """Of replica-0, on the trainer's GPU."""
    monkeypatch.setattr(rollout_sleep, "used_gpus", lambda: ["GPU-a"])
    double = _engine()
    pool.add_replica("replica-0", double)
    until(lambda: pool.agents["replica-0"].is_ready)
    return double


def _restart(pool: Pool) -> None:
    pool.stop_coordinator()
    pool.start_coordinator()


def _lose_catalog(pool: Pool, tmp_path: Path) -> None:
    pool.stop_coordinator()
    pool.config |= {"catalog": tmp_path / "anew.db", "recover": True}
    pool.start_coordinator()


def _registered(pool: Pool) -> None:
    until(lambda: pool.agents["replica-0"].registration.is_known)  # type: ignore[union-attr]


@pytest.mark.parametrize("loses_catalog", [False, True])
def test_replicas_sleep_on_for_as_long_as_their_trainer_does_nothing(
    pool: Pool, engine: EngineDouble, publisher: Publisher, tmp_path: Path, loses_catalog: bool
) -> None:
    """It computes on that GPU, and calls nothing: its leases are renewed beside."""
    with publisher.rollouts_asleep():
        if loses_catalog:
            _lose_catalog(pool, tmp_path)
        else:
            _restart(pool)
        _registered(pool)
        stays(lambda: engine.sleeps == ["sleep"], 2 * LEASE_SECONDS + 1.0)
    until(lambda: pool.agents["replica-0"].is_ready)
    assert engine.asleep is None


def test_a_replica_that_is_restarted_beside_the_coordinator_comes_back_asleep(
    pool: Pool, engine: EngineDouble, publisher: Publisher
) -> None:
    with publisher.rollouts_asleep():
        pool.stop_coordinator()
        pool.remove_replica("replica-0")
        pool.start_coordinator()
        again = _engine()
        pool.add_replica("replica-0", again)
        until(lambda: again.asleep is not None)
        stays(lambda: again.sleeps == ["sleep"], LEASE_SECONDS)
    until(lambda: pool.agents["replica-0"].is_ready)


def test_one_whose_trainer_died_while_the_coordinator_was_away_wakes_after_the_grace(
    pool: Pool, engine: EngineDouble
) -> None:
    with Publisher(pool.target, trainer_id="trainer-a", timeout_seconds=20) as publisher:
        publisher.rollouts_asleep().__enter__()
        pool.stop_coordinator()
    began = time.monotonic()
    pool.start_coordinator()
    until(lambda: engine.asleep is None)
    assert time.monotonic() - began >= LEASE_SECONDS
    until(lambda: pool.agents["replica-0"].is_ready)


def test_the_owner_is_asked_when_coordinator_and_replicas_were_restarted_together(
    pool: Pool, engine: EngineDouble, publisher: Publisher
) -> None:
    publisher.push_base(Model(5))
    pool.stop_coordinator()
    pool.remove_replica("replica-0")
    pool.start_coordinator()
    pool.add_replica("replica-0", _engine())
    until(lambda: publisher.wanted == {"base"})
    assert policy(pool, "base").lease.trainer_id == "trainer-a"
    assert str(publisher.push_base(Model(5)).version) == "base@2"
    until(lambda: pool.agents["replica-0"].is_ready)


def test_a_trainer_that_does_nothing_owns_its_policies_again_after_the_catalog_was_lost(
    pool: Pool, engine: EngineDouble, publisher: Publisher, tmp_path: Path
) -> None:
    first = publisher.push_base(Model(5)).version
    _lose_catalog(pool, tmp_path)
    until(lambda: policy(pool, "base").lease.trainer_id == "trainer-a")
    assert publisher.push_base(Model(6)).version.version > first.version


@pytest.mark.parametrize("pool", [LONG_LEASE_SECONDS], indirect=True)
@pytest.mark.parametrize("away_seconds", [0.0, LONG_LEASE_SECONDS + 0.5])
@pytest.mark.parametrize("where", ["sending", "committing"])
def test_a_restart_in_mid_push_ends_it_in_time_and_takes_nothing_from_its_trainer(
    pool: Pool,
    engine: EngineDouble,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    away_seconds: float,
) -> None:
    """It is away for no time, or for longer than a lease lasts and a push may take."""
    pending, back = [True], threading.Event()

    def restart() -> None:
        pool.stop_coordinator()
        time.sleep(away_seconds)
        pool.start_coordinator()
        back.set()

    owner, name = (Packer, "pack") if where == "sending" else (EngineDouble, "apply_base")
    original = getattr(owner, name)

    def struck(*given: Any, **more: Any) -> Any:
        if pending and pool.coordinator is not None:
            pending.clear()
            threading.Thread(target=restart).start()
        return original(*given, **more)

    with Publisher(pool.target, trainer_id="trainer-a", timeout_seconds=20) as publisher:
        before = publisher.push_base(Model(1)).version.version
        publisher.push_adapter(peft_of(Model(1)), "math")
        monkeypatch.setattr(owner, name, struck)
        began, reason = time.monotonic(), ""
        try:
            pushed = publisher.push_base(Model(2), timeout_seconds=PUSH_SECONDS)
            before = pushed.version.version
        except WeftError as error:
            reason = error.reason
        assert reason != "INTERNAL"
        assert time.monotonic() - began < PUSH_SECONDS + SLACK_SECONDS
        assert not pending
        assert back.wait(PUSH_SECONDS + SLACK_SECONDS + away_seconds)
        for name in ("base", "math"):
            until(lambda name=name: policy(pool, name).lease.trainer_id == "trainer-a")  # type: ignore[misc]
        assert publisher.push_base(Model(3)).version.version > before
        assert same(engine.base, weights(Model(3)))
        assert str(publisher.push_adapter(peft_of(Model(3)), "math").version) == "math@2"
        with (
            Publisher(pool.target, trainer_id="trainer-b", timeout_seconds=20) as other,
            pytest.raises(PolicyOwnedError, match="trainer-a"),
        ):
            other.push_base(Model(4))
