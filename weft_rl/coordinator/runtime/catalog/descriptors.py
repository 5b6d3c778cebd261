"""Descriptors that SQLite finds whatever else the process has open."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from typing import Final, TypeVar

from weft_rl import descriptors
from weft_rl.coordinator.runtime.catalog.errors import SHORTAGE

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

# SQLite opens its journal for each transaction, and to see whether another left one; beside it the
# directory.
_NUM_SPARE: Final = 4
_WAIT_SECONDS: Final = 0.1
# Attempts where a file cannot be opened though descriptors are free.
_MAX_OTHER: Final = 3


class SpareFiles:
    """Descriptors held for SQLite alone; used by one thread at a time."""

    def __init__(self) -> None:
        self._held: list[int] = []
        self._take()

    def lend(self, work: Callable[[], _T]) -> _T:
        """Return what ``work`` returns, which is called again where it lacked a descriptor.

        It must have changed nothing where it raises. Blocks as long as the process has no
        descriptor left beside those that are held.

        Raises:
            sqlite3.Error: Another error than that.
        """
        num_other, is_said = 0, False
        try:
            while True:
                try:
                    return work()
                except sqlite3.Error as error:
                    is_short = descriptors.is_short()
                    num_other += not is_short
                    if not _cannot_open(error) or num_other >= _MAX_OTHER:
                        raise
                if is_short and self._held:
                    self.close()
                    continue
                if is_short and not is_said:
                    is_said = True
                    _log.error("%s: nothing is decided until the catalog can be used", SHORTAGE)
                time.sleep(_WAIT_SECONDS)
        finally:
            self._take()

    def close(self) -> None:
        """Let others have them."""
        while self._held:
            os.close(self._held.pop())

    def _take(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._held) < _NUM_SPARE:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def _cannot_open(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_CANTOPEN
