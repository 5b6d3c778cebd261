"""Shared memory is made in slices, and says so."""

from __future__ import annotations

import pytest

from rollout_side.memory import segment
from rollout_side.memory.segment import HostSegment


def test_memory_is_made_in_slices_that_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "SLICE_BYTES", 4096)
    told: list[tuple[int, int]] = []
    made = HostSegment.allocate(10_000, speak=lambda done, total: told.append((done, total)))
    assert told == [(4096, 10_000), (8192, 10_000), (10_000, 10_000)]
    assert made.data.numel() == 10_000
    assert not made.data.any()
