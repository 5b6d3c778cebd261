"""Replicas that leave in good order, and those kept out of service: real coordinator,
real gRPC, engine double, and the commands."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from typer.testing import CliRunner

from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool
from tests.integration.models import Model, peft_of, until
from trainer_side import Publisher
from weft_rl.cli.main import app
from weft_rl.cli.orders import drain
from weft_rl.contract.errors import WeftError


def weft(pool: Pool, *args: str) -> str:
    """What a command prints.

    Raises:
        WeftError: It was refused.
    """
    result = CliRunner().invoke(app, [*args, "-c", pool.target], env={"COLUMNS": "200"})
    if isinstance(result.exception, WeftError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_a_drained_replica_finishes_its_requests_and_leaves(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    agent = pool.agents["replica-0"]
    until(lambda: agent.is_ready)
    engines[0].running = 1
    gone = pool.leave_when_drained("replica-0")
    with ThreadPoolExecutor(1) as threads:
        command = threads.submit(
            drain, "replica-0", timeout=600, reason="old card", coordinator=pool.target
        )
        try:
            until(lambda: "is leaving" in engines[0].refuse_reason)
            assert not agent.is_ready
            assert "draining for" in weft(pool, "status")
            assert str(publisher.push_adapter(peft_of(Model()), "math").version) == "math@1"
            assert (engines[0].aliases, engines[1].aliases) == ({}, {"math": 1})
            assert not gone.done()
            assert not command.done()
        finally:
            engines[0].running = 0
        assert gone.result(60) == "drained: by an operator: old card"
        command.result(60)
    assert "replica-0" not in weft(pool, "status")


def test_what_still_runs_when_the_time_is_over_is_cut(
    pool: Pool, engines: list[EngineDouble]
) -> None:
    engines[0].running = 2
    gone = pool.leave_when_drained("replica-0")
    pool.call(lambda: pool.agents["replica-0"].drain(600.0, "told to stop"))
    pool.call(lambda: pool.agents["replica-0"].drain(0.5, "told again"))
    why = "drained: told to stop; the time was over, 2 requests were cut"
    assert gone.result(60) == why


def test_a_transfer_under_way_is_finished_first(
    pool: Pool,
    engines: list[EngineDouble],
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loading, may_load = threading.Event(), threading.Event()
    load = engines[0].load_adapter

    async def slowly(*args: object) -> object:
        loading.set()
        await asyncio.to_thread(may_load.wait, 60)
        return await load(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(engines[0], "load_adapter", slowly)
    with ThreadPoolExecutor(1) as threads:
        push = threads.submit(publisher.push_adapter, peft_of(Model()), "math")
        assert loading.wait(60)
        gone = pool.leave_when_drained("replica-0")
        pool.call(lambda: pool.agents["replica-0"].drain(600.0, "told to stop"))
        until(lambda: engines[0].refuse_reason)
        assert not gone.done()
        may_load.set()
        assert str(push.result(60).version) == "math@1"
        assert gone.result(60) == "drained: told to stop"
    assert engines[0].aliases == {"math": 1}


def test_a_drain_does_not_wait_for_a_coordinator_that_is_away(
    pool: Pool, engines: list[EngineDouble]
) -> None:
    until(lambda: pool.agents["replica-0"].is_ready)
    pool.stop_coordinator()
    gone = pool.leave_when_drained("replica-0")
    pool.call(lambda: pool.agents["replica-0"].drain(600.0, "told to stop"))
    assert gone.result(60) == "drained: told to stop"


def test_a_coordinator_that_comes_back_knows_who_drains(
    pool: Pool, engines: list[EngineDouble]
) -> None:
    engines[0].running = 1
    weft(pool, "cordon", "replica-1")
    pool.call(lambda: pool.agents["replica-0"].drain(600.0, "told to stop"))
    pool.stop_coordinator()
    assert not pool.agents["replica-0"].is_ready
    pool.start_coordinator()
    until(lambda: "draining for" in weft(pool, "status"))
    assert "out of service" in weft(pool, "status")


def test_cordon_uncordon(pool: Pool, engines: list[EngineDouble]) -> None:
    agent = pool.agents["replica-0"]
    until(lambda: agent.is_ready)
    weft(pool, "cordon", "replica-0", "--reason", "new disk")
    until(lambda: not agent.is_ready)
    assert "by an operator: new disk" in weft(pool, "status")
    assert engines[0].refuse_reason == ""
    weft(pool, "cordon", "replica-0", "--no-pushes", "--reason", "nonsense")
    until(lambda: "out of service: nonsense" in engines[0].refuse_reason)
    pool.remove_replica("replica-0")
    assert "replica-0 is not in the pool, and out of service by an operator: nonsense" in weft(
        pool, "status"
    )
    assert "as soon as" in weft(pool, "uncordon", "replica-0")
    agent = pool.add_replica("replica-0", engines[0])
    until(lambda: agent.is_ready)
    assert engines[0].refuse_reason == ""


def test_routes(pool: Pool, engines: list[EngineDouble]) -> None:
    until(lambda: all(agent.is_ready for agent in pool.agents.values()))
    assert "replica-1 │ http://replica-1.test │ double │ base@0" in weft(pool, "routes")
    weft(pool, "cordon", "replica-0")
    (route,) = json.loads(weft(pool, "routes", "--json"))["routes"]
    assert route["replica_id"] == "replica-1"


def test_retain(pool: Pool, engines: list[EngineDouble], publisher: Publisher) -> None:
    publisher.push_adapter(peft_of(Model()), "math")
    assert "│ 4 (default) │" in weft(pool, "status")
    assert weft(pool, "retain", "math", "10") == "of math the newest 10 versions are kept"
    assert "│ 10 │" in weft(pool, "status")


def test_retire(pool: Pool, engines: list[EngineDouble], publisher: Publisher) -> None:
    for _ in range(2):
        publisher.push_adapter(peft_of(Model()), "math")
    assert weft(pool, "retire", "math@1") == "math@1 can no longer be requested"
    until(lambda: pool.agents["replica-0"].serving.vector.adapters["math"].versions == (2,))
    with pytest.raises(WeftError, match="push a newer version"):
        weft(pool, "retire", "math", "2")
    with pytest.raises(WeftError, match="name one version"):
        weft(pool, "retire", "math")
