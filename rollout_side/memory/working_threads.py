"""Threads of a worker that receive, load or send, for code that must not overtake them."""

from __future__ import annotations

import threading
from collections.abc import Callable

#: How often a wait looks whether a thread has ended, which nothing tells.
_LOOK_SECONDS = 0.2

#: Has a thread set the event when it comes to it; False if it cannot be asked.
Ask = Callable[[threading.Event], bool]


class WorkingThreads:
    """Threads of one worker process; thread-safe. Those that have ended are forgotten."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: dict[threading.Thread, Ask] = {}

    def add(self, thread: threading.Thread, ask: Ask = lambda turn: False) -> None:
        """Add a thread that has been started.

        Args:
            ask: Has a thread that lives on answer between two pieces of work. Threads without one
                are waited for until they end.
        """
        with self._lock:
            self._threads = {t: a for t, a in self._threads.items() if t.is_alive()}
            self._threads[thread] = ask

    def wait_turns(self, given_up: threading.Event) -> bool:
        """Block until each thread that was known at the call has answered or ended.

        Returns:
            False if ``given_up`` was set before.
        """
        with self._lock:
            known = dict(self._threads)
        for thread, ask in known.items():
            turn = threading.Event()
            asked = False
            while thread.is_alive() and not turn.is_set():
                asked = asked or ask(turn)
                if given_up.is_set():
                    return False
                turn.wait(_LOOK_SECONDS)
        return not given_up.is_set()
