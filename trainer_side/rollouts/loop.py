"""Event loop on a thread of its own, for callers that have none, or another one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from weft_rl.contract.errors import InvalidRequestError

_T = TypeVar("_T")
_STOP_SECONDS = 10.0


class LoopThread:
    """Daemon thread that runs an event loop until ``stop``."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def submit(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run a coroutine on the loop; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        """Cancel everything that still runs on the loop and end the thread; idempotent."""
        if not self._thread.is_alive():
            return
        if threading.current_thread() is self._thread:  # its owner was collected there
            self._loop.stop()
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(_STOP_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_SECONDS)


def closed_error(what: str = "RolloutClient") -> InvalidRequestError:
    """Return the error of calls on a closed client or stream."""
    return InvalidRequestError(f"this {what} is closed", reason="PUBLISHER_CLOSED")


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
