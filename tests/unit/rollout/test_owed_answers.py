"""What an engine owes, and when it was last seen to get on."""

from __future__ import annotations

import time

import pytest

from rollout_side.waits import OwedAnswers


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
    assert OwedAnswers().work.owed == ""


def test_the_oldest_call_counts_however_many_are_piled_on_it(clock: Clock) -> None:
    owed = OwedAnswers()
    owed.begin(1, "weft_drop_adapter")
    clock.now += 8.0
    owed.begin(2, "weft_join")
    assert owed.work == ("weft_drop_adapter", 1000.0)


def test_an_answer_and_a_word_of_its_threads_are_progress(clock: Clock) -> None:
    spoken = [0.0]
    owed = OwedAnswers(lambda: spoken[0])
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
    owed = OwedAnswers()
    owed.begin(1, "falling asleep", quiet_seconds=60.0)
    owed.begin(2, "weft_join")
    clock.now += 40.0
    assert owed.work.seen_at == clock.now
    clock.now += 30.0
    assert owed.work.seen_at == 1060.0


def test_what_is_waited_for_elsewhere_is_not_held_against_the_engine(clock: Clock) -> None:
    owed = OwedAnswers()
    with owed.elsewhere():
        clock.now += 100.0
        assert owed.work.seen_at == clock.now
    clock.now += 5.0
    assert owed.work.seen_at == 1100.0
