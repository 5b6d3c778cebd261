"""Bounds of a worker's memory: bytes held and promised, and checks that more fits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from weft_rl.contract.errors import CapacityError
from weft_rl.contract.names import PolicyVersion


@dataclass
class Usage:
    """Bytes that a worker holds for Weft: on the host, except bases staged on a device."""

    adapter_bytes: int = 0
    staging_bytes: int = 0
    """Bytes that are staged or retained; retained copies give way to a push."""
    free_bytes: int = 0
    pinned_bytes: int = 0
    """Bytes of the retained copies that no push may take."""
    transfer_ids: tuple[str, ...] = ()
    """Transfers with bytes that are staged, whole or in part, or loaded in place."""


def check_adapter_room(
    num_bytes: int, capacity: int, held: Mapping[PolicyVersion, int], waiting: int
) -> None:
    """Refuse an adapter that the store has no room for.

    Args:
        held: Bytes of each adapter that can be served.
        waiting: Bytes that wait for their commit.

    Raises:
        CapacityError: Says what holds the memory.
    """
    in_use = sum(held.values())
    if in_use + waiting + num_bytes > capacity:
        names = ", ".join(map(str, sorted(held)))
        raise CapacityError(
            f"the adapter store holds {in_use:,} of {capacity:,} bytes "
            f"({names or 'nothing'}) and {waiting:,} wait for their commit: no room for "
            f"{num_bytes:,} more; end what is done with (weft forget POLICY), keep fewer versions "
            "(weft retain POLICY N), or start the replica with a larger --adapter-memory-gib"
        )


def check_base_room(
    num_bytes: int, capacity: int, in_use: int, pinned: Sequence[PolicyVersion]
) -> None:
    """Refuse a base that there is no room to stage.

    Args:
        in_use: Bytes that are staged or retained.
        pinned: Versions among them that no push may take.

    Raises:
        CapacityError: Says what holds the memory.
    """
    if in_use + num_bytes > capacity:
        names = ", ".join(sorted(map(str, pinned)))
        text = f", {names} pinned" if names else ""
        raise CapacityError(
            f"staging holds {in_use:,} of {capacity:,} bytes{text}: no room for {num_bytes:,} "
            "more; start the replica with a larger --staging-memory-gib"
        )


class Reservations:
    """Memory promised to each transfer until it is staged or over.

    Args:
        lock: ``WorkerStore``'s lock, which guards the reservations.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._ended = threading.Condition(lock)
        self._num_bytes: dict[str, int] = {}
        self._clones: set[str] = set()

    @property
    def num_bytes(self) -> int:
        """Bytes promised to all transfers."""
        return sum(self._num_bytes.values())

    def add(self, transfer_id: str, num_bytes: int, *, clone: bool) -> None:
        """Promise memory to a transfer."""
        self._num_bytes[transfer_id] = num_bytes
        if clone:
            self._clones.add(transfer_id)

    def end(self, *transfer_ids: str) -> None:
        """End the promises to transfers; succeeds for those that were promised nothing."""
        for transfer_id in transfer_ids:
            self._num_bytes.pop(transfer_id, None)
            self._clones.discard(transfer_id)
        self._ended.notify_all()

    def end_clones(
        self, fits: Callable[[], bool], drop: Callable[[], Sequence[str]], timeout_seconds: float
    ) -> None:
        """End the promises to clones until there is room. Waits for clones that have still to hear
        that they were ended.

        Args:
            fits: Returns whether there is room by now.
            drop: Drops what was kept of clones; returns the transfers whose promises end with it.
        """
        end = time.monotonic() + timeout_seconds
        while self._clones and not fits():
            dropped = drop()
            self.end(*dropped)
            left = end - time.monotonic()
            if not dropped and (left <= 0 or not self._ended.wait(left)):
                return
