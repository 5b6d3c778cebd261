"""Channels to replicas, read-only calls over them, and orders.

Each call has a deadline; the outcome of an order is posted as an event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc

from weft_rl.contract.errors import REASONS, NotAllowedError, NotFoundError, WeftError
from weft_rl.contract.manifest import Manifest
from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.values import Failure, RecordedFacts
from weft_rl.coordinator.messages.wire import FACTS, SPILLED_COPY, group_to_proto
from weft_rl.rpc.bounds import MAX_TEXT_CHARS
from weft_rl.rpc.channel import open_aio_channel
from weft_rl.rpc.codec import (
    POLICY_VERSION,
    SLEEP,
    duration_from_proto,
    vector_from_proto,
    when_running_to_proto,
)
from weft_rl.rpc.inbound import CheckedChannel
from weft_rl.rpc.manifest_codec import ManifestDecoder
from weft_rl.rpc.security.credentials import NO_CREDENTIALS, Credentials, stamp_of
from weft_rl.rpc.status import error_from_rpc
from weft_rl.schema import listing
from weft_rl.tracing import call_metadata, untraced
from weft_rl.v1 import replica_pb2, replica_pb2_grpc, types_pb2

_log = logging.getLogger(__name__)

_DESCRIBE_SECONDS: Final = 60.0
_DIGEST_SECONDS: Final = 600.0
_GRACE_SECONDS: Final = 1.0
# Of a look whether a replica takes orders; for how long it is known.
_CHECK_SECONDS: Final = 5.0
_LET_IN_SECONDS: Final = 1.0
# Added to the time after which a silent replica is given up, so that the call does not end before.
_AFTER_STALL_SECONDS: Final = 2.0
_BEGUN_AT_ONCE: Final = 16
# Before the second batch: the time that an answer takes to leave a quiet loop.
_HEAD_START_SECONDS: Final = 0.005


class ReplicaReader:
    """Channels to replicas, and read-only calls over them.

    Args:
        credentials: Credentials shown to replicas.
    """

    def __init__(self, credentials: Credentials = NO_CREDENTIALS) -> None:
        self._credentials = credentials
        self._channels: dict[str, tuple[grpc.aio.Channel, Any]] = {}
        #: By address, what was shown to a replica that took it, and when.
        self._let_in: dict[str, tuple[Any, float]] = {}

    async def close_channel(self, address: str) -> None:
        """Close the channel to an address; calls under way have a second to end."""
        self._let_in.pop(address, None)
        entry = self._channels.pop(address, None)
        if entry is not None:
            await entry[0].close(grace=_GRACE_SECONDS)

    async def close(self) -> None:
        """Close every channel."""
        for channel, _ in self._channels.values():
            await channel.close()
        self._channels.clear()

    def stub(self, address: str) -> Any:
        """Return the stub for calls to the replica at ``address``."""
        if address not in self._channels:
            channel = open_aio_channel(address, self._credentials)
            # The generated stub is typed for the channels of grpc alone.
            checked: Any = CheckedChannel(channel, f"the replica at {address}")
            self._channels[address] = (channel, replica_pb2_grpc.ReplicaServiceStub(checked))
        return self._channels[address][1]

    def may_be_refused(self, address: str) -> bool:
        """Return whether a replica may refuse this coordinator: it shows credentials, and the
        replica has not taken these just now."""
        if not self._shows_any:
            return False
        shown, at = self._let_in.get(address, (None, 0.0))
        return shown != self._shown or time.monotonic() - at > _LET_IN_SECONDS

    async def check_let_in(self, address: str, generation: int) -> WeftError | None:
        """Return the error of a replica that refuses this coordinator; None if it does not, or
        does not answer. It is given an order to do nothing."""
        request = replica_pb2.RetireVersionsRequest(coordinator_generation=generation)
        try:
            await self.stub(address).RetireVersions(request, timeout=_CHECK_SECONDS)
        except grpc.RpcError as error:
            typed = error_from_rpc(error)
            return typed if isinstance(typed, NotAllowedError) else None
        except WeftError as error:  # the file of its token cannot be read, and never could
            return error
        self.note_let_in(address)
        return None

    def note_let_in(self, address: str) -> None:
        """Note that a replica has taken an order, and with it the credentials that were shown."""
        if self._shows_any:
            self._let_in[address] = self._shown, time.monotonic()

    @property
    def _shows_any(self) -> bool:
        known = self._credentials
        return bool(known.tls_cert or known.token or known.token_file)

    @property
    def _shown(self) -> Any:
        return self._credentials.stamps(), stamp_of(self._credentials.token_file)

    async def describe(self, address: str, version: PolicyVersion) -> Manifest:
        """Return the manifest of a version that the replica at ``address`` holds.

        Raises:
            WeftError: It does not answer, or holds no copy.
        """
        decoder = ManifestDecoder()
        request = replica_pb2.DescribeVersionRequest(version=POLICY_VERSION.encode(version))
        try:
            call = self.stub(address).DescribeVersion(request, timeout=_DESCRIBE_SECONDS)
            async for response in call:
                decoder.add(response.chunk)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        return await asyncio.to_thread(decoder.finish)

    async def facts(self, address: str, version: PolicyVersion, digest: bytes) -> RecordedFacts:
        """Return the facts to record of a version that a replica holds with ``digest``.

        Raises:
            WeftError: It does not answer, or does not hold it.
        """
        request = replica_pb2.DescribeVersionRequest(
            version=POLICY_VERSION.encode(version), facts_of_digest=digest
        )
        try:
            call = self.stub(address).DescribeVersion(request, timeout=_DESCRIBE_SECONDS)
            async for response in call:
                return FACTS.decode(response.facts)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        raise NotFoundError(f"the replica at {address} says nothing of {version}")

    async def digests(
        self, replica_id: str, address: str, version: PolicyVersion
    ) -> AsyncGenerator[types_pb2.TensorDigestChunk, None]:
        """Yield the digests of a version's tensors, as the replica computes them now.

        Raises:
            WeftError: The replica does not answer, or refuses.
        """
        request = replica_pb2.DigestVersionRequest(version=POLICY_VERSION.encode(version))
        try:
            stub = self.stub(address)
            async for response in stub.DigestVersion(request, timeout=_DIGEST_SECONDS):
                yield response.chunk
        except grpc.RpcError as error:
            raise failure_of(error, replica_id).error() from error


class ReplicaCaller:
    """Orders to replicas, carried out concurrently.

    Args:
        reader: Owner of the channels.
        generation: Returns the generation of this coordinator, which grows as it hears of
            later ones; repeated in every order.
        post: Takes the outcomes, as events.
        commit_seconds: Longest time that a replica may take to switch.
        trace_context: Returns the traceparent of a transfer; empty where nobody traces.
        stall_seconds: Longest time that a replica may say nothing.
        pool_id: Returns the identity of the pool; repeated in every order, too.
    """

    def __init__(
        self,
        reader: ReplicaReader,
        generation: Callable[[], int],
        post: Callable[[events.Event], None],
        commit_seconds: float,
        trace_context: Callable[[str], str] = untraced,
        stall_seconds: float = 0.0,
        pool_id: Callable[[], str] = str,
    ) -> None:
        self._reader = reader
        self._pool_id = pool_id
        self._least_seconds = stall_seconds + _AFTER_STALL_SECONDS
        self._trace_context = trace_context
        self._generation = generation
        self._post = post
        self._commit_seconds = commit_seconds
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: deque[effects.ReplicaCall] = deque()

    def start(self, call: effects.ReplicaCall) -> None:
        """Queue a call, to begin soon and in the order of these calls; returns at once.

        A few begin in each turn of the loop. A thousand at once would delay the
        answer that their push's trainer waits for, and everybody's heartbeats. After
        the first few there is a pause, in which that answer leaves.
        """
        if not self._waiting:
            self._spawn(self._begin_waiting())
        self._waiting.append(call)

    async def _begin_waiting(self) -> None:
        pause = _HEAD_START_SECONDS
        while True:
            for _ in range(min(_BEGUN_AT_ONCE, len(self._waiting))):
                self._spawn(self._carry_out(self._waiting.popleft()))
            if not self._waiting:
                return
            await asyncio.sleep(pause)
            pause = 0.0

    async def _carry_out(self, call: effects.ReplicaCall) -> None:
        try:
            await self._make(call)
        except Exception as error:  # noqa: BLE001 (whoever waits for the answer would wait on)
            _log.error("a call to a replica failed unexpectedly", exc_info=error)
            text = f"the coordinator could not make the call: {error}"[:MAX_TEXT_CHARS]
            failure = Failure("INTERNAL", text, {"member": call.replica_id})
            failed = _ORDERS[type(call)].answered(call, None, failure)
            if failed is not None:
                self._post(failed)

    async def _make(self, call: effects.ReplicaCall) -> None:
        order, response, failure = _ORDERS[type(call)], None, None
        generation, pool_id = self._generation(), self._pool_id()
        encode = ENCODERS[type(call)]
        request = encode(call, coordinator_generation=generation, pool_id=pool_id, **_told(call))
        is_switch = order.answered is _switched
        is_traced = is_switch or isinstance(call, effects.CallLoad)
        context = self._trace_context(getattr(call, "transfer_id", "")) if is_traced else ""
        try:
            method = getattr(self._reader.stub(call.address), order.method)
            response = await method(
                request, timeout=self._seconds(call), metadata=call_metadata(context)
            )
        except grpc.RpcError as error:
            failure = failure_of(error, call.replica_id)
            version = getattr(call, "version", "")
            _log.log(order.level, "replica %s did not carry out %s%s: %s", call.replica_id,
                     order.method, version and f" of {version}", failure.message)  # fmt: skip
        else:
            if is_switch:
                self._reader.note_let_in(call.address)
        if (event := order.answered(call, response, failure)) is not None:
            self._post(event)

    def _seconds(self, call: effects.ReplicaCall) -> float:
        match call:
            case effects.CallSleep() | effects.CallWake():
                return call.call_seconds
            case effects.CallRestore():
                return call.timeout_seconds + self._commit_seconds
            case effects.CallJoin() | effects.CallSend() | effects.CallLoad():
                return max(_ORDERS[type(call)].seconds, self._least_seconds)
        return _ORDERS[type(call)].seconds or self._commit_seconds

    def close_channel(self, address: str) -> None:
        """Close the channel to an address; calls under way have a second to end."""
        self._spawn(self._reader.close_channel(address))

    async def close(self) -> None:
        """Cancel the orders that wait or are under way."""
        self._waiting.clear()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a call to a replica failed unexpectedly", exc_info=task.exception())


def _told(call: effects.ReplicaCall) -> dict[str, Any]:
    """Return the fields of an order's message that its value has in another form."""
    match call:
        case effects.CallJoin(group=group):
            return {
                "group": group_to_proto(group, group.ranks_from(call.first_rank)),
                "trainer_id": group.trainer_id,
                "is_probe": group.is_probe,
            }
        case effects.CallSend(group=group):
            return {"group": group_to_proto(group, group.senders)}
        case effects.CallRestore():
            return {"spilled": SPILLED_COPY(call)}
        case effects.CallSleep():
            return {"when_running": when_running_to_proto(call.aborts)}
    return {}


@dataclass(frozen=True)
class _Order:
    """Row of the table of orders: the RPC, and what its outcome is to ``step``."""

    method: str
    answered: Callable[[Any, Any, Failure | None], events.Event | None]
    """Makes the event of an order, its answer (None without one), and its failure."""
    seconds: float = 0.0
    """Longest time that it may take; 0 for as long as a replica may switch."""
    level: int = logging.DEBUG
    """Level at which a failure is logged: others are told of, or repeated each second."""


def _joined(
    call: effects.CallJoin | effects.CallSend, _: Any, failure: Failure | None
) -> events.Event:
    return events.JoinAnswered(call.transfer_id, call.replica_id, failure)


def _switched(
    call: effects.CallCommit | effects.CallSwitch | effects.CallRestore,
    response: Any,
    failure: Failure | None,
) -> events.Event:
    named = call.transfer_id, call.replica_id, call.incarnation
    if response is None:
        return events.CommitAnswered(*named, None, 0.0, failure)
    return events.CommitAnswered(
        *named,
        vector_from_proto(response.version_vector),
        duration_from_proto(response.pause),
        None,
        tuple(response.retained_base_versions),
        # SwitchVersion's answer has none: what comes of it, a heartbeat says.
        getattr(response, "base_as_started", False),
        undoable=tuple(response.undo_base_versions),
    )


def _loaded(call: effects.CallLoad, _: Any, failure: Failure | None) -> events.Event:
    return events.LoadAnswered(call.transfer_id, call.replica_id, failure)


def _slept(call: effects.CallSleep, response: Any, failure: Failure | None) -> events.Event:
    told = response is not None and response.HasField("sleep")
    asleep = SLEEP.decode(response.sleep) if told else None
    return events.SleepAnswered(call.replica_id, call.incarnation, asleep, failure)


def _woken(call: effects.CallWake, response: Any, failure: Failure | None) -> events.Event:
    reason = response.dirty_reason[:MAX_TEXT_CHARS] if response is not None else ""
    return events.WakeAnswered(call.replica_id, call.incarnation, failure, reason)


# The last three are repeated, or said again by a heartbeat: their failures are not waited for.


def _discarded(call: effects.CallDiscard, response: Any, _: object) -> events.Event | None:
    if response is None:
        return None
    vector = vector_from_proto(response.version_vector)
    named = call.replica_id, call.transfer_id, response.incarnation
    return events.DiscardAnswered(*named, vector)


def _retired(call: effects.CallRetire, response: Any, _: object) -> events.Event | None:
    if response is None:
        return None
    vector = vector_from_proto(response.version_vector)
    return events.RetireAnswered(call.replica_id, call.incarnation, vector)


def _refused(call: effects.CallRefuse, response: Any, _: object) -> events.Event | None:
    if response is None:
        return None
    enforced = response.refusing, response.order_number
    return events.RefuseAnswered(call.replica_id, call.incarnation, *enforced)


_ORDERS: Final[Mapping[type[effects.ReplicaCall], _Order]] = {
    effects.CallJoin: _Order("JoinGroup", _joined, 10.0),
    effects.CallSend: _Order("SendVersion", _joined, 10.0),
    # A replica waits for its engine's step before it pauses generation.
    effects.CallLoad: _Order("LoadTransfer", _loaded, 30.0),
    effects.CallCommit: _Order("CommitTransfer", _switched, level=logging.WARNING),
    effects.CallSwitch: _Order("SwitchVersion", _switched, level=logging.WARNING),
    effects.CallRestore: _Order("SwitchVersion", _switched, level=logging.WARNING),
    effects.CallSleep: _Order("Sleep", _slept),
    effects.CallWake: _Order("WakeUp", _woken),
    effects.CallDiscard: _Order("DiscardTransfer", _discarded, 5.0),
    effects.CallRetire: _Order("RetireVersions", _retired, 10.0, logging.INFO),
    effects.CallRefuse: _Order("RefuseRequests", _refused, 5.0, logging.INFO),
}


_SERVICE: Final = replica_pb2.DESCRIPTOR.services_by_name["ReplicaService"]
#: Descriptors of the orders' messages, and what encodes the orders.
REQUESTS: Final[Mapping[type[effects.ReplicaCall], Any]] = {
    call: _SERVICE.methods_by_name[order.method].input_type for call, order in _ORDERS.items()
}
ENCODERS: Final = {
    call: listing(call, request._concrete_class, told={"group"} & {*request.fields_by_name})
    for call, request in REQUESTS.items()
}


def failure_of(error: grpc.RpcError, replica_id: str) -> Failure:
    """Return the outcome of a failed call.

    No answer at all means that the peer is gone, and so does one that nobody can make sense of.
    """
    typed: WeftError = error_from_rpc(error)
    reason = typed.reason
    if reason == "COORDINATOR_AWAY" or reason not in REASONS:
        reason = "PEER_GONE"
    metadata = {key: value[:MAX_TEXT_CHARS] for key, value in typed.metadata.items()}
    return Failure(reason, typed.message[:MAX_TEXT_CHARS], {**metadata, "member": replica_id})
