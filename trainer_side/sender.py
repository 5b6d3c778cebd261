"""The sender of a side group: packs, sends and keeps buckets until all have them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import torch

from trainer_side.packer import Packer
from trainer_side.sources.source import Source
from weft.contract.errors import (
    PeerUnavailableError,
    TransferTimeoutError,
    WeftError,
    error_from_reason,
)
from weft.contract.group import GroupTicket
from weft.contract.manifest import Manifest
from weft.rpc.codec import ticket_from_proto
from weft.transport.digest import content_digest
from weft.transport.group import Operation
from weft.transport.member import Membership
from weft.transport.speaking import speaking_time
from weft.v1 import rendezvous_pb2 as pb
from weft.v1 import types_pb2

_log = logging.getLogger(__name__)

_STAND_BY_SECONDS = 1.0

#: Called after each release with (buckets verified by all, buckets in all).
Progress = Callable[[int, int], None]


@dataclass
class _Direction:
    """What the coordinator has said about the transfer that is under way."""

    transfer_id: str = ""
    started: bool = False
    first_bucket: int = 0
    num_released: int = 0
    error: WeftError | None = None


#: The place in the group that a transfer goes on in now, if it is another than this one.
FindGroup = Callable[[str], GroupTicket | None]


class _Reformed(Exception):
    """Members were lost; the transfer goes on in another group."""


class _Epoch:
    """One membership of the sender and what was said in it; ``condition`` guards it."""

    def __init__(self, ticket: GroupTicket, device: torch.device) -> None:
        self.ticket = ticket
        self.condition = threading.Condition()
        self.direction = _Direction()
        self.broken: WeftError | None = None
        self.successor: GroupTicket | None = None
        self.num_sent = 0
        self.membership = Membership(
            ticket, device, on_message=self._on_message, on_closed=self._on_closed
        )

    def follow(self, transfer_id: str) -> _Direction:
        """The direction of ``transfer_id``; Start may come before the push is called."""
        with self.condition:
            if self.direction.transfer_id != transfer_id:
                self.direction = _Direction(transfer_id)
                self.num_sent = 0
            return self.direction

    def wait(self, ready: Callable[[], bool], deadline: float, what: str) -> None:
        """Block until ``ready``.

        Raises:
            _Reformed: The transfer goes on elsewhere.
            TransferTimeoutError: The deadline passed.
            WeftError: The transfer or the group has ended.
        """

        def woken() -> bool:
            return ready() or self._is_over()

        with self.condition:
            while not self.condition.wait_for(woken, speaking_time(deadline)):
                if time.monotonic() >= deadline:
                    raise TransferTimeoutError(f"the deadline passed while waiting for {what}")
                self.say(pb.ACTIVITY_WAITING)
            self._raise_end()

    def wait_sent(self, operation: Operation, deadline: float) -> None:
        """Block until the backend has let go of a buffer; raises as ``wait``.

        A broken connection says that somebody died, not who, nor whether the push
        goes on: the coordinator is told, and its word is awaited.
        """
        try:
            operation.wait(deadline, partial(self.say, pb.ACTIVITY_SENDING))
        except PeerUnavailableError as error:
            if not self._is_over():
                self.report_failure(self.direction.transfer_id, error)
            self.wait(lambda: False, deadline, "word of what became of the push")
        except WeftError:
            self._raise_end()
            raise

    def say(self, activity: pb.Activity.ValueType) -> None:
        """Say what the thread that packs and sends does, if it is time to."""
        self.membership.progress.say(activity, self.direction.transfer_id, self.num_sent)

    def report_failure(self, transfer_id: str, error: WeftError) -> None:
        """Tell the coordinator that this rank cannot go on."""
        failed = pb.RankFailed(transfer_id=transfer_id, reason=error.reason, message=error.message)
        self.membership.attendance.send(pb.AttendRequest(failed=failed))

    def _is_over(self) -> bool:
        return (
            self.successor is not None
            or self.direction.error is not None
            or self.broken is not None
        )

    def _raise_end(self) -> None:
        if self.successor is not None:
            raise _Reformed
        if self.direction.error is not None:
            raise self.direction.error
        if self.broken is not None:
            raise self.broken

    # -- on the stream's thread ----------------------------------------------

    def _on_message(self, response: pb.AttendResponse) -> None:
        kind = response.WhichOneof("message")
        with self.condition:
            if kind == "start":
                direction = self.follow(response.start.transfer_id)
                direction.first_bucket = response.start.first_bucket
                direction.started = True
            elif kind == "released":
                released = response.released
                self.follow(released.transfer_id).num_released = released.num_buckets
            elif kind == "abort":
                abort = response.abort
                error = error_from_reason(abort.reason, abort.message)
                self.follow(abort.transfer_id).error = error
                # Other ranks leave with operations under way: the group is over.
                self.broken = error
                self.membership.group.abort(error)
            elif kind == "reform":
                reform = response.reform
                _log.warning("going on in epoch %d: %s", reform.group.epoch, reform.message)
                self.successor = ticket_from_proto(
                    reform.group, coordinator=self.ticket.coordinator, host=self.ticket.host
                )
                self.membership.group.abort(WeftError("going on in another group"))
            self.condition.notify_all()

    def _on_closed(self, error: WeftError) -> None:
        with self.condition:
            self.broken = self.broken or error  # an abort said why already
            self.condition.notify_all()


@dataclass
class _Push:
    """One push's progress; it outlives the groups that carry it."""

    source: Source
    transfer_id: str
    nonce: int
    deadline: float
    progress: Progress | None
    check_finite: bool
    find_group: FindGroup
    spoiled: bool = False
    """Whether the source has failed, or gave what must not be sent: no other group helps."""
    digests: list[int] = field(default_factory=list)
    """Of the buckets packed so far."""
    num_released: int = 0
    """Buckets that every receiver has verified, in whatever epoch."""


def _was_dropped(error: Exception) -> bool:
    return isinstance(error, WeftError) and error.reason == "EPOCH_FENCED"


class Sender:
    """Rank 0 of one side group, kept across pushes while membership stays.

    Used by one thread; the group's stream has a thread of its own.

    Args:
        ticket: The sender's place.
        device: Where its buffers lie.
    """

    def __init__(self, ticket: GroupTicket, device: torch.device) -> None:
        self.device = device
        self._packer: Packer | None = None
        self._last_push: _Push | None = None
        self._epoch = _Epoch(ticket, device)

    @property
    def ticket(self) -> GroupTicket:
        """The sender's place now; another one after members were lost."""
        return self._epoch.ticket

    @property
    def usable(self) -> bool:
        """Whether the group can carry a further push."""
        return self._epoch.broken is None and self._epoch.successor is None

    def send(
        self,
        source: Source,
        manifest: Manifest,
        *,
        transfer_id: str,
        nonce: int,
        deadline: float,
        progress: Progress | None = None,
        check_finite: bool = False,
        find_group: FindGroup = lambda group_id: None,
    ) -> bytes:
        """Send every bucket, each kept until all receivers have verified it.

        Blocks until the last bucket was released. The source is read once, in
        order, whatever happens; extra memory is the packer's buffers, and as many
        more while a group is replaced that cannot be aborted (gloo's).

        Args:
            source: What is sent.
            manifest: Its layout.
            transfer_id, nonce: Of the transfer.
            deadline: ``time.monotonic()`` at which to give up.
            progress: See ``Progress``.
            check_finite: Look at each bucket as it was packed for NaN and infinities.
            find_group: Asked with the id of a group that was dropped before this rank came
                to it: nobody could tell it there where the transfer goes on.

        Returns:
            The content digest.

        Raises:
            NotFiniteError: A tensor holds one; the other ranks were told.
            TransferTimeoutError: The deadline passed.
            WeftError: The transfer was aborted, with its reason; or the source
                failed, and then the other ranks were told.
        """
        push = _Push(source, transfer_id, nonce, deadline, progress, check_finite, find_group)
        self._packer = self._packer_for(manifest)
        self._last_push = push
        return self._carry(push)

    def stand_by(self, outcome: grpc.Future[Any]) -> None:
        """Stay a member until the transfer's outcome is known; blocks until then.

        A replica may be lost after the last bucket: the survivors then agree once
        more in another group, which needs its sender.

        Args:
            outcome: AwaitTransfer under way; its failure is for the caller to see.
        """
        outcome.add_done_callback(lambda _: self._wake())
        while not outcome.done():
            epoch = self._epoch
            with epoch.condition:
                if not outcome.done() and epoch.successor is None:
                    # Bounded, since the callback may have woken a former epoch.
                    epoch.condition.wait(_STAND_BY_SECONDS)
            if epoch.successor is not None and self._last_push is not None:
                try:
                    self._carry(self._last_push)
                except WeftError as error:
                    _log.info("could not go on in another group: %s", error)
                    return

    def _wake(self) -> None:
        with self._epoch.condition:
            self._epoch.condition.notify_all()

    def _carry(self, push: _Push) -> bytes:
        """Send what is not verified yet, in as many groups as it takes."""
        while True:
            epoch, packer = self._epoch, self._packer
            assert packer is not None
            epoch.follow(push.transfer_id)
            try:
                self._send_buckets(epoch, packer, push)
                break
            except Exception as error:
                moves = isinstance(error, _Reformed | WeftError) and not push.spoiled
                if moves and epoch.successor is None and _was_dropped(error):
                    epoch.successor = push.find_group(epoch.ticket.group_id)
                if moves and epoch.successor is not None:
                    push.num_released = max(push.num_released, epoch.direction.num_released)
                    settled = self._rejoin(epoch)
                    if not settled:
                        held = range(push.num_released, len(push.digests))
                        self._packer = packer.moved(held)
                    continue
                typed = error if isinstance(error, WeftError) else WeftError(repr(error))
                epoch.report_failure(push.transfer_id, typed)
                epoch.broken = epoch.broken or typed
                raise
        digest = content_digest(push.digests)
        content = types_pb2.ContentDigest(
            algorithm=types_pb2.DigestAlgorithm.ValueType(packer.manifest.digest_algorithm),
            value=digest,
            size_bytes=packer.manifest.total_bytes,
        )
        staged = pb.Staged(transfer_id=push.transfer_id, content_digest=content)
        epoch.membership.attendance.send(pb.AttendRequest(staged=staged))
        return digest

    def close(self) -> None:
        """Leave the group; blocks at most 5 s."""
        self._epoch.broken = self._epoch.broken or WeftError("the sender was closed")
        self._epoch.membership.leave()
        self._packer = None

    def _send_buckets(self, epoch: _Epoch, packer: Packer, push: _Push) -> None:
        num_buckets, num_buffers = len(packer.manifest.buckets), len(packer.buffers)
        if not push.digests:
            self._pack(epoch, packer, push, 0)  # while the group still forms
        direction = epoch.direction
        epoch.wait(lambda: direction.started, push.deadline, "all receivers to be ready")
        if direction.first_bucket < push.num_released:
            raise PeerUnavailableError(
                f"a receiver lost bucket {direction.first_bucket}, which it had verified and "
                "which is no longer held here; push again"
            )
        epoch.num_sent = direction.first_bucket
        operations: dict[int, Operation] = {}
        for index in range(direction.first_bucket, num_buckets):
            if index >= len(push.digests):
                reused = index - num_buffers
                if reused >= 0:
                    self._await_released(epoch, push, reused + 1, num_buckets)
                    if reused in operations:
                        epoch.wait_sent(operations.pop(reused), push.deadline)
                self._pack(epoch, packer, push, index)
            seconds = max(1.0, push.deadline - time.monotonic())
            wire = packer.wire(index)
            forming = partial(epoch.say, pb.ACTIVITY_FORMING)
            operations[index] = epoch.membership.group.broadcast(wire, seconds, forming)
            epoch.num_sent = index + 1
        for operation in operations.values():
            epoch.wait_sent(operation, push.deadline)
        self._await_released(epoch, push, num_buckets, num_buckets)

    def _pack(self, epoch: _Epoch, packer: Packer, push: _Push, index: int) -> None:
        epoch.say(pb.ACTIVITY_PACKING)
        try:
            _, digest = packer.pack(index, push.source, push.nonce, push.check_finite)
        except BaseException:
            push.spoiled = True
            raise
        push.digests.append(digest)

    def _await_released(
        self, epoch: _Epoch, push: _Push, num_wanted: int, num_buckets: int
    ) -> None:
        direction = epoch.direction
        what = f"every receiver to verify bucket {num_wanted - 1}"
        epoch.wait(lambda: direction.num_released >= num_wanted, push.deadline, what)
        if push.progress is not None:
            push.progress(direction.num_released, num_buckets)

    def _rejoin(self, old: _Epoch) -> bool:
        """Go on in the next group; tells whether the buffers are safe to use there."""
        assert old.successor is not None
        settled = old.membership.leave()
        self._epoch = _Epoch(old.successor, self.device)
        return settled

    def _packer_for(self, manifest: Manifest) -> Packer:
        """The packer of this layout; its buffers are handed on to another layout's."""
        if self._packer is None or self._packer.manifest.layout_digest != manifest.layout_digest:
            buffers: list[torch.Tensor] = self._packer.buffers if self._packer else []
            self._packer = Packer(manifest, buffers, self.device)
        return self._packer
