"""Bounded log of what happened, written by one thread and read by any."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar


class Entry(Protocol):
    """Immutable entry of a log; a log has them in the order of their revisions."""

    @property
    def revision(self) -> int:
        """Place of the entry among all that happened."""
        ...


_E = TypeVar("_E", bound=Entry)


class Log(Generic[_E]):
    """Log of the newest entries. Readers need no lock: its list is appended to, or replaced whole.

    Args:
        max_entries: Number of entries that readers see; twice as many are held for a while.
        on_drop: Called with the oldest entries, before they are forgotten.
    """

    def __init__(
        self, max_entries: int, on_drop: Callable[[Sequence[_E]], None] | None = None
    ) -> None:
        self._max_entries, self._on_drop = max_entries, on_drop
        self._entries: list[_E] = []

    def add(self, entry: _E) -> None:
        """Add the newest entry; O(1) but for one time in ``max_entries``."""
        self._entries.append(entry)
        if len(self._entries) >= 2 * self._max_entries:
            if self._on_drop is not None:
                self._on_drop(self._entries[: -self._max_entries])
            self._entries = self._entries[-self._max_entries :]

    def since(self, revision: int = 0) -> list[_E]:
        """Return the entries newer than ``revision``, oldest first."""
        newest = self._entries[-self._max_entries :]
        return newest[bisect_right(newest, revision, key=lambda entry: entry.revision) :]
