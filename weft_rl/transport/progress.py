"""Progress reports of threads that work or wait for long (see ``member.Progress``)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

_T = TypeVar("_T")

#: Longest that a thread works or waits before it can report: it reports at least every 2 s.
PROGRESS_SECONDS: Final = 1.0

#: What a step that takes long calls, often, with how far it is and of how much.
OnProgress = Callable[[int, int], None]


def ignore_progress(done: int, total: int) -> None:
    """Ignore progress: an ``OnProgress`` for steps that nobody watches."""


def seconds_to_report(deadline: float) -> float:
    """Return the seconds that a wait may last before its thread reports; ``deadline`` is a
    ``time.monotonic()``."""
    return max(0.0, min(PROGRESS_SECONDS, deadline - time.monotonic()))


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
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 (raised by the caller's thread)
            errors.append(error)

    thread = threading.Thread(target=run, name="weft-long-call", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(PROGRESS_SECONDS)
        if thread.is_alive():
            on_progress()
    if errors:
        raise errors[0]
    return results[0]
