"""Slot of the served base, which can be read back from a worker's engine."""

from __future__ import annotations

import threading

from rollout_side.memory.versions import ServedBase


class ServedSlot:
    """Base that the engine's own weights hold, if they can be read. They cannot before they were
    loaded whole, nor while the engine sleeps.

    Args:
        lock: ``WorkerStore``'s lock, which guards the slot.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._asleep: ServedBase | None = None
        #: None where there is none.
        self.base: ServedBase | None = None

    def set(self, base: ServedBase | None) -> ServedBase | None:
        """Set the base that can be read from now on; None before the weights are loaded anew.
        Returns the former one."""
        with self._lock:
            former, self.base = self.base, base
            return former

    def is_of(self, transfer_id: str, content_digest: bytes) -> bool:
        """Return whether the weights are what a transfer brought, whole."""
        base = self.base
        return base is not None and (base.transfer_id, base.content_digest) == (
            transfer_id,
            content_digest,
        )

    def fall_asleep(self) -> None:
        """Forbid reads of the weights."""
        with self._lock:
            if self.base is not None:
                self._asleep, self.base = self.base, None

    def wake_up(self, *, discarded: bool) -> None:
        """Allow reads of the weights again, as they were, unless they were discarded. A base that
        was loaded since stays."""
        with self._lock:
            former, self._asleep = self._asleep, None
            if self.base is None and not discarded:
                self.base = former
