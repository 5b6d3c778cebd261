"""Memory that is promised to transfers whose bytes are still to come."""

from __future__ import annotations

import threading


class Reservations:
    """What each transfer was promised, until it is staged or over.

    Args:
        lock: ``WorkerStore``'s, which guards them.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._ended = threading.Condition(lock)
        self._num_bytes: dict[str, int] = {}
        self._clones: set[str] = set()

    @property
    def num_bytes(self) -> int:
        """Memory that is promised to all."""
        return sum(self._num_bytes.values())

    @property
    def has_clones(self) -> bool:
        """Whether memory is promised to what another replica sends."""
        return bool(self._clones)

    def add(self, transfer_id: str, num_bytes: int, *, clone: bool) -> None:
        """Promise memory to a transfer."""
        self._num_bytes[transfer_id] = num_bytes
        if clone:
            self._clones.add(transfer_id)

    def end(self, *transfer_ids: str) -> None:
        """Promise transfers nothing any more; succeeds for those that were promised nothing."""
        for transfer_id in transfer_ids:
            self._num_bytes.pop(transfer_id, None)
            self._clones.discard(transfer_id)
        self._ended.notify_all()

    def wait_end(self, timeout_seconds: float) -> bool:
        """Let go of the lock until ``end`` was called; False if it was not in time."""
        return self._ended.wait(timeout_seconds)
