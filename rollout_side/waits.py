"""Waits of a replica's process: for a disk, for its engine, for the next second.

Reads of a disk that may hang each have their own thread, which is abandoned at the deadline. With
asyncio's own threads a few such reads would take all of them, and the process could not end. All
periodic work of the process wakes at whole seconds of the monotonic clock, since each wake-up of an
idle process costs more than its work.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeVar

from rollout_side.engine import EngineWork
from weft_rl.contract.errors import TransferTimeoutError

_T = TypeVar("_T")

#: Threads that may hang at a time; beyond that a read fails at once.
MAX_HANGING: Final = 16
_free = threading.BoundedSemaphore(MAX_HANGING)


def read_within(seconds: float, what: str, read: Callable[[], _T]) -> _T:
    """Return what ``read`` returns, or raise what it raises; block at most ``seconds``.

    Args:
        what: Name of what is read, for error messages.

    Raises:
        TransferTimeoutError: The disk did not answer; the read goes on, and its result is dropped.
    """
    try:
        return _begin(what, read).result(seconds)
    except TimeoutError:
        raise _no_answer(what, seconds) from None


async def answer_within(seconds: float, what: str, read: Callable[[], _T]) -> _T:
    """Do as ``read_within``, but without blocking the event loop."""
    future = asyncio.wrap_future(_begin(what, read))
    done, _ = await asyncio.wait({future}, timeout=seconds)
    if not done:
        future.cancel()
        raise _no_answer(what, seconds)
    return future.result()


def _begin(what: str, read: Callable[[], _T]) -> Future[_T]:
    if not _free.acquire(blocking=False):
        raise TransferTimeoutError(
            f"{what} is not read: the disk does not answer, and {MAX_HANGING} reads hang already"
        )
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            found = read()
        except BaseException as error:  # noqa: BLE001 (raised by the caller)
            _settle(outcome.set_exception, error)
        else:
            _settle(outcome.set_result, found)
        finally:
            _free.release()

    threading.Thread(target=run, name="weft-disk", daemon=True).start()
    return outcome


def _settle(settle: Callable[[Any], None], outcome: Any) -> None:
    """Set the outcome, unless its waiter has gone."""
    try:
        settle(outcome)
    except InvalidStateError:
        return


def _no_answer(what: str, seconds: float) -> TransferTimeoutError:
    return TransferTimeoutError(f"{what} was not read in {seconds:g} s: the disk does not answer")


def seconds_to_tick() -> float:
    """Return the seconds until the next whole second."""
    return 1.0 - time.monotonic() % 1.0


class _UnansweredCall(NamedTuple):
    what: str
    begun_at: float
    quiet_seconds: float


class UnansweredCalls:
    """Unanswered calls to one engine; changed on its event loop, read on any thread.

    Args:
        progress_at: Returns when the engine's own threads last reported progress, as
            ``time.monotonic()``.
    """

    def __init__(self, progress_at: Callable[[], float] = lambda: 0.0) -> None:
        self._progress_at = progress_at
        self._calls: dict[Hashable, _UnansweredCall] = {}
        self._answered_at = 0.0
        self._num_elsewhere = 0

    def begin(self, key: Hashable, what: str, quiet_seconds: float = 0.0) -> None:
        """Record a call.

        Args:
            key: Any value that identifies the call, for ``end``.
            what: Description of the call, for messages.
            quiet_seconds: Seconds without progress that the engine may take for the call.
        """
        self._calls[key] = _UnansweredCall(what, time.monotonic(), quiet_seconds)

    def end(self, key: Hashable) -> None:
        """Record the answer to a call, of whatever kind."""
        self._calls.pop(key, None)
        self._answered_at = time.monotonic()

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Count every wait inside the ``with`` as progress: it is for a disk, for example, and has
        its own deadline."""
        self._num_elsewhere += 1
        try:
            yield
        finally:
            self._num_elsewhere -= 1
            self._answered_at = time.monotonic()

    @property
    def work(self) -> EngineWork:
        """Oldest unanswered call, and the engine's last progress; see ``Engine.work``."""
        now, calls = time.monotonic(), list(self._calls.values())
        seen_at = now if self._num_elsewhere else max(self._answered_at, self._progress_at())
        if not calls:
            return EngineWork("", seen_at)
        first = min(calls, key=lambda call: call.begun_at)
        quiet = [c.begun_at + c.quiet_seconds for c in calls if c.quiet_seconds]
        return EngineWork(first.what, min(now, max(seen_at, first.begun_at, *quiet)))
