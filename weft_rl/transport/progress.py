"""Progress reports of threads that work or wait for long (see ``member.Progress``)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

_T = TypeVar("_T")

#: Longest that a thread works or waits before it can speak: at least every 2 s it does.
SPEAK_SECONDS: Final = 1.0

#: What a step that takes long calls, often, with how far it is and of how much.
Speak = Callable[[int, int], None]


def silent(done: int, total: int) -> None:
    """Ignore progress: a ``Speak`` for steps that nobody watches."""


def speaking_time(deadline: float) -> float:
    """Return the seconds that a wait may last before its thread reports; ``deadline`` is a
    ``time.monotonic()``."""
    return max(0.0, min(SPEAK_SECONDS, deadline - time.monotonic()))


def speaking(work: Callable[[], _T], speak: Callable[[], None]) -> _T:
    """Run a call that can neither be cut nor report on a thread of its own, and report meanwhile.

    For one call into a library whose length is known to be its own affair (a driver that
    locks pages, communicators that form): it counts as work for as long as it lasts.

    Args:
        speak: Called at least every ``SPEAK_SECONDS``; what it raises ends the wait, and the
            work continues unattended.

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
        thread.join(SPEAK_SECONDS)
        if thread.is_alive():
            speak()
    if errors:
        raise errors[0]
    return results[0]
