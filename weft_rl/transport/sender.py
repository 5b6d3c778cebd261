"""Sender of a side group, which keeps each bucket until all receivers have verified it.

A ``SendingRank`` is one membership, a ``TransferSender`` one after another. They know neither where
the bytes come from (a trainer's model, a replica's own copy) nor what they are: ``Buckets`` makes
each when its turn has come.
How far a transfer is outlives a membership (``SenderProgress``): a push whose members are lost is
sent on by another membership, in another group; a clone never is.

Where a transfer has several senders, each sends its wire buckets of the send plan, in their
order, and counts in that order what receivers have verified of all.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from weft_rl.contract.errors import (
    PeerUnavailableError,
    TransferTimeoutError,
    WeftError,
    error_from_reason,
)
from weft_rl.contract.group import GroupTicket
from weft_rl.contract.manifest import Manifest, SendPlan
from weft_rl.interrupts import PROGRESS_SECONDS, ThreadWaker, on_own_thread
from weft_rl.rpc.codec import TICKET, content_to_proto
from weft_rl.rpc.security.credentials import Credentials
from weft_rl.transport.digests.wsum64 import content_digest
from weft_rl.transport.group import Operation, same_stream
from weft_rl.transport.member import Membership
from weft_rl.transport.wire.buckets import BucketOptions, SealedBucket
from weft_rl.v1 import rendezvous_pb2 as pb

_log = logging.getLogger(__name__)

# How often a sender looks whether the others have come to their end, too.
_SUM_SECONDS = 0.0005
_STAND_BY_SECONDS = 1.0

#: Called once the receivers are ready and after each release, with (buckets verified by all,
#: buckets in all).
Progress = Callable[[int, int], None]
#: Finds the place in the group that a transfer continues in, if it is another than the named one.
FindGroup = Callable[[str], GroupTicket | None]


class Buckets(Protocol):
    """The buckets of one transfer, made one after the other in a few reused buffers."""

    @property
    def manifest(self) -> Manifest:
        """Layout of the version."""

    @property
    def plan(self) -> SendPlan:
        """Plan of the transfer's buckets, whoever sends them."""

    @property
    def sender(self) -> int:
        """Number of this sender in the plan."""

    @property
    def num_buffers(self) -> int:
        """Number of buckets that are held at once."""

    def make(self, index: int, on_progress: Callable[[], None]) -> SealedBucket:
        """Make a bucket in the buffer of bucket ``index - num_buffers``; each once, in order.
        Blocks until its bytes are there.

        Args:
            index: Place among the buckets that this sender sends, from 0; see
                ``SenderProgress.indices``.
            on_progress: Called now and then by what may take long.
        """

    def are_summed(self) -> bool:
        """Return whether ``digests`` returns at once: where several ranks send, each adds its part.
        Asked again and again after the last bucket; the first call begins the sum."""

    def digests(self, made: list[int]) -> list[int]:
        """Return the digests of the version's tensors, in the manifest's order. ``made`` are the
        digests of all trailers."""

    def wire(self, index: int) -> torch.Tensor:
        """Return the uint8 bytes of a held bucket, with room for its tail: a view, on the buffers'
        device."""


class HeldBuckets(Buckets, Protocol):
    """Buckets of a transfer that may resume in another group."""

    @property
    def spoiled(self) -> bool:
        """True if they failed, or hold what must not be sent: no other group helps."""

    def move(self, held: range) -> None:
        """Put the held buckets into fresh buffers; done when it returns. Operations that nobody can
        stop may still read the old ones."""


@dataclass
class SenderProgress:
    """One transfer's progress; it outlives the groups that carry it."""

    transfer_id: str
    buckets: Buckets
    deadline: float
    """``time.monotonic()`` at which to give up."""
    progress: Progress | None = None
    digests: list[int] = field(default_factory=list)
    """Digests in the trailers of the buckets made so far, in order."""
    sealed: dict[int, SealedBucket] = field(default_factory=dict)
    """Held buckets, by their place among those that are sent here."""
    num_released: int = 0
    """Number of buckets that every receiver has verified, in any group."""

    @property
    def num_buckets(self) -> int:
        """Number of buckets of the transfer, whoever sends them, released or not."""
        return len(self.buckets.plan.buckets)

    @property
    def indices(self) -> Sequence[int]:
        """Indices of the transfer's buckets that are sent here, ascending."""
        return self.buckets.plan.sent_by(self.buckets.sender)


@dataclass(kw_only=True)
class ResumableProgress(SenderProgress):
    """Progress of a transfer that may resume in another group."""

    buckets: HeldBuckets
    find_group: FindGroup = lambda group_id: None
    """Function asked with the id of a group that was dropped before this rank came to it: there it
    could not be told where the transfer continues."""


class Outcome(Protocol):
    """Outcome of a transfer that may still be unknown: a call under way, a future."""

    def done(self) -> bool:
        """Return whether the outcome is known."""

    def add_done_callback(self, fn: Callable[[Any], None]) -> Any:
        """Call ``fn`` when the outcome is known, on any thread."""


class MembersLostError(Exception):
    """Loss of members, after which the transfer resumes in ``SendingRank.successor``."""


@dataclass
class _TransferState:
    """State of the transfer under way, as the coordinator has told it."""

    transfer_id: str = ""
    started: bool = False
    first_bucket: int = 0
    num_released: int = 0
    error: WeftError | None = None


class SendingRank:
    """One membership as a sender, kept across transfers while membership stays.

    Used by one thread, but for ``abort``; the group's stream has a thread of its own.

    Args:
        ticket: The sender's place.
        device: Device of its buffers.
        credentials: Credentials that it shows to the coordinator; by default this process's.

    Raises:
        PeerUnavailableError: The coordinator does not answer.
    """

    def __init__(
        self,
        ticket: GroupTicket,
        device: torch.device,
        credentials: Credentials | None = None,
    ) -> None:
        self.ticket = ticket
        #: The place in the group that the transfer resumes in, if it is another one.
        self.successor: GroupTicket | None = None
        self._lock = threading.RLock()  # guards all that the stream's thread says
        self._changed = ThreadWaker()
        self._direction = _TransferState()
        self._broken: WeftError | None = None
        self._num_sent = 0
        self._membership = Membership(
            ticket,
            device,
            on_message=self._on_message,
            on_closed=self._on_closed,
            credentials=credentials,
        )

    @property
    def usable(self) -> bool:
        """True if the group can carry a further transfer."""
        return self._broken is None and self.successor is None

    def wait_attended(self) -> None:
        """Block until the coordinator attends this rank, some seconds at most: from then on it
        knows at once if this process ends.

        Raises:
            TransferTimeoutError: It does not answer.
            WeftError: It has refused this rank.
        """
        self._membership.attendance.wait_welcome()

    def report_packing(self, transfer_id: str) -> None:
        """Report that this rank works on a transfer, before it sends: in a group that is kept the
        rank attends in any case."""
        said = pb.Progress(transfer_id=transfer_id, activity=pb.ACTIVITY_PACKING)
        self._membership.attendance.send(pb.AttendRequest(progress=said))

    def send(self, sending: SenderProgress) -> bytes:
        """Send every bucket that the receivers lack, each kept until all have verified it.

        Blocks until the last bucket was released. Says what it sent as soon as all is handed
        over, so that nobody waits for it once all have verified. Where the receivers have a
        beginning of the transfer already, it is made for its digests and not sent again. The
        first bucket is made before the receivers are ready: its work overlaps their
        allocation.

        Returns:
            The content digest.

        Raises:
            Reformed: The transfer resumes elsewhere.
            TransferTimeoutError: The deadline passed.
            WeftError: The transfer or the group has ended, with its reason; or ``buckets``
                failed. Nobody was told: ``give_up`` does.
        """
        self._follow(sending.transfer_id)
        buckets = sending.buckets
        if not sending.digests:
            self._make(sending)  # while the group still forms
        direction = self._direction
        self._await(lambda: direction.started, sending.deadline, "all receivers to be ready")
        if self.successor is not None:  # where nothing is left to send, nothing else would tell
            raise MembersLostError
        _tell_progress(sending)
        first = direction.first_bucket
        if first < sending.num_released:
            what = f"bucket {first}, which it had verified and which is no longer held here"
            raise PeerUnavailableError(f"a receiver lost {what}; push again")
        self._num_sent = first
        indices, lane = sending.indices, self._membership.lanes[self.ticket.rank]
        to_send = bisect_left(indices, first)
        under_way: dict[int, Operation] = {}
        for nth in range(min(to_send, len(sending.digests)), len(indices)):
            if nth >= len(sending.digests):
                reused = nth - buckets.num_buffers
                if reused >= to_send:
                    operation = under_way.pop(reused)
                    self._await_released(sending, indices[reused] + 1, operation)
                    self._await_sent(operation, sending.deadline)
                self._make(sending)
            if nth < to_send:
                self._raise_end()
                continue
            seconds = max(1.0, sending.deadline - time.monotonic())
            forming = partial(self._say, pb.ACTIVITY_FORMING)
            wire, sealed = buckets.wire(nth), sending.sealed[nth]
            room = wire.numel() - sealed.payload_bytes
            options = BucketOptions(tail_bytes=room, tail=sealed.tail, on_kept=self.wake)
            under_way[nth] = lane.broadcast(wire, seconds, forming, options)
            self._num_sent = indices[nth] + 1
        digest = self._stage(sending) if buckets.are_summed() else b""
        for operation in under_way.values():
            self._await_sent(operation, sending.deadline)
        self._await_released(sending, sending.num_buckets)
        if not digest:
            self._await_sum(sending)
            digest = self._stage(sending)
        return digest

    def give_up(self, transfer_id: str, error: Exception) -> None:
        """Tell the others that this rank cannot continue; the group is over."""
        typed = error if isinstance(error, WeftError) else WeftError(repr(error))
        self._report_failure(transfer_id, typed)
        self._broken = self._broken or typed

    def num_released(self, transfer_id: str) -> int:
        """Return the number of a transfer's buckets that every receiver in this group has
        verified."""
        direction = self._direction
        return direction.num_released if direction.transfer_id == transfer_id else 0

    def wait(self, done: Callable[[], bool], timeout_seconds: float) -> None:
        """Block until ``done()``, at most ``timeout_seconds``. It is checked whenever the
        coordinator has said something and at each ``wake``."""
        self._changed.wait_for(done, timeout_seconds)

    def wake(self) -> None:
        """Make ``wait`` check its condition again; callable from any thread."""
        self._changed.ring()

    def abort(self, error: WeftError) -> None:
        """Make ``send`` raise ``error`` soon; from any thread, never blocks."""
        with self._lock:
            self._broken = self._broken or error
        self._changed.ring()
        self._membership.abort(error)

    def leave(self) -> bool:
        """Leave the group; blocks at most 10 s.

        Returns:
            True if the buffers of operations that were under way are safe to use again.
        """
        self._broken = self._broken or WeftError("the sender has left the group")
        return self._membership.leave()

    def _stage(self, sending: SenderProgress) -> bytes:
        """Report that all buckets were handed over; return their content digest."""
        digest = content_digest(sending.buckets.digests(sending.digests))
        content = content_to_proto(sending.buckets.manifest, digest)
        staged = pb.Staged(transfer_id=sending.transfer_id, content_digest=content)
        self._membership.attendance.send(pb.AttendRequest(staged=staged))
        return digest

    def _make(self, sending: SenderProgress) -> None:
        on_progress = partial(self._say, pb.ACTIVITY_PACKING)
        on_progress()
        nth, buckets = len(sending.digests), sending.buckets
        sealed = sending.sealed[nth] = buckets.make(nth, on_progress)
        sending.sealed.pop(nth - buckets.num_buffers, None)
        sending.digests.append(sealed.digest)

    def _await_released(
        self, sending: SenderProgress, num_wanted: int, operation: Operation | None = None
    ) -> None:
        """Block until all receivers have verified ``num_wanted`` buckets. The coordinator says so,
        or the receivers themselves on ``operation``, the last of these buckets: that comes sooner.

        Receivers verify in one order for all senders, so the buckets before it are, too.
        """
        direction = self._direction
        what = f"every receiver to verify bucket {num_wanted - 1}"

        def is_released() -> bool:
            is_kept = operation is not None and operation.is_kept
            return is_kept or direction.num_released >= num_wanted

        self._await(is_released, sending.deadline, what)
        sending.num_released = max(sending.num_released, direction.num_released, num_wanted)
        _tell_progress(sending)

    def _await_sum(self, sending: SenderProgress) -> None:
        """Block until the other senders' parts of the digests are known, or the transfer goes
        on in another group."""
        while not sending.buckets.are_summed():
            if time.monotonic() >= sending.deadline:
                raise TransferTimeoutError("the deadline passed while waiting for other senders")
            self.wait(self._is_over, _SUM_SECONDS)
            self._raise_end()
            self._say(pb.ACTIVITY_WAITING)

    def _await_sent(self, operation: Operation, deadline: float) -> None:
        """Block until the backend has let go of a buffer; raises as ``send``.

        A broken connection says that somebody died, not who, nor whether the transfer goes
        on: the coordinator is told, and its word is awaited.
        """
        try:
            operation.wait(deadline, partial(self._say, pb.ACTIVITY_SENDING))
        except PeerUnavailableError as error:
            if not self._is_over():
                self._report_failure(self._direction.transfer_id, error)
            self._await(lambda: False, deadline, "word of what became of the transfer")
        except WeftError:
            self._raise_end()
            raise

    def _await(self, ready: Callable[[], bool], deadline: float, what: str) -> None:
        woken = partial(self._changed.wait_for, lambda: ready() or self._is_over())
        while not woken(max(0.0, min(PROGRESS_SECONDS, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise TransferTimeoutError(f"the deadline passed while waiting for {what}")
            self._say(pb.ACTIVITY_WAITING)
        # The end of a group may come with the last word on what was waited for.
        if not ready():
            self._raise_end()

    def _say(self, activity: pb.Activity.ValueType) -> None:
        """Report what the thread that makes and sends buckets does, if a report is due."""
        self._membership.progress.report(activity, self._direction.transfer_id, self._num_sent)

    def _report_failure(self, transfer_id: str, error: WeftError) -> None:
        failed = pb.RankFailed(transfer_id=transfer_id, reason=error.reason, message=error.message)
        self._membership.attendance.send(pb.AttendRequest(failed=failed))

    def _is_over(self) -> bool:
        return not self.usable or self._direction.error is not None

    def _raise_end(self) -> None:
        if self.successor is not None:
            raise MembersLostError
        if self._direction.error is not None:
            raise self._direction.error
        if self._broken is not None:
            raise self._broken

    # -- on the stream's thread ----------------------------------------------

    def _on_message(self, response: pb.AttendResponse) -> None:
        kind = response.WhichOneof("message")
        with self._lock:
            if kind == "start":
                direction = self._follow(response.start.transfer_id)
                direction.first_bucket = response.start.first_bucket
                direction.started = True
            elif kind == "released":
                released = response.released
                self._follow(released.transfer_id).num_released = released.num_buckets
            elif kind == "abort":
                abort = response.abort
                error = error_from_reason(abort.reason, abort.message)
                self._follow(abort.transfer_id).error = error
                # Other ranks leave with operations under way: the group is over.
                self._broken = error
                self._membership.abort(error)
            elif kind == "reform":
                reform = response.reform
                _log.warning("resuming in epoch %d: %s", reform.group.epoch, reform.message)
                self.successor = TICKET.decode(
                    reform.group,
                    coordinator=self.ticket.coordinator,
                    host=self.ticket.host,
                    site=self.ticket.site,
                )
                self._membership.abort(WeftError("resuming in another group"))
        self._changed.ring()

    def _follow(self, transfer_id: str) -> _TransferState:
        """Return the direction of a transfer; Start may come before ``send`` is called."""
        with self._lock:
            if self._direction.transfer_id != transfer_id:
                self._direction = _TransferState(transfer_id)
                self._num_sent = 0
            return self._direction

    def _on_closed(self, error: WeftError) -> None:
        with self._lock:
            self._broken = self._broken or error  # an abort said why already
        self._changed.ring()


def _tell_progress(sending: SenderProgress) -> None:
    if sending.progress is not None:
        sending.progress(sending.num_released, sending.num_buckets)


class TransferSender:
    """Sender of one transfer after another, in the group that each of them continues in.

    Kept across transfers while membership stays. Used by one thread; the group's stream has a
    thread of its own.

    Args:
        ticket: Place of the sender in its group.
        device: Device of its buffers.
        credentials: Credentials to show to the coordinator; by default this process's.
    """

    def __init__(
        self,
        ticket: GroupTicket,
        device: torch.device,
        credentials: Credentials | None = None,
    ) -> None:
        self.device = device
        self._credentials = credentials
        self._last: ResumableProgress | None = None
        self._rank = self._join(ticket)

    @property
    def ticket(self) -> GroupTicket:
        """Current place of the sender in its group; another one after members were lost."""
        return self._rank.ticket

    @property
    def usable(self) -> bool:
        """True if the group can carry a further transfer."""
        return self._rank.usable

    def wait_attended(self) -> None:
        """See ``SendingRank``."""
        self._rank.wait_attended()

    def report_packing(self, transfer_id: str) -> None:
        """Report in a kept group that this rank is at work for a transfer."""
        self._rank.report_packing(transfer_id)

    def send(self, sending: ResumableProgress) -> bytes:
        """Send the buckets that are not verified yet, in as many groups as it takes; each is kept
        until all receivers have verified it.

        Blocks until the last bucket was released. Extra memory is the buffers, and as many more
        while a group is replaced that cannot be aborted (gloo's).

        Returns:
            The content digest.

        Raises:
            TransferTimeoutError: The deadline passed.
            WeftError: The transfer was aborted, with its reason; or the buckets failed, and then
                the other ranks were told.
        """
        self._last = sending
        while True:
            rank = self._rank
            try:
                return rank.send(sending)
            except Exception as error:
                moves = isinstance(error, MembersLostError | WeftError)
                moves = moves and not sending.buckets.spoiled
                if moves and rank.successor is None and _was_dropped(error):
                    rank.successor = sending.find_group(rank.ticket.group_id)
                if not moves or rank.successor is None:
                    rank.give_up(sending.transfer_id, error)
                    raise
                self._rejoin(rank, rank.successor, sending)

    def stand_by(self, outcome: Outcome) -> None:
        """Stay a member until the outcome of the last transfer is known; block until then.

        A replica may be lost after the last bucket: the survivors then agree once
        more in another group, which needs its sender.

        Args:
            outcome: AwaitTransfer under way; its failure is for the caller to see.
        """
        outcome.add_done_callback(lambda _: self._rank.wake())
        while not outcome.done():
            rank = self._rank
            # Bounded, since the callback may have woken a former rank.
            rank.wait(partial(_is_known_or_moved, outcome, rank), _STAND_BY_SECONDS)
            if rank.successor is not None and self._last is not None:
                try:
                    self.send(self._last)
                except WeftError as error:
                    _log.info("could not resume in another group: %s", error)
                    return

    def _rejoin(self, old: SendingRank, successor: GroupTicket, sending: ResumableProgress) -> None:
        """Resume in the next group, with other buffers where the old ones are not safe to use."""
        released = old.num_released(sending.transfer_id)
        sending.num_released = max(sending.num_released, released)
        are_safe = on_own_thread(old.leave)
        self._rank = self._join(successor)
        if not are_safe:
            first = bisect_left(sending.indices, sending.num_released)
            sending.buckets.move(range(first, len(sending.digests)))

    def _join(self, ticket: GroupTicket) -> SendingRank:
        """Join a group, which is left again if this is interrupted."""
        in_stream = same_stream(self.device)

        def join() -> SendingRank:
            with in_stream():
                return SendingRank(ticket, self.device, self._credentials)

        return on_own_thread(join, SendingRank.leave)

    def abort(self, error: WeftError) -> None:
        """Make ``send`` raise ``error`` soon; from any thread, never blocks."""
        self._rank.abort(error)

    def close(self) -> None:
        """Leave the group; block at most 10 s."""
        on_own_thread(self._rank.leave)


def _is_known_or_moved(outcome: Outcome, rank: SendingRank) -> bool:
    return outcome.done() or rank.successor is not None


def _was_dropped(error: Exception) -> bool:
    return isinstance(error, WeftError) and error.reason == "EPOCH_FENCED"
