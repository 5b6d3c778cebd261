"""Drain of a replica: running requests finish within a time limit, then it leaves."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from weft_rl.contract.replica_report import DrainNote

_log = logging.getLogger(__name__)

#: New requests are still taken for so long: routers and balancers need a moment to
#: hear that this replica is not ready.
NOTICE_SECONDS = 1.0
_POLL_SECONDS = 0.05


class Drain:
    """Drain of one replica. Used on the event loop, except ``note``.

    Args:
        num_requests: Returns the number of requests that run now.
        refuse: Called once, when new requests are to be refused from now on; says why.
        is_needed: Returns whether a transfer needs the replica.
    """

    def __init__(
        self,
        num_requests: Callable[[], int],
        refuse: Callable[[str], None],
        is_needed: Callable[[], bool],
    ) -> None:
        self._num_requests, self._refuse, self._is_needed = num_requests, refuse, is_needed
        self._began = asyncio.Event()
        self._refuse_at = self._deadline = float("inf")
        self._reason = ""

    @property
    def under_way(self) -> bool:
        """True if it has begun; it ends only with the process."""
        return self._began.is_set()

    def note(self) -> DrainNote | None:
        """Return the drain to report to the coordinator; None before it begins. Quick and
        thread-safe."""
        if not self.under_way:
            return None
        return DrainNote(max(0.0, self._deadline - time.monotonic()), self._reason)

    def begin(self, seconds: float, reason: str) -> None:
        """Begin the drain, or shorten the time of the one under way."""
        now = time.monotonic()
        self._deadline = min(self._deadline, now + seconds)
        if self.under_way:
            return
        self._reason = reason
        self._refuse_at = now + NOTICE_SECONDS
        _log.info("draining for at most %.1f s: %s", seconds, reason)
        self._began.set()

    async def over(self) -> str:
        """Wait until the replica may go: nothing runs and no transfer needs it, or the
        time is over.

        Returns:
            Description of how it ended, for messages.
        """
        await self._began.wait()
        refusing = False
        while (now := time.monotonic()) < self._deadline:
            if now >= self._refuse_at and not refusing:
                refusing = True
                self._refuse(f"this replica is leaving ({self._reason}): ask another")
            if refusing and not self._num_requests() and not self._is_needed():
                return f"drained: {self._reason}"
            await asyncio.sleep(_POLL_SECONDS)
        left = [f"{self._num_requests()} requests were cut"] if self._num_requests() else []
        left += ["a transfer was left"] if self._is_needed() else []
        return f"drained: {self._reason}; the time was over" + "".join(f", {what}" for what in left)
