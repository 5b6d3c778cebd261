"""Side groups that a worker receives in, each with a thread that prepares, receives and verifies.

The threads run beside the engine's in the worker's process and touch no engine state: what they
receive lies in the ``WorkerStore``, or is handed to the thread that loads it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from rollout_side.engine import JoinOrder
from rollout_side.memory.handoff import HandoffQueue
from rollout_side.memory.store import WorkerStore, WorkingThreads
from rollout_side.memory.versions import PartialTransfer, ServedBase, is_adapter
from rollout_side.receive.delta_transfer import DeltaTransfer, ServedDeltaTransfer
from rollout_side.receive.incoming_buckets import (
    DroppedRing,
    IncomingPart,
    IncomingTransfer,
    InPlaceTransfer,
    PreparedTransfer,
    StagingTransfer,
    receive_buckets,
)
from weft_rl.contract.backends import BACKENDS
from weft_rl.contract.errors import (
    CapacityError,
    PeerUnavailableError,
    TransferAbortedError,
    TransferTimeoutError,
    UnsupportedError,
    WeftError,
    error_from_reason,
)
from weft_rl.contract.group import GroupTicket
from weft_rl.contract.manifest import Manifest, SendPlan, transfer_plan
from weft_rl.contract.names import PolicyVersion, is_replica_sender
from weft_rl.interrupts import report_while
from weft_rl.progress import OnProgress
from weft_rl.rpc.channel import open_channel
from weft_rl.rpc.codec import content_to_proto, send_plan_from_proto
from weft_rl.tracing import NO_TRACER, Span, Tracer
from weft_rl.transport.group import on_device
from weft_rl.transport.member import AttendStream, FetchedManifests, GroupEndedError, Membership
from weft_rl.transport.wire.changes import warm
from weft_rl.v1 import rendezvous_pb2 as pb
from weft_rl.v1.rendezvous_pb2_grpc import RendezvousServiceStub

_log = logging.getLogger(__name__)

# Bound of the directions that wait while a transfer is received. A trainer carries out one
# transfer at a time, so there are never more than a few.
_MAX_DIRECTIONS = 100
# Receives posted ahead for each sender: one arrives, one is verified, one more is ready.
_MAX_AHEAD = 3
# A push ends by its trainer's deadline: what a receiver says at the same moment, of what it waited
# for, would come first now and then, and make it a push that lost a replica.
_GRACE_SECONDS = 1.0
# Interval at which a thread that waits for the former one checks whether it must leave.
_LOOK_SECONDS = 0.2
# A received push is committed by then; making memory before could slow the engine down.
_IDLE_SECONDS = 0.5

#: A message of the coordinator, None for the end, or an event that the thread sets.
_Direction = pb.AttendResponse | threading.Event | None


class GroupReceiver:
    """Membership of a worker in one side group, and the thread that receives in it."""

    def __init__(
        self,
        ticket: GroupTicket,
        trainer_id: str,
        store: WorkerStore,
        former: GroupReceiver | None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self.ticket = ticket
        self._tracer = tracer
        self._trainer_id = trainer_id
        self._former = former
        self._left = threading.Event()
        self._store = store
        self._device = store.memory.device_of(ticket.backend)
        self._manifests = FetchedManifests()
        self._directions: queue.Queue[_Direction] = queue.Queue(_MAX_DIRECTIONS)
        self._membership: Membership | None = None
        self._prepared: PreparedTransfer | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"weft-receive-{trainer_id}", daemon=True
        )
        self._thread.start()
        store.threads.add(self._thread, self._request_turn)

    def leave(self) -> None:
        """End the thread soon; a receive under way is abandoned."""
        self._left.set()
        if (membership := self._membership) is not None:
            membership.abort(TransferAbortedError("the replica left the side group"))
        self._wake()
        with contextlib.suppress(queue.Full):  # the thread checks ``_left`` after each
            self._directions.put_nowait(None)

    def _request_turn(self, turn: threading.Event) -> bool:
        """Ask the thread to set ``turn`` between two directions; return False if it cannot be
        asked."""
        with contextlib.suppress(queue.Full):
            self._directions.put_nowait(turn)
            return True
        return False

    # -- on the stream's thread --------------------------------------------

    def _on_message(self, response: pb.AttendResponse) -> None:
        if response.HasField("abort"):
            abort = response.abort
            error = error_from_reason(abort.reason, abort.message)
            if self._membership is not None:
                self._membership.abort(error)
            self._wake()
        self._directions.put_nowait(response)

    def _on_closed(self, error: WeftError) -> None:
        why = "" if isinstance(error, GroupEndedError) else f": {error}"
        _log.info("group %s of trainer %s has ended%s", self.ticket.group_id, self._trainer_id, why)
        self._wake()
        self._directions.put(None)

    def _wake(self) -> None:
        """Wake the group's thread wherever it waits, since the group was aborted."""
        if (prepared := self._prepared) is not None:
            prepared.transfer.wake()

    # -- on the group's own thread -----------------------------------------

    def _run(self) -> None:
        # Also what arrives on the host is put on the engine's GPU, beside the engine's own work.
        with on_device(self._store.memory.device):
            self._attend()

    def _attend(self) -> None:
        ticket = self.ticket
        if not self._wait_for_former():
            return
        try:
            self._membership = Membership(
                ticket, self._device, on_message=self._on_message, on_closed=self._on_closed
            )
        except WeftError as error:
            # The coordinator notices that this rank never attends.
            _log.warning("could not join group %s: %s", ticket.group_id, error)
            return
        except Exception:  # noqa: BLE001 (the edge of a thread)
            _log.exception("could not join group %s", ticket.group_id)
            return
        try:
            while (direction := self._next_direction()) is not None:
                self._follow(self._membership, direction)
        finally:
            self._keep_prepared()
            if self._membership.leave():
                self._store.settle_partial(self._trainer_id)

    def _wait_for_former(self) -> bool:
        """Wait until the trainer's former group has handed over the verified part of a transfer
        that resumes here. Returns False if this group was left meanwhile.

        Without a timeout: a thread of the former group that hangs must not be overtaken.
        """
        while (former := self._former) is not None:
            former._thread.join(_LOOK_SECONDS)
            if not former._thread.is_alive():
                self._former = former._former  # it may have ended while it waited for this one
            elif self._left.is_set():
                return False
        return not self._left.is_set()

    def _next_direction(self) -> pb.AttendResponse | None:
        """Wait for the next direction; return None once the group was left. While idle, make memory
        for the next push of an adapter."""
        is_idle = False
        while not self._left.is_set():
            try:
                direction = self._directions.get(timeout=None if is_idle else _IDLE_SECONDS)
            except queue.Empty:
                is_idle = True
                self._make_spare()
                continue
            if not isinstance(direction, threading.Event):
                return direction
            direction.set()  # shows that this thread is alive
        return None

    def _make_spare(self) -> None:
        self._store.memory.give_back()
        try:
            self._store.make_spare()
        except (MemoryError, OSError, CapacityError) as error:
            _log.warning("memory for the next adapter cannot be made in advance: %s", error)

    def _follow(self, membership: Membership, direction: pb.AttendResponse) -> None:
        """Carry out one direction; report failures, never raise them."""
        kind = direction.WhichOneof("message")
        transfer_id = getattr(direction, kind).transfer_id if kind in _TRANSFER_KINDS else ""
        try:
            if kind == "prepare":
                self._drop_prepared()
                self._prepare(membership, direction.prepare)
            elif kind == "start":
                self._receive(membership, transfer_id, direction.start.first_bucket)
            elif kind == "abort":
                if (prepared := self._prepared) is not None:
                    prepared.span.set_failed(direction.abort.reason, direction.abort.message)
                self._drop_prepared()
                self._store.discard(transfer_id)
        except Exception as error:  # noqa: BLE001 (the edge of a thread)
            typed = error if isinstance(error, WeftError) else WeftError(repr(error))
            if not isinstance(error, WeftError):
                _log.exception("transfer %s failed", transfer_id)
            _log.info("receiving transfer %s failed: %s", transfer_id, typed)
            if (prepared := self._prepared) is not None:
                prepared.span.fail(typed)
            self._keep_prepared()
            failed = pb.RankFailed(
                transfer_id=transfer_id, reason=typed.reason, message=typed.message
            )
            membership.attendance.send(pb.AttendRequest(failed=failed))

    def _prepare(self, membership: Membership, prepare: pb.Prepare) -> None:
        version = PolicyVersion(prepare.version.policy, prepare.version.version)
        span = self._tracer.start(
            "weft.receive",
            parent=prepare.trace_context,
            transfer_id=prepare.transfer_id,
            policy=version.policy,
            version=version.version,
            epoch=self.ticket.epoch,
            backend=self.ticket.backend,
        )
        try:
            self._prepared = self._make_room(membership, prepare, version, span)
        except BaseException as error:
            span.fail(error)
            span.end()
            raise
        prepared = pb.Prepared(
            transfer_id=prepare.transfer_id,
            num_buckets_verified=self._prepared.num_verified,
        )
        membership.attendance.send(pb.AttendRequest(prepared=prepared))

    def _make_room(
        self, membership: Membership, prepare: pb.Prepare, version: PolicyVersion, span: Span
    ) -> PreparedTransfer:
        """Make ready to receive a transfer; blocks for its manifest and its memory."""
        timeout_seconds = prepare.timeout.ToTimedelta().total_seconds()
        deadline = time.monotonic() + timeout_seconds + _GRACE_SECONDS

        def allocating(done: int, total: int) -> None:
            membership.progress.report(
                pb.ACTIVITY_ALLOCATING, prepare.transfer_id, done=done, total=total
            )

        def fetched() -> Manifest:
            return self._manifests.get(
                prepare.layout_digest,
                membership.stub,
                membership.credential,
                timeout_seconds,
                lambda: allocating(0, 0),
            )

        plans: list[SendPlan] = []

        def planned(manifest: Manifest) -> SendPlan:
            divided = prepare.send_plan if prepare.HasField("send_plan") else None

            def plan() -> SendPlan:
                return transfer_plan(
                    manifest,
                    None if divided is None else send_plan_from_proto(divided),
                    carries_runs=prepare.carries_runs,
                )

            plans.append(report_while(plan, lambda: allocating(0, 0)))
            return plans[-1].part(takes_whole=prepare.takes_whole)

        transfer: IncomingTransfer
        in_place = self._store.memory.in_place and not is_adapter(version)
        if prepare.send_plan.delta_from and not prepare.takes_whole:
            transfer = self._prepare_delta(
                membership, prepare.transfer_id, version, fetched, planned, allocating
            )
        elif in_place:
            if prepare.carries_runs:  # the coordinator refuses it at begin
                raise UnsupportedError(
                    f"{version} lists runs, which cannot be loaded in place; push the whole model, "
                    "or to replicas that stage bases"
                )
            transfer = self._load_in_place(
                membership, prepare.transfer_id, version, fetched, planned, deadline
            )
        else:
            transfer = self._stage(prepare.transfer_id, version, fetched, planned, allocating)
        return PreparedTransfer(
            transfer_id=prepare.transfer_id,
            version=version,
            nonce=prepare.nonce,
            deadline=deadline,
            num_in_flight=min(prepare.num_buckets_in_flight, _MAX_AHEAD),
            transfer=transfer,
            span=span,
            plan=plans[-1],
            takes_whole=prepare.takes_whole,
        )

    def _stage(
        self,
        transfer_id: str,
        version: PolicyVersion,
        fetched: Callable[[], Manifest],
        planned: Callable[[Manifest], SendPlan],
        on_progress: OnProgress,
    ) -> IncomingTransfer:
        partial = self._store.take_partial(transfer_id, self._trainer_id, on_progress)
        manifest = fetched() if partial is None else partial.manifest
        plan = planned(manifest)
        if partial is None:
            partial = self._reserved(transfer_id, version, manifest, plan, on_progress)
        return StagingTransfer(self._store, version, partial, plan)

    def _reserved(
        self,
        transfer_id: str,
        version: PolicyVersion,
        manifest: Manifest,
        plan: SendPlan,
        on_progress: OnProgress,
    ) -> PartialTransfer:
        """Return a transfer of which nothing has come, in memory that is reserved for it."""
        segment = self._store.reserve(
            transfer_id,
            manifest.wire_bytes,
            adapter=is_adapter(version),
            clone=is_replica_sender(self._trainer_id),
            on_progress=on_progress,
        )
        return PartialTransfer(
            transfer_id, self._trainer_id, manifest, segment, [], plan.lists_runs
        )

    def _prepare_delta(
        self,
        membership: Membership,
        transfer_id: str,
        version: PolicyVersion,
        fetched: Callable[[], Manifest],
        planned: Callable[[Manifest], SendPlan],
        on_progress: OnProgress,
    ) -> IncomingTransfer:
        """Make ready to receive a delta of a base that is held here."""
        store = self._store
        found = store.take_partial(transfer_id, self._trainer_id, on_progress)
        manifest = fetched() if found is None else found.manifest
        plan = planned(manifest)
        content = manifest.layout_digest, plan.delta_from
        verifying = partial(membership.progress.report, pb.ACTIVITY_VERIFYING, transfer_id)
        try:
            with ExitStack() as stack:
                # Before memory is reserved: other copies give way to a push, this one does not.
                base = stack.enter_context(store.lend(lambda: store.base_for_delta(*content)))
                memory, is_served = store.memory, isinstance(base, ServedBase)
                warm(memory.device if is_served else memory.place(adapter=False))
                if is_served:
                    own = found or PartialTransfer.of_changes(
                        transfer_id, self._trainer_id, manifest
                    )
                    return ServedDeltaTransfer(
                        store, version, own, plan, base, stack.pop_all(), verifying
                    )
                if found is None or not found.segment.num_bytes:
                    own = self._reserved(transfer_id, version, manifest, plan, on_progress)
                    own.verified.extend(found.verified if found is not None else ())
                else:
                    own = found
                return DeltaTransfer(store, version, own, plan, base, stack.pop_all(), verifying)
        except BaseException:
            if found is not None:
                store.put_partial(found)
            raise

    def _load_in_place(
        self,
        membership: Membership,
        transfer_id: str,
        version: PolicyVersion,
        fetched: Callable[[], Manifest],
        planned: Callable[[Manifest], SendPlan],
        deadline: float,
    ) -> IncomingTransfer:
        handoff = self._store.handoff.of(transfer_id)
        if handoff is None:
            manifest = fetched()
            plan = planned(manifest)
            handoff = HandoffQueue(transfer_id, version, manifest, deadline, self._store.num_ranks)
            self._store.put_handoff(handoff)
        else:
            plan = planned(handoff.manifest)
            handoff.resume(deadline)
        handoff.report_to(partial(membership.progress.report, pb.ACTIVITY_LOADING, transfer_id))
        bound_bytes = self._store.staging_capacity_bytes
        return InPlaceTransfer(handoff, self._store.memory, bound_bytes, plan)

    def _receive(self, membership: Membership, transfer_id: str, first_bucket: int) -> None:
        prepared = self._prepared
        if prepared is None or prepared.transfer_id != transfer_id:
            raise WeftError(f"transfer {transfer_id} was started, but was never prepared here")
        began = time.monotonic()
        check, manifest = membership.check, prepared.transfer.manifest
        before, own, behind = prepared.parts()
        for part in before:
            self._drop_buckets(membership, prepared, part, first_bucket)
        own_first = own.place(first_bucket)
        ring = prepared.transfer.ring(own_first, self._device, prepared.num_in_flight, check)
        receive_buckets(membership, prepared, ring, own, own_first)
        # It waits for the loader if it loads in place, so ``_wake`` must still find it.
        digest = prepared.transfer.finish(check)
        self._prepared = None
        prepared.span.set(bytes=manifest.total_bytes, buckets=prepared.num_buckets)
        prepared.span.end()  # before the report to the coordinator, which may end the transfer
        for part in behind:  # only now: a delta that cannot be applied is told before they come
            self._drop_buckets(membership, prepared, part, first_bucket)
        content = content_to_proto(manifest, digest)
        staged = pb.Staged(transfer_id=transfer_id, content_digest=content)
        membership.attendance.send(pb.AttendRequest(staged=staged))
        _log.debug(
            "staged %s: %d bytes in %.3f s, epoch %d",
            prepared.version,
            manifest.total_bytes,
            time.monotonic() - began,
            self.ticket.epoch,
        )

    def _drop_buckets(
        self,
        membership: Membership,
        prepared: PreparedTransfer,
        part: IncomingPart,
        first_bucket: int,
    ) -> None:
        """Take part in the sending of buckets that other receivers take, from ``first_bucket`` in
        the order of all on; blocks until the last has come."""
        first = part.place(first_bucket)
        if first == len(part.plan.buckets):
            return
        is_read_there = BACKENDS[self.ticket.backend].within_host
        ring = DroppedRing(
            part.plan, first, self._device, prepared.num_in_flight, is_read_there=is_read_there
        )
        receive_buckets(membership, prepared, ring, part, first)

    def _drop_prepared(self) -> None:
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            prepared.span.end()
            prepared.transfer.drop()

    def _keep_prepared(self) -> None:
        """Keep the verified buckets: the transfer may resume in another group."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            prepared.span.end()
            prepared.transfer.keep()


_TRANSFER_KINDS = frozenset({"prepare", "start", "abort"})


#: First and longest wait between attempts to attend, which doubles, while the coordinator is away.
FIRST_SECONDS = 1.0
LONGEST_SECONDS = 60.0


class Probe:
    """One probe, from the order to attend it until the coordinator drops its group."""

    def __init__(self, ticket: GroupTicket, threads: WorkingThreads) -> None:
        self.ticket = ticket
        self._threads = threads
        self._left = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"weft-probe-{ticket.epoch}", daemon=True
        )
        self._thread.start()

    def leave(self) -> None:
        """End the probe soon; does not wait."""
        self._left.set()

    def _run(self) -> None:
        if not self._threads.wait_turns(self._left):
            return
        pause = FIRST_SECONDS
        while not self._left.is_set():
            try:
                self._attend()
                return
            except (PeerUnavailableError, TransferTimeoutError) as error:
                _log.info("the answer of this worker does not reach the coordinator: %s", error)
            except WeftError as error:  # the group was dropped: the probe is answered or replaced
                _log.debug("probe %s has ended: %s", self.ticket.group_id, error)
                return
            except Exception:  # noqa: BLE001 (the edge of a thread)
                _log.exception("probe %s could not be answered", self.ticket.group_id)
            self._left.wait(pause)
            pause = min(LONGEST_SECONDS, 2 * pause)

    def _attend(self) -> None:
        ticket = self.ticket
        errors: list[WeftError] = []
        ended = threading.Event()

        def closed(error: WeftError) -> None:
            errors.append(error)
            ended.set()

        with open_channel(ticket.coordinator) as channel:
            attendance = AttendStream(
                RendezvousServiceStub(channel),
                pb.GroupCredential(group_id=ticket.group_id, token=ticket.token),
                ticket.rank,
                on_message=lambda response: None,
                on_closed=closed,
            )
            try:
                attendance.wait_welcome()
                while not self._left.is_set() and not ended.wait(FIRST_SECONDS):
                    pass
            finally:
                attendance.close()
        if errors:
            raise errors[0]


class Receiver:
    """All side groups of one worker process, one per trainer."""

    def __init__(self, store: WorkerStore, tracer: Tracer = NO_TRACER) -> None:
        self._store, self._tracer = store, tracer
        self._lock = threading.Lock()
        self.groups: dict[str, GroupReceiver] = {}
        self._probe: Probe | None = None

    def join(self, order: JoinOrder) -> None:
        """Join a group in place of the trainer's former one. Returns at once; success and failure
        are reported on the group's stream. A probe replaces a former probe instead."""
        with self._lock:
            ticket, trainer_id = order.ticket, order.trainer_id
            if order.is_probe:
                if _leave_for(ticket, self._probe):
                    self._probe = Probe(ticket, self._store.threads)
                return
            former = self.groups.get(trainer_id)
            if _leave_for(ticket, former):
                self.groups[trainer_id] = GroupReceiver(
                    ticket, trainer_id, self._store, former, self._tracer
                )

    def close(self) -> None:
        """Leave all groups; does not wait for their threads."""
        with self._lock:
            if self._probe is not None:
                self._probe.leave()
            for group in self.groups.values():
                group.leave()
            self.groups.clear()


def _leave_for(ticket: GroupTicket, former: GroupReceiver | Probe | None) -> bool:
    """Leave a former group for a new one; return False if the new one is older, or the same."""
    if former is not None:
        if former.ticket.group_id == ticket.group_id or former.ticket.epoch > ticket.epoch:
            return False
        former.leave()
    return True
