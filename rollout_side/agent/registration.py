"""Membership of a replica in the pool: first contact, registering, heartbeats, leaving."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import grpc

from rollout_side.config import AgentConfig
from rollout_side.engine import Engine
from weft_rl.contract.checkpoint import READING, Checkpoint, not_compared
from weft_rl.contract.errors import (
    CapacityError,
    InvalidNameError,
    InvalidRequestError,
    NotFoundError,
    NotReadyError,
    PeerUnavailableError,
    RequestConflictError,
    TransferTimeoutError,
    WeftError,
)
from weft_rl.contract.names import PolicyVersion, VersionVector, check_counted
from weft_rl.contract.replica_report import (
    AbsentPolicy,
    DrainNote,
    HeldVersion,
    OutOfService,
    ReplicaReport,
    Sleep,
)
from weft_rl.rpc.bounds import PROTOCOL_REVISION
from weft_rl.rpc.channel import check_target, open_aio_channel, open_channel
from weft_rl.rpc.codec import (
    CAPABILITIES,
    CHECKPOINT,
    HELD,
    OUT_OF_SERVICE,
    REPORT,
    duration_from_proto,
)
from weft_rl.rpc.handshake import why_refused
from weft_rl.rpc.manifest_codec import reference_to_chunks
from weft_rl.rpc.security.credentials import Credentials
from weft_rl.rpc.status import error_from_rpc
from weft_rl.schema import codec
from weft_rl.v1 import registry_pb2 as pb
from weft_rl.v1.registry_pb2_grpc import RegistryServiceStub

_NOT_KNOWN = not_compared("it does not say what it was started with")


@dataclass(frozen=True)
class HeldVersions:
    """Versions that a replica serves and holds now, with its report."""

    report: ReplicaReport
    """Report, whose ``asleep`` is set while the engine sleeps, not while it waits to."""
    staged: tuple[str, ...] = ()
    """Transfers with staged bytes, whole or in part."""
    checkpoint: Checkpoint = _NOT_KNOWN
    """Checkpoint that the engine was started with."""
    held: frozenset[HeldVersion] = frozenset()
    """Held versions, in memory and spilled."""
    last_epoch: int = 0
    """Highest epoch of its side groups."""
    to_sleep: Sleep | None = None
    """Set while it waits to sleep, refusing new requests."""


@dataclass(frozen=True, order=True)
class OrderKey:
    """Key that sorts orders to refuse requests: the newer one is greater."""

    generation: int
    """Generation of the coordinator that gave the order."""
    number: int


@dataclass(frozen=True, kw_only=True)
class OrderSource:
    """Coordinator that has given an order, or an answer, and how far it has counted."""

    generation: int
    pool_id: str = ""
    """Empty is any."""
    epoch: int = 0
    """Epoch of the side group that is to be joined; 0 for none."""
    number: int = 0
    """Number of an order to refuse requests; 0 for none."""


@dataclass(frozen=True)
class HeartbeatOrders:
    """Answer of the coordinator to a heartbeat."""

    drain: DrainNote | None
    """Set when the replica is to drain."""
    is_draining: bool
    """True if the coordinator knew, as it answered, that the replica drains."""
    in_transfer: bool
    """True if a transfer needs the replica."""
    out_of_service: OutOfService
    """Operator's order that stands."""
    order: OrderKey
    """Number of the newest order to refuse requests, or to take them."""
    pinned_base_versions: tuple[int, ...]
    """Versions of the base whose copies are to be kept."""
    vector: VersionVector = field(default_factory=VersionVector)
    """Vector that was reported."""
    lacking: tuple[PolicyVersion, ...] = ()
    """Versions behind the pool's aliases that the vector lacks."""
    lacking_more: bool = False
    """True if there are more than ``lacking`` lists."""
    base_doubt: str = ""
    """Reason why base@0 here is not known to be the pool's; empty if it is, or is not served."""
    absent_policies: tuple[AbsentPolicy, ...] = ()
    """Policies that the pool does not serve any more."""


_ORDERS = codec(
    HeartbeatOrders,
    pb.HeartbeatResponse,
    given=["is_draining", "order", "vector"],
    told=[
        "ready",
        "held_versions_wanted",
        "coordinator_generation",
        "order_number",
        "epoch",
        "pool_id",
    ],
)


_log = logging.getLogger(__name__)

_CHECK_SECONDS = 5.0
_CHECK_AGAIN_SECONDS = 0.5
#: Added to the time after which a former process of this name counts as gone.
_MORE_SECONDS = 1.0


async def check_contact(config: AgentConfig) -> None:
    """Check whether the coordinator will register this replica, and log what prevents it.

    A coordinator that is away, or refuses this replica by rules that others can change, is waited
    for when the replica registers. The model is loaded meanwhile.

    Raises:
        InvalidRequestError: The coordinator's address is malformed.
        RequestConflictError: Another process of this name lives on. Nothing is served here yet, so
            nothing is lost.
    """
    check_target(config.coordinator)
    request = pb.CheckReplicaRequest(
        replica_id=config.replica_id,
        incarnation=config.incarnation,
        protocol_revision=PROTOCOL_REVISION,
    )
    conflict_since: float | None = None
    async with open_aio_channel(config.coordinator) as channel:
        stub = RegistryServiceStub(channel)
        while True:
            try:
                await stub.CheckReplica(request, timeout=_CHECK_SECONDS)
                return
            except grpc.RpcError as rpc_error:
                error = error_from_rpc(rpc_error)
            if isinstance(error, InvalidNameError):
                raise error
            if not isinstance(error, RequestConflictError):
                await _log_trouble(config, error)
                return
            now = time.monotonic()
            if conflict_since is None:
                conflict_since = now
                _log.warning(
                    "waiting until a former process of this name has left: %s", error.message
                )
            elif now - conflict_since > _patience(config, error):
                raise error
            await asyncio.sleep(_CHECK_AGAIN_SECONDS)


def _patience(config: AgentConfig, error: RequestConflictError) -> float:
    try:
        needed = float(error.metadata["silent_seconds"]) + _MORE_SECONDS
    except (KeyError, ValueError):
        return config.conflict_patience_seconds
    return min(needed, config.conflict_patience_seconds)


async def _log_trouble(config: AgentConfig, error: WeftError) -> None:
    if not isinstance(error, PeerUnavailableError | TransferTimeoutError):
        what = f"the coordinator at {config.coordinator} refuses this replica: {error}"
    else:
        credentials = Credentials.from_environment()
        why = await asyncio.to_thread(why_refused, config.coordinator, credentials)
        what = f"no contact with the coordinator at {config.coordinator}: {why or error.message}"
    _log.warning("%s; the model is loaded meanwhile, then the replica tries again", what)


_CALL_SECONDS = 10.0
_REFERENCE_SECONDS = 60.0
_RETRY_SECONDS = 1.0
#: Between heartbeats of a replica that drains: it waits until no transfer needs it.
_DRAIN_BEAT_SECONDS = 0.25
_STOP_SECONDS = 5.0
#: Between two attempts to find out why there is no contact.
_TRY_AGAIN_SECONDS = 30.0
#: Refusals for what a replica is, beside requests that are malformed.
_FINAL_REASONS = frozenset({"BASE_MISMATCH", "BACKEND_MISMATCH"})
#: Interval at which the checkpoint is checked while it is read.
_LOOK_SECONDS = 0.1


class Registration:
    """Membership of one replica in the registry, from ``start`` to ``stop``.

    Args:
        config: Settings of the replica.
        address: Address of its ReplicaService, HOST:PORT.
        engine: Engine whose capabilities and reference the replica declares.
        current: Returns the versions served and held now; called on this object's thread,
            must be quick and thread-safe.
        on_failed: Called once, on this object's thread, if a replica that was never registered
            is refused for good: another base model, no backend in common, or an id that stays
            taken. A replica that was registered stays and serves, whatever it is answered.
        on_answer: Called on this object's thread with the answer to each heartbeat.
        on_ordered: Called on this object's thread with the order to refuse requests, and its
            reason, that registration returned.
        on_told: Called on this object's thread with how far the coordinator has counted, as each
            answer says.
    """

    def __init__(
        self,
        config: AgentConfig,
        address: str,
        engine: Engine,
        *,
        current: Callable[[], HeldVersions],
        on_failed: Callable[[WeftError], object],
        on_answer: Callable[[HeartbeatOrders], object],
        on_ordered: Callable[[OrderKey, str], object] = lambda order, reason: None,
        on_told: Callable[[OrderSource], object] = lambda told: None,
    ) -> None:
        #: Set while the coordinator knows this process.
        self.registered = threading.Event()
        #: Set while this replica serves all that the pool serves.
        self.ready = threading.Event()
        #: Generation of the last coordinator that registered it; only grows.
        self.coordinator_generation = 0
        #: Pool that it was told of, with which it stays; empty before.
        self.pool_id = ""
        self._config, self._address, self._engine = config, address, engine
        self._current, self._on_failed, self._on_answer = current, on_failed, on_answer
        self._on_ordered, self._on_told = on_ordered, on_told
        self._channel = open_channel(config.coordinator)
        self._stub = RegistryServiceStub(self._channel)
        self._interval_seconds = _RETRY_SECONDS
        # Held versions that the coordinator knows, and whether it wants all of them.
        self._held_reported: frozenset[HeldVersion] = frozenset()
        self._held_wanted = False
        #: Reason why the coordinator does not answer, or refuses; empty once it has answered.
        self.trouble = ""
        self._was_registered = False
        self._coordinator_id = ""
        # Last operator's order that it knows, for a coordinator that does not.
        self._out_of_service: pb.OutOfService | None = None
        self._epoch = 0
        self._conflict_since: float | None = None
        self._away = False
        self._tried_at, self._why = float("-inf"), ""
        # No answer yet: what aliases stand for is not known.
        self._answered_at = float("-inf")
        self._stopping = False
        self._reported_checkpoint: Checkpoint | None = None
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft-registration", daemon=True)

    @property
    def is_known(self) -> bool:
        """True if the coordinator knows this process and answered the last call."""
        return self.registered.is_set() and not self._away

    @property
    def in_contact(self) -> bool:
        """True if a heartbeat was answered within ``AgentConfig.unready_after_seconds``."""
        return time.monotonic() - self._answered_at < self._config.unready_after_seconds

    def start(self) -> None:
        """Start the thread; it continues through restarts of the coordinator."""
        self._thread.start()

    def stop(self) -> None:
        """Leave the pool, best effort; blocks at most some seconds."""
        self._stopping = True
        self._wake.set()
        self._thread.join(_STOP_SECONDS)
        self._leave()
        self._channel.close()

    def hurry(self) -> None:
        """Send the next heartbeat at once."""
        self._wake.set()

    def _run(self) -> None:
        wait = 0.0
        while True:
            try:
                self._pause(wait)
                self._wake.clear()
                if self._stopping:
                    return
                wait = self._contact()
                continue
            except grpc.RpcError as rpc_error:
                error = error_from_rpc(rpc_error)
                if isinstance(error, NotFoundError):
                    _log.info("registering again: the coordinator does not know this replica")
                    self.registered.clear()
                    wait = 0.0
                    continue
                if self._is_final(error):
                    if not self._stopping:
                        self._on_failed(error)
                    return
                self._record_failure(error)
            except WeftError as error:  # from a file of its own credentials
                self._record_trouble(f"the replica could not ask the coordinator: {error.message}")
            except Exception as error:  # noqa: BLE001 (it would end the thread in silence)
                self._record_trouble(
                    f"the replica could not report what it serves: {error!r}", error
                )
            wait = _RETRY_SECONDS

    def _contact(self) -> float:
        """Register if needed and send a heartbeat; return the seconds until the next."""
        if not self.registered.is_set():
            self._register()
        self._report_checkpoint()
        draining = self._heartbeat()
        return _DRAIN_BEAT_SECONDS if draining else self._interval_seconds

    def _pause(self, seconds: float) -> None:
        """Wait until the next heartbeat is due, or the checkpoint is read: readiness needs it."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            is_reading = self._reported_checkpoint == READING
            if self._wake.wait(min(left, _LOOK_SECONDS) if is_reading else left):
                return
            if is_reading and self._current().checkpoint != READING:
                return

    def _report_checkpoint(self) -> None:
        """Report the checkpoint that the engine was started with, unless it is reported already."""
        checkpoint = self._current().checkpoint
        if checkpoint == self._reported_checkpoint:
            return
        request = pb.ReportCheckpointRequest(
            replica_id=self._config.replica_id,
            incarnation=self._config.incarnation,
            checkpoint=CHECKPOINT.encode(checkpoint),
        )
        self._stub.ReportCheckpoint(request, timeout=_CALL_SECONDS)
        self._reported_checkpoint = checkpoint

    def _is_final(self, error: WeftError) -> bool:
        """Return whether the pool refuses this replica for good, and never registered it.

        Rules of access, tokens and revisions can change meanwhile. A former process of this id is
        forgotten after some missed heartbeats.
        """
        if self._was_registered:
            return False
        if isinstance(error, RequestConflictError):
            now = time.monotonic()
            self._conflict_since = self._conflict_since or now
            return now - self._conflict_since >= self._config.conflict_patience_seconds
        return isinstance(error, InvalidRequestError) or error.reason in _FINAL_REASONS

    def _record_failure(self, error: WeftError) -> None:
        if error.reason == "POOL_RECOVERING":
            self._record_trouble(f"the coordinator does not take this replica yet: {error}")
        elif isinstance(error, PeerUnavailableError | TransferTimeoutError):
            self._record_trouble(self._why_away(error))
        elif type(error) is WeftError or isinstance(error, CapacityError):
            self._record_trouble(f"the coordinator could not answer: {error}")
        else:
            self._record_trouble(f"the coordinator refuses this replica: {error}")

    def _record_trouble(self, trouble: str, cause: Exception | None = None) -> None:
        """Record why there is no contact, and log each cause once. A refusal is no contact
        either: a replica that is refused for long is not ready (``in_contact``)."""
        if trouble != self.trouble and not self._stopping:
            _log.warning(
                "%s; this replica serves what it has, and tries again every %g s",
                trouble,
                _RETRY_SECONDS,
                exc_info=cause,
            )
        self.trouble, self._away = trouble, True

    def _why_away(self, error: WeftError) -> str:
        """Explain why there is no answer. gRPC reports a failed TLS handshake only as a lost
        connection, so a handshake is made now and then to find the cause."""
        now = time.monotonic()
        if now - self._tried_at < _TRY_AGAIN_SECONDS and self._why:
            return self._why
        self._tried_at = now
        target = self._config.coordinator
        why = why_refused(target, Credentials.from_environment()) or error.message
        self._why = f"no contact with the coordinator at {target}: {why}"
        return self._why

    def _register(self) -> None:
        config, engine = self._config, self._engine
        now = self._current()
        request = pb.RegisterRequest(
            replica_id=config.replica_id,
            incarnation=config.incarnation,
            address=self._address,
            http_url=config.http_url,
            capabilities=CAPABILITIES.encode(engine.capabilities),
            model_name=engine.model_name,
            report=REPORT.encode(now.report),
            held_versions=map(HELD.encode, sorted(now.held)),
            last_coordinator_generation=self.coordinator_generation,
            last_epoch=max(now.last_epoch, self._epoch),
            out_of_service=self._out_of_service,
            last_coordinator_id=self._coordinator_id,
            checkpoint=CHECKPOINT.encode(now.checkpoint),
            protocol_revision=PROTOCOL_REVISION,
            pool_id=self.pool_id,
        )
        response = self._stub.Register(request, timeout=_CALL_SECONDS)
        if response.coordinator_id != self._coordinator_id:
            self._check_pool(response.pool_id)
        self._check_numbers(response)
        self._conflict_since = None
        self._reported_checkpoint = now.checkpoint
        self._held_reported = now.held
        self.coordinator_generation = max(
            self.coordinator_generation, response.coordinator_generation
        )
        self._interval_seconds = duration_from_proto(response.heartbeat_interval)
        self._coordinator_id = response.coordinator_id
        self._record_orders(response)
        if response.reference_wanted:
            self._stub.PutReference(self._reference_chunks(), timeout=_REFERENCE_SECONDS)
        self._was_registered = True
        self._tell(response)
        _log.info(
            "registered as %s with coordinator generation %d",
            config.replica_id,
            self.coordinator_generation,
        )
        self._on_ordered(
            OrderKey(self.coordinator_generation, response.order_number),
            OUT_OF_SERVICE.decode(response.out_of_service).refusal,
        )
        self.registered.set()

    def _reference_chunks(self) -> Iterator[pb.PutReferenceRequest]:
        for chunk in reference_to_chunks(self._engine.reference):
            yield pb.PutReferenceRequest(chunk=chunk)

    def _heartbeat(self) -> bool:
        """Send a heartbeat and take in its answer; return whether the replica drains."""
        now = self._current()
        report = replace(now.report, sleep=now.report.sleep or now.to_sleep)
        request = pb.HeartbeatRequest(
            replica_id=self._config.replica_id,
            incarnation=self._config.incarnation,
            report=REPORT.encode(report),
            staged_transfer_ids=now.staged,
            held_versions=map(HELD.encode, sorted(self._held_to_report(now.held))),
            held_versions_complete=self._held_wanted,
        )
        response = self._stub.Heartbeat(request, timeout=_CALL_SECONDS)
        self._check_numbers(response)
        self._held_reported, self._held_wanted = now.held, response.held_versions_wanted
        self._record_orders(response)
        # It grows if another replica was registered by a later coordinator.
        self.coordinator_generation = max(
            self.coordinator_generation, response.coordinator_generation
        )
        self._tell(response)
        self._answered_at = time.monotonic()
        if self._away:
            _log.info("in contact with the coordinator again")
        self._away, self.trouble, self._why = False, "", ""
        if response.ready:
            self.ready.set()
        else:
            self.ready.clear()
        is_draining = now.report.drain is not None
        if not self._stopping:
            self._on_answer(
                _ORDERS.decode(
                    response,
                    is_draining=is_draining,
                    order=OrderKey(self.coordinator_generation, response.order_number),
                    vector=now.report.version_vector,
                )
            )
        return is_draining

    def _record_orders(self, response: pb.RegisterResponse | pb.HeartbeatResponse) -> None:
        is_ordered = response.HasField("out_of_service")
        self._out_of_service = response.out_of_service if is_ordered else None
        self._epoch = max(self._epoch, response.epoch)
        self.pool_id = response.pool_id or self.pool_id

    def _tell(self, response: pb.RegisterResponse | pb.HeartbeatResponse) -> None:
        source = OrderSource(
            generation=self.coordinator_generation,
            pool_id=self.pool_id,
            epoch=self._epoch,
            number=response.order_number,
        )
        self._on_told(source)

    def _check_pool(self, pool_id: str) -> None:
        if pool_id and self.pool_id and pool_id != self.pool_id:
            raise NotReadyError(
                f"{self._config.coordinator} leads to the coordinator of pool {pool_id}, and this "
                f"replica belongs to pool {self.pool_id}; to move it, restart it",
                reason="POOL_MISMATCH",
            )

    def _check_numbers(self, response: pb.RegisterResponse | pb.HeartbeatResponse) -> None:
        """Refuse numbers that leave no room to count on."""
        try:
            check_counted("coordinator generation", response.coordinator_generation)
            check_counted("epoch", response.epoch)
            check_counted("order number", response.order_number)
        except InvalidRequestError as error:  # it is no fault of this replica, nor for good
            raise NotReadyError(f"{self._config.coordinator} answers: {error.message}") from error

    def _held_to_report(self, held: frozenset[HeldVersion]) -> frozenset[HeldVersion]:
        """Return the held versions to name in a heartbeat: all of a version if any of it is new."""
        if self._held_wanted:
            return held
        new = {(one.version, one.spilled) for one in held ^ self._held_reported}
        return frozenset(one for one in held if (one.version, one.spilled) in new)

    def _leave(self) -> None:
        if not self.registered.is_set():
            return
        request = pb.LeaveRequest(
            replica_id=self._config.replica_id, incarnation=self._config.incarnation
        )
        try:
            self._stub.Leave(request, timeout=2.0)
        except (grpc.RpcError, WeftError) as error:
            why = error if isinstance(error, WeftError) else error_from_rpc(error)
            _log.info("this replica could not leave the pool in good order: %s", why)
