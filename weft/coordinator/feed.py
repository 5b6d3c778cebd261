"""What happens, and where requests may be sent, to everyone who watches."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Final

from weft.contract.errors import CapacityError, PeerUnavailableError
from weft.rpc.codec import timestamp_to_proto
from weft.v1 import inspect_pb2

#: A watcher that falls this far behind is cut off.
MAX_BEHIND: Final = 1000


class Watcher:
    """One reader's queue of events."""

    def __init__(self) -> None:
        self._queue: deque[inspect_pb2.WatchEventsResponse] = deque()
        self._wake = asyncio.Event()
        self._too_slow = False
        self._closed = False

    def put(self, event: inspect_pb2.WatchEventsResponse) -> None:
        """Queue an event, or mark the reader as too slow."""
        if len(self._queue) >= MAX_BEHIND:
            self._too_slow = True
        else:
            self._queue.append(event)
        self._wake.set()

    def close(self) -> None:
        """The coordinator stops."""
        self._closed = True
        self._wake.set()

    async def next(self) -> inspect_pb2.WatchEventsResponse:
        """The next event.

        Raises:
            CapacityError: ``TOO_SLOW``.
            PeerUnavailableError: The coordinator stops.
        """
        while True:
            if self._too_slow:
                raise CapacityError(
                    f"the reader fell {MAX_BEHIND} events behind", reason="TOO_SLOW"
                )
            if self._queue:
                return self._queue.popleft()
            if self._closed:
                raise _stopping()
            self._wake.clear()
            await self._wake.wait()


class Feed:
    """All watchers."""

    def __init__(self) -> None:
        self._watchers: set[Watcher] = set()

    def watch(self) -> Watcher:
        """A new reader, from now on; give it back to ``unwatch``."""
        watcher = Watcher()
        self._watchers.add(watcher)
        return watcher

    def unwatch(self, watcher: Watcher) -> None:
        """A reader has gone."""
        self._watchers.discard(watcher)

    def publish(self, unix_seconds: float, kind: str, subject: str, message: str) -> None:
        """Tell every watcher."""
        if self._watchers:
            event = inspect_pb2.WatchEventsResponse(
                time=timestamp_to_proto(unix_seconds), kind=kind, subject=subject, message=message
            )
            for watcher in self._watchers:
                watcher.put(event)

    def close(self) -> None:
        """End all readers."""
        for watcher in self._watchers:
            watcher.close()


class RouteFeed:
    """The number of the newest list of routes. Readers make the list when they take it,
    so none is queued and a slow one gets the newest."""

    def __init__(self) -> None:
        self._revision = 0
        self._changed = asyncio.Event()
        self._closed = asyncio.Event()

    def change(self) -> None:
        """There is a newer list."""
        self._revision += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def newer(self, revision: int) -> int:
        """The number of the newest list, once it is above ``revision``.

        Raises:
            PeerUnavailableError: The coordinator stops.
        """
        while not self._closed.is_set():
            if self._revision > revision:
                return self._revision
            await self._changed.wait()
        raise _stopping()

    async def hold(self, seconds: float) -> None:
        """Wait for so long, or until the coordinator stops."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closed.wait()

    def close(self) -> None:
        """End all readers."""
        self._closed.set()
        self._changed.set()


def _stopping() -> PeerUnavailableError:
    return PeerUnavailableError("the coordinator is stopping", reason="COORDINATOR_AWAY")
