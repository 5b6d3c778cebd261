"""Transfers that a worker receives: staged until their commit, or loaded in place as they come."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from rollout_side.memory.handoff import HandoffQueue, SharedBucket
from rollout_side.memory.segment import DeviceSegment, HostSegment, Memory, Segment
from rollout_side.memory.store import WorkerStore
from rollout_side.memory.versions import (
    BucketContents,
    PartialTransfer,
    StagedVersion,
    bucket_starts,
    is_adapter,
)
from rollout_side.receive.incoming_buckets import (
    ReceiveRing,
    arrival_buffers,
    make_buffers,
    make_each,
)
from weft_rl.contract.manifest import Manifest, SendPlan
from weft_rl.contract.names import PolicyVersion
from weft_rl.transport.digests.wsum64 import content_digest
from weft_rl.transport.wire.buckets import BucketMemory, bucket_sums


class StagingTransfer:
    """``IncomingTransfer`` that is staged."""

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
        return self._partial.num_verified

    def ring(
        self,
        first_bucket: int,
        device: torch.device,
        num_in_flight: int,
        check: Callable[[], None],
    ) -> ReceiveRing:
        """See ``IncomingTransfer``. Buckets from the first on come again, for a slower member."""
        partial, manifest, plan = self._partial, self.manifest, self.plan
        partial.forget(first_bucket)
        data = partial.segment.data
        if is_adapter(self._version) and device.type != "cpu":
            # The engine's slot is filled from this copy, while it is copied to the host.
            copy = torch.empty(manifest.wire_bytes, dtype=torch.uint8, device=device)
            if partial.num_verified:
                copy.copy_(data[: len(copy)])
            data, self._device_copy = copy, [copy]
        sink, buffers = StagingSink(partial, data, device), {}
        if plan.lists_runs or data.device != device:
            buffers = arrival_buffers(plan, num_in_flight, device)
        return ReceiveRing(manifest, plan, sink, buffers, num_in_flight)

    def finish(self, check: Callable[[], None]) -> bytes:
        partial = self._partial
        self._copy_to_segment()
        digest = content_digest(partial.tensor_digests())
        self._store.put_staged(
            StagedVersion(
                partial.transfer_id,
                self._version,
                partial.manifest,
                partial.segment,
                digest,
                partial,
                self._device_copy,
            )
        )
        return digest

    def keep(self) -> None:
        if self._partial.num_verified:
            self._copy_to_segment()
        self._store.put_partial(self._partial)

    def _copy_to_segment(self) -> None:
        """Begin to copy the received bytes from the device to the segment that keeps them."""
        for copy in self._device_copy:
            self._partial.segment.fill(copy)

    def drop(self) -> None:
        self._store.release(self._partial.transfer_id, self._partial.segment)

    def wake(self) -> None:
        """See ``IncomingTransfer``: nothing waits."""


class StagingSink:
    """``Sink`` that is the version in one piece.

    Args:
        partial: Verified part of the transfer; grows.
        data: uint8, for all buckets of the layout, one after the other with their trailers.
        device: Device on which the side group receives.
    """

    def __init__(self, partial: PartialTransfer, data: torch.Tensor, device: torch.device) -> None:
        self._partial, self._data = partial, data
        self._starts = bucket_starts(partial.manifest)
        self._sizes = [bucket.wire_bytes for bucket in partial.manifest.buckets]
        self._is_on_device = data.device == device

    @property
    def num_kept(self) -> int:
        return self._partial.num_verified

    def make_room(self, bucket: int, *, wait: bool) -> bool:
        """See ``Sink``: each bucket has a place of its own."""
        return True

    def place(self, bucket: int) -> torch.Tensor | None:
        return self._place(bucket) if self._is_on_device else None

    def assembly(self, bucket: int) -> BucketMemory | None:
        return BucketMemory(self._data, self._starts)

    def put(self, index: int, wire: torch.Tensor, carried: BucketContents) -> None:
        if not self._partial.lists_runs and not self._is_on_device:
            self._place(index).copy_(wire)  # blocks
        self._partial.verified.append(carried)

    def is_load_due(self) -> bool:
        """See ``Sink``: it is loaded once it is committed."""
        return False

    def _place(self, bucket: int) -> torch.Tensor:
        return self._data[self._starts[bucket] : self._starts[bucket] + self._sizes[bucket]]


#: Seconds from the report that a load is due until generation is paused: the order's way and
#: the running steps (10 to 19 ms of an 8B model on an H200).
PAUSE_SECONDS = 0.025


class LoadingSink:
    """``Sink`` that a hand-off queue's loaders load from; if there are several, the other ranks map
    its buffers.

    The buffers are new: an operation that a former group abandoned may still write to the old ones.

    A bucket of the layout is handed over once all buckets that carry its runs have come. A part of
    it is lost with the group, so none of these is kept, nor released at its sender, before the last
    has come.

    Args:
        handoff: Queue that verified buckets are put in.
        plan: Plan of the transfer's buckets.
        device: Device on which the side group receives.
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
        """See ``Sink``: the bucket that was in the buffer must have been loaded."""
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
    """``IncomingTransfer`` that is loaded in place; the store has its queue already.

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
        """See ``IncomingTransfer``. Buckets that come again, for a slower member, are verified and
        dropped."""
        plan, manifest = self.plan, self.manifest
        # Made before the further buffers take the memory.
        buffers = arrival_buffers(plan, num_in_flight, device) if plan.lists_runs else {}
        largest = max(bucket.wire_bytes for bucket in manifest.buckets)
        num_more = self._memory.room_for(largest, device, self._bound_bytes, num_in_flight)
        sink = LoadingSink(self._handoff, plan, device, num_in_flight, check, num_more)
        return ReceiveRing(manifest, plan, sink, buffers, num_in_flight)

    def finish(self, check: Callable[[], None]) -> bytes:
        self._handoff.wait_complete(check)
        return self._handoff.content_digest

    def keep(self) -> None:
        """See ``IncomingTransfer``: the store keeps it until it is discarded, its loader waits."""

    def drop(self) -> None:
        """See ``IncomingTransfer``: as ``keep``; another one takes its place."""

    def wake(self) -> None:
        self._handoff.wake()
