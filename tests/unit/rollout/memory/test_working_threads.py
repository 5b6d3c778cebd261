"""A worker answers a probe after the thread that may be stuck, never beside it."""

from __future__ import annotations

import threading

from rollout_side.memory.store import WorkingThreads

WAIT_SECONDS = 10.0


def _stuck(until: threading.Event) -> threading.Thread:
    thread = threading.Thread(target=until.wait, args=(WAIT_SECONDS,), daemon=True)
    thread.start()
    return thread


def _waiting(threads: WorkingThreads) -> tuple[threading.Thread, list[bool], threading.Event]:
    answers: list[bool] = []
    given_up = threading.Event()

    def wait() -> None:
        answers.append(threads.wait_turns(given_up))

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    return waiter, answers, given_up


def test_it_waits_for_a_thread_that_ends() -> None:
    threads, over = WorkingThreads(), threading.Event()
    stuck = _stuck(over)
    threads.add(stuck)
    waiter, answers, _ = _waiting(threads)
    assert not answers
    over.set()
    waiter.join(WAIT_SECONDS)
    assert answers == [True]
    assert not stuck.is_alive(), "it had ended before"


def test_a_thread_that_goes_on_answers_between_two_works() -> None:
    threads, over, asked = WorkingThreads(), threading.Event(), []

    def ask(turn: threading.Event) -> bool:
        asked.append(turn)
        if len(asked) < 3:
            return False  # its queue is full
        turn.set()
        return True

    threads.add(_stuck(over), ask)
    assert threads.wait_turns(threading.Event())
    assert len(asked) == 3
    over.set()


def test_a_probe_that_is_replaced_waits_no_longer() -> None:
    threads, over = WorkingThreads(), threading.Event()
    threads.add(_stuck(over))
    waiter, answers, given_up = _waiting(threads)
    given_up.set()
    waiter.join(WAIT_SECONDS)
    assert answers == [False]
    over.set()
