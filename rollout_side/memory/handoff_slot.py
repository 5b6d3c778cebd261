"""Slot of a worker's hand-off queue."""

from __future__ import annotations

import threading

from rollout_side.memory.handoff import HandoffQueue
from weft_rl.contract.errors import TransferAbortedError


class HandoffSlot:
    """Slot of a worker's hand-off queue, of which there is at most one; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handoff: HandoffQueue | None = None

    @property
    def transfer_ids(self) -> tuple[str, ...]:
        """Transfer that is loaded in place, or was and waits for its commit; empty if there is
        none."""
        handoff = self._handoff
        return (handoff.transfer_id,) if handoff is not None else ()

    def put(self, handoff: HandoffQueue) -> None:
        """Put a new queue in the slot; the former one is ended."""
        with self._lock:
            former, self._handoff = self._handoff, handoff
        if former is not None:
            former.fail(TransferAbortedError(f"{handoff.version} is loaded in place instead"))

    def of(self, transfer_id: str) -> HandoffQueue | None:
        """Return a transfer's queue; None if it is not, or no longer, loaded in place."""
        handoff = self._handoff
        return handoff if handoff is not None and handoff.transfer_id == transfer_id else None

    def forget(self, transfer_id: str) -> HandoffQueue | None:
        """Remove and return the queue of a transfer, which is committed; None if it is not held."""
        with self._lock:
            handoff = self.of(transfer_id)
            if handoff is not None:
                self._handoff = None
            return handoff

    def discard(self, transfer_id: str) -> None:
        """Remove a transfer's queue, and end it."""
        if (handoff := self.forget(transfer_id)) is not None:
            handoff.fail(TransferAbortedError(f"{transfer_id} was discarded"))
