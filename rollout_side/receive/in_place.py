"""Transfer of a base that is loaded in place while it is received.

The transfer is received into a few buffers. A hand-off queue is all that the receiving and the
loading thread share.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rollout_side.memory.handoff import HandoffQueue
from rollout_side.memory.placement import Memory
from rollout_side.receive.loading import LoadingSink
from rollout_side.receive.ring import Ring, arrival_buffers
from weft_rl.contract.layout.manifest import Manifest
from weft_rl.contract.layout.send_plan import SendPlan


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
        """See ``IncomingTransfer``."""
        return self._handoff.manifest

    @property
    def num_verified(self) -> int:
        """See ``IncomingTransfer``."""
        return self.plan.begin_of(len(self._handoff.digests))

    def ring(
        self,
        first_bucket: int,
        device: torch.device,
        num_in_flight: int,
        check: Callable[[], None],
    ) -> Ring:
        """See ``IncomingTransfer``. What comes again, for a slower member, is verified and
        dropped."""
        plan, manifest = self.plan, self.manifest
        # Before what more there is memory for.
        buffers = arrival_buffers(plan, num_in_flight, device) if plan.lists_runs else {}
        largest = max(bucket.wire_bytes for bucket in manifest.buckets)
        num_more = self._memory.room_for(largest, device, self._bound_bytes, num_in_flight)
        sink = LoadingSink(self._handoff, plan, device, num_in_flight, check, num_more)
        return Ring(manifest, plan, sink, buffers, num_in_flight)

    def finish(self, check: Callable[[], None]) -> bytes:
        """See ``IncomingTransfer``."""
        self._handoff.wait_complete(check)
        return self._handoff.content_digest

    def keep(self) -> None:
        """See ``IncomingTransfer``: the store keeps it until it is discarded, its loader waits."""

    def drop(self) -> None:
        """See ``IncomingTransfer``: as ``keep``; another one takes its place."""

    def wake(self) -> None:
        """See ``IncomingTransfer``."""
        self._handoff.wake()
