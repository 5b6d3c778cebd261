"""Where the buckets of a base are received that is loaded in place."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from rollout_side.memory.incoming import Inflow
from rollout_side.receive.landing import make_buffers, verify
from weft.transport.group import window

#: What it takes until an engine that was to be told holds its requests still: the order's
#: way, and the steps under way (10 to 19 ms of an 8B model on an H200).
HOLD_SECONDS = 0.025


def is_load_due(num_received: int, num_buffers: int, num_buckets: int, seconds: float) -> bool:
    """Whether requests must be held still soon, so that receiving need not wait for it.

    As late as that: until then they go on, and a push that fails costs nothing.

    Args:
        num_received: Buckets that wait to be loaded.
        num_buffers: Buckets that there is memory for.
        num_buckets: Of the whole transfer.
        seconds: That it took to receive ``num_received``.
    """
    left = min(num_buffers, num_buckets) - num_received
    if left <= 1:
        return True
    return num_received > 0 and (left - 1) * seconds / num_received <= HOLD_SECONDS


class InPlaceLanding:
    """A ``Landing`` in buffers from which an inflow's loader loads.

    The buffers are new: an operation that a former group abandoned may still write to the
    old ones, but for those whose buckets were put and not loaded, which had none under way.

    Args:
        inflow: Where verified buckets are put.
        device: Where the side group receives.
        check: Raises to end a wait for the loader, once ``inflow.wake`` was called.
        num_more: Buckets that there may be memory for beside those that must be: the more,
            the later requests are held still.
    """

    def __init__(
        self,
        inflow: Inflow,
        device: torch.device,
        check: Callable[[], None],
        num_more: int = 0,
    ) -> None:
        self._inflow, self._check = inflow, check
        #: See ``Landing``. A loader that is slow leaves fewer buffers free.
        self.ahead = window(device)
        self._buffers = make_buffers(inflow.manifest, self.ahead, device, more=num_more)
        # With so few there is nothing to wait for; nor where it has begun, in another group.
        self._is_due = len(self._buffers) <= self.ahead or bool(inflow.digests)
        self._was_due = False
        self._began = time.monotonic()
        self._num_landed = 0

    def make_room(self, index: int, *, wait: bool) -> bool:
        """See ``Landing``: the bucket that was in the buffer must have been loaded."""
        before = index - len(self._buffers)
        if before < 0 or self._inflow.is_loaded(before):
            return True
        if wait:
            self._inflow.wait_loaded(before, self._check)
        return wait

    def wire(self, index: int) -> torch.Tensor:
        """See ``Landing``."""
        size = self._inflow.manifest.buckets[index].wire_bytes
        return self._buffers[index % len(self._buffers)][:size]

    def land(self, index: int, nonce: int) -> None:
        """See ``Landing``."""
        wire = self.wire(index)
        self._inflow.put(index, wire, verify(wire, self._inflow.manifest, index, nonce))
        self._num_landed += 1
        seconds = time.monotonic() - self._began
        num_buckets = len(self._inflow.manifest.buckets)
        due = is_load_due(self._num_landed, len(self._buffers), num_buckets, seconds)
        self._is_due = self._is_due or due

    def is_load_due(self) -> bool:
        """See ``Landing``."""
        now = self._is_due and not self._was_due
        self._was_due = self._was_due or now
        return now
