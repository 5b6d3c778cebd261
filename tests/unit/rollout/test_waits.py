"""Reads of disks that hang, and calls that an engine has not answered."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from rollout_side.waits import MAX_HANGING, UnansweredCalls, answer_within, read_within
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


async def test_a_read_that_hangs_holds_up_nobody_and_there_are_only_so_many() -> None:
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
    for _ in range(MAX_HANGING - 1):
        with pytest.raises(TransferTimeoutError, match=r"not read in 0\.01 s"):
            read_within(0.01, "it", go_on.wait)
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


class Clock:
    """``time.monotonic`` as told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def test_nothing_is_owed_before_anything_was_asked(clock: Clock) -> None:
    assert UnansweredCalls().work.owed == ""


def test_the_oldest_call_counts_however_many_are_piled_on_it(clock: Clock) -> None:
    owed = UnansweredCalls()
    owed.begin(1, "weft_drop_adapter")
    clock.now += 8.0
    owed.begin(2, "weft_join")
    assert owed.work == ("weft_drop_adapter", 1000.0)


def test_an_answer_and_a_word_of_its_threads_are_progress(clock: Clock) -> None:
    spoken = [0.0]
    owed = UnansweredCalls(lambda: spoken[0])
    owed.begin(1, "weft_apply_base")
    owed.begin(2, "weft_join")
    clock.now = 1005.0
    owed.end(2)
    assert owed.work == ("weft_apply_base", 1005.0)
    clock.now = 1009.0
    spoken[0] = 1007.5
    assert owed.work.seen_at == 1007.5
    owed.end(1)
    assert owed.work.owed == ""


def test_a_quiet_call_has_its_own_time_and_gives_it_to_those_that_wait_behind_it(
    clock: Clock,
) -> None:
    owed = UnansweredCalls()
    owed.begin(1, "falling asleep", quiet_seconds=60.0)
    owed.begin(2, "weft_join")
    clock.now += 40.0
    assert owed.work.seen_at == clock.now
    clock.now += 30.0
    assert owed.work.seen_at == 1060.0


def test_what_is_waited_for_elsewhere_is_not_held_against_the_engine(clock: Clock) -> None:
    owed = UnansweredCalls()
    with owed.elsewhere():
        clock.now += 100.0
        assert owed.work.seen_at == clock.now
    clock.now += 5.0
    assert owed.work.seen_at == 1100.0
