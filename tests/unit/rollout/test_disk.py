"""Reads of a disk that hangs: who asks goes on at the deadline, and hangs are bounded."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from rollout_side import waits
from rollout_side.waits import answer_within, read_within
from weft_rl.contract.errors import TransferTimeoutError


def _fail() -> None:
    raise OSError("gone")


async def test_what_is_read_and_what_is_raised_is_told() -> None:
    assert read_within(5, "it", lambda: 7) == 7
    assert await answer_within(5, "it", lambda: 7) == 7
    with pytest.raises(OSError, match="gone"):
        read_within(5, "it", _fail)
    with pytest.raises(OSError, match="gone"):
        await answer_within(5, "it", _fail)


async def test_a_read_that_hangs_holds_up_nobody_and_there_are_only_so_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waits, "_free", threading.BoundedSemaphore(2))
    go_on, ticks = threading.Event(), 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    with pytest.raises(TransferTimeoutError, match=r"the spill directory was not read in 0\.2 s"):
        await answer_within(0.2, "the spill directory", go_on.wait)
    assert ticks > 3, "the loop went on"
    with pytest.raises(TransferTimeoutError, match=r"not read in 0\.05 s"):
        read_within(0.05, "it", go_on.wait)
    began = time.monotonic()
    with pytest.raises(TransferTimeoutError, match="reads hang already"):
        read_within(5, "it", lambda: 7)
    assert time.monotonic() - began < 1
    go_on.set()
    for _ in range(500):
        try:
            assert read_within(5, "it", lambda: 7) == 7
            break
        except TransferTimeoutError:
            await asyncio.sleep(0.01)
    else:
        pytest.fail("what hung is over, and still counts")
    ticking.cancel()
