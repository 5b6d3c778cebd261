"""Feeds of events, and of changed routes, for everyone who watches; the log that keeps them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from heapq import merge
from itertools import takewhile
from operator import attrgetter
from typing import Final, Generic, TypeVar

from google.protobuf.timestamp_pb2 import Timestamp

from weft_rl.contract.errors import CapacityError, PeerUnavailableError
from weft_rl.coordinator.decisions.state.effects import Announce, EventKind, SaveEvent
from weft_rl.coordinator.decisions.state.event_kinds import (
    DETAILS,
    KEPT_WITH,
    MAX_KEPT,
    TONE,
    TOPIC,
)
from weft_rl.rpc.codec import timestamp_to_proto
from weft_rl.v1 import inspect_pb2

#: A watcher that falls this far behind is cut off.
MAX_BEHIND: Final = 1000
#: Replicas whose last change of routes is known; who is behind the oldest of these is told
#: the whole list.
MAX_REMEMBERED: Final = 10_000


_OUTCOMES: Final = {
    "good": inspect_pb2.EVENT_OUTCOME_SUCCESS,
    "bad": inspect_pb2.EVENT_OUTCOME_FAILURE,
    "plain": inspect_pb2.EVENT_OUTCOME_UNSPECIFIED,
}


def story(event: Announce) -> str:
    """Return the key of the events that one line tells together; empty if it is told by itself.

    A push and the retirement of its version are one story, and so is each repair. Of a story at
    most one event is a failure: its end.
    """
    match event.kind:
        case (
            EventKind.TRANSFER_BEGUN
            | EventKind.TRANSFER_STAGED
            | EventKind.TRANSFER_COMMITTED
            | EventKind.TRANSFER_ABORTED
            | EventKind.VERSION_RETIRED
        ):
            return str(event.concerns)
        case kind if TOPIC[kind] == "repairs":
            return event.subject
    return ""


class Watcher:
    """Queue of events for one reader."""

    def __init__(self) -> None:
        self._queue: deque[inspect_pb2.WatchEventsResponse] = deque()
        self._wake = asyncio.Event()
        self._too_slow = False
        self._closed = False

    def put(self, event: inspect_pb2.WatchEventsResponse) -> None:
        """Queue an event, or mark the reader as too slow."""
        if len(self._queue) >= MAX_BEHIND:
            self._too_slow = True
            self._queue.clear()  # nobody is told of them any more
        else:
            self._queue.append(event)
        self._wake.set()

    def close(self) -> None:
        """End the reader, since the coordinator stops."""
        self._closed = True
        self._wake.set()

    async def next(self) -> inspect_pb2.WatchEventsResponse:
        """Return the next event.

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
    """All watchers, and the last events for readers that come later.

    Args:
        clock: Seconds since 1970.
        former: Events of former coordinators, oldest first.
    """

    def __init__(
        self, clock: Callable[[], float] = time.time, former: Sequence[SaveEvent] = ()
    ) -> None:
        self.watchers: set[Watcher] = set()
        self._kept = {
            name: Log[inspect_pb2.WatchEventsResponse](MAX_KEPT) for name in set(KEPT_WITH.values())
        }
        self._num_published = 0
        for past in former:
            self.publish(past.time, past.event)
        self._num_former = self._num_published
        self._began = timestamp_to_proto(clock())

    @property
    def kept_since(self) -> Timestamp:
        """Time since which every event is kept."""
        full = [kept for log in self._kept.values() if len(kept := log.newest()) == MAX_KEPT]
        # Only of this coordinator every event was told to begin with.
        cut = [kept[0] for kept in full if kept[0].revision > self._num_former + 1]
        return max(cut, key=attrgetter("revision")).time if cut else self._began

    def past(self, before: int | None = None) -> list[inspect_pb2.WatchEventsResponse]:
        """Return the kept events, newest first; on any thread.

        Args:
            before: Only events with a smaller number are returned.
        """
        logs = (reversed(log.newest()) for log in self._kept.values())
        newest_first = merge(*logs, key=attrgetter("revision"), reverse=True)
        return [kept for kept in newest_first if before is None or kept.revision < before]

    def watch(self) -> Watcher:
        """Return a new reader of events from now on; give it back to ``unwatch``."""
        watcher = Watcher()
        self.watchers.add(watcher)
        return watcher

    def unwatch(self, watcher: Watcher) -> None:
        """Remove a reader that has gone."""
        self.watchers.discard(watcher)

    def publish(self, unix_seconds: float, announced: Announce) -> None:
        """Keep an event, and notify every watcher."""
        concerns = announced.concerns
        event = inspect_pb2.WatchEventsResponse(
            time=timestamp_to_proto(unix_seconds),
            kind=inspect_pb2.EventKind.Value(f"EVENT_KIND_{announced.kind.name}"),
            subject=announced.subject,
            message=announced.message,
            policy=concerns.policy if concerns else "",
            version=concerns.version if concerns else 0,
            revision=self._num_published + 1,
            topic=TOPIC[announced.kind],
            outcome=_OUTCOMES[TONE[announced.kind]],
            detail=announced.kind in DETAILS,
            story=story(announced),
        )
        self._num_published += 1
        self._kept[KEPT_WITH[announced.kind]].add(event)
        for watcher in self.watchers:
            watcher.put(event)

    def close(self) -> None:
        """End all readers."""
        for watcher in self.watchers:
            watcher.close()


class RouteFeed:
    """Revisions of the routes, and the replicas that changed with each.

    Readers ask for what has changed when they can take it, so nothing is queued for a slow one.
    """

    def __init__(self) -> None:
        self._revision = 0
        self._forgotten = 0
        # Replicas, listed or not, by the revision of their last change; oldest first.
        self._changed_in: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._closed = asyncio.Event()

    def change(self, replica_ids: Iterable[str]) -> None:
        """Count a new revision, in which these replicas came, went or changed."""
        self._revision += 1
        for replica_id in replica_ids:
            self._changed_in.pop(replica_id, None)
            self._changed_in[replica_id] = self._revision
        while len(self._changed_in) > MAX_REMEMBERED:
            self._forgotten = self._changed_in.pop(next(iter(self._changed_in)))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def changed_since(self, revision: int) -> list[str] | None:
        """Return the replicas changed since; None if that is not known any more. O(changes)."""
        if revision < self._forgotten:
            return None
        newest_first = reversed(self._changed_in.items())
        return [name for name, _ in takewhile(lambda item: item[1] > revision, newest_first)]

    async def newer(self, revision: int) -> int:
        """Return the newest revision, once it is above ``revision``.

        Raises:
            PeerUnavailableError: The coordinator stops.
        """
        while not self._closed.is_set():
            if self._revision > revision:
                return self._revision
            await self._changed.wait()
        raise _stopping()

    async def wait(self, seconds: float) -> None:
        """Wait for ``seconds``, or until the coordinator stops."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closed.wait()

    def close(self) -> None:
        """End all readers."""
        self._closed.set()
        self._changed.set()


def _stopping() -> PeerUnavailableError:
    return PeerUnavailableError("the coordinator is stopping", reason="COORDINATOR_AWAY")


_E = TypeVar("_E")


class Log(Generic[_E]):
    """Log of the newest entries. Readers need no lock: its list is appended to, or replaced whole.

    Args:
        max_entries: Number of entries that readers see; twice as many are held for a while.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: list[_E] = []

    def add(self, entry: _E) -> None:
        """Add the newest entry; O(1) but for one time in ``max_entries``."""
        self._entries.append(entry)
        if len(self._entries) >= 2 * self._max_entries:
            self._entries = self._entries[-self._max_entries :]

    def newest(self) -> list[_E]:
        """Return the entries, oldest first."""
        return self._entries[-self._max_entries :]
