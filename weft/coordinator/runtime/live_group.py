"""One live side group: its store, its ranks' streams, and how far its receivers are.

The hot path counts here, not in events.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Mapping
from typing import Final

from weft.containers.lru import Lru
from weft.contract.errors import CapacityError, InvalidRequestError, WeftError
from weft.coordinator.decisions import events
from weft.coordinator.decisions.state.group import Group
from weft.coordinator.decisions.state.progress import Word
from weft.coordinator.decisions.state.values import Layout
from weft.coordinator.runtime.key_value_store import KeyValueStore
from weft.v1 import rendezvous_pb2

_MAX_QUEUED: Final = 256
_MAX_LAYOUTS: Final = 8


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
        """Tell a sender how far it may reuse memory; only the newest count is kept."""
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


class Watermark:
    """Counts, for one transfer, the buckets that every receiver has verified."""

    def __init__(
        self,
        transfer_id: str,
        num_receivers: int,
        num_buckets: int,
        first_bucket: int = 0,
        num_senders: int = 1,
    ) -> None:
        self.transfer_id, self._num_senders = transfer_id, num_senders
        self.num_verified = self._first = first_bucket
        self._num_receivers = num_receivers
        self._reports = [0] * num_buckets
        self._next: dict[int, int] = {}

    @property
    def num_reported(self) -> Mapping[int, int]:
        """Buckets, from the first, that each receiver has reported, of those that did."""
        return self._next

    def report(self, rank: int, bucket: int) -> bool:
        """Count a report of all buckets up to one; return whether the watermark advanced.

        Raises:
            InvalidRequestError: ``PROTOCOL``: the receiver has reported it, or there is none such.
        """
        expected = self._next.get(rank, self._first)
        if not expected <= bucket < len(self._reports) or rank < self._num_senders:
            raise InvalidRequestError(
                f"rank {rank} reported bucket {bucket}, its next is {expected}", reason="PROTOCOL"
            )
        self._next[rank] = bucket + 1
        for index in range(expected, bucket + 1):
            self._reports[index] += 1
        before = self.num_verified
        while (
            self.num_verified < len(self._reports)
            and self._reports[self.num_verified] == self._num_receivers
        ):
            self.num_verified += 1
        return self.num_verified > before

    def is_through(self, rank: int) -> bool:
        """Whether a receiver has reported every bucket."""
        return self._next.get(rank, self._first) == len(self._reports)


class LiveGroup:
    """One live group: its store, its ranks' streams, and how far its receivers are."""

    def __init__(self, group: Group) -> None:
        self.group_id = group.group_id
        # By digest, so that how long a look-up takes tells nothing of a token.
        self.ranks = {token_digest(group.token_of(rank)): rank for rank in range(group.size)}
        self.size, self.num_senders = group.size, group.num_senders
        self.store = KeyValueStore()
        self.links: dict[int, RankLink] = {}
        self.layouts: Lru[bytes, Layout] = Lru(_MAX_LAYOUTS)
        self.watermark: Watermark | None = None
        #: Buckets that each sender keeps, as it has said when it came.
        self.num_in_flight: dict[int, int] = {}
        self.words: dict[int, Word] = {}
        self.num_told: dict[int, int] = {}

    @property
    def senders(self) -> list[RankLink]:
        """The streams of those senders that attend."""
        return [self.links[rank] for rank in range(self.num_senders) if rank in self.links]

    def take_progress(self) -> events.RanksHeard | None:
        """What its ranks have said, and verified, since this was asked last; None if nothing."""
        words, self.words = self.words, {}
        transfer_id, new = "", dict[int, int]()
        if (mark := self.watermark) is not None:
            transfer_id, told = mark.transfer_id, self.num_told
            new = {rank: n for rank, n in mark.num_reported.items() if told.get(rank) != n}
            told.update(new)
        if not words and not new:
            return None
        return events.RanksHeard(self.group_id, words, transfer_id, new)


def token_digest(token: str) -> bytes:
    """What a token is looked up by."""
    return hashlib.sha256(token.encode()).digest()
