"""Shared memory is made in slices, and says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rollout_side.memory import segment
from rollout_side.memory.segment import DeviceSegment, HostSegment


def test_memory_is_made_in_slices_that_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "SLICE_BYTES", 4096)
    told: list[tuple[int, int]] = []
    made = HostSegment.allocate(10_000, speak=lambda done, total: told.append((done, total)))
    assert told == [(4096, 10_000), (8192, 10_000), (10_000, 10_000)]
    assert made.data.numel() == 10_000
    assert not made.data.any()


class _Filling:
    """A copy from an accelerator, which has ended once it was waited for."""

    def __init__(self) -> None:
        self.num_waits = 0

    def synchronize(self) -> None:
        self.num_waits += 1


@pytest.mark.parametrize("look", [lambda s: s.data, lambda s: s.ref, lambda s: s.__del__()])
def test_who_looks_at_what_is_filled_waits_for_that(look: Callable[[HostSegment], object]) -> None:
    made, filling = HostSegment.allocate(8), _Filling()
    made._filled = filling  # type: ignore[assignment]
    assert made.num_bytes == 8
    assert not filling.num_waits
    look(made)
    look(made)
    assert filling.num_waits == 1


def test_a_segment_is_filled_from_its_beginning() -> None:
    for made in (HostSegment.allocate(8), DeviceSegment.allocate(8, torch.device("cpu"))):
        made.data.zero_()
        made.fill(torch.arange(1, 6, dtype=torch.uint8))
        assert made.data.tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
