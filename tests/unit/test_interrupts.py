"""What stays whole where the thread that waits is interrupted."""

from __future__ import annotations

import gc
import sys
import threading
import time
from functools import partial
from types import FrameType
from typing import Any

import pytest

from tests.waits import stays, until
from weft_rl import interrupts
from weft_rl.interrupts import Flag, OwnThread, ThreadWaker, on_own_thread, side_by_side


def test_a_doorbell_wakes_who_waits_and_is_rung_once_for_many() -> None:
    bell, values = ThreadWaker(), list[int]()

    def change() -> None:
        values.append(1)
        bell.ring()

    assert not bell.wait_for(lambda: bool(values), 0.01)
    for _ in range(100):
        bell.ring()
    assert bell._rung.qsize() == 1
    timer = threading.Timer(0.05, change)
    timer.start()
    assert bell.wait_for(lambda: bool(values), 5)
    timer.join()


def test_a_flag_stays_set() -> None:
    flag = Flag()
    assert not flag.wait(0.01)
    flag.set()
    assert flag.wait(0.0)
    assert flag.wait(0.0)


def test_work_returns_and_raises_as_it_would_here() -> None:
    assert on_own_thread(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        on_own_thread(lambda: 1 // 0)


def test_one_call_after_the_other_is_made_by_one_thread_which_then_ends() -> None:
    def fail() -> None:
        raise ValueError("here")

    first, idle = on_own_thread(threading.current_thread), interrupts.IDLE
    until(lambda: first in idle)
    with pytest.raises(ValueError, match="here"):
        on_own_thread(fail)
    until(lambda: first in idle)
    assert on_own_thread(threading.current_thread) is first
    until(lambda: not first.is_alive())
    assert first not in idle


def test_a_thread_that_was_taken_waits_for_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_IDLE_SECONDS", 0.001)
    worker = interrupts._Worker()  # in no list: as one that was taken
    worker.start()
    stays(worker.is_alive, 0.05)
    done = threading.Event()
    worker.works.put(done.set)
    assert done.wait(5)
    until(lambda: not worker.is_alive())


def test_who_stands_by_is_told_of_the_end() -> None:
    go_on, ended = threading.Event(), threading.Event()
    running = OwnThread(lambda: go_on.wait(5)).start()
    assert not running.done()
    running.add_done_callback(lambda _: ended.set())
    go_on.set()
    assert ended.wait(5)
    assert running.done()
    assert running.result()
    again: list[object] = []
    running.add_done_callback(again.append)
    assert again == [running]


def test_what_comes_after_its_caller_has_left_is_undone() -> None:
    begun, go_on, late = threading.Event(), threading.Event(), list[int]()
    running = OwnThread(lambda: begun.set() or go_on.wait(5), late.append).start()
    assert begun.wait(5)
    running.leave()
    go_on.set()
    until(lambda: late == [True])
    # Left at the very moment that it has ended.
    quick = OwnThread(lambda: 7, late.append).start()
    until(quick.done)
    quick.leave()
    until(lambda: late == [True, 7])


def test_what_has_not_begun_as_its_caller_leaves_is_never_begun() -> None:
    begun: list[int] = []
    running = OwnThread(lambda: begun.append(1))
    running.leave()
    running.start()
    stays(lambda: not begun and not running.done(), 0.05)


@pytest.mark.parametrize("step", range(40))
def test_a_result_is_had_or_undone_wherever_its_caller_was_interrupted(step: int) -> None:
    """Interrupted at each line in turn, as a signal's handler would."""
    made: list[object] = []
    undone: list[object] = []
    num_steps = 0

    def work() -> object:
        made.append(object())
        return made[-1]

    def strike(frame: FrameType, event: str, _: object) -> Any:
        nonlocal num_steps
        if "weakref" in frame.f_code.co_filename:
            return None  # Python calls it, and would ignore what it raises
        num_steps += 1
        if num_steps == step:
            raise KeyboardInterrupt
        return strike

    before = sys.gettrace()
    gc.disable()  # nor are destructors of others' garbage struck
    sys.settrace(strike)
    try:
        had: object = on_own_thread(work, undone.append)
    except KeyboardInterrupt:
        had = None
    finally:
        sys.settrace(before)
        gc.enable()
    time.sleep(0.02)
    assert made == ([had] if had is not None else undone)


def test_works_side_by_side_have_all_ended_where_one_of_them_is_interrupted() -> None:
    ended, released = list[int](), threading.Event()

    def beside() -> None:
        assert released.wait(5)
        ended.append(1)

    def interrupted() -> None:
        raise KeyboardInterrupt

    timer = threading.Timer(0.05, released.set)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        side_by_side([interrupted, beside, beside])
    timer.join()
    assert ended == [1, 1]


def test_works_side_by_side_return_in_order_and_raise_what_any_raises() -> None:
    assert side_by_side([partial(pow, 2, n) for n in range(4)]) == [1, 2, 4, 8]
    with pytest.raises(ZeroDivisionError):
        side_by_side([lambda: 1, lambda: 1 // 0])
