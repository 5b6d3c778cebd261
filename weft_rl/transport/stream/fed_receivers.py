"""Receivers at the other ends of hops, as a member feeds them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from weft_rl.transport.stream.lane import Lane
from weft_rl.transport.stream.messages import Wants
from weft_rl.transport.stream.piece_coding import SLOW_BYTES_PER_SECOND
from weft_rl.transport.stream.works import StreamWork, pieces_in

#: Links that were busy for less are not measured.
_MEASURED_SECONDS = 0.1


class FedReceiver:
    """The receiver at the other end of a hop, as it is fed: how far it is. Guarded by its member's
    lock."""

    def __init__(self, rank: int, wants: Wants) -> None:
        self.rank = rank
        #: Bucket that is being sent, and place in the order of its pieces.
        self.sequence, self._at = wants.first, 0  # the cursor
        self._held = {held.sequence: pieces_in(held) for held in wants.held}
        self.on_their_way: Counter[int] = Counter()
        self.lanes: list[Lane] = []
        self.is_over = False
        self._told = (0, 0.0)
        #: True while its links carry so little that fewer bytes are worth the coding.
        self.is_slow = False

    def take_sent(self, works: Mapping[int, StreamWork]) -> tuple[int, float, int]:
        """Return the bytes sent since the last call, the seconds for which their links had any, and
        the bytes that wait."""
        each = [lane.sent() for lane in self.lanes]
        num_bytes = sum(lane.num_bytes for lane in each)
        seconds = max((lane.busy_seconds for lane in each), default=0.0)
        (bytes_before, seconds_before), self._told = self._told, (num_bytes, seconds)
        here = sum(
            work.bytes_here - (self._at * work.piece_bytes if work.sequence == self.sequence else 0)
            for work in works.values()
            if work.sequence >= self.sequence
        )
        waiting = max(0, here) + sum(lane.num_queued for lane in each)
        sent, busy = max(0, num_bytes - bytes_before), max(0.0, seconds - seconds_before)
        if busy >= _MEASURED_SECONDS:
            self.is_slow = sent < SLOW_BYTES_PER_SECOND * busy
        return sent, busy, waiting

    def has_next(self, works: Mapping[int, StreamWork]) -> bool:
        """Return whether ``next_piece`` may find one."""
        work = works.get(self.sequence)
        return self.is_over or (work is not None and self._at < len(work.order))

    def next_piece(
        self, works: Mapping[int, StreamWork], first: int
    ) -> tuple[StreamWork, int] | None:
        """Take the next piece to send, if one is here.

        A bucket's last piece goes before the next one's first: a receiver may have no memory for
        the next one before it has this one, and then reads nothing more.

        Args:
            first: First bucket that is here; all have what was before.
        """
        if self.sequence < first:
            self._go_to(first)
        while (work := works.get(self.sequence)) is not None:
            held = self._held.get(work.sequence, frozenset())
            while self._at < len(work.order):
                index = work.order[self._at]
                self._at += 1
                if index in held:
                    continue
                self.on_their_way[work.sequence] += 1
                if self._at == work.num_pieces:
                    self._go_to(work.sequence + 1)
                return work, index
            if self._at < work.num_pieces:
                return None
            self._go_to(work.sequence + 1)
        return None

    def _go_to(self, sequence: int) -> None:
        self._held.pop(self.sequence, None)
        self.sequence, self._at = sequence, 0

    def note_sent(self, sequence: int) -> None:
        """Note that a piece of a bucket was handed to the system."""
        self.on_their_way[sequence] -= 1
        if not self.on_their_way[sequence]:
            del self.on_their_way[sequence]

    def is_fed(self, work: StreamWork) -> bool:
        """Return whether all of a bucket was sent."""
        return self.sequence > work.sequence and not self.on_their_way[work.sequence]

    def end(self) -> None:
        """End its connections."""
        self.is_over = True
        for lane in self.lanes:
            lane.shut()
