"""Receive buffers of a base that is loaded in place."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from rollout_side.memory.handoff import HandoffQueue, Shared
from rollout_side.memory.segment import DeviceSegment, HostSegment, Segment
from rollout_side.memory.versions import Carried
from rollout_side.receive.transfer import make_buffers, make_each
from rollout_side.receive.wire_buckets import LaneBuffers, take_runs
from weft_rl.contract.layout.send_plan import SendPlan
from weft_rl.transport.wire.buckets import Assembly, bucket_sums, start_bucket, start_runs
from weft_rl.transport.wire.options import IN_ITS_BUFFER, Arrived

#: What it takes until an engine that was to be told has paused generation: the order's way,
#: and the steps under way (10 to 19 ms of an 8B model on an H200).
PAUSE_SECONDS = 0.025


class InPlaceBuffers:
    """``ReceiveBuffers`` that a hand-off queue's loaders load from; if there are several, the other
    ranks map them.

    The buffers are new: an operation that a former group abandoned may still write to the old ones.
    Only old buffers whose buckets were put and not loaded had no operation under way.

    Args:
        handoff: Queue that verified buckets are put in.
        device: Device on which the side group receives.
        ahead: Receives that may be posted; a loader that is slow leaves fewer buffers free.
        check: Raises to end a wait for the loader, once ``handoff.wake`` was called.
        num_more: Buffers to make beside the needed ones, if there is memory: the more, the later
            generation is paused.
    """

    copies_lent = True

    def __init__(
        self,
        handoff: HandoffQueue,
        device: torch.device,
        ahead: int,
        check: Callable[[], None],
        num_more: int = 0,
    ) -> None:
        self._handoff, self._check = handoff, check
        self.ahead = ahead
        sizes = [bucket.wire_bytes for bucket in handoff.manifest.buckets]
        self._shared: list[Segment] = []
        if handoff.num_loaders > 1:
            make = _shared_on(device)
            self._shared = make_each(make, sizes, self.ahead, device, num_more)
            self._buffers = [segment.data for segment in self._shared]
        else:
            self._buffers = make_buffers(sizes, self.ahead, device, more=num_more)
        # With so few there is nothing to wait for; nor where it has begun, in another group.
        self._is_due = len(self._buffers) <= self.ahead or bool(handoff.digests)
        self._was_due = False
        self._began = time.monotonic()
        self._num_accepted = 0
        self.num_kept = len(handoff.digests)

    def make_room(self, index: int, *, wait: bool) -> bool:
        """See ``ReceiveBuffers``: the bucket that was in the buffer must have been loaded."""
        before = index - len(self._buffers)
        if before < 0 or self._handoff.is_loaded(before):
            return True
        if wait:
            self._handoff.wait_loaded(before, self._check)
        return wait

    def wire(self, index: int) -> torch.Tensor:
        """See ``ReceiveBuffers``."""
        size = self._handoff.manifest.buckets[index].wire_bytes
        return self._buffers[index % len(self._buffers)][:size]

    def payload_bytes(self, index: int) -> int:
        """See ``ReceiveBuffers``."""
        return self._handoff.manifest.buckets[index].payload_bytes

    def accept(
        self, index: int, nonce: int, arrived: Arrived = IN_ITS_BUFFER
    ) -> Callable[[], None]:
        """See ``ReceiveBuffers``."""
        wire = self.wire(index)
        verified = start_bucket(wire, self._handoff.manifest, index, nonce, arrived)

        def end() -> None:
            self._put(index, wire, verified())
            self.num_kept = max(self.num_kept, index + 1)

        return end

    def _put(self, bucket: int, wire: torch.Tensor, digests: list[int]) -> None:
        number = bucket % len(self._buffers)
        shared = Shared(self._shared, number) if self._shared else None
        self._handoff.put(bucket, wire, digests, shared)
        self._num_accepted += 1
        seconds = time.monotonic() - self._began
        num_buckets = len(self._handoff.manifest.buckets)
        due = is_load_due(self._num_accepted, len(self._buffers), num_buckets, seconds)
        self._is_due = self._is_due or due

    def is_load_due(self) -> bool:
        """See ``ReceiveBuffers``."""
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


class GatheringBuffers(InPlaceBuffers):
    """``InPlaceBuffers`` for several senders: wire buckets arrive in buffers of their own. A bucket
    of the layout is handed over once all of its wire buckets have come.

    A bucket that was gathered in part is gone with the group. So no wire bucket is reported, and
    released at its sender, before all wire buckets of its bucket of the layout have come.

    Args:
        plan: Plan of which rank sends what.
        lanes: Buffers that wire buckets are received in.
        given: Arguments of ``InPlaceBuffers``.
    """

    copies_lent = False

    def __init__(self, plan: SendPlan, lanes: LaneBuffers, *given: Any) -> None:
        super().__init__(*given)
        self._plan, self._lanes = plan, lanes
        self._num_put = self.num_kept
        self.num_kept = plan.begin_of(self._num_put)
        self._gathered: list[Carried] = []

    def make_room(self, index: int, *, wait: bool) -> bool:
        """See ``ReceiveBuffers``: as for its bucket of the layout."""
        return super().make_room(self._plan.buckets[index].bucket, wait=wait)

    def wire(self, index: int) -> torch.Tensor:
        """See ``ReceiveBuffers``."""
        return self._lanes.wire(index)

    def payload_bytes(self, index: int) -> int:
        """See ``ReceiveBuffers``."""
        return self._plan.buckets[index].payload_bytes

    def accept(
        self, index: int, nonce: int, arrived: Arrived = IN_ITS_BUFFER
    ) -> Callable[[], None]:
        """See ``ReceiveBuffers``."""
        manifest, wire = self._handoff.manifest, self.wire(index)
        planned = self._plan.buckets[index]
        bucket, size = planned.bucket, planned.payload_bytes
        if bucket < self._num_put:  # it comes again, for a slower member
            verified = start_runs(
                wire, size, manifest, index, nonce, bucket=bucket, arrived=arrived
            )
            return partial(self._drop, verified)
        into = Assembly(super().wire(bucket), [0] * len(manifest.buckets))
        taken = take_runs(wire, size, manifest, index, nonce, into, bucket, arrived)
        return partial(self._gather, index, bucket, into.data, taken)

    def _drop(self, verified: Callable[[], object]) -> None:
        verified()

    def _gather(
        self, index: int, bucket: int, place: torch.Tensor, taken: Callable[[], Carried]
    ) -> None:
        self._gathered.append(taken())
        if index + 1 == self._plan.begin_of(bucket + 1):
            manifest = self._handoff.manifest
            runs = [run for wire in self._gathered for run in wire.runs]
            digests = [digest for wire in self._gathered for digest in wire.digests]
            self._put(bucket, place, bucket_sums(manifest, bucket, runs, digests))
            self._gathered.clear()
            self._num_put, self.num_kept = bucket + 1, index + 1


def is_load_due(num_received: int, num_buffers: int, num_buckets: int, seconds: float) -> bool:
    """Return whether generation must pause soon, so that receiving need not wait for it.

    It is to pause as late as possible: until then requests run, and a push that fails costs
    nothing.

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
