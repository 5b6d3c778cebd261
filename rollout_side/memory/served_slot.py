"""The place of the base that a worker's engine can be asked to give back."""

from __future__ import annotations

import threading

from rollout_side.memory.versions import ServedBase


class ServedSlot:
    """The base that the engine's own weights are, where they can be read: not before they were
    loaded whole, nor while the engine sleeps.

    Args:
        lock: ``WorkerStore``'s, which guards it.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._asleep: ServedBase | None = None
        #: None where there is none.
        self.base: ServedBase | None = None

    def set(self, base: ServedBase | None) -> ServedBase | None:
        """Let it be read from now on; None before the weights are loaded anew. Returns what was
        set before."""
        with self._lock:
            former, self.base = self.base, base
            return former

    def is_of(self, transfer_id: str, content_digest: bytes) -> bool:
        """Whether the weights are what a transfer brought, whole."""
        base = self.base
        return base is not None and (base.transfer_id, base.content_digest) == (
            transfer_id,
            content_digest,
        )

    def fall_asleep(self) -> None:
        """Let nobody read them."""
        with self._lock:
            if self.base is not None:
                self._asleep, self.base = self.base, None

    def wake_up(self, *, discarded: bool) -> None:
        """They can be read again, as they were, unless they were discarded; what was loaded since
        stays."""
        with self._lock:
            former, self._asleep = self._asleep, None
            if self.base is None and not discarded:
                self.base = former
