"""Rollback and pins: real coordinator, real gRPC, engine double, and the command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool, running_pool
from tests.integration.models import Model, lora, peft_of, same, until, weights
from trainer_side import Publisher
from weft_rl.cli.main import app
from weft_rl.contract.errors import NotFoundError, NotReadyError, WeftError
from weft_rl.contract.names import AdapterVersions, PolicyVersion


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with running_pool(tmp_path / "weft.db", retain_versions=2) as running:
        yield running


@pytest.fixture
def engines(pool: Pool) -> list[EngineDouble]:
    doubles = [EngineDouble(weights(Model()), base_copies=2) for _ in range(2)]
    for i, engine in enumerate(doubles):
        pool.add_replica(f"replica-{i}", engine)
    return doubles


@pytest.fixture
def publisher(pool: Pool) -> Iterator[Publisher]:
    with Publisher(pool.target, trainer_id="trainer-a", timeout_seconds=20) as running:
        yield running


def weft(pool: Pool, *args: str) -> str:
    """What a command prints.

    Raises:
        WeftError: It was refused.
    """
    result = CliRunner().invoke(app, [*args, "-c", pool.target])
    if isinstance(result.exception, WeftError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def _all_serve(pool: Pool, base: int, **adapters: AdapterVersions) -> bool:
    return all(
        agent.is_ready
        and (agent.serving.vector.base, agent.serving.vector.adapters) == (base, adapters)
        for agent in pool.agents.values()
    )


def test_a_base_goes_back_and_a_push_goes_on(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    publisher.push_base(Model(1))
    publisher.push_base(Model(2))
    text = weft(pool, "rollback", "base", "--to", "1")
    assert text.startswith("base@1 is served again by 2 replicas, in place of base@2 (paused")
    for engine in engines:
        assert same(engine.base, weights(Model(1)))
    assert weft(pool, "rollback", "base", "--to", "1") == "base@1 is served already"
    assert str(publisher.push_base(Model(3)).version) == "base@3"
    for engine in engines:
        assert same(engine.base, weights(Model(3)))
        assert engine.store.retained_bases() == (3, 1)
    with pytest.raises(NotReadyError, match="base-copies") as caught:
        weft(pool, "rollback", "base", "--to", "2")
    assert caught.value.reason == "NOT_RETAINED"


def test_an_adapter_goes_back_and_a_push_goes_on(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    adapters = [peft_of(Model(), seed) for seed in (1, 2, 3)]
    publisher.push_adapter(adapters[0], "math")
    publisher.push_adapter(adapters[1], "math")
    text = weft(pool, "rollback", "math", "--to", "1")
    assert text == "math@1 is served again by 2 replicas, in place of math@2"
    until(lambda: _all_serve(pool, 0, math=AdapterVersions((1, 2), 1)))
    assert [engine.aliases["math"] for engine in engines] == [1, 1]
    late = EngineDouble(weights(Model()))
    pool.add_replica("replica-2", late)
    until(lambda: _all_serve(pool, 0, math=AdapterVersions((1, 2), 1)))
    assert late.aliases == {"math": 1}
    assert same(late.adapter("math@2"), lora(adapters[1]))
    assert str(publisher.push_adapter(adapters[2], "math").version) == "math@3"
    until(lambda: _all_serve(pool, 0, math=AdapterVersions((2, 3), 3)))


def test_a_coordinator_that_is_restarted_serves_what_was_gone_back_to(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    publisher.push_base(Model(1))
    publisher.push_base(Model(2))
    publisher.push_adapter(peft_of(Model(), 1), "math")
    publisher.push_adapter(peft_of(Model(), 2), "math")
    weft(pool, "rollback", "base", "--to", "1")
    weft(pool, "rollback", "math", "--to", "1")
    weft(pool, "pin", "math", "2")
    publisher.close()
    pool.stop_coordinator()
    pool.start_coordinator()
    until(lambda: _all_serve(pool, 1, math=AdapterVersions((1, 2), 1)))
    assert "(pinned: 2)" in weft(pool, "status")
    pool.remove_replica("replica-1")
    late = EngineDouble(weights(Model()), base_copies=1)
    pool.add_replica("replica-1", late)
    until(lambda: _all_serve(pool, 1, math=AdapterVersions((1, 2), 1)))
    assert same(late.base, weights(Model(1)))


def test_a_replica_that_was_away_goes_back_when_it_returns(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    publisher.push_base(Model(1))
    publisher.push_base(Model(2))
    away = engines[1]
    vector = pool.agents["replica-1"].serving.vector
    pool.remove_replica("replica-1")
    weft(pool, "rollback", "base", "--to", "1")

    async def returns() -> None:
        agent = await pool.join("replica-1", away)
        agent.serving.vector = vector  # it had only lost contact

    pool.run(returns())
    until(lambda: _all_serve(pool, 1))
    assert same(away.base, weights(Model(1)))


def test_a_pinned_version_stays(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    model = peft_of(Model(), 1)
    publisher.push_adapter(model, "math")
    assert weft(pool, "pin", "math", "1") == "math@1 is kept until it is unpinned"
    for _ in range(3):
        publisher.push_adapter(model, "math")
    until(lambda: _all_serve(pool, 0, math=AdapterVersions((1, 3, 4), 4)))
    late = EngineDouble(weights(Model()))
    pool.add_replica("replica-2", late)
    until(lambda: _all_serve(pool, 0, math=AdapterVersions((1, 3, 4), 4)))
    assert weft(pool, "pin", "math", "1", "--off") == "math@1 may be retired"
    until(lambda: engines[0].store.adapter(PolicyVersion("math", 1)) is None)
    with pytest.raises(NotReadyError):
        weft(pool, "pin", "math", "1")


def test_a_pinned_base_stays_until_it_is_let_go(
    pool: Pool, engines: list[EngineDouble], publisher: Publisher
) -> None:
    new = Model(1)
    publisher.push_base(new)
    until(
        lambda: all(agent.serving.memory.retained_bases == (1,) for agent in pool.agents.values())
    )
    assert weft(pool, "pin", "base@1") == "base@1 is kept until it is unpinned"
    for seed in (2, 3, 4):  # each retains two
        publisher.push_base(Model(seed))
    for engine in engines:
        assert engine.store.retained_bases() == (4, 3, 1)
    assert "base@4 (pinned: 1)" in weft(pool, "status")
    pool.stop_coordinator()
    pool.start_coordinator()
    until(lambda: "2 of 2 replicas ready" in weft(pool, "status"))
    weft(pool, "rollback", "base", "--to", "1")
    assert all(same(engine.base, weights(new)) for engine in engines)
    weft(pool, "pin", "base", "1", "--off")
    publisher.push_base(Model(5))
    publisher.push_base(Model(6))
    for engine in engines:
        until(lambda engine=engine: engine.store.retained_bases() == (6, 5))


def test_what_is_refused(pool: Pool, engines: list[EngineDouble], publisher: Publisher) -> None:
    publisher.push_base(Model(1))
    for args in (("rollback", "nope", "--to", "1"), ("rollback", "base", "--to", "7")):
        with pytest.raises(NotFoundError):
            weft(pool, *args)
    with pytest.raises(NotReadyError, match="no replica in contact holds"):
        weft(pool, "pin", "base@0")
