"""Receiving of a transfer's buckets: ring of buffers, sink, verification, reports.

A bucket that travels whole is verified where it arrives: in the sink's own memory if that lies on
the side group's device, else in a buffer of the ring. A bucket that lists its runs arrives in a
buffer, and its runs are copied to their places in the sink's memory. Where a side group receives on
the host, and the sink's memory lies on a GPU, a bucket is copied there as it arrived, and verified
there. One file: the ring, the loop that fills it and the two sinks agree on which memory a bucket
has, and when it is free again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from rollout_side.memory.handoff import HandoffQueue, SharedBucket
from rollout_side.memory.segment import DeviceSegment, HostSegment, Memory, Segment
from rollout_side.memory.store import WorkerStore
from rollout_side.memory.versions import (
    BaseChanges,
    BucketContents,
    PartialTransfer,
    StagedVersion,
    bucket_starts,
    is_adapter,
)
from weft_rl.contract.errors import CapacityError, DigestMismatchError, PeerUnavailableError
from weft_rl.contract.manifest import SLICE_ALIGN_BYTES, Listing, Manifest, Run, SendPlan, align_up
from weft_rl.contract.names import PolicyVersion
from weft_rl.interrupts import report_while
from weft_rl.tracing import Span
from weft_rl.transport.digests.wsum64 import content_digest
from weft_rl.transport.group import Operation
from weft_rl.transport.host_memory import host_buffer
from weft_rl.transport.member import Membership
from weft_rl.transport.wire.buckets import (
    IN_ITS_BUFFER,
    ArrivedBucket,
    BucketMemory,
    BucketOptions,
    bucket_sums,
    start_bucket,
    start_changes,
    start_runs,
)
from weft_rl.transport.wire.change_coding import WrongBaseError
from weft_rl.v1 import rendezvous_pb2 as pb

_T = TypeVar("_T")


class ReceiveRing:
    """Memory that a transfer's buckets are received in, one after the other, in one side group.

    On an accelerator everything runs on the calling thread's current stream.

    Args:
        manifest: Layout of the version.
        plan: Plan of the buckets.
        sink: Destination of the verified buckets.
        buffers: Result of ``arrival_buffers``; empty where buckets arrive in the sink's memory.
        ahead: Buckets of one sender whose receives may be posted before the first of them was
            accepted.
        copies_to: GPU of the sink's memory, where buckets arrive on the host: each is copied and
            verified there while the next one is received, and the host reads none. Its buffer is
            received in again only once it was verified, and that is after it was copied.
    """

    def __init__(
        self,
        manifest: Manifest,
        plan: SendPlan,
        sink: Sink,
        buffers: Mapping[int, torch.Tensor],
        ahead: int,
        copies_to: torch.device | None = None,
    ) -> None:
        self._manifest, self._plan, self._buffers = manifest, plan, buffers
        self.sink, self.ahead = sink, ahead
        #: True if buckets arrive on the host, and are verified on a GPU.
        self.copies_to_gpu = copies_to is not None
        self._runs: torch.Tensor | None = None
        if copies_to is not None:
            assert buffers, "buckets arrive beside the sink's memory"
            if plan.lists_runs:  # one, since each is placed before the next one is copied
                sizes = [bucket.wire_bytes for bucket in plan.buckets]
                (self._runs,) = make_buffers(sizes, 1, copies_to)

    @property
    def is_dropped(self) -> bool:
        """True if nobody reads what arrives."""
        return False

    @property
    def num_kept(self) -> int:
        """Number of buckets, from the plan's first, that need not come again."""
        return self.sink.num_kept

    def is_load_due(self) -> bool:
        """Return whether the replica is to load now; True only once."""
        return self.sink.is_load_due()

    @property
    def copies_lent(self) -> bool:
        """True if ``accept`` verifies a copy of lent memory, and not the lent memory itself."""
        return not self._plan.lists_runs or bool(self._plan.delta_from)

    def make_room(self, index: int, *, wait: bool) -> bool:
        """Return whether a receive to ``wire(index)`` may be posted now; see ``Sink.make_room``."""
        return self.sink.make_room(self._plan.buckets[index].bucket, wait=wait)

    def wire(self, index: int) -> torch.Tensor:
        """Return the memory that a bucket is received in."""
        planned = self._plan.buckets[index]
        place = self._buffers.get(index) if self._buffers else self.sink.place(planned.bucket)
        assert place is not None
        return place[: planned.wire_bytes]

    def payload_bytes(self, index: int) -> int:
        """Return the bytes of a bucket before its trailer."""
        return self._plan.buckets[index].payload_bytes

    def num_runs(self, index: int) -> int:
        """Return how many runs a bucket may carry."""
        planned = self._plan.buckets[index]
        return planned.num_runs or self._manifest.buckets[planned.bucket].num_tensors

    def accept(
        self, index: int, nonce: int, arrived: ArrivedBucket = IN_ITS_BUFFER
    ) -> Callable[[], None]:
        """Begin to verify a bucket that has arrived; return a function that ends the verification.
        That function puts the bucket into the sink. It is called once, in the buckets' order.

        Args:
            arrived: How the bucket has arrived; lent memory is read until the returned function has
                ended.
        """
        wire, arrived = self._verified_memory(index, arrived)
        if self._plan.delta_from:
            verified = self._start_changes(index, wire, nonce, arrived)
        elif self._plan.lists_runs:
            verified = self._start_runs(index, wire, nonce, arrived)
        else:
            digests = start_bucket(wire, self._manifest, index, nonce, arrived)

            def verified() -> BucketContents:
                return BucketContents((), digests())

        def end() -> None:
            self.sink.put(index, wire, verified())

        return end

    def _verified_memory(
        self, index: int, arrived: ArrivedBucket
    ) -> tuple[torch.Tensor, ArrivedBucket]:
        """Return the memory that a bucket which has arrived is verified in, and how it came
        there."""
        own, size, there = self.wire(index), self.payload_bytes(index), self._runs
        if not self.copies_to_gpu:
            return own, arrived
        if there is None:
            there = self.sink.place(self._plan.buckets[index].bucket)
            assert there is not None, "the sink's memory is there"
        there[:size].copy_(own[:size], non_blocking=True)
        return there[: own.numel()], ArrivedBucket(tail=own[size:].numpy().tobytes())

    def _start_changes(
        self, index: int, wire: torch.Tensor, nonce: int, arrived: ArrivedBucket
    ) -> Callable[[], BucketContents]:
        planned = self._plan.buckets[index]
        changed = start_changes(wire, planned.payload_bytes, self._manifest, index, nonce, arrived)

        def end() -> BucketContents:
            runs, changes = changed()
            return BucketContents(runs, [], changes)

        return end

    def _start_runs(
        self, index: int, wire: torch.Tensor, nonce: int, arrived: ArrivedBucket
    ) -> Callable[[], BucketContents]:
        planned, manifest = self._plan.buckets[index], self._manifest
        into = self.sink.assembly(planned.bucket)
        verified = start_runs(
            wire,
            planned.payload_bytes,
            manifest,
            index,
            nonce,
            bucket=planned.bucket if self._plan.listing is Listing.WITHIN_BUCKET else None,
            into=into,
            arrived=arrived,
        )

        def end() -> BucketContents:
            runs, digests, is_placed = verified()
            if into is not None and not is_placed:
                place_runs(wire, manifest, runs, into)
            return BucketContents(runs, digests)

        return end


class DroppedRing:
    """Ring, as ``ReceiveRing``, of buckets that other receivers take: what arrives is dropped.

    Args:
        plan: Plan of these buckets: the other part of a mixed plan.
        first_bucket: Buckets before it do not come.
        device: Device on which the side group receives.
        ahead: See ``ReceiveRing``.
        is_read_there: True if receivers read the sender's memory, and this one need not.
    """

    is_dropped = copies_lent = True
    copies_to_gpu = False

    def __init__(
        self,
        plan: SendPlan,
        first_bucket: int,
        device: torch.device,
        ahead: int,
        *,
        is_read_there: bool,
    ) -> None:
        self._plan, self.ahead = plan, ahead
        self.num_kept = first_bucket
        #: Without memory of its own: it is never written.
        self._nowhere = torch.empty(1, dtype=torch.uint8, device=device) if is_read_there else None
        self._buffers = {} if is_read_there else arrival_buffers(plan, ahead, device)

    def is_load_due(self) -> bool:
        return False

    def make_room(self, index: int, *, wait: bool) -> bool:
        return True

    def wire(self, index: int) -> torch.Tensor:
        num_bytes = self._plan.wire_bytes(index)
        if self._nowhere is not None:
            return self._nowhere.expand(num_bytes)
        return self._buffers[index][:num_bytes]

    def payload_bytes(self, index: int) -> int:
        return self._plan.buckets[index].payload_bytes

    def num_runs(self, index: int) -> int:
        return 0

    def accept(
        self, index: int, nonce: int, arrived: ArrivedBucket = IN_ITS_BUFFER
    ) -> Callable[[], None]:
        def end() -> None:
            self.num_kept = index + 1

        return end


def arrival_buffers(
    plan: SendPlan, ahead: int, device: torch.device, *, locked: bool = False
) -> dict[int, torch.Tensor]:
    """Make a few buffers for each sender, which its buckets arrive in in turn.

    Args:
        locked: Lock those on the host, which are copied to a GPU.

    Returns:
        The buffer of each bucket, by its place in the plan.
    """
    found: dict[int, torch.Tensor] = {}
    for sender in range(plan.num_senders):
        indices = plan.sent_by(sender)
        sizes = [plan.wire_bytes(i) for i in indices]
        buffers = make_buffers(sizes, ahead, device, locked=locked)
        for nth, index in enumerate(indices):
            found[index] = buffers[nth % len(buffers)]
    return found


def make_buffers(
    sizes: Sequence[int],
    count: int,
    device: torch.device,
    *,
    more: int = 0,
    locked: bool = False,
) -> list[torch.Tensor]:
    """Make buffers that each fit any bucket; no more than there are buckets. See ``make_each`` and
    ``arrival_buffers``."""

    def make(num_bytes: int) -> torch.Tensor:
        if device.type == "cpu":
            return host_buffer(num_bytes, locked=locked)
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    return make_each(make, sizes, count, device, more)


def make_each(
    make: Callable[[int], _T],
    sizes: Sequence[int],
    count: int,
    device: torch.device,
    more: int = 0,
) -> list[_T]:
    """Make buffers as ``make_buffers`` does, but of any kind.

    Args:
        make: Makes a buffer of so many bytes, on ``device``.
        sizes: Bytes on the wire of each bucket.
        more: Further buffers to make at most, as far as there is memory.
    """
    need, count = max(sizes), min(count, len(sizes))
    try:
        made = [make(need) for _ in range(count)]
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"{device} has no room for the {count} buffers of {need:,} bytes that a push is "
            "received in: push smaller buckets (bucket_bytes), or start the replica with a "
            "smaller --gpu-memory-utilization"
        ) from error
    with contextlib.suppress(torch.OutOfMemoryError):
        for _ in range(min(more, len(sizes) - count)):
            made.append(make(need))
    return made


def place_runs(
    wire: torch.Tensor,
    manifest: Manifest,
    runs: Sequence[Run],
    into: BucketMemory,
) -> None:
    """Copy runs to their places, and write the zeros that follow their tensors. Blocks until
    ``wire`` may be written again."""
    data, starts = into
    at = 0
    for run in runs:
        slot = manifest.tensors[run.tensor]
        size = slot.meta.dtype.itemsize_bytes
        begin = starts[slot.bucket] + slot.offset_bytes
        first, end, num_bytes = run.first * size, run.end * size, slot.meta.num_bytes
        if run.repeats > 1:
            width, stride = run.count * size // SLICE_ALIGN_BYTES, run.stride * size
            rows = data[begin + first : begin + end].view(torch.int64)
            rows = rows.as_strided((run.repeats, width), (stride // SLICE_ALIGN_BYTES, 1))
            packed = wire[at : at + run.num_elements * size].view(torch.int64)
            rows.copy_(packed.view(run.repeats, width), non_blocking=True)
            if end == num_bytes:
                data[begin + end : begin + align_up(end)].zero_()
        else:
            skipped = first - run.begin_bytes(size)
            if end == num_bytes:
                end = align_up(end)
            run_bytes = wire[at + skipped : at + skipped + end - first]
            data[begin + first : begin + end].copy_(run_bytes, non_blocking=True)
        at += run.payload_bytes(size)
    for device in {wire.device, data.device}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


_log = logging.getLogger(__name__)

# If senders get receivers' reports directly, a receiver that need not wait for bytes reports to the
# coordinator only this often: a report takes its process as long as half a bucket.
_REPORT_SECONDS = 0.1
# In a bucket: some tenths of a second of a core that is shared.
_MANY_RUNS = 4_096


@dataclass(frozen=True, kw_only=True)
class PreparedTransfer:
    """Transfer that a side group is to receive, and its destination."""

    transfer_id: str
    version: PolicyVersion
    nonce: int
    deadline: float
    num_in_flight: int
    transfer: IncomingTransfer
    span: Span
    """Span of receiving the transfer; ended with it."""
    plan: SendPlan
    """Plan of all buckets that come; the transfer has its part of a mixed one."""
    takes_whole: bool = False
    """True if its part of a mixed plan is the one of all elements."""

    @property
    def num_buckets(self) -> int:
        """Number of buckets that come, those for other receivers included."""
        return len(self.plan.buckets)

    @property
    def num_verified(self) -> int:
        """Number of buckets, from the first, that need not come again for this receiver."""
        num_own = self.transfer.num_verified
        if self.takes_whole:
            return self.plan.num_changes + num_own
        is_all = num_own == len(self.transfer.plan.buckets)
        return self.num_buckets if is_all else num_own

    def parts(self) -> tuple[list[IncomingPart], IncomingPart, list[IncomingPart]]:
        """Return the part of the plan that comes before this receiver's own, if there is one; its
        own; and the one behind it."""
        changes, *rest = self.plan.parts
        found = [IncomingPart(changes, 0), *(IncomingPart(p, len(changes.buckets)) for p in rest)]
        own = len(rest) if self.takes_whole else 0
        return found[:own], found[own], found[own + 1 :]


@dataclass(frozen=True)
class IncomingPart:
    """Wire buckets of one part of a plan, which are received one after the other."""

    plan: SendPlan
    """Plan of the part."""
    begin: int
    """Index of its first bucket in the order of all buckets."""

    def place(self, index: int) -> int:
        """Return how many of its buckets come before an index in the order of all buckets."""
        return min(max(0, index - self.begin), len(self.plan.buckets))


def receive_buckets(
    membership: Membership,
    prepared: PreparedTransfer,
    ring: ReceiveRing | DroppedRing,
    part: IncomingPart,
    first_bucket: int,
) -> None:
    """Receive every bucket of a part from its ``first_bucket`` on; blocks until the last was
    verified.

    Receives are posted in the order of all buckets, as every other receiver posts them:
    communicators of several senders on one device must be used in one order. While a GPU verifies a
    bucket, the next one is awaited.
    """
    course = _ReceivePipeline(membership, prepared, ring, part, first_bucket)
    began, waited = time.perf_counter(), 0.0
    try:
        for index in range(first_bucket, len(part.plan.buckets)):
            _notify_if_due(membership, prepared, ring)
            course.post()
            if course.has_to_settle:
                course.settle()
                course.post()
            turned = time.perf_counter()
            course.await_bucket(index)
            waited += time.perf_counter() - turned
            course.accept(index)
        course.settle()
    except BaseException:
        course.abandon()
        raise
    verified = time.perf_counter() - began - waited
    if not ring.is_dropped:
        prepared.span.set(wait_seconds=waited, verify_seconds=verified)
    _log.debug("%s: %.4f s waited for bytes, %.4f verified", prepared.version, waited, verified)
    _notify_if_due(membership, prepared, ring)


class _ReceivePipeline:
    """Buckets of a part that are posted, arrived, being verified or to be reported. They count from
    the part's first, but where they are named to the coordinator."""

    def __init__(
        self,
        membership: Membership,
        prepared: PreparedTransfer,
        ring: ReceiveRing | DroppedRing,
        part: IncomingPart,
        first_bucket: int,
    ) -> None:
        self._membership, self._prepared, self._ring = membership, prepared, ring
        self._buckets, self._begin = part.plan.buckets, part.begin
        self._device = torch.device("cpu")  # of the buffers
        self._posted: deque[Operation] = deque()
        self._num_posted = self._num_reported = first_bucket
        #: Receives that are posted, and buckets that are being verified, by sender.
        self._held = dict.fromkeys(membership.lanes, 0)
        self._verified: deque[tuple[int, Operation, Callable[[], None]]] = deque()
        #: Verified, but not kept yet: their bucket of the layout is not complete.
        self._unkept: deque[Operation] = deque()
        self._num_kept = first_bucket
        self._reported_at = time.monotonic()
        self._arrived: Operation | None = None
        report, transfer_id = membership.progress.report, prepared.transfer_id
        self._forming = partial(report, pb.ACTIVITY_FORMING, transfer_id)
        self._waiting = partial(report, pb.ACTIVITY_WAITING, transfer_id)
        self._verifying = partial(report, pb.ACTIVITY_VERIFYING, transfer_id)

    def post(self) -> None:
        """Post receives, as many as may be."""
        prepared, ring = self._prepared, self._ring
        while self._num_posted < len(self._buckets):
            # No more: a receive that waits for its sender may block the device, and with it the
            # work that the sender waits for.
            sender = self._buckets[self._num_posted].sender
            if self._held[sender] == ring.ahead:
                break
            # Room may depend on the buckets that are being verified.
            may_wait = not self._posted and not self._verified
            if may_wait:
                self._report()
            if not ring.make_room(self._num_posted, wait=may_wait):
                break
            seconds = max(1.0, prepared.deadline - time.monotonic())
            wire = ring.wire(self._num_posted)
            self._device, lane = wire.device, self._membership.lanes[sender]
            # On the host a sender could change a lent bucket after it was verified.
            borrows = wire.is_cuda or ring.copies_lent
            tail_bytes = wire.numel() - ring.payload_bytes(self._num_posted)
            options = BucketOptions(borrows, tail_bytes, is_dropped=ring.is_dropped)
            self._posted.append(lane.broadcast(wire, seconds, self._forming, options))
            self._held[sender] += 1
            self._num_posted += 1

    @property
    def has_to_settle(self) -> bool:
        """True if buckets are being verified and the next has not arrived yet."""
        return bool(self._verified) and not (self._posted and self._posted[0].done)

    def await_bucket(self, index: int) -> None:
        """Block until the next bucket has arrived."""
        self._arrived = self._posted.popleft()
        if not self._arrived.done:
            self._report()
        self._arrived.wait(self._prepared.deadline, partial(self._waiting, self._begin + index))

    def accept(self, index: int) -> None:
        """Begin to verify the bucket that has arrived, and settle the one before. On the host
        verification is synchronous, so settle this one too."""
        arrived = self._arrived
        assert arrived is not None  # ``await_bucket`` was called
        nonce = self._prepared.nonce

        def begin() -> Callable[[], None]:
            return self._ring.accept(index, nonce, arrived.arrived)

        end = self._verify(index, arrived, begin, begin)
        self._arrived = None
        self._verified.append((index, arrived, end))
        while len(self._verified) > int(self._device.type == "cuda"):
            self._settle_one()

    def settle(self) -> None:
        """Block until all arrived buckets are verified, and report them."""
        while self._verified:
            self._settle_one()
        self._report()

    def abandon(self) -> None:
        """Block until nothing reads the buffers or lent memory. Only the group's lanes may still
        write."""
        if self._device.type == "cuda" or self._ring.copies_to_gpu:
            with contextlib.suppress(RuntimeError):
                torch.cuda.current_stream().synchronize()
        arrived = [self._arrived] if self._arrived is not None else []
        for operation in [*self._posted, *arrived, *[held[1] for held in self._verified]]:
            with contextlib.suppress(PeerUnavailableError):
                operation.give_back()

    def _settle_one(self) -> None:
        index, operation, end = self._verified[0]
        nonce = self._prepared.nonce
        self._verify(index, operation, end, lambda: self._ring.accept(index, nonce)())
        self._verified.popleft()
        operation.give_back()
        self._held[self._buckets[index].sender] -= 1
        self._unkept.append(operation)
        while self._num_kept < min(self._ring.num_kept, index + 1):
            self._num_kept += 1
            # The sender packs its next bucket into the memory of this one.
            sender_knows = self._unkept.popleft().keep()
            if not sender_knows or time.monotonic() - self._reported_at > _REPORT_SECONDS:
                self._report()

    def _verify(
        self, index: int, operation: Operation, read: Callable[[], _T], again: Callable[[], _T]
    ) -> _T:
        """Return what ``read`` returns of a bucket that has arrived, or ``again`` where other bytes
        have arrived at first, and could be received again. On the host each of its tensors takes
        some time, and there may be many: that is reported."""
        verifying = partial(self._verifying, self._begin + index)
        try:
            is_on_gpu = self._device.type == "cuda" or self._ring.copies_to_gpu
            if is_on_gpu or self._ring.num_runs(index) < _MANY_RUNS:
                return read()
            return report_while(read, verifying)
        except DigestMismatchError as error:
            operation.give_back()
            deadline = self._prepared.deadline
            if isinstance(error, WrongBaseError):
                raise
            if not report_while(lambda: operation.receive_again(deadline), verifying):
                raise
            _log.info("bucket %d has come again: at first %s", self._begin + index, error)
        return report_while(again, verifying)

    def _report(self) -> None:
        """Report to the coordinator how many buckets are kept, unless it knows."""
        if self._num_reported == self._num_kept:
            return
        self._num_reported, self._reported_at = self._num_kept, time.monotonic()
        report = pb.BucketVerified(
            transfer_id=self._prepared.transfer_id, bucket=self._begin + self._num_kept - 1
        )
        self._membership.attendance.send(pb.AttendRequest(bucket_verified=report))


def _notify_if_due(
    membership: Membership, prepared: PreparedTransfer, ring: ReceiveRing | DroppedRing
) -> None:
    if ring.is_load_due():
        due = pb.LoadDue(transfer_id=prepared.transfer_id)
        membership.attendance.send(pb.AttendRequest(load_due=due))


# -- transfers: staged until their commit, or loaded in place as they come -----------


class StagingTransfer:
    """Prepared transfer that is staged."""

    def __init__(
        self,
        store: WorkerStore,
        version: PolicyVersion,
        partial: PartialTransfer,
        plan: SendPlan,
    ) -> None:
        self._store, self._version, self._partial, self.plan = store, version, partial, plan
        self._device_copy: list[torch.Tensor] = []

    @property
    def manifest(self) -> Manifest:
        return self._partial.manifest

    @property
    def num_verified(self) -> int:
        """Number of buckets that were verified and kept."""
        return self._partial.num_verified

    def ring(
        self,
        first_bucket: int,
        device: torch.device,
        num_in_flight: int,
        check: Callable[[], None],
    ) -> ReceiveRing:
        """Return a ring to receive buckets in, from ``first_bucket`` on, which come again for a
        slower member.

        Args:
            device: Device of the side group.
            num_in_flight: Buckets that a sender keeps: no more receives from it may be posted.
            check: Raises if the group has ended; called after ``wake``.
        """
        partial, manifest, plan = self._partial, self.manifest, self.plan
        partial.forget(first_bucket)
        data = partial.segment.data
        if is_adapter(self._version) and device.type != "cpu":
            # The engine's slot is filled from this copy, while it is copied to the host.
            copy = torch.empty(manifest.wire_bytes, dtype=torch.uint8, device=device)
            if partial.num_verified:
                copy.copy_(data[: len(copy)])
            data, self._device_copy = copy, [copy]
        if data.is_cuda and device.type == "cpu":
            sink = StagingSink(partial, data, data.device)
            buffers = arrival_buffers(plan, num_in_flight, device, locked=True)
            return ReceiveRing(manifest, plan, sink, buffers, num_in_flight, data.device)
        sink, buffers = StagingSink(partial, data, device), {}
        if plan.lists_runs or data.device != device:
            buffers = arrival_buffers(plan, num_in_flight, device)
        return ReceiveRing(manifest, plan, sink, buffers, num_in_flight)

    def finish(self, check: Callable[[], None]) -> bytes:
        """Block, after the last bucket, until the version is staged or loaded in place; return its
        content digest.

        Raises:
            TransferAbortedError: The transfer was discarded meanwhile.
            WeftError: The error for which it could not be loaded in place.
        """
        partial = self._partial
        self._copy_to_segment()
        digests = self._tensor_digests()
        digest = content_digest(digests)
        staged = StagedVersion(
            partial.transfer_id,
            self._version,
            partial.manifest,
            partial.segment,
            digest,
            partial,
            self._device_copy,
            tensor_digests=tuple(digests),
            changes=self._came_as(),
        )
        self._prepare_switch(staged)
        self._store.put_staged(staged)
        return digest

    def _came_as(self) -> list[BaseChanges]:
        """Return the changes that the version is written to disk as; none where it is whole."""
        return []

    def _prepare_switch(self, staged: StagedVersion) -> None:
        """Make the switch shorter, where little of the weights changes."""

    def _tensor_digests(self) -> list[int]:
        """Return the digests of the version's tensors, which lie in the segment, in manifest
        order."""
        return self._partial.tensor_digests()

    def keep(self) -> None:
        """Keep the verified buckets as the side group ends: the transfer may resume in another, or
        the coordinator orders it discarded."""
        if self._partial.num_verified:
            self._copy_to_segment()
        self._store.put_partial(self._partial)

    def _copy_to_segment(self) -> None:
        """Begin to copy the received bytes from the device to the segment that keeps them."""
        for copy in self._device_copy:
            self._partial.segment.fill(copy)

    def drop(self) -> None:
        """Free the memory of a transfer that was never started."""
        self._store.release(self._partial.transfer_id, self._partial.segment)

    def wake(self) -> None:
        """Have a waiting thread call its ``check``, from any thread; here none waits."""


class StagingSink:
    """Destination of verified buckets that is the version in one piece.

    Args:
        partial: Verified part of the transfer; grows.
        data: uint8, for all buckets of the layout, one after the other with their trailers.
        device: Device on which buckets are verified.
    """

    def __init__(self, partial: PartialTransfer, data: torch.Tensor, device: torch.device) -> None:
        self._partial, self._data = partial, data
        self._starts = bucket_starts(partial.manifest)
        self._sizes = [bucket.wire_bytes for bucket in partial.manifest.buckets]
        self._is_on_device = data.device == device

    @property
    def num_kept(self) -> int:
        """Number of buckets, from the first, that need not come again, whatever becomes of this
        group."""
        return self._partial.num_verified

    def make_room(self, bucket: int, *, wait: bool) -> bool:
        """Return whether ``place`` of a bucket of the layout may be written now, after every one
        before it. With ``wait``, block until it may."""
        return True

    def place(self, bucket: int) -> torch.Tensor | None:
        """Return the memory, on the device given, that a bucket of the layout may arrive in as it
        travels; None if there is none."""
        return self._place(bucket) if self._is_on_device else None

    def assembly(self, bucket: int) -> BucketMemory | None:
        """Return the memory that runs of a bucket of the layout have their places in; None if the
        bucket comes again and is dropped."""
        return BucketMemory(self._data, self._starts)

    def put(self, index: int, wire: torch.Tensor, carried: BucketContents) -> None:
        """Take a verified bucket; blocks until ``wire`` may be written again.

        Args:
            index: Place in the plan; called in its order.
            wire: Memory that the bucket arrived in; listed runs are in their places already.
            carried: Its digests, and its runs if it lists them.
        """
        if not self._partial.lists_runs and not self._is_on_device:
            self._place(index).copy_(wire)  # blocks
        self._partial.verified.append(carried)

    def is_load_due(self) -> bool:
        """Return whether the replica is to load now; True only once."""
        return False

    def _place(self, bucket: int) -> torch.Tensor:
        return self._data[self._starts[bucket] : self._starts[bucket] + self._sizes[bucket]]


#: Seconds from the report that a load is due until generation is paused: the order's way and
#: the running steps (10 to 19 ms of an 8B model on an H200).
PAUSE_SECONDS = 0.025


class LoadingSink:
    """Sink, as ``StagingSink``, that a hand-off queue's loaders load from; if there are several,
    the other ranks map its buffers.

    The buffers are new: an operation that a former group abandoned may still write to the old ones.

    A bucket of the layout is handed over once all buckets that carry its runs have come. A part of
    it is lost with the group, so none of these is kept, nor released at its sender, before the last
    has come.

    Args:
        handoff: Queue that verified buckets are put in.
        plan: Plan of the transfer's buckets.
        device: Device on which buckets are verified.
        ahead: Receives that may be posted; a slow loader leaves fewer buffers free.
        check: Raises to end a wait for the loader, once ``handoff.wake`` was called.
        num_more: Further buffers to make if there is memory; with more of them, generation is
            paused later.
    """

    def __init__(
        self,
        handoff: HandoffQueue,
        plan: SendPlan,
        device: torch.device,
        ahead: int,
        check: Callable[[], None],
        num_more: int = 0,
    ) -> None:
        self._handoff, self._plan, self._check = handoff, plan, check
        sizes = [bucket.wire_bytes for bucket in handoff.manifest.buckets]
        self._shared: list[Segment] = []
        if handoff.num_loaders > 1:
            make = _shared_on(device)
            self._shared = make_each(make, sizes, ahead, device, num_more)
            self._buffers = [segment.data for segment in self._shared]
        else:
            self._buffers = make_buffers(sizes, ahead, device, more=num_more)
        # Due at once if there are no spare buffers, or the load has begun in another group.
        self._is_due = len(self._buffers) <= ahead or bool(handoff.digests)
        self._was_due = False
        self._began = time.monotonic()
        self._num_accepted = 0
        self._num_put = len(handoff.digests)
        self._gathered: list[BucketContents] = []
        self.num_kept = plan.begin_of(self._num_put)

    def make_room(self, bucket: int, *, wait: bool) -> bool:
        # The bucket that was in the buffer must have been loaded.
        before = bucket - len(self._buffers)
        if before < 0 or self._handoff.is_loaded(before):
            return True
        if wait:
            self._handoff.wait_loaded(before, self._check)
        return wait

    def place(self, bucket: int) -> torch.Tensor:
        size = self._handoff.manifest.buckets[bucket].wire_bytes
        return self._buffers[bucket % len(self._buffers)][:size]

    def assembly(self, bucket: int) -> BucketMemory | None:
        if bucket < self._num_put:  # it comes again, for a slower member
            return None
        return BucketMemory(self.place(bucket), [0] * len(self._handoff.manifest.buckets))

    def put(self, index: int, wire: torch.Tensor, carried: BucketContents) -> None:
        bucket = self._plan.buckets[index].bucket
        if not self._plan.lists_runs:
            self._hand_over(bucket, carried.digests)
        elif bucket >= self._num_put:
            self._gathered.append(carried)
            if index + 1 == self._plan.begin_of(bucket + 1):
                self._hand_over(bucket, self._sum(bucket))
                self._gathered.clear()

    def _sum(self, bucket: int) -> list[int]:
        runs = [run for each in self._gathered for run in each.runs]
        digests = [digest for each in self._gathered for digest in each.digests]
        return bucket_sums(self._handoff.manifest, bucket, runs, digests)

    def _hand_over(self, bucket: int, digests: list[int]) -> None:
        number = bucket % len(self._buffers)
        shared = SharedBucket(self._shared, number) if self._shared else None
        self._handoff.put(bucket, self.place(bucket), digests, shared)
        self._num_put = max(self._num_put, bucket + 1)
        self.num_kept = self._plan.begin_of(self._num_put)
        self._num_accepted += 1
        seconds = time.monotonic() - self._began
        num_buckets = len(self._handoff.manifest.buckets)
        due = is_load_due(self._num_accepted, len(self._buffers), num_buckets, seconds)
        self._is_due = self._is_due or due

    def is_load_due(self) -> bool:
        now = self._is_due and not self._was_due
        self._was_due = self._was_due or now
        return now


def _shared_on(device: torch.device) -> Callable[[int], Segment]:
    """Return a function that makes memory which the replica's other ranks can map."""

    def make(num_bytes: int) -> Segment:
        if device.type == "cpu":
            return HostSegment.allocate(num_bytes)
        return DeviceSegment(torch.empty(num_bytes, dtype=torch.uint8, device=device), owned=True)

    return make


def is_load_due(num_received: int, num_buffers: int, num_buckets: int, seconds: float) -> bool:
    """Return whether generation must pause soon, so that receiving need not wait for it.

    It pauses as late as possible: until then requests run, and a failed push costs nothing.

    Args:
        num_received: Buckets that wait to be loaded.
        num_buffers: Buckets that there is memory for.
        num_buckets: Buckets of the whole transfer.
        seconds: Seconds that it took to receive ``num_received``.
    """
    left = min(num_buffers, num_buckets) - num_received
    if left <= 1:
        return True
    return num_received > 0 and (left - 1) * seconds / num_received <= PAUSE_SECONDS


class InPlaceTransfer:
    """Transfer, as ``StagingTransfer``, that is loaded in place; the store has its queue already.

    Args:
        handoff: Queue that buckets are put in; what was put stays with it.
        memory: Memory that there is beside the engine's.
        bound_bytes: Bound of the receive buffers, except those that are needed anyhow.
        plan: Plan of its buckets as they come.
    """

    def __init__(
        self, handoff: HandoffQueue, memory: Memory, bound_bytes: int, plan: SendPlan
    ) -> None:
        self._handoff, self._memory, self._bound_bytes = handoff, memory, bound_bytes
        self.plan = plan

    @property
    def manifest(self) -> Manifest:
        return self._handoff.manifest

    @property
    def num_verified(self) -> int:
        return self.plan.begin_of(len(self._handoff.digests))

    def ring(
        self,
        first_bucket: int,
        device: torch.device,
        num_in_flight: int,
        check: Callable[[], None],
    ) -> ReceiveRing:
        # Buckets that come again are verified and dropped.
        plan, manifest, place = self.plan, self.manifest, self._memory.device
        copies = place.type == "cuda" and device.type == "cpu"
        # Made before the further buffers take the memory.
        buffers = {}
        if plan.lists_runs or copies:
            buffers = arrival_buffers(plan, num_in_flight, device, locked=copies)
        # Buckets that were received wait for the loader on the GPU: so generation pauses late.
        own = place if copies else device
        largest = max(bucket.wire_bytes for bucket in manifest.buckets)
        num_more = self._memory.room_for(largest, own, self._bound_bytes, num_in_flight)
        sink = LoadingSink(self._handoff, plan, own, num_in_flight, check, num_more)
        copies_to = own if copies else None
        return ReceiveRing(manifest, plan, sink, buffers, num_in_flight, copies_to)

    def finish(self, check: Callable[[], None]) -> bytes:
        self._handoff.wait_complete(check)
        return self._handoff.content_digest

    def keep(self) -> None:
        """Keep nothing: the store has the queue until it is discarded, its loader waits."""

    def drop(self) -> None:
        """Drop nothing: another queue takes its place."""

    def wake(self) -> None:
        self._handoff.wake()


Sink = StagingSink | LoadingSink
IncomingTransfer = StagingTransfer | InPlaceTransfer
