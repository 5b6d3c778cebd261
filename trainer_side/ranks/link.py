"""Connections between the ranks of one trainer, and messages over them.

TCP connections of our own. A process group could carry the same, but would leave ranks waiting for
one that is gone: gloo (torch 2.13) tells nobody whose message was under way when its connection
broke, and ends nothing before its timeout. Here whoever leaves, or dies, is noticed by those who
wait for it at once, and ``close`` ends every wait of this rank.
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

from weft.transport.forked import close_in_children

#: Which call a message belongs to, and how many bytes follow.
_HEAD: Final = struct.Struct("<IQ")
# Whatever says that the other side is gone; none has to be asked for but the first, which is
# Linux's.
_HANGS_UP: Final = getattr(select, "POLLRDHUP", select.POLLHUP)
#: A message whose length its receiver does not know has at most so many bytes.
MAX_BYTES: Final = 2**30


class Channel(IntEnum):
    """What is said beside what else: each has connections of its own, used by one thread at a
    time."""

    STAR = 0
    """Between rank 0 and each other one."""
    PAIRS = 1
    """Between any two."""
    SUM = 2
    """As ``STAR``, beside it."""


class LinkError(Exception):
    """The link cannot be used any more: a rank is gone, says what was not asked for, or was
    silent until the deadline; or this rank has left."""


class RankLink:
    """The connections of one rank, once it has met the others; see ``meeting.meet``.

    Thread-safe between channels. A message that fails, or is interrupted, leaves its connection
    in the middle of it, so the link is closed.

    Args:
        sockets: By channel and rank; they belong to the link from now on.
    """

    def __init__(self, sockets: Mapping[tuple[Channel, int], socket.socket]) -> None:
        self._sockets = dict(sockets)
        for each in self._sockets.values():
            each.setblocking(False)
            close_in_children(each)
        self._lock = threading.Lock()  # guards the two below
        self._num_inside = 0
        self._why_closed = ""

    @property
    def closed(self) -> bool:
        """Whether this rank has left, by ``close`` or for what failed."""
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
        """Send and receive messages, all at once; blocks until all have come and gone.

        Args:
            call: A number that the other side must say, too.
            outgoing: Bytes to send, by rank; the caller must leave them alone.
            incoming: Where to put what a rank sends, which is as long; None where only the
                sender knows how long it is.
            deadline: ``time.monotonic()`` seconds.
            whoever_is_there: Nothing is sent to ranks that are gone, and their absence is not
                told: it will be by whoever waits for one.

        Returns:
            What came, by rank, in the memory that was given for it if any was.

        Raises:
            LinkError: The link is closed.
        """
        with self._inside():
            sends = [
                _Send(self._sockets[channel, rank], rank, call, content, whoever_is_there)
                for rank, content in outgoing.items()
            ]
            receives = [
                _Receive(self._sockets[channel, rank], rank, call, out)
                for rank, out in incoming.items()
            ]
            _finish([*sends, *receives], deadline)
            return {each.rank: each.content for each in receives}

    def check(self, channel: Channel) -> None:
        """Look whether all ranks are still there, also such as were heard before they went.

        Raises:
            LinkError: Names one that is gone. The link is closed.
        """
        with self._inside():
            poll, ranks = select.poll(), {}
            for (each, rank), sock in self._sockets.items():
                if each is channel:
                    poll.register(sock, _HANGS_UP)
                    ranks[sock.fileno()] = rank
            for number, _ in poll.poll(0):
                raise LinkError(f"rank {ranks[number]} has left")

    def close(self, why: str = "this rank has left the push") -> None:
        """Leave: whoever waits for this rank is told, and so are threads of its own. From any
        thread, never blocks."""
        with self._lock:
            if self.closed:
                return
            self._why_closed = why
            for each in self._sockets.values():
                with contextlib.suppress(OSError):  # the other side was first
                    each.shutdown(socket.SHUT_RDWR)  # wakes who waits for it, also here
            self._close_sockets()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        with self._lock:
            if self.closed:
                raise LinkError(self._why_closed)
            self._num_inside += 1
        try:
            yield
        except LinkError as error:
            self.close(str(error))
            raise LinkError(self._why_closed) from error  # perhaps another thread's
        except BaseException as error:
            self.close(f"this rank was interrupted: {error!r}")
            raise
        finally:
            with self._lock:
                self._num_inside -= 1
                self._close_sockets()

    def _close_sockets(self) -> None:
        """Once nobody uses them: their numbers may be those of other files at once."""
        if self.closed and not self._num_inside:
            for each in self._sockets.values():
                each.close()


class _Send:
    """A message on its way out."""

    events = select.POLLOUT

    def __init__(
        self, sock: socket.socket, rank: int, call: int, content: memoryview, may_be_gone: bool
    ) -> None:
        self.sock, self.rank = sock, rank
        self._may_be_gone = may_be_gone
        self._parts = [memoryview(_HEAD.pack(call, len(content))), content]

    def advance(self) -> bool:
        """Whether all is sent; as much as goes without waiting."""
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
    """A message on its way in."""

    events = select.POLLIN

    def __init__(self, sock: socket.socket, rank: int, call: int, out: memoryview | None) -> None:
        self.sock, self.rank = sock, rank
        self._call, self._out = call, out
        self._head: memoryview | None = memoryview(bytearray(_HEAD.size))
        self._left = self._head
        self.content = memoryview(b"")

    def advance(self) -> bool:
        """Whether all has come; as much as there is without waiting."""
        while True:
            while self._left:
                try:
                    num_bytes = self.sock.recv_into(self._left)
                except BlockingIOError:
                    return False
                if not num_bytes:
                    raise ConnectionResetError("it has left")
                self._left = self._left[num_bytes:]
            if self._head is None:
                return True
            self._begin(*_HEAD.unpack(self._head))

    def _begin(self, call: int, num_bytes: int) -> None:
        wanted = MAX_BYTES if self._out is None else len(self._out)
        if call != self._call or num_bytes > wanted or (self._out and num_bytes < wanted):
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
    """Those that are not done."""
    left = []
    for each in operations:
        try:
            if not each.advance():
                left.append(each)
        except OSError as error:
            raise LinkError(f"rank {each.rank}: {error}") from error
    return left
