"""A drain at the replica: what begins it, what it waits for, what ends it."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest
import torch

from rollout_side.agent import agent as drain_module
from rollout_side.agent.agent import Agent
from rollout_side.agent.registration import HeartbeatOrders, OrderKey
from rollout_side.config import AgentConfig
from rollout_side.service.main import _StopSignals
from tests.doubles.agent import Registered
from tests.doubles.engine import EngineDouble
from weft_rl.contract.replica_report import DrainNote, OutOfService


@pytest.fixture
def registered() -> Registered:
    made = Registered()
    made.in_contact = False
    return made


@pytest.fixture
def agent(registered: Registered, monkeypatch: pytest.MonkeyPatch) -> Agent:
    monkeypatch.setattr(drain_module, "NOTICE_SECONDS", 0.0)
    config = AgentConfig(coordinator="127.0.0.1:1", replica_id="r0")
    agent = Agent(config, EngineDouble({"w": torch.zeros(8)}))
    monkeypatch.setattr(agent, "registration", registered)
    return agent


def _told(agent: Agent, **changes: Any) -> None:
    fields = {"drain": None, "is_draining": False, "in_transfer": False}
    agent.take_answer(
        HeartbeatOrders(
            **fields
            | {"out_of_service": OutOfService()}
            | {"order": OrderKey(0, 0), "pinned_base_versions": ()}
            | changes
        )
    )


async def test_an_order_begins_it_and_hurries_one_heartbeat(
    agent: Agent, registered: Registered
) -> None:
    for _ in range(3):
        _told(agent, drain=DrainNote(60.0, "by an operator"))
    assert registered.hurried == 1
    note = agent.holdings().report.drain
    assert note is not None
    assert (note.reason, note.time_left_seconds > 50) == ("by an operator", True)


async def test_it_waits_for_the_word_of_a_coordinator_that_knows_of_it(agent: Agent) -> None:
    agent.drain(60.0, "told to stop")
    over = asyncio.create_task(agent.wait_drained())
    _told(agent, in_transfer=False)  # the answer to a heartbeat from before
    _told(agent, is_draining=True, in_transfer=True)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(over), 0.3)
    _told(agent, is_draining=True, in_transfer=False)
    assert await asyncio.wait_for(over, 10) == "drained: told to stop"


async def test_nobody_is_asked_while_the_coordinator_is_away(
    agent: Agent, registered: Registered
) -> None:
    agent.drain(60.0, "told to stop")
    registered.is_known = False
    assert await asyncio.wait_for(agent.wait_drained(), 10) == "drained: told to stop"


async def test_what_was_left_is_said(agent: Agent) -> None:
    agent.engine.running = 3  # type: ignore[attr-defined]
    agent.drain(0.2, "told to stop")
    why = await asyncio.wait_for(agent.wait_drained(), 10)
    assert why.endswith("; the time was over, 3 requests were cut, a transfer was left")


async def test_a_refusal_stays_while_it_drains(agent: Agent) -> None:
    _told(agent, out_of_service=OutOfService("odd", no_pushes=True))
    assert agent.engine.refuse_reason.endswith("out of service: odd")  # type: ignore[attr-defined]
    agent._close("leaving")
    _told(agent)
    assert agent.engine.refuse_reason == "leaving"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("signals", "seconds", "drains", "at_once"),
    [
        ([signal.SIGTERM], 30.0, True, False),
        ([signal.SIGTERM, signal.SIGTERM], 30.0, True, True),
        ([signal.SIGTERM, signal.SIGINT], 30.0, True, True),
        ([signal.SIGINT], 30.0, False, True),
        ([signal.SIGTERM], 0.0, False, True),
    ],
)
async def test_signals(
    agent: Agent, signals: list[int], seconds: float, drains: bool, at_once: bool
) -> None:
    stop = _StopSignals(seconds)
    stop.agent = agent
    for number in signals:
        stop.signal(number)
    assert ((agent.holdings().report.drain is not None), stop.received.is_set()) == (
        drains,
        at_once,
    )
