"""The buckets of one transfer as they come: received, verified in order, reported."""

from __future__ import annotations

import logging
import time
from collections import deque
from functools import partial

from rollout_side.receive.transfer import Prepared, ReceiveBuffers
from weft.transport.group import Operation
from weft.transport.member import Membership
from weft.v1 import rendezvous_pb2 as pb

_log = logging.getLogger(__name__)


def receive_buckets(
    membership: Membership, prepared: Prepared, buffers: ReceiveBuffers, first_bucket: int
) -> None:
    """Receive every bucket from ``first_bucket`` on; blocks until the last was verified.

    Receives are posted in the order of all buckets, whoever sends them, as every other receiver
    posts them: communicators of several senders on one device must be used in one order.

    Raises:
        DigestMismatchError: Other bytes arrived than were sent.
        WeftError: The group has ended, or the deadline has passed.
    """
    num_buckets = prepared.num_buckets
    say = membership.progress.say
    forming = partial(say, pb.ACTIVITY_FORMING, prepared.transfer_id)
    posted: deque[Operation] = deque()
    num_posted = num_reported = first_bucket
    from_sender = dict.fromkeys(membership.lanes, 0)  # receives that are posted
    waited = verified = 0.0
    for index in range(first_bucket, num_buckets):
        _notify_if_due(membership, prepared, buffers)
        while num_posted < num_buckets:
            # Never further: a receive that waits for its sender may hold up the device, and with
            # it what the sender itself waits for.
            sender = prepared.sender_of(num_posted)
            if from_sender[sender] == buffers.ahead:
                break
            if not buffers.make_room(num_posted, wait=not posted):
                break
            seconds = max(1.0, prepared.deadline - time.monotonic())
            wire = buffers.wire(num_posted)
            posted.append(membership.lanes[sender].broadcast(wire, seconds, forming))
            from_sender[sender] += 1
            num_posted += 1
        waiting = partial(say, pb.ACTIVITY_WAITING, prepared.transfer_id, index)
        began = time.perf_counter()
        posted.popleft().wait(prepared.deadline, waiting)
        came = time.perf_counter()
        buffers.accept(index, prepared.nonce)
        from_sender[prepared.sender_of(index)] -= 1
        waited, verified = waited + came - began, verified + time.perf_counter() - came
        while num_reported < min(buffers.num_kept, index + 1):
            report = pb.BucketVerified(transfer_id=prepared.transfer_id, bucket=num_reported)
            membership.attendance.send(pb.AttendRequest(bucket_verified=report))
            num_reported += 1
    prepared.span.set(wait_seconds=waited, verify_seconds=verified)
    _log.debug("%s: %.4f s waited for bytes, %.4f verified", prepared.version, waited, verified)
    _notify_if_due(membership, prepared, buffers)


def _notify_if_due(membership: Membership, prepared: Prepared, buffers: ReceiveBuffers) -> None:
    if buffers.is_load_due():
        due = pb.LoadDue(transfer_id=prepared.transfer_id)
        membership.attendance.send(pb.AttendRequest(load_due=due))
