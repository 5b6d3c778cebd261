"""Channels to replicas, read-only calls over them, and orders.

Each call has a deadline; the outcome of an order is posted as an event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Final

import grpc

from weft_rl.contract.errors import REASONS, NotAllowedError, NotFoundError, WeftError
from weft_rl.contract.manifest import Manifest
from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.values import Failure, RecordedFacts
from weft_rl.coordinator.messages.wire import FACTS, ORDERS, SPILLED_COPY, group_to_proto
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
from weft_rl.tracing import call_metadata, untraced
from weft_rl.v1 import replica_pb2, replica_pb2_grpc, types_pb2

_log = logging.getLogger(__name__)

_DESCRIBE_SECONDS: Final = 60.0
_DIGEST_SECONDS: Final = 600.0
_GRACE_SECONDS: Final = 1.0
_JOIN_SECONDS: Final = 10.0
# Of a look whether a replica takes orders; for how long it is known.
_CHECK_SECONDS: Final = 5.0
_LET_IN_SECONDS: Final = 1.0
# Added to the time after which a silent replica is given up, so that the call does not end before.
_AFTER_STALL_SECONDS: Final = 2.0
# A replica waits for its engine's step before it pauses generation.
_LOAD_SECONDS: Final = 30.0
_DISCARD_SECONDS: Final = 5.0
_RETIRE_SECONDS: Final = 10.0
_REFUSE_SECONDS: Final = 5.0
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
            failed = _unanswered(call, Failure("INTERNAL", text, {"member": call.replica_id}))
            if failed is not None:
                self._post(failed)

    async def _make(self, call: effects.ReplicaCall) -> None:
        match call:
            case effects.CallJoin():
                await self._join(call)
            case effects.CallLoad():
                await self._load(call)
            case effects.CallCommit():
                await self._commit(call)
            case effects.CallSend():
                await self._send(call)
            case effects.CallSwitch():
                await self._switch(call)
            case effects.CallRestore():
                await self._restore(call)
            case effects.CallDiscard():
                await self._discard(call)
            case effects.CallRetire():
                await self._retire(call)
            case effects.CallRefuse():
                await self._refuse(call)
            case effects.CallSleep() | effects.CallWake():
                await self._sleep_or_wake(call)

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

    def _order(self, call: effects.ReplicaCall, **told: Any) -> Any:
        """Return the message of a call."""
        generation, pool_id = self._generation(), self._pool_id()
        encode = ORDERS[type(call)].encode
        return encode(call, coordinator_generation=generation, pool_id=pool_id, **told)

    def _metadata(self, transfer_id: str) -> Any:
        return call_metadata(self._trace_context(transfer_id))

    async def _join(self, call: effects.CallJoin) -> None:
        group = call.group
        request = replica_pb2.JoinGroupRequest(
            coordinator_generation=self._generation(),
            pool_id=self._pool_id(),
            trainer_id=group.trainer_id,
            group=group_to_proto(group, group.ranks_from(call.first_rank)),
            is_probe=group.is_probe,
        )
        failure = None
        try:
            await self._reader.stub(call.address).JoinGroup(
                request, timeout=max(_JOIN_SECONDS, self._least_seconds)
            )
        except grpc.RpcError as error:
            failure = failure_of(error, call.replica_id)
        self._post(events.JoinAnswered(call.transfer_id, call.replica_id, failure))

    async def _load(self, call: effects.CallLoad) -> None:
        request = self._order(call)
        failure = None
        try:
            await self._reader.stub(call.address).LoadTransfer(
                request,
                timeout=max(_LOAD_SECONDS, self._least_seconds),
                metadata=self._metadata(call.transfer_id),
            )
        except grpc.RpcError as error:
            failure = failure_of(error, call.replica_id)
        self._post(events.LoadAnswered(call.transfer_id, call.replica_id, failure))

    async def _commit(self, call: effects.CallCommit) -> None:
        request = self._order(call)
        await self._have_switched(
            call, self._reader.stub(call.address).CommitTransfer, request, self._commit_seconds
        )

    async def _switch(self, call: effects.CallSwitch) -> None:
        request = self._order(call)
        await self._have_switched(
            call, self._reader.stub(call.address).SwitchVersion, request, self._commit_seconds
        )

    async def _restore(self, call: effects.CallRestore) -> None:
        request = replica_pb2.SwitchVersionRequest(
            coordinator_generation=self._generation(),
            pool_id=self._pool_id(),
            version=POLICY_VERSION.encode(call.version),
            spilled=SPILLED_COPY.encode(call),
            incarnation=call.incarnation,
        )
        await self._have_switched(
            call,
            self._reader.stub(call.address).SwitchVersion,
            request,
            call.timeout_seconds + self._commit_seconds,
        )

    async def _have_switched(
        self,
        call: effects.CallCommit | effects.CallSwitch | effects.CallRestore,
        method: Any,
        request: Any,
        timeout_seconds: float,
    ) -> None:
        vector, pause, retained, as_started, failure = None, 0.0, (), False, None
        try:
            metadata = self._metadata(call.transfer_id)
            response = await method(request, timeout=timeout_seconds, metadata=metadata)
            vector = vector_from_proto(response.version_vector)
            pause = duration_from_proto(response.pause)
            retained = tuple(response.retained_base_versions)
            # SwitchVersion's answer has none: what comes of it, a heartbeat says.
            as_started = getattr(response, "base_as_started", False)
            self._reader.note_let_in(call.address)
        except grpc.RpcError as error:
            failure = failure_of(error, call.replica_id)
            _log.warning("replica %s did not switch to %s: %s", call.replica_id, call.version,
                         failure.message)  # fmt: skip
        self._post(
            events.CommitAnswered(
                call.transfer_id,
                call.replica_id,
                call.incarnation,
                vector,
                pause,
                failure,
                retained,
                as_started,
            )
        )

    async def _send(self, call: effects.CallSend) -> None:
        request = self._order(call, group=group_to_proto(call.group, call.group.senders))
        failure = None
        try:
            await self._reader.stub(call.address).SendVersion(
                request, timeout=max(_JOIN_SECONDS, self._least_seconds)
            )
        except grpc.RpcError as error:
            failure = failure_of(error, call.replica_id)
        self._post(events.JoinAnswered(call.transfer_id, call.replica_id, failure))

    async def _discard(self, call: effects.CallDiscard) -> None:
        request = self._order(call)
        try:
            response = await self._reader.stub(call.address).DiscardTransfer(
                request, timeout=_DISCARD_SECONDS
            )
        except grpc.RpcError as error:
            _log.debug("replica %s was not told to discard %s: %s", call.replica_id,
                       call.transfer_id, error_from_rpc(error))  # fmt: skip
            return
        self._post(
            events.DiscardAnswered(
                call.replica_id,
                call.transfer_id,
                response.incarnation,
                vector_from_proto(response.version_vector),
            )
        )

    async def _retire(self, call: effects.CallRetire) -> None:
        request = self._order(call)
        try:
            response = await self._reader.stub(call.address).RetireVersions(
                request, timeout=_RETIRE_SECONDS
            )
        except grpc.RpcError as error:
            _log.info("replica %s did not retire versions and is asked again later: %s",
                      call.replica_id, error_from_rpc(error))  # fmt: skip
            return
        vector = vector_from_proto(response.version_vector)
        self._post(events.RetireAnswered(call.replica_id, call.incarnation, vector))

    async def _refuse(self, call: effects.CallRefuse) -> None:
        request = self._order(call)
        try:
            response = await self._reader.stub(call.address).RefuseRequests(
                request, timeout=_REFUSE_SECONDS
            )
        except grpc.RpcError as error:
            _log.info("replica %s hears with its next heartbeat whether to refuse requests: %s",
                      call.replica_id, error_from_rpc(error))  # fmt: skip
            return
        self._post(
            events.RefuseAnswered(
                call.replica_id, call.incarnation, response.refusing, response.order_number
            )
        )

    async def _sleep_or_wake(self, call: effects.CallSleep | effects.CallWake) -> None:
        stub, asleep, failure, dirty_reason = self._reader.stub(call.address), None, None, ""
        try:
            if isinstance(call, effects.CallSleep):
                request = self._order(call, when_running=when_running_to_proto(call.aborts))
                response = await stub.Sleep(request, timeout=call.call_seconds)
                asleep = SLEEP.decode(response.sleep) if response.HasField("sleep") else None
            else:
                woken = await stub.WakeUp(self._order(call), timeout=call.call_seconds)
                dirty_reason = woken.dirty_reason[:MAX_TEXT_CHARS]
        except grpc.RpcError as error:
            failure = failure_of(error, call.replica_id)
        of = (call.replica_id, call.incarnation)
        if isinstance(call, effects.CallSleep):
            self._post(events.SleepAnswered(*of, asleep, failure))
        else:
            self._post(events.WakeAnswered(*of, failure, dirty_reason))


def _unanswered(call: effects.ReplicaCall, failure: Failure) -> events.Event | None:
    """Return the outcome of a call that could not be made; None if it is made again anyhow."""
    of_transfer = getattr(call, "transfer_id", ""), call.replica_id
    match call:
        case effects.CallJoin() | effects.CallSend():
            return events.JoinAnswered(*of_transfer, failure)
        case effects.CallLoad():
            return events.LoadAnswered(*of_transfer, failure)
        case effects.CallCommit() | effects.CallSwitch() | effects.CallRestore():
            return events.CommitAnswered(*of_transfer, call.incarnation, None, 0.0, failure, ())
        case effects.CallSleep():
            return events.SleepAnswered(call.replica_id, call.incarnation, None, failure)
        case effects.CallWake():
            return events.WakeAnswered(call.replica_id, call.incarnation, failure, "")
    return None


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
