"""What an engine was asked and has not answered, and when it was last seen to get on."""

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
    """The calls to one engine that are not answered; changed on its event loop, read on any
    thread.

    Args:
        spoken_at: When the engine's own threads last said that they get on, as
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
            key: Whatever tells this call from others, for ``end``.
            what: It asks for, for people.
            quiet_seconds: How long the engine may say nothing in it.
        """
        self._calls[key] = _Call(what, time.monotonic(), quiet_seconds)

    def end(self, key: Hashable) -> None:
        """Note the answer to a call, of whatever kind."""
        self._calls.pop(key, None)
        self._answered_at = time.monotonic()

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Count as progress whatever is waited for in the ``with``: a disk, which has a deadline
        of its own and says nothing of the engine."""
        self._num_elsewhere += 1
        try:
            yield
        finally:
            self._num_elsewhere -= 1
            self._answered_at = time.monotonic()

    @property
    def work(self) -> EngineWork:
        """See ``Engine.work``."""
        now, calls = time.monotonic(), list(self._calls.values())
        seen_at = now if self._num_elsewhere else max(self._answered_at, self._spoken_at())
        if not calls:
            return EngineWork("", seen_at)
        first = min(calls, key=lambda call: call.begun_at)
        quiet = [c.begun_at + c.quiet_seconds for c in calls if c.quiet_seconds]
        return EngineWork(first.what, min(now, max(seen_at, first.begun_at, *quiet)))
