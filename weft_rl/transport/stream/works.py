"""Broadcasts over a stream group, in pieces."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

import torch

from weft_rl.interrupts import Flag
from weft_rl.transport.stream.messages import Held, StreamError, piece_bytes
from weft_rl.transport.stream.piece_coding import encode_piece
from weft_rl.transport.wire.buckets import IN_ITS_BUFFER, BucketOptions

#: Pieces in turn that coding does not shorten, before the rest of their bucket goes as it is.
_MOST_LONG = 4


class StreamWork:
    """A broadcast; see ``backends.Work``. Its state is guarded by its member's lock.

    Args:
        buffer: Bytes to send, or memory to receive them in: uint8 of the host.
        sequence: Number of the bucket in its lane.
        options: See ``Backend.broadcast``.
        num_receivers: Number of receivers of the group.
        unkept: Receivers that have to say that they keep it, at the sender; None at a receiver.
    """

    arrived = IN_ITS_BUFFER

    def __init__(
        self,
        buffer: torch.Tensor,
        sequence: int,
        options: BucketOptions,
        num_receivers: int,
        unkept: Collection[int] | None = None,
    ) -> None:
        self.sequence, self.num_bytes, self.on_kept = sequence, buffer.numel(), options.on_kept
        self._bytes: memoryview | None = memoryview(buffer.numpy())  # type: ignore[arg-type]
        begin = buffer.data_ptr()
        self._span = range(begin, begin + self.num_bytes)
        #: Bytes of each piece but the last.
        self.piece_bytes = piece_bytes(self.num_bytes, num_receivers)
        self.num_pieces = -(-self.num_bytes // self.piece_bytes)
        is_whole = unkept is not None
        #: Pieces that are here, in the order in which they have come.
        self.order = list(range(self.num_pieces)) if is_whole else []
        self._held = bytearray([is_whole]) * self.num_pieces
        #: Pieces that came coded, to be passed on so.
        self.coded: dict[int, bytes] = {}
        self._num_long = 0  # pieces in turn that coding did not shorten
        self.unkept = set(unkept or ())
        self.is_kept = False
        #: Names of the members that have sent pieces of it here.
        self.passed_on_by: set[str] = set()
        #: How a receiver receives it again, from the sender; see ``backends.Work``.
        self.fetch: Callable[[StreamWork, torch.Tensor, float], bool] | None = None
        #: How a receiver tells the sender that it keeps the bucket; never blocks, never raises.
        self.tell_kept: Callable[[int], None] | None = None
        self._woken = Flag()
        self._error = ""
        #: True once the bytes are here, or were sent. They may be passed on for longer: before
        #: its memory is received in again, that has ended.
        self.done = False

    @property
    def is_whole(self) -> bool:
        """True if all pieces are here."""
        return len(self.order) == self.num_pieces

    @property
    def bytes_here(self) -> int:
        """Number of bytes that are here, the last piece taken for a whole one."""
        return len(self.order) * self.piece_bytes

    def overlaps(self, other: StreamWork) -> bool:
        """Return whether the memory of two broadcasts has bytes in common."""
        one, two = self._span, other._span
        return max(one.start, two.start) < min(one.stop, two.stop)

    def piece(self, index: int) -> memoryview:
        """Return the bytes of a piece.

        Raises:
            StreamError: There is no such piece, or the memory was let go of.
        """
        if self._bytes is None or index >= self.num_pieces:
            raise StreamError(f"piece {index} of bucket {self.sequence} is not here")
        begin = index * self.piece_bytes
        return self._bytes[begin : begin + self.piece_bytes]

    def coded_piece(self, index: int) -> bytes | None:
        """Code a piece, if that shortens it; soon not tried any more where it does not. Without
        the member's lock: coding takes longer than others may wait."""
        coded = self.coded.get(index)
        if coded is None and self._num_long < _MOST_LONG:
            coded = encode_piece(self.piece(index))
            self._num_long = self._num_long + 1 if coded is None else 0
        return coded

    def has(self, index: int) -> bool:
        """Return whether a piece is here."""
        return bool(self._held[index])

    def put(self, index: int, peer: str) -> None:
        """Note that a piece has come, from a member."""
        self.passed_on_by.add(peer)
        if not self._held[index]:
            self._held[index] = 1
            self.order.append(index)
            if self.is_whole:
                self._set_done()

    def held(self) -> Held:
        """Return which pieces are here."""
        bits = bytearray(-(-self.num_pieces // 8))
        for index in self.order:
            bits[index >> 3] |= 1 << (index & 7)
        return Held(self.sequence, bytes(bits))

    def sent(self) -> None:
        """Note that all who have asked were sent all of it: the sender waits no longer."""
        self._set_done()

    def let_go(self) -> None:
        """Pass the bytes on no more."""
        self._bytes = None
        self.coded.clear()
        self._set_done()

    def fail(self, error: str) -> None:
        """Let who waits for it raise an error, if it is not done; the memory may still be used."""
        if not self.done:
            self._error = error
        self._woken.set()

    def _set_done(self) -> None:
        self.done = True
        self._woken.set()

    # -- see ``backends.Work`` -----------------------------------------------------

    def wait_until(self, deadline: float) -> bool:
        return self._woken.wait(deadline - time.monotonic())

    def finish(self) -> None:
        if self._error:
            raise StreamError(self._error)

    def give_back(self) -> None:
        pass  # nothing is lent

    def receive_again(self, buffer: torch.Tensor, deadline: float) -> bool:
        return self.fetch is not None and self.fetch(self, buffer, deadline)

    def keep(self) -> bool:
        if self.tell_kept is not None:
            self.tell_kept(self.sequence)
        return self.tell_kept is not None

    def wake(self) -> None:
        self._woken.set()


def pieces_in(held: Held) -> frozenset[int]:
    """Return the numbers of the pieces that a bitmap names."""
    return frozenset(
        8 * at + bit for at, byte in enumerate(held.pieces) for bit in range(8) if byte >> bit & 1
    )
