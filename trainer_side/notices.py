"""Calls of the user's function, one after the other, on a thread of their own."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable

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
        self._names: queue.Queue[str | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="weft-notices", daemon=True)
        self._thread.start()

    def put(self, name: str) -> None:
        """Have the function called with ``name`` soon; returns at once."""
        try:
            self._names.put_nowait(name)
        except queue.Full:
            _log.warning("the notice of %s is dropped: %d wait", name, _MAX_WAITING)

    def close(self) -> None:
        """Drop what waits; blocks at most some seconds for a call that is under way,
        not at all when that call does this."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._names.get_nowait()
        self._names.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        while (name := self._names.get()) is not None:
            try:
                self._function(name)
            except Exception:  # noqa: BLE001 (the user's code)
                _log.exception("on_publish_again failed for %s", name)
