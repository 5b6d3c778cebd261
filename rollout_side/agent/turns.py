"""Orders that change what an engine serves take turns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Turns:
    """Carries out one order at a time, to its end: cut off in the middle it would leave mixed
    weights. One whose caller went away while it waited is not begun."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @property
    def taken(self) -> bool:
        """Whether an order is being carried out."""
        return self._lock.locked()

    async def take(self, order: Coroutine[Any, Any, _T]) -> _T:
        """Carry out an order when its turn has come; returns what it returns."""
        try:
            await self._lock.acquire()
        except asyncio.CancelledError:
            order.close()
            raise
        work = asyncio.ensure_future(order)
        work.add_done_callback(lambda _: self._lock.release())
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(_log_unheard)
            raise


def _log_unheard(work: asyncio.Future[Any]) -> None:
    """What became of an order that nobody waits for any more; the heartbeat tells it."""
    if not work.cancelled() and (error := work.exception()) is not None:
        _log.warning("an order whose caller had gone away failed: %s", error)
