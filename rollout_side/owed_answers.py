"""Calls that an engine has not answered yet, and the time of its last progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rollout_side.engine import EngineWork


class _Call(NamedTuple):
    what: str
    begun_at: float
    quiet_seconds: float


class OwedAnswers:
    """Unanswered calls to one engine; changed on its event loop, read on any thread.

    Args:
        spoken_at: Returns when the engine's own threads last reported progress, as
            ``time.monotonic()``.
    """

    def __init__(self, spoken_at: Callable[[], float] = lambda: 0.0) -> None:
        self._spoken_at = spoken_at
        self._calls: dict[Hashable, _Call] = {}
        self._answered_at = 0.0
        self._num_elsewhere = 0

    def begin(self, key: Hashable, what: str, quiet_seconds: float = 0.0) -> None:
        """Note a call.

        Args:
            key: Any value that identifies the call, for ``end``.
            what: Description of the call, for messages.
            quiet_seconds: Seconds that the engine may say nothing during the call.
        """
        self._calls[key] = _Call(what, time.monotonic(), quiet_seconds)

    def end(self, key: Hashable) -> None:
        """Note the answer to a call, of whatever kind."""
        self._calls.pop(key, None)
        self._answered_at = time.monotonic()

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Count every wait inside the ``with`` as progress. Such a wait is for a disk, say, which
        has a deadline of its own and tells nothing about the engine."""
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
        seen_at = now if self._num_elsewhere else max(self._answered_at, self._spoken_at())
        if not calls:
            return EngineWork("", seen_at)
        first = min(calls, key=lambda call: call.begun_at)
        quiet = [c.begun_at + c.quiet_seconds for c in calls if c.quiet_seconds]
        return EngineWork(first.what, min(now, max(seen_at, first.begun_at, *quiet)))
