"""Copies of the base that are kept after they were loaded.

Late replicas clone them, a rollback loads them again, and a push takes their room.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from rollout_side.memory.segment import SLICE_BYTES, Segment
from rollout_side.memory.versions import StagedVersion
from weft_rl.contract.errors import CapacityError
from weft_rl.contract.names import PolicyVersion

_log = logging.getLogger(__name__)


class RetainedBases:
    """Retained copies, last used first; ``WorkerStore``'s lock guards them.

    Methods that drop copies return their memory, which is the caller's again.

    Args:
        retain_base: Number of versions to keep, the served one included.
    """

    def __init__(self, retain_base: int) -> None:
        self._retain_base = retain_base
        self._copies: list[StagedVersion] = []
        # Kept beside the newest, where they are held.
        self._pinned: frozenset[int] = frozenset()

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions of the copies, last used first."""
        return tuple(copy.version.version for copy in self._copies)

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies."""
        return sum(copy.segment.num_bytes for copy in self._copies)

    @property
    def num_pinned_bytes(self) -> int:
        """Bytes of the copies that no push may take."""
        return sum(copy.segment.num_bytes for copy in self._copies if self._is_pinned(copy))

    @property
    def pinned(self) -> list[PolicyVersion]:
        """Versions of the copies that no push may take."""
        return [copy.version for copy in self._copies if self._is_pinned(copy)]

    def of_transfer(self, transfer_id: str) -> StagedVersion | None:
        """Return the copy that a transfer brought; None if there is none."""
        return next((copy for copy in self._copies if copy.transfer_id == transfer_id), None)

    def of_version(self, version: PolicyVersion) -> StagedVersion | None:
        """Return the copy of a version; None if there is none."""
        return next((copy for copy in self._copies if copy.version == version), None)

    def keep(self, base: StagedVersion) -> list[Segment]:
        """Retain a copy, or count a held one as used. It replaces other copies of its version; the
        least recently used beyond ``retain_base`` are dropped."""
        others = [copy for copy in self._copies if copy.version != base.version]
        gone = [c.segment for c in self._copies if c.version == base.version and c is not base]
        self._copies = [base, *others]
        return gone + self._drop_beyond()

    def pin(self, versions: Iterable[int]) -> list[Segment]:
        """Pin the held copies of these versions and unpin all others. Unpinned copies beyond
        ``retain_base`` are dropped."""
        self._pinned = frozenset(versions)
        return self._drop_beyond()

    def give_way(self, room_bytes: int, is_lent: Callable[[Segment], bool]) -> list[Segment]:
        """Drop copies, oldest first, until the others fit in ``room_bytes``. Copies that are being
        sent or are pinned stay."""
        dropped: list[Segment] = []
        while self._copies and self.num_bytes > room_bytes:
            droppable = (copy for copy in reversed(self._copies) if not is_lent(copy.segment))
            oldest = next((copy for copy in droppable if not self._is_pinned(copy)), None)
            if oldest is None:
                break  # the push is told what holds the room
            self._copies.remove(oldest)
            dropped.append(oldest.segment)
        return dropped

    def move_newest(self, allocate: Callable[[int], Segment]) -> None:
        """Move the copy used last to the host, unless it lies there, is pinned or finds no room.
        Blocks for the copy.

        Args:
            allocate: Makes a host segment of so many bytes, or raises CapacityError.
        """
        copy = next(iter(self._copies), None)
        if copy is None or _is_on_host(copy) or self._is_pinned(copy):
            return
        try:
            segment = allocate(copy.segment.num_bytes)
        except CapacityError as error:
            _log.warning("no copy of the base is kept: %s", error)
            return
        for start in range(0, segment.num_bytes, SLICE_BYTES):
            part = slice(start, min(segment.num_bytes, start + SLICE_BYTES))
            segment.data[part].copy_(copy.segment.data[part])
        self._copies[0] = replace(copy, segment=segment)

    def drop_on_device(self) -> None:
        """Drop the copies on an accelerator, except pinned ones. Their memory is free once nobody
        sends them."""
        self._copies = [copy for copy in self._copies if _is_on_host(copy) or self._is_pinned(copy)]

    def _drop_beyond(self) -> list[Segment]:
        newest, beyond = self._copies[: self._retain_base], self._copies[self._retain_base :]
        self._copies = newest + [copy for copy in beyond if self._is_pinned(copy)]
        return [copy.segment for copy in beyond if not self._is_pinned(copy)]

    def _is_pinned(self, copy: StagedVersion) -> bool:
        return copy.version.version in self._pinned


def _is_on_host(copy: StagedVersion) -> bool:
    return copy.segment.data.device.type == "cpu"
