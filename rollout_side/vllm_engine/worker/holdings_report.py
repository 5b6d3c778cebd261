"""Reports of a worker on what it holds, to the page that the replica's process reads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rollout_side.vllm_engine.worker.holdings_page import HoldingsWriter

_log = logging.getLogger(__name__)

# How soon a change by another thread than the engine's (a version that was staged, or spilled)
# is written: soon where something was done of late, else as often as it was once asked for.
_LOOK_SECONDS, _IDLE_LOOK_SECONDS = 0.1, 1.0
_ACTIVE_SECONDS = 5.0
_STOP_SECONDS = 2.0


class HoldingsReport:
    """Reporter of what is held, whenever that has changed; usable from any thread.

    It writes at once where ``notify`` is called, else by a thread that looks.

    Args:
        writer: Writer of the page, used by this object alone.
        look: Returns what is held, in a form that is cheap to make and compare.
        describe: Returns what is held as plain values; called where ``look`` has changed.
    """

    def __init__(
        self,
        writer: HoldingsWriter,
        look: Callable[[], object],
        describe: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._writer, self._look, self._describe = writer, look, describe
        self._told: object = None
        self._active_at = time.monotonic()
        self._lock = threading.Lock()
        self._closed = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft-holdings", daemon=True)

    def start(self) -> None:
        """Write what is held now, and from then on whenever it changes."""
        self._write_change()
        self._thread.start()

    def notify(self) -> None:
        """Write what is held if it has changed, and look often for a while. Never raises.

        What calls this may have begun something.
        """
        self._write_change()
        self._active_at = time.monotonic()
        self._wake.set()

    def close(self) -> None:
        """End the thread; what was written last stays."""
        self._closed = True
        self._wake.set()
        self._thread.join(_STOP_SECONDS)

    def _write_change(self) -> None:
        try:
            with self._lock:
                seen = self._look()
                if seen != self._told:
                    # Seen before it is described: what changes between is told again.
                    self._writer.write(self._describe())
                    self._told, self._active_at = seen, time.monotonic()
        except Exception:  # noqa: BLE001 (the edge of a thread, and of each worker method)
            _log.exception("what this worker holds cannot be told; it is tried again")

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(self._pause_seconds())
            self._wake.clear()
            self._write_change()

    def _pause_seconds(self) -> float:
        is_active = time.monotonic() - self._active_at < _ACTIVE_SECONDS
        return _LOOK_SECONDS if is_active else _IDLE_LOOK_SECONDS
