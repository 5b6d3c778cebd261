"""A rank's stream to a side group: what the rank must still be told."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from weft.contract.errors import CapacityError, WeftError
from weft.v1 import rendezvous_pb2

_MAX_QUEUED: Final = 256


class RankLink:
    """One rank's stream: what it must still be told. Bounded; releases coalesce."""

    def __init__(self, group_id: str, rank: int) -> None:
        self.group_id = group_id
        self.rank = rank
        self._queue: deque[rendezvous_pb2.AttendResponse] = deque()
        self._released: rendezvous_pb2.AttendResponse | None = None
        self._ended = False
        self._error: WeftError | None = None
        self._wake = asyncio.Event()

    def send(self, message: rendezvous_pb2.AttendResponse) -> None:
        """Queue a message; a rank that reads nothing is cut off."""
        if len(self._queue) >= _MAX_QUEUED:
            self.end(CapacityError("the rank does not read its stream", reason="TOO_SLOW"))
            return
        self._queue.append(message)
        self._wake.set()

    def release(self, transfer_id: str, num_buckets: int) -> None:
        """Tell the sender how far it may reuse memory; only the newest count is kept."""
        released = rendezvous_pb2.Released(transfer_id=transfer_id, num_buckets=num_buckets)
        self._released = rendezvous_pb2.AttendResponse(released=released)
        self._wake.set()

    def end(self, error: WeftError | None) -> None:
        """Close the stream after what is queued: with ``error``, or in peace."""
        if not self._ended:
            self._ended, self._error = True, error
            self._released = None  # of no use to a stream that closes
        self._wake.set()

    async def next(self) -> rendezvous_pb2.AttendResponse | None:
        """The next message; None when the stream is to be closed in peace.

        Raises:
            WeftError: The stream is to be closed.
        """
        while True:
            if self._queue:
                return self._queue.popleft()
            if self._released is not None:
                message, self._released = self._released, None
                return message
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            self._wake.clear()
            await self._wake.wait()
