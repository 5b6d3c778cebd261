"""Sends generated requests to every service, and says what they should not have caused.

Each is a valid request to which a few things were done, a random message of the right
kind, or bytes that may be neither. Allowed are an answer, the caller's own deadline, and a
typed failure. Not allowed are INTERNAL (but for what a replica's engine, or a rank, says of
itself), UNKNOWN, a failure without ErrorInfo, a traceback in the log, and a refusal that
changes anything.
"""

from __future__ import annotations

import asyncio
import collections
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from google.protobuf import text_format
from google.protobuf.message import Message

from tests.fuzz.requests import valid_requests
from tests.fuzz.values import Generator
from tests.fuzz.watch import watching
from tests.fuzz.world import World
from weft_rl.rpc.channel import MAX_MESSAGE_BYTES
from weft_rl.rpc.status import DOMAIN, _error_info
from weft_rl.v1 import (
    admin_pb2,
    generate_pb2,
    inspect_pb2,
    publish_pb2,
    registry_pb2,
    rendezvous_pb2,
    replica_pb2,
)

_MODULES: Final = (
    admin_pb2, generate_pb2, inspect_pb2, publish_pb2, registry_pb2, rendezvous_pb2, replica_pb2,
)  # fmt: skip
METHODS: Final[list[Any]] = [
    method
    for module in _MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
_OF_THE_REPLICA: Final = frozenset({"ReplicaService", "GenerateService"})
#: Longest wait for an answer: those that wait for something wait as long as they may.
_WAIT_SECONDS: Final = 0.05
_AT_ONCE: Final = 8
_BETWEEN_REFRESHES: Final = 40
_MAX_FOUND: Final = 20
#: What grpc.aio makes of a stream that the server ends while it writes to it.
_OF_THIS_CLIENT: Final = "the stream ended while more was sent"
_MAX_BYTES: Final = MAX_MESSAGE_BYTES - 1024


@dataclass
class Report:
    """What was sent and what came of it."""

    num_calls: int = 0
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    """By ``Service/Method status/reason``."""
    found: list[str] = field(default_factory=list)
    """What is wrong; empty when nothing is."""


class Fuzzer:
    """Sends requests to one world; on its loop."""

    def __init__(self, world: World, report: Report, chance: random.Random) -> None:
        self._world, self.report, self._chance = world, report, chance
        self._known: Mapping[str, Any] = {}
        self._order = asyncio.Lock()  # orders to the replica, which are compared before and after

    async def run(self, num_calls: int, seconds: float) -> None:
        """Send so many requests, or for so long, or until enough is found."""
        end = time.monotonic() + seconds
        with watching(self.report.found):
            left = num_calls
            while left > 0 and time.monotonic() < end and len(self.report.found) < _MAX_FOUND:
                await self._world.refresh()
                self._known = self._world.known()
                batch = min(left, _BETWEEN_REFRESHES)
                for first in range(0, batch, _AT_ONCE):
                    count = min(_AT_ONCE, batch - first)
                    await asyncio.gather(*(self._one() for _ in range(count)))
                left -= batch
            await self._world.refresh()

    async def _one(self) -> None:
        method = self._chance.choice(METHODS)
        messages = self._messages(method)
        data = [message.SerializeToString() for message in messages]
        if max(map(len, data), default=0) > _MAX_BYTES:
            return  # its own side would not send it
        if self._chance.random() < 0.1:
            data = [Generator(self._chance, {}).spoil(part) for part in data] or [b"\xff"]
        if method.containing_service.name not in _OF_THE_REPLICA:
            await self._send(self._world.channel, method, data, messages)
            return
        async with self._order:
            before = self._world.replica_now()
            refused = await self._send(self._world.replica_channel, method, data, messages)
            now = self._world.replica_now()
            if refused and now != before and not self._world.is_repair(before, now):
                self._note(method, messages, f"a refusal changed the replica: {before} {now}")

    def _messages(self, method: Any) -> list[Message]:
        name = f"{method.containing_service.name}/{method.name}"
        generator = Generator(self._chance, self._known)
        valid = valid_requests(self._world, name)
        if not valid or self._chance.random() < 0.2:
            kind = method.input_type._concrete_class
            count = self._chance.choice((0, 1, 2, 3)) if method.client_streaming else 1
            return [generator.message(kind) for _ in range(count)]
        for _ in range(self._chance.choice((0, 1, 1, 2, 3))):
            generator.mutate(self._chance.choice(valid))
        return valid

    async def _send(
        self, channel: grpc.aio.Channel, method: Any, data: list[bytes], messages: list[Message]
    ) -> bool:
        """Returns whether it was refused."""
        name = f"{method.containing_service.name}/{method.name}"
        self.report.num_calls += 1
        try:
            await _call(channel, method, data)
        except grpc.aio.AioRpcError as error:
            outcome, wrong = _judge(error)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            outcome, wrong = _OF_THIS_CLIENT, ""
        else:
            outcome, wrong = "OK", ""
        self.report.outcomes[f"{name} {outcome}"] += 1
        if wrong:
            self._note(method, messages, wrong)
        return outcome not in ("OK", "DEADLINE_EXCEEDED")

    def _note(self, method: Any, messages: list[Message], wrong: str) -> None:
        said = " | ".join(text_format.MessageToString(m, as_one_line=True) for m in messages)
        self.report.found.append(f"{method.full_name}: {wrong}\n  sent: {said[:1_500]}")


async def _call(channel: grpc.aio.Channel, method: Any, data: list[bytes]) -> None:
    path = f"/{method.containing_service.full_name}/{method.name}"
    if not method.client_streaming and not method.server_streaming:
        await channel.unary_unary(path)(data[0], timeout=_WAIT_SECONDS * 4)
    elif not method.server_streaming:
        await channel.stream_unary(path)(iter(data), timeout=_WAIT_SECONDS * 4)
    else:
        call: Any
        if method.client_streaming:
            call = channel.stream_stream(path)(iter(data), timeout=_WAIT_SECONDS)
        else:
            call = channel.unary_stream(path)(data[0], timeout=_WAIT_SECONDS)
        async for _ in call:
            pass


def _judge(error: grpc.aio.AioRpcError) -> tuple[str, str]:
    """What a failure was, and what is wrong with it."""
    code, info = error.code().name, _error_info(error)
    if "execute_batch" in (error.debug_error_string() or ""):
        return _OF_THIS_CLIENT, ""
    if info is None:
        wrong = (
            "" if code == "DEADLINE_EXCEEDED" else f"{code} without ErrorInfo: {error.details()}"
        )
        return code, wrong
    outcome = f"{code}/{info.reason}"
    if info.domain != DOMAIN or not error.details():
        return outcome, f"{outcome} with nothing said"
    # What an engine, or another rank, says of itself is no failure of who passes it on.
    passed_on = info.reason == "LOAD_FAILED" or "member" in info.metadata
    if code in ("INTERNAL", "UNKNOWN") and not passed_on:
        return outcome, f"{outcome}: {error.details()}"
    return outcome, ""
