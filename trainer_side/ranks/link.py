"""Connections between the ranks of one trainer, and messages over them.

TCP connections of our own. A process group could carry the same, but would leave ranks waiting for
one that is gone: gloo (torch 2.13) reports a broken connection to no rank whose message was under
way, and ends nothing before its timeout. Here a rank that leaves, or dies, is noticed at once by
those that wait for it, and ``close`` ends every wait of this rank.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import Final

from weft_rl.ipc.sockets import close_in_children

#: Which call a message belongs to, and how many bytes follow.
_HEAD: Final = struct.Struct("<IQ")
# Whatever says that the other side is gone; none has to be asked for but the first, which is
# Linux's.
_HANGS_UP: Final = getattr(select, "POLLRDHUP", select.POLLHUP)
# In a call's place: whoever sends this leaves, and what follows is why.
_LEAVES: Final = 2**32 - 1
# Before the reason: the rank that had it, if it is not who sends it.
_WHO: Final = struct.Struct("<i")
_SELF: Final = -1
#: A message whose length its receiver does not know has at most so many bytes.
MAX_BYTES: Final = 2**30
#: Why a rank leaves is said in at most so many bytes.
MAX_REASON_BYTES: Final = 2**13


class Channel(IntEnum):
    """Channel of messages that run beside others. Each has connections of its own, used by one
    thread at a time."""

    STAR = 0
    """Messages between rank 0 and each other rank."""
    PAIRS = 1
    """Messages between any two ranks."""
    SUM = 2
    """Sums over the same pairs as ``STAR``, beside it."""


class LinkError(Exception):
    """Error of a link that cannot be used any more.

    A rank is gone, says what was not asked for, or was silent until the deadline; or this rank has
    left.

    Args:
        message: Description of what has happened.
        rank: Rank that has left and said why; -1 if none has.
        reason: Reason that it has said.
    """

    def __init__(self, message: str, rank: int = -1, reason: bytes = b"") -> None:
        super().__init__(message)
        self.rank, self.reason = rank, reason


class RankLink:
    """Connections of one rank, once it has met the others; see ``meeting.meet``.

    Thread-safe between channels. A message that fails, or is interrupted, leaves its connection
    in the middle of it, so the link is closed.

    Args:
        sockets: Sockets by channel and rank; they belong to the link from now on.
    """

    def __init__(self, sockets: Mapping[tuple[Channel, int], socket.socket]) -> None:
        self._sockets = dict(sockets)
        for each in self._sockets.values():
            each.setblocking(False)
            close_in_children(each)
        self._lock = threading.Lock()  # guards the three below
        self._inside_of = dict.fromkeys(Channel, 0)
        self._why_closed = ""
        self._left: tuple[int, bytes] = (-1, b"")

    @property
    def closed(self) -> bool:
        """True if this rank has left, by ``close`` or after a failure."""
        return bool(self._why_closed)

    def swap(
        self,
        channel: Channel,
        call: int,
        outgoing: Mapping[int, memoryview],
        incoming: Mapping[int, memoryview | None],
        deadline: float,
        *,
        whoever_is_there: bool = False,
    ) -> dict[int, memoryview]:
        """Send and receive messages, all at once; block until all have come and gone.

        Args:
            call: A number that the other side must say, too.
            outgoing: Bytes to send, by rank; the caller must leave them alone.
            incoming: Memory for each rank's bytes, of their length; None where only the sender
                knows the length.
            deadline: ``time.monotonic()`` seconds.
            whoever_is_there: True if nothing is sent to ranks that are gone, and their absence is
                not reported: a rank that waits for one will report it.

        Returns:
            Received bytes by rank, in the memory that was given for them if any was.

        Raises:
            LinkError: The link is closed.
        """
        with self._inside(channel):
            sends = [
                _Send(self._sockets[channel, rank], rank, call, content, whoever_is_there)
                for rank, content in outgoing.items()
            ]
            receives = [
                _Receive(self._sockets[channel, rank], rank, call, out)
                for rank, out in incoming.items()
            ]
            try:
                _finish([*sends, *receives], deadline)
            except LinkError as error:
                begun = {each.sock for each in receives if each.has_begun}
                self._note_who_left(error, channel, begun)
                raise
            return {each.rank: each.content for each in receives}

    def check(self, channel: Channel) -> None:
        """Check that all ranks are still there, also those that were heard before they went.

        Raises:
            LinkError: A rank is gone; names it. The link is closed.
        """
        with self._inside(channel):
            poll, ranks = select.poll(), {}
            for (each, rank), sock in self._sockets.items():
                if each is channel:
                    poll.register(sock, _HANGS_UP)
                    ranks[sock.fileno()] = rank
            for number, _ in poll.poll(0):
                error = LinkError(f"rank {ranks[number]} has left")
                self._note_who_left(error, channel, set())
                raise error

    def close(
        self, why: str = "this rank has left the push", reason: bytes = b"", rank: int = _SELF
    ) -> None:
        """Leave the link: ranks and own threads that wait for this rank are told.

        Callable from any thread, never blocks.

        Args:
            why: Error message of later calls of this rank.
            reason: Error of the other ranks' calls, as far as they hear it: it is said where no
                message is under way, and at once or not at all.
            rank: Rank that had the reason, if this rank only heard of it.
        """
        with self._lock:
            if self.closed:
                return
            self._why_closed = why
            said = _WHO.pack(rank) + reason
            for (channel, _), each in self._sockets.items():
                if reason and channel is not Channel.SUM and not self._inside_of[channel]:
                    with contextlib.suppress(OSError):
                        each.sendmsg([_HEAD.pack(_LEAVES, len(said)), said])
            for each in self._sockets.values():  # once all were told: it is noticed first
                with contextlib.suppress(OSError):  # the other side was first
                    each.shutdown(socket.SHUT_RDWR)  # wakes who waits for it, also here
            self._close_sockets()

    def _note_who_left(self, error: LinkError, channel: Channel, begun: set[socket.socket]) -> None:
        """Note the reason of a rank that has left, if it has said one.

        It is said to ranks that first noticed another's leaving, or that wait for another.

        Args:
            channel: Channel whose use has ended with ``error``.
            begun: Connections in the middle of a message.
        """
        if error.reason:
            self._left = error.rank, error.reason
            return
        with self._lock:  # nobody begins to use what is read here
            for (each, rank), sock in self._sockets.items():
                is_idle = self._inside_of[each] == (1 if each is channel else 0)
                if each is Channel.SUM or not is_idle or sock in begun:
                    continue
                try:
                    _Receive(sock, rank, _LEAVES, None).advance()
                except LinkError as said:
                    if said.reason:
                        self._left = said.rank, said.reason
                        return
                except OSError:
                    continue

    @contextmanager
    def _inside(self, channel: Channel) -> Iterator[None]:
        with self._lock:
            if self.closed:
                raise LinkError(self._why_closed, *self._left)
            self._inside_of[channel] += 1
        try:
            yield
        except LinkError as error:
            rank, reason = self._left
            self.close(str(error), reason, rank)
            raise LinkError(self._why_closed, *self._left) from error  # perhaps another thread's
        except BaseException as error:
            self.close(f"this rank was interrupted: {error!r}")
            raise
        finally:
            with self._lock:
                self._inside_of[channel] -= 1
                self._close_sockets()

    def _close_sockets(self) -> None:
        """Close the sockets of a closed link once none is in use. Their numbers may be those of
        other files at once."""
        if self.closed and not any(self._inside_of.values()):
            for each in self._sockets.values():
                each.close()


class _Send:
    """Message on its way out."""

    events = select.POLLOUT

    def __init__(
        self, sock: socket.socket, rank: int, call: int, content: memoryview, may_be_gone: bool
    ) -> None:
        self.sock, self.rank = sock, rank
        self._may_be_gone = may_be_gone
        self._parts = [memoryview(_HEAD.pack(call, len(content))), content]

    def advance(self) -> bool:
        """Send as much as goes without waiting; return whether all is sent."""
        while self._parts:
            try:
                num_bytes = self.sock.sendmsg(self._parts)
            except BlockingIOError:
                return False
            except OSError:
                if self._may_be_gone:
                    return True
                raise
            while self._parts and num_bytes >= len(self._parts[0]):
                num_bytes -= len(self._parts.pop(0))
            if self._parts:
                self._parts[0] = self._parts[0][num_bytes:]
        return True


class _Receive:
    """Message on its way in."""

    events = select.POLLIN

    def __init__(self, sock: socket.socket, rank: int, call: int, out: memoryview | None) -> None:
        self.sock, self.rank = sock, rank
        self._call, self._out = call, out
        self._head: memoryview | None = memoryview(bytearray(_HEAD.size))
        self._left = self._head
        self._leaves = False
        self.content = memoryview(b"")

    @property
    def has_begun(self) -> bool:
        """True if some of the message has come."""
        return self._head is None or len(self._left or b"") < _HEAD.size

    def advance(self) -> bool:
        """Receive as much as there is without waiting; return whether all has come."""
        while True:
            while self._left:
                try:
                    num_bytes = self.sock.recv_into(self._left)
                except BlockingIOError:
                    return False
                if not num_bytes:
                    raise ConnectionResetError("it has left")
                self._left = self._left[num_bytes:]
            if self._leaves:
                (who,) = _WHO.unpack_from(self.content)
                who = self.rank if who == _SELF else who
                raise LinkError(f"rank {who} has left", who, bytes(self.content[_WHO.size :]))
            if self._head is None:
                return True
            self._begin(*_HEAD.unpack(self._head))

    def _begin(self, call: int, num_bytes: int) -> None:
        self._leaves = call == _LEAVES and _WHO.size < num_bytes <= _WHO.size + MAX_REASON_BYTES
        if self._leaves:
            self._out = None
        wanted = MAX_BYTES if self._out is None else len(self._out)
        if not self._leaves and (
            call != self._call or num_bytes > wanted or (self._out and num_bytes < wanted)
        ):
            raise LinkError(
                f"rank {self.rank} takes part in something else: {num_bytes} bytes of call {call}, "
                f"where call {self._call} was awaited"
            )
        self._head = None
        self.content = memoryview(bytearray(num_bytes)) if self._out is None else self._out
        self._left = self.content


def _finish(operations: list[_Send | _Receive], deadline: float) -> None:
    pending = _advance(operations)
    while pending:
        poll = select.poll()
        events: dict[int, int] = {}
        for each in pending:
            number = each.sock.fileno()
            events[number] = events.get(number, 0) | each.events
        for number, wanted in events.items():
            poll.register(number, wanted)
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000 + 1):
            silent = ", ".join(str(each.rank) for each in pending)
            raise LinkError(f"nothing came of rank {silent} in time")
        pending = _advance(pending)


def _advance(operations: list[_Send | _Receive]) -> list[_Send | _Receive]:
    """Advance operations; return those that are not done."""
    left = []
    for each in operations:
        try:
            if not each.advance():
                left.append(each)
        except OSError as error:
            raise LinkError(f"rank {each.rank}: {error}") from error
    return left
