"""Buckets of a base that is loaded in place, handed to the loader as they are verified."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from rollout_side.memory.handoff import HandoffQueue, Shared
from rollout_side.memory.segment import DeviceSegment, HostSegment, Segment
from rollout_side.memory.versions import Carried
from rollout_side.receive.ring import make_buffers, make_each
from weft_rl.contract.layout.send_plan import SendPlan
from weft_rl.transport.wire.buckets import Assembly, bucket_sums

#: What it takes until an engine that was to be told has paused generation: the order's way,
#: and the steps under way (10 to 19 ms of an 8B model on an H200).
PAUSE_SECONDS = 0.025


class LoadingSink:
    """``Sink`` that a hand-off queue's loaders load from; if there are several, the other ranks map
    its buffers.

    The buffers are new: an operation that a former group abandoned may still write to the old ones.
    Only old buffers whose buckets were put and not loaded had no operation under way.

    A bucket of the layout is handed over once all that carry runs of it have come. What was
    gathered of it before is gone with the group, so none of these is kept, and released at its
    sender, before the last has come.

    Args:
        handoff: Queue that verified buckets are put in.
        plan: Plan of the transfer's buckets.
        device: Device on which the side group receives.
        ahead: Receives that may be posted; a loader that is slow leaves fewer buffers free.
        check: Raises to end a wait for the loader, once ``handoff.wake`` was called.
        num_more: Buffers to make beside the needed ones, if there is memory: the more, the later
            generation is paused.
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
        # With so few there is nothing to wait for; nor where it has begun, in another group.
        self._is_due = len(self._buffers) <= ahead or bool(handoff.digests)
        self._was_due = False
        self._began = time.monotonic()
        self._num_accepted = 0
        self._num_put = len(handoff.digests)
        self._gathered: list[Carried] = []
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
        """See ``Sink``."""
        size = self._handoff.manifest.buckets[bucket].wire_bytes
        return self._buffers[bucket % len(self._buffers)][:size]

    def assembly(self, bucket: int) -> Assembly | None:
        """See ``Sink``."""
        if bucket < self._num_put:  # it comes again, for a slower member
            return None
        return Assembly(self.place(bucket), [0] * len(self._handoff.manifest.buckets))

    def put(self, index: int, wire: torch.Tensor, carried: Carried) -> None:
        """See ``Sink``."""
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
        shared = Shared(self._shared, number) if self._shared else None
        self._handoff.put(bucket, self.place(bucket), digests, shared)
        self._num_put = max(self._num_put, bucket + 1)
        self.num_kept = self._plan.begin_of(self._num_put)
        self._num_accepted += 1
        seconds = time.monotonic() - self._began
        num_buckets = len(self._handoff.manifest.buckets)
        due = is_load_due(self._num_accepted, len(self._buffers), num_buckets, seconds)
        self._is_due = self._is_due or due

    def is_load_due(self) -> bool:
        """See ``Sink``."""
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
