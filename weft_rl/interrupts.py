"""Waits and work that stay whole where the caller's thread is interrupted.

A signal's handler runs in the main thread between any two steps of Python. One that raises, as
Ctrl-C's does, may leave a ``threading.Condition`` (and so an ``Event``, a ``Queue``, a ``Future``)
locked for good; inside of gRPC, which is made of them, it takes the channel's answers away. What
is here is made of locks and queues of the interpreter's own, which no handler can come into.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

_T = TypeVar("_T")
# Of one wait for what has a deadline of its own.
_LONG_SECONDS = 60.0

#: Longest that a thread works or waits before it can report: it reports at least every 2 s.
PROGRESS_SECONDS: Final = 1.0


class ThreadWaker:
    """Waker of the one thread that waits for something that other threads change."""

    def __init__(self) -> None:
        self._rung: queue.SimpleQueue[None] = queue.SimpleQueue()

    def ring(self) -> None:
        """Make the waiting thread check again, after a change; callable from any thread."""
        if self._rung.empty():  # else it has not looked yet since an earlier one
            self._rung.put(None)

    def wait_for(self, ready: Callable[[], bool], timeout_seconds: float) -> bool:
        """Block until ``ready()``, which is checked after each ring, at most ``timeout_seconds``.

        Returns:
            True if it is ready.
        """
        deadline = time.monotonic() + timeout_seconds
        while not (is_ready := ready()):
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                break
            with contextlib.suppress(queue.Empty):
                self._rung.get(timeout=seconds)
        return is_ready


class Flag:
    """A ``threading.Event`` for one thread that waits."""

    def __init__(self) -> None:
        self._is_set, self._changed = False, ThreadWaker()

    def set(self) -> None:
        """Set the flag, for good; callable from any thread."""
        self._is_set = True
        self._changed.ring()

    def is_set(self) -> bool:
        """Return whether the flag is set."""
        return self._is_set

    def wait(self, timeout_seconds: float) -> bool:
        """Block until the flag is set, at most ``timeout_seconds``; return whether it is."""
        return self._changed.wait_for(self.is_set, timeout_seconds)


class SelectorWaker:
    """Waker of a thread that waits in ``selectors``; used from any other."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """Return the descriptor to wait for, for ``selectors``."""
        return self._fd

    def set(self) -> None:
        """Wake the thread."""
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Let the thread wait again."""
        with self._lock:
            if self._fd >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._fd)

    def close(self) -> None:
        """Close the descriptor; ``set`` does nothing from now on."""
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)


#: Threads that wait for further work: a push makes several calls, and a new thread takes longer to
#: begin than a short one takes.
IDLE: deque[_Worker] = deque()
os.register_at_fork(after_in_child=IDLE.clear)
_IDLE_SECONDS = 1.0


class _Worker(threading.Thread):
    """Thread that works for one call after another."""

    def __init__(self) -> None:
        super().__init__(name="weft-call", daemon=True)
        self.works: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def run(self) -> None:
        """Do what is given, one after the other, and end where nothing is for a second."""
        while True:
            try:
                work = self.works.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with contextlib.suppress(ValueError):
                    IDLE.remove(self)
                    return
                # Taken just now. No deadline: whoever took it may be stopped before it gives the
                # work, which would be lost.
                work = self.works.get()
            work()
            IDLE.append(self)


class OwnThread(Generic[_T]):
    """Work on a thread of its own, which an interrupt of its caller does not reach. One that comes
    as the thread starts may leave it where it has begun nothing, until the process ends.

    Args:
        work: Called once; has a deadline of its own.
        late: Called there with what ``work`` returns where nobody waits for that any more.
    """

    def __init__(self, work: Callable[[], _T], late: Callable[[_T], object] | None = None) -> None:
        self._work, self._late = work, late
        #: Taken by the first of two: the thread with a result, or the caller who leaves.
        self._claim = threading.Lock()
        self._ended = Flag()
        self._callbacks: list[Callable[[OwnThread[_T]], object]] = []
        self._results: list[_T] = []
        self._errors: list[BaseException] = []

    def start(self) -> OwnThread[_T]:
        """Begin the work; returns at once."""
        try:
            worker = IDLE.pop()
        except IndexError:
            worker = _Worker()
            worker.start()
        worker.works.put(self._run)
        return self

    def done(self) -> bool:
        """Return whether ``result`` returns at once."""
        return self._ended.is_set()

    def add_done_callback(self, fn: Callable[[OwnThread[_T]], object]) -> None:
        """Call ``fn`` with this at the work's end, on any thread; it may be called twice."""
        self._callbacks.append(fn)
        if self.done():
            fn(self)

    def leave(self) -> None:
        """Wait for the work no longer: ``late`` is given what it returns. Returns at once."""
        if not self._claim.acquire(blocking=False) and self._late is not None and self._results:
            late, result = self._late, self._results.pop()
            OwnThread(lambda: late(result)).start()

    def wait(self, timeout_seconds: float) -> bool:
        """Block until the work has ended, at most ``timeout_seconds``; return whether it has."""
        return self._ended.wait(timeout_seconds)

    def result(self) -> _T:
        """Block until the work has ended, and return or raise its result; called once."""
        while not self._ended.wait(_LONG_SECONDS):
            pass
        if self._errors:
            raise self._errors.pop()
        return self._results[0]

    def _run(self) -> None:
        if self._claim.locked():  # the caller has left already
            return
        try:
            result = self._work()
        except BaseException as error:  # noqa: BLE001 (it is the caller's)
            self._errors.append(error)
        else:
            self._results.append(result)
        if self._claim.acquire(blocking=False):
            self._ended.set()
            for callback in self._callbacks:
                callback(self)
        elif self._late is not None and self._results:
            self._late(self._results.pop())


def on_own_thread(work: Callable[[], _T], late: Callable[[_T], object] | None = None) -> _T:
    """Do work on a thread of its own and block for what it returns or raises.

    Args:
        late: See ``OwnThread``: called where the caller's thread is interrupted meanwhile.
    """
    running = OwnThread(work, late)
    try:
        return running.start().result()
    except BaseException:
        running.leave()
        raise


def side_by_side(works: Sequence[Callable[[], _T]]) -> list[_T]:
    """Do works side by side, the first on this thread, and return what they return.

    All have ended when it returns or raises, an interrupt too: what they write to may be used
    again at once.

    Args:
        works: Functions that take milliseconds, and wait for nothing.
    """
    own, *others = works
    beside: list[OwnThread[_T]] = []
    try:
        for work in others:
            beside.append(OwnThread(work).start())
        return [own(), *(each.result() for each in beside)]
    finally:
        for each in beside:
            each.wait(_LONG_SECONDS)


def report_while(work: Callable[[], _T], on_progress: Callable[[], None]) -> _T:
    """Run a call that can neither be cut nor report on a thread of its own, and report meanwhile.

    For one call into a library whose length is known to be its own affair (a driver that
    locks pages, communicators that form): it counts as work for as long as it lasts.

    Args:
        on_progress: Called at least every ``PROGRESS_SECONDS``; what it raises ends the wait, and
            the work continues unattended.

    Raises:
        BaseException: The error that ``work`` raised.
    """
    running = OwnThread(work).start()
    while not running.wait(PROGRESS_SECONDS):
        on_progress()
    return running.result()
