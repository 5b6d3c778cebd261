"""A worker's reports of what it holds, to the page that the replica's process reads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from rollout_side.vllm_engine.holdings_page import HoldingsWriter

_log = logging.getLogger(__name__)

#: How soon a change by another thread than the engine's (a bucket that came, a version that
#: was spilled) is written. Looking costs some 20 microseconds.
_LOOK_SECONDS = 0.25
_STOP_SECONDS = 2.0


class HoldingsReport:
    """Writes what is held when it has changed: at once where ``tell`` is called, else by a
    thread that looks. Usable from any thread.

    Args:
        writer: The page; this object's alone.
        look: What is held, in a form that is cheap to make and compare.
        describe: The same as plain values; called where ``look`` has changed.
    """

    def __init__(
        self,
        writer: HoldingsWriter,
        look: Callable[[], object],
        describe: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._writer, self._look, self._describe = writer, look, describe
        self._told: object = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft-holdings", daemon=True)

    def start(self) -> None:
        """Write what is held now, and go on by itself."""
        self.tell()
        self._thread.start()

    def tell(self) -> None:
        """Write what is held unless it was written; never raises."""
        try:
            with self._lock:
                seen = self._look()
                if seen != self._told:
                    # Seen before it is described: what changes between is told again.
                    self._writer.write(self._describe())
                    self._told = seen
        except Exception:  # noqa: BLE001 (the edge of a thread, and of each worker method)
            _log.exception("what this worker holds cannot be told; it is tried again")

    def close(self) -> None:
        """End the thread; what was written last stays."""
        self._closed.set()
        self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            self.tell()
