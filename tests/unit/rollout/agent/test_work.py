"""What an agent says of what it carries out, on the thread that beats."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch

from rollout_side.agent.agent import Agent
from rollout_side.config import AgentConfig
from tests.doubles.engine import EngineDouble


@pytest.fixture
def engine() -> EngineDouble:
    return EngineDouble({"w": torch.zeros(4)}, backends=("gloo",))


def _agent(engine: EngineDouble) -> Agent:
    return Agent(AgentConfig(coordinator="127.0.0.1:1", replica_id="r0"), engine)


def test_one_that_does_nothing_says_nothing(engine: EngineDouble) -> None:
    assert _agent(engine).holdings().report.work is None


def test_an_order_that_does_not_get_on_grows_silent(engine: EngineDouble) -> None:
    async def run() -> None:
        agent = _agent(engine)
        ended = asyncio.Event()
        order = asyncio.create_task(agent.serving.orders.run(ended.wait(), "switching to math@1"))
        await asyncio.sleep(0.1)
        work = agent.holdings().report.work
        assert work is not None
        assert work.what == "switching to math@1"
        assert 0.05 <= work.silence_seconds < 5.0
        engine.owed.end(0)  # a call to the engine that was part of it has been answered
        later = agent.holdings().report.work
        assert later is not None
        assert later.silence_seconds < work.silence_seconds
        ended.set()
        await order
        assert agent.holdings().report.work is None

    asyncio.run(run())


def test_what_the_engine_owes_counts_first(engine: EngineDouble) -> None:
    agent = _agent(engine)
    engine.owed.begin(1, "weft_drop_adapter")
    time.sleep(0.05)
    work = agent.holdings().report.work
    assert work is not None
    assert work.what == "its engine, weft_drop_adapter"
    assert work.silence_seconds >= 0.05


def test_a_loop_that_is_held_is_told_though_no_order_was_taken(engine: EngineDouble) -> None:
    agent = _agent(engine)
    agent._ticked_at = time.monotonic() - 1.0  # it has its turn each second
    assert agent.holdings().report.work is None
    agent._ticked_at -= 6.0
    work = agent.holdings().report.work
    assert work is not None
    assert work.what == "its event loop"
    assert 6.9 < work.silence_seconds < 60.0
