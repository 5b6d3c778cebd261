"""The place of a worker's hand-off queue."""

from __future__ import annotations

import threading

from rollout_side.memory.handoff import HandoffQueue
from weft_rl.contract.errors import TransferAbortedError


class HandoffSlot:
    """The hand-off queue of a worker, of which there is at most one; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handoff: HandoffQueue | None = None

    @property
    def transfer_ids(self) -> tuple[str, ...]:
        """The transfer that is loaded in place, or was and waits for its commit."""
        handoff = self._handoff
        return (handoff.transfer_id,) if handoff is not None else ()

    def put(self, handoff: HandoffQueue) -> None:
        """Begin another one; what is there ends."""
        with self._lock:
            former, self._handoff = self._handoff, handoff
        if former is not None:
            former.fail(TransferAbortedError(f"{handoff.version} is loaded in place instead"))

    def of(self, transfer_id: str) -> HandoffQueue | None:
        """What a transfer brings; None if that is not, or no longer, loaded in place."""
        handoff = self._handoff
        return handoff if handoff is not None and handoff.transfer_id == transfer_id else None

    def forget(self, transfer_id: str) -> HandoffQueue | None:
        """What ``of`` tells, which is committed: it is no longer held here."""
        with self._lock:
            handoff = self.of(transfer_id)
            if handoff is not None:
                self._handoff = None
            return handoff

    def discard(self, transfer_id: str) -> None:
        """Forget it, and end it."""
        if (handoff := self.forget(transfer_id)) is not None:
            handoff.fail(TransferAbortedError(f"{transfer_id} was discarded"))
