"""Rank 0 of a side group: sends buckets, keeps each until all have verified it.

It knows neither where the bytes come from (a trainer's model, a replica's retained
copy) nor what they are: a callable makes each bucket when its turn has come.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from weft.contract.errors import TransferTimeoutError, WeftError, error_from_reason
from weft.contract.group import GroupTicket
from weft.contract.manifest import Manifest
from weft.transport.digest import content_digest
from weft.transport.group import Operation
from weft.transport.member import Membership
from weft.transport.speaking import speaking_time
from weft.v1 import rendezvous_pb2 as pb
from weft.v1 import types_pb2

#: Called after each release with (buckets verified by all, buckets in all).
Progress = Callable[[int, int], None]
#: Makes bucket ``index`` as it travels: uint8 wire bytes, and the payload's digest.
#: The tensor may be reused once bucket ``index + num_buffers`` is asked for.
WireBytes = Callable[[int], tuple[torch.Tensor, int]]


@dataclass
class _Direction:
    """What the coordinator has said about the transfer that is under way."""

    transfer_id: str = ""
    started: bool = False
    first_bucket: int = 0
    num_released: int = 0
    error: WeftError | None = None


class BucketSender:
    """One membership as rank 0, kept across transfers while membership stays.

    Used by one thread; the group's stream has a thread of its own.

    Args:
        ticket: The sender's place.
        device: Where its buffers lie.
    """

    def __init__(self, ticket: GroupTicket, device: torch.device) -> None:
        self._condition = threading.Condition()
        self._direction = _Direction()
        self._broken: WeftError | None = None
        self._membership = Membership(
            ticket, device, on_message=self._on_message, on_closed=self._on_closed
        )

    @property
    def usable(self) -> bool:
        """Whether the group can carry a further transfer."""
        return self._broken is None

    def send(
        self,
        manifest: Manifest,
        wire_bytes: WireBytes,
        *,
        num_buffers: int,
        transfer_id: str,
        deadline: float,
        progress: Progress | None = None,
    ) -> bytes:
        """Send every bucket that the receivers lack, each kept until all have verified it.

        Blocks until the last bucket was released. Where the receivers have a beginning of
        the same transfer already, what they have is not sent again.

        Args:
            wire_bytes: Called for each bucket, in order, once, those that are not sent
                included, for their digests; the first time before the receivers are
                ready, so that its work overlaps their allocation.
            num_buffers: How many buckets may be on their way.
            deadline: ``time.monotonic()`` at which to give up.

        Returns:
            The content digest.

        Raises:
            TransferTimeoutError: The deadline passed.
            WeftError: The transfer was aborted, with its reason; or ``wire_bytes``
                failed, and then the other ranks were told.
        """
        with self._condition:
            if self._direction.transfer_id != transfer_id:
                self._direction = _Direction(transfer_id)
        try:
            digests = self._send_buckets(manifest, wire_bytes, num_buffers, deadline, progress)
        except Exception as error:
            typed = error if isinstance(error, WeftError) else WeftError(repr(error))
            self.give_up(transfer_id, typed)
            raise
        digest = content_digest(digests)
        content = types_pb2.ContentDigest(
            algorithm=types_pb2.DigestAlgorithm.ValueType(manifest.digest_algorithm),
            value=digest,
            size_bytes=manifest.total_bytes,
        )
        staged = pb.Staged(transfer_id=transfer_id, content_digest=content)
        self._membership.attendance.send(pb.AttendRequest(staged=staged))
        return digest

    def give_up(self, transfer_id: str, error: WeftError) -> None:
        """Tell the others that this rank cannot continue; the group is over."""
        failed = pb.RankFailed(transfer_id=transfer_id, reason=error.reason, message=error.message)
        self._membership.attendance.send(pb.AttendRequest(failed=failed))
        self._broken = self._broken or error

    def wait_ended(self, timeout_seconds: float) -> None:
        """Block until the coordinator has ended the group, or for so long."""
        with self._condition:
            self._condition.wait_for(lambda: self._broken is not None, timeout_seconds)

    def abort(self, error: WeftError) -> None:
        """Make ``send`` raise ``error`` soon; from any thread, never blocks."""
        with self._condition:
            self._broken = self._broken or error
            self._condition.notify_all()
        self._membership.group.abort(error)

    def close(self) -> None:
        """Leave the group; blocks at most 5 s."""
        self._broken = self._broken or WeftError("the sender was closed")
        self._membership.leave()

    def _send_buckets(
        self,
        manifest: Manifest,
        wire_bytes: WireBytes,
        num_buffers: int,
        deadline: float,
        progress: Progress | None,
    ) -> list[int]:
        num_buckets = len(manifest.buckets)
        digests: list[int] = []
        operations: deque[Operation] = deque()
        for index in range(num_buckets):
            if len(operations) == num_buffers:
                self._await_released(index - num_buffers + 1, index, deadline)
                sending = partial(self._say, pb.ACTIVITY_SENDING, index)
                operations.popleft().wait(deadline, sending)
            if progress is not None:
                progress(self._direction.num_released, num_buckets)
            self._say(pb.ACTIVITY_PACKING, index)
            wire, digest = wire_bytes(index)
            if index == 0:
                self._await_start(deadline)
            digests.append(digest)
            if index >= self._direction.first_bucket:
                seconds = max(1.0, deadline - time.monotonic())
                forming = partial(self._say, pb.ACTIVITY_FORMING, index)
                operations.append(self._membership.group.broadcast(wire, seconds, forming))
            else:
                self._check_goes_on()
        sending = partial(self._say, pb.ACTIVITY_SENDING, num_buckets)
        for operation in operations:
            operation.wait(deadline, sending)
        self._await_released(num_buckets, num_buckets, deadline)
        if progress is not None:
            progress(num_buckets, num_buckets)
        return digests

    def _await_start(self, deadline: float) -> None:
        what = "all receivers to be ready"
        self._await(lambda: self._direction.started, 0, deadline, what)

    def _await_released(self, num_buckets: int, num_sent: int, deadline: float) -> None:
        self._await(
            lambda: self._direction.num_released >= num_buckets,
            num_sent,
            deadline,
            f"every receiver to verify bucket {num_buckets - 1}",
        )

    def _say(self, activity: pb.Activity.ValueType, num_sent: int) -> None:
        self._membership.progress.say(activity, self._direction.transfer_id, num_sent)

    def _await(self, ready: Callable[[], bool], num_sent: int, deadline: float, what: str) -> None:
        def woken() -> bool:
            return ready() or self._direction.error is not None or self._broken is not None

        with self._condition:
            while not self._condition.wait_for(woken, speaking_time(deadline)):
                if time.monotonic() >= deadline:
                    raise TransferTimeoutError(f"the deadline passed while waiting for {what}")
                self._say(pb.ACTIVITY_WAITING, num_sent)
            self._check_goes_on()

    def _check_goes_on(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._direction.error is not None:
            raise self._direction.error

    # -- on the stream's thread --------------------------------------------

    def _on_message(self, response: pb.AttendResponse) -> None:
        kind = response.WhichOneof("message")
        with self._condition:
            if kind == "start":
                direction = self._for(response.start.transfer_id)
                direction.first_bucket = response.start.first_bucket
                direction.started = True
            elif kind == "released":
                released = response.released
                self._for(released.transfer_id).num_released = released.num_buckets
            elif kind == "abort":
                abort = response.abort
                error = error_from_reason(abort.reason, abort.message)
                self._for(abort.transfer_id).error = error
                # Other ranks leave with operations under way: the group is over.
                self._broken = error
                self._membership.group.abort(error)
            self._condition.notify_all()

    def _for(self, transfer_id: str) -> _Direction:
        """The direction of ``transfer_id``; Start may arrive before ``send`` is called."""
        if self._direction.transfer_id != transfer_id:
            self._direction = _Direction(transfer_id)
        return self._direction

    def _on_closed(self, error: WeftError) -> None:
        with self._condition:
            self._broken = self._broken or error  # an abort said why already
            self._condition.notify_all()
