"""Calls to replicas: how long they may take, and what they send."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.runtime.replica_client import ENCODERS, REQUESTS, ReplicaCaller
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


#: Fields of orders that are not in their messages under the same name.
_NOT_SENT = {
    effects.CallJoin: {"transfer_id", "first_rank"},
    effects.CallSwitch: {"transfer_id"},
    effects.CallRestore: {
        "transfer_id", "adapter", "content_digest", "layout_digest", "alias", "timeout_seconds",
    },
    effects.CallSleep: {"aborts", "call_seconds"},
    effects.CallWake: {"call_seconds"},
    effects.CallRetire: {"incarnation"},
}  # fmt: skip


@pytest.mark.parametrize("call", ENCODERS, ids=lambda call: call.__name__)
def test_an_order_sends_what_it_holds(call: type[effects.ReplicaCall]) -> None:
    told = inspect.signature(ENCODERS[call]).parameters
    sent = {name for name in REQUESTS[call].fields_by_name if name not in told}
    names = {field.name for field in dataclasses.fields(call)}  # type: ignore[arg-type]
    unsent = {name for name in names if name.removesuffix("_seconds") not in sent}
    assert unsent == _NOT_SENT.get(call, set()) | {"replica_id", "address"} | ({"group"} & names)
