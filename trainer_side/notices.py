"""Calls of the user's function, one after the other, on a thread of their own."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_log = logging.getLogger(__name__)

_MAX_WAITING = 1000
_STOP_SECONDS = 5.0


class Notices:
    """Hands names to a function that may take long, from threads that may not.

    Args:
        function: Called with each name; what it raises is logged.
    """

    def __init__(self, function: Callable[[str], None]) -> None:
        self._function = function
        self._thread: threading.Thread | None = None
        self._free_places = threading.Semaphore(_MAX_WAITING)
        self._executor = ThreadPoolExecutor(1, "weft-notices", self._note_thread)

    def put(self, name: str) -> None:
        """Have the function called with ``name`` soon; returns at once."""
        if not self._free_places.acquire(blocking=False):
            _log.warning("the notice of %s is dropped: %d wait", name, _MAX_WAITING)
            return
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._executor.submit(self._call, name)

    def close(self) -> None:
        """Drop what waits; blocks at most some seconds for a call that is under way,
        not at all when that call does this."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_STOP_SECONDS)

    def _note_thread(self) -> None:
        self._thread = threading.current_thread()

    def _call(self, name: str) -> None:
        self._free_places.release()
        try:
            self._function(name)
        except Exception:  # noqa: BLE001 (the user's code)
            _log.exception("on_publish_again failed for %s", name)
