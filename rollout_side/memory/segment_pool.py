"""Segments that are free, for transfers of the same layouts; and those that must not be yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from rollout_side.memory.segment import Segment


class SegmentPool:
    """Free segments of one worker, one of a size and two in all; ``WorkerStore``'s lock
    guards them."""

    def __init__(self) -> None:
        self._free: list[Segment] = []
        # By id, while they are sent.
        self._lent: Counter[int] = Counter()

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._free)

    @property
    def num_bytes(self) -> int:
        """Memory of all free segments."""
        return sum(segment.num_bytes for segment in self._free)

    def find(self, num_bytes: int, device: torch.device) -> Segment | None:
        """A free segment of that size there, which stays free."""
        fitting = (s for s in self._free if s.num_bytes == num_bytes and s.data.device == device)
        return next(fitting, None)

    def take(self, num_bytes: int, device: torch.device) -> Segment | None:
        """What ``find`` tells, the caller's from now on. Where there is none, those of other
        layouts are given back to the system, before the caller takes more."""
        segment = self.find(num_bytes, device)
        self._free = [free for free in self._free if segment is not None and free is not segment]
        return segment

    def put(self, *segments: Segment | None) -> None:
        """Let segments be reused that their owner needs no more; lent ones are left alone."""
        for segment in segments:
            if segment is None or not segment.owned or self.is_lent(segment):
                continue
            if segment.num_bytes not in {free.num_bytes for free in self._free}:
                self._free = [*self._free[-1:], segment]

    def is_lent(self, segment: object) -> bool:
        """Whether a segment is being sent."""
        return self._lent[id(segment)] > 0

    def lend(self, segment: object) -> None:
        """Note that a segment is being sent, until as many calls of ``take_back``."""
        self._lent[id(segment)] += 1

    def take_back(self, segment: object) -> None:
        """Note that one of those who send a segment has ended."""
        self._lent -= Counter([id(segment)])
