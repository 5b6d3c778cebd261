"""The second rank of the pool's only replica is killed, or stopped, as it loads a base in place:
real coordinator, transport and hand-off, and a process of its own for that rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.pool import Pool
from tests.doubles.ranks import TwoRankDouble
from tests.fault.strikes import Strike
from tests.integration.models import Model, same, until, weights
from trainer_side import Publisher
from weft_rl.contract.errors import WeftError

_PUSH_SECONDS, _SLACK_SECONDS, _WAIT_SECONDS = 4.0, 4.0, 20.0


@pytest.fixture
def publisher(pool: Pool) -> Iterator[Publisher]:
    with Publisher(
        pool.target, trainer_id="trainer-a", timeout_seconds=_PUSH_SECONDS, bucket_bytes=2048
    ) as running:
        yield running


def _add(pool: Pool) -> TwoRankDouble:
    engine = TwoRankDouble(weights(Model(50)), in_place=True)
    pool.add_replica("replica-0", engine)
    until(lambda: pool.agents["replica-0"].is_ready)
    return engine


def _add_victim(pool: Pool, strike: Strike, monkeypatch: pytest.MonkeyPatch) -> TwoRankDouble:
    with monkeypatch.context() as patch:
        for name, value in strike.env.items():
            patch.setenv(name, value)
        return _add(pool)


def _serves(pool: Pool, engine: TwoRankDouble, model: Model) -> bool:
    expected = weights(model)
    return same(engine.base, expected) and same(pool.run(engine.second_base()), expected)


def _fails(publisher: Publisher) -> WeftError:
    began = time.monotonic()
    with pytest.raises(WeftError) as caught:
        publisher.push_base(Model(2))
    assert time.monotonic() - began < _PUSH_SECONDS + _SLACK_SECONDS
    return caught.value


@pytest.mark.parametrize("point", ["at a bucket", "before commit"])
def test_a_rank_that_is_killed_ends_the_push_and_a_new_process_is_served_the_next(
    pool: Pool, publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    strike = Strike("replica rank, in place", point, "SIGKILL", str(tmp_path))
    engine = _add_victim(pool, strike, monkeypatch)
    publisher.push_base(Model(1))
    assert _serves(pool, engine, Model(1))
    strike.armed.touch()
    error = _fails(publisher)
    assert "a rank of the replica has ended its load" in error.message
    until(lambda: bool(engine.dirty_reason))
    until(lambda: not pool.agents["replica-0"].is_ready)
    # An engine without a worker is dead: its process ends, and is started again.
    pool.run(engine.wait_ended())
    pool.remove_replica("replica-0")
    again = TwoRankDouble(weights(Model(50)), in_place=True)
    pool.add_replica("replica-0", again)
    publisher.push_base(Model(3))
    assert _serves(pool, again, Model(3))
    until(lambda: pool.agents["replica-0"].is_ready)


@pytest.mark.parametrize("point", ["at a bucket", "before commit"])
def test_a_rank_that_is_stopped_ends_the_push_in_time_and_the_next_one_repairs_it(
    pool: Pool, publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    strike = Strike("replica rank, in place", point, "SIGSTOP", str(tmp_path))
    engine = _add_victim(pool, strike, monkeypatch)
    publisher.push_base(Model(1))
    strike.armed.touch()
    try:
        error = _fails(publisher)
        assert error.reason in ("DEADLINE", "STALLED"), error
        until(lambda: not pool.agents["replica-0"].is_ready)
    finally:
        _, pid = strike.await_struck(_WAIT_SECONDS)
        os.kill(pid, signal.SIGCONT)
    until(lambda: bool(engine.dirty_reason))
    publisher.push_base(Model(3))
    assert _serves(pool, engine, Model(3))
    until(lambda: pool.agents["replica-0"].is_ready)
