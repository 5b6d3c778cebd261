"""Calls to replicas: how long they may take."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.runtime.replica_client import ReplicaCaller
from weft_rl.v1 import replica_pb2


@pytest.mark.parametrize(("stall_seconds", "longest"), [(10.0, 30.0), (60.0, 62.0)])
async def test_a_call_does_not_end_before_the_silence_that_is_allowed(
    stall_seconds: float, longest: float
) -> None:
    timeouts: list[float] = []
    posted = asyncio.Queue[events.Event]()

    async def load(request: Any, timeout: float, **_: Any) -> replica_pb2.LoadTransferResponse:
        timeouts.append(timeout)
        return replica_pb2.LoadTransferResponse()

    reader: Any = SimpleNamespace(stub=lambda address: SimpleNamespace(LoadTransfer=load))
    caller = ReplicaCaller(reader, lambda: 1, posted.put_nowait, 120.0, stall_seconds=stall_seconds)
    caller.start(effects.CallLoad("t1", "r0", "r0:1", PolicyVersion("base", 1), 60.0))
    assert await posted.get() == events.LoadAnswered("t1", "r0", None)
    assert timeouts == [longest]
