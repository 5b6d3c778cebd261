"""Messages between members, over a Unix socket that keeps their bounds. They have fixed sizes but
for the tail that goes along with ``Ready``. Nothing in them is executed, and none is longer than
``MAX_BYTES``."""

from __future__ import annotations

import array
import contextlib
import itertools
import os
import select
import socket
import struct
from dataclasses import astuple, dataclass
from typing import Final

from weft_rl.ipc.sockets import close_in_children
from weft_rl.transport.one_sided.errors import OneSidedError

#: Grows with each change that an older peer would not understand.
VERSION: Final = 4
#: What goes along with ``Ready`` at most: a socket holds as many as a sender has under way.
MAX_TAIL_BYTES: Final = 16_384
MAX_BYTES: Final = MAX_TAIL_BYTES + 256
SECRET_BYTES: Final = 32
_HEAD: Final = struct.Struct("<4sHH")
_MAGIC: Final = b"WEFT"
_CREDENTIALS: Final = struct.Struct("3i")
# More of them than are taken would be dropped by the kernel, which says so.
_MAX_FDS = 1


@dataclass(frozen=True, slots=True)
class Hello:
    """Introduction of a receiver to the sender."""

    rank: int
    secret: bytes
    """Secret whose digest the group's store has."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """Admission of a receiver by the sender, with the secret that shows it to be the group's."""

    secret: bytes


@dataclass(frozen=True, slots=True)
class Export:
    """A memory file of the sender, whose descriptor comes along."""

    export_id: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ExportDevice:
    """An allocation of the sender's on a GPU."""

    export_id: int
    num_bytes: int
    gpu: bytes
    """UUID of the GPU."""
    handle: bytes
    """CUDA's handle for another process."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Notice that the sender uses an export no more: its receivers unmap it."""

    export_id: int


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Report that a receiver has unmapped an export."""

    export_id: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Bytes that may be copied now, and do not change until all have said ``Taken``."""

    sequence: int
    export_id: int
    first_byte: int
    num_bytes: int
    """Number of bytes, with room for the tail."""
    tail: bytes = b""
    """Beginning of the last bytes, which the receiver wants on the host and does not find there: a
    GPU would have to bring them back, in its turn. Empty where it finds them."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Report that a receiver has its own copy, or reads the sender's memory no more."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Kept:
    """Report that a receiver has verified a bucket, and will not ask for it again in any group."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Try:
    """Request to read the beginning of a memory file, whose descriptor comes along."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class Tried:
    """Answer to ``Try`` or ``TryDevice``: the bytes that were read."""

    content: bytes


@dataclass(frozen=True, slots=True)
class TryDevice:
    """Request to read the beginning of an allocation on a GPU."""

    num_bytes: int
    gpu: bytes
    handle: bytes


@dataclass(frozen=True, slots=True)
class Left:
    """Report that a receiver takes part no more. It may still read what it has mapped, until it has
    said ``Withdrawn`` or closed its socket."""


Message = (
    Hello | Welcome | Export | ExportDevice | Withdraw | Withdrawn | Ready | Taken | Kept
    | Try | TryDevice | Tried | Left
)  # fmt: skip

_export_ids = itertools.count(1)


def next_export_id() -> int:
    """Return a number for a buffer, unlike any other's of this process."""
    return next(_export_ids)


_BODIES: Final[dict[int, tuple[type[Message], struct.Struct]]] = {
    1: (Hello, struct.Struct("<I32s")),
    2: (Welcome, struct.Struct("<32s")),
    3: (Export, struct.Struct("<QQ")),
    4: (Withdraw, struct.Struct("<Q")),
    5: (Ready, struct.Struct("<QQQQH")),
    6: (Taken, struct.Struct("<Q")),
    7: (Try, struct.Struct("<Q")),
    8: (Tried, struct.Struct("<32s")),
    9: (ExportDevice, struct.Struct("<QQ16s64s")),
    10: (Withdrawn, struct.Struct("<Q")),
    11: (TryDevice, struct.Struct("<Q16s64s")),
    12: (Left, struct.Struct("<")),
    13: (Kept, struct.Struct("<Q")),
}
_KINDS: Final = {kind: number for number, (kind, _) in _BODIES.items()}


def pack(message: Message) -> bytes:
    """Encode a message as it travels."""
    number = _KINDS[type(message)]
    fields, tail = astuple(message), b""
    if isinstance(message, Ready):
        fields, tail = (*fields[:-1], len(message.tail)), message.tail
    return _HEAD.pack(_MAGIC, VERSION, number) + _BODIES[number][1].pack(*fields) + tail


def unpack(data: bytes) -> Message:
    """Decode a message that has arrived.

    Raises:
        OneSidedError: It is none, or another version's.
    """
    if len(data) < _HEAD.size:
        raise OneSidedError(f"a message of {len(data)} bytes")
    magic, version, number = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise OneSidedError("what has arrived is no message of Weft's")
    if version != VERSION:
        raise OneSidedError(f"the peer speaks version {version}, this process {VERSION}")
    kind, body = _BODIES.get(number, (None, None))
    if kind is None or body is None or len(data) < _HEAD.size + body.size:
        raise OneSidedError(f"a message of kind {number} with {len(data)} bytes")
    fields, tail = body.unpack_from(data, _HEAD.size), data[_HEAD.size + body.size :]
    if len(tail) != (fields[-1] if kind is Ready else 0):
        raise OneSidedError(f"a message of kind {number} with {len(data)} bytes")
    if kind is Ready:
        sequence, export_id, first_byte, num_bytes, _ = fields
        return Ready(sequence, export_id, first_byte, num_bytes, tail)
    return kind(*fields)


class Channel:
    """A connection to a peer of the same user.

    Args:
        connected: The socket, owned from now on.

    Raises:
        OneSidedError: The peer is another user's; the socket is closed.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        close_in_children(connected)
        raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid, uid, _ = _CREDENTIALS.unpack(raw)
        if uid != os.geteuid():
            connected.close()
            raise OneSidedError(
                f"the peer (pid {self.pid}) is of uid {uid}, this process of {os.geteuid()}"
            )

    def fileno(self) -> int:
        """Return the socket's descriptor, for ``selectors``."""
        return self._socket.fileno()

    def send(self, message: Message, fd: int | None = None) -> None:
        """Send a message; never blocks: messages are few and small.

        Raises:
            OneSidedError: The peer is gone, or reads nothing.
        """
        fds = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
        try:
            self._socket.sendmsg([pack(message)], fds, flags)
        except OSError as error:
            raise OneSidedError(f"the peer (pid {self.pid}) is gone: {error}") from error

    def receive(self, timeout_seconds: float | None = None) -> tuple[Message, int | None]:
        """Wait for a message; return it with the descriptor that came along, owned by the caller.

        Raises:
            OneSidedError: The peer is gone, said nothing in time, or no message.
        """
        flags = socket.MSG_CMSG_CLOEXEC
        fds: list[int] = []
        try:
            self._socket.settimeout(timeout_seconds)
            room = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
            data, carried, told, _ = self._socket.recvmsg(MAX_BYTES, room, flags)
        except ConnectionResetError:  # closed before it had read all
            data, carried, told = b"", [], 0
        except OSError as error:
            raise OneSidedError(f"the peer (pid {self.pid}) is gone: {error}") from error
        for level, kind, content in carried:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(content) - len(content) % array.array("i").itemsize
                fds.extend(array.array("i", content[:whole]))
        try:
            if not data:
                raise OneSidedError(f"the peer (pid {self.pid}) closed its socket")
            if told & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(fds) > _MAX_FDS:
                raise OneSidedError(f"the peer (pid {self.pid}) said more than a message holds")
            message = unpack(data)
            if bool(fds) != isinstance(message, Export | Try):
                raise OneSidedError("a message with a descriptor too many, or one too few")
        except OneSidedError:
            for fd in fds:
                os.close(fd)
            raise
        return message, fds[0] if fds else None

    def shut(self) -> None:
        """Shut the connection down, so that both ends find it closed at once; callable from any
        thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Tell the peer that nothing follows; callable from any thread. The peer may still be
        heard."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    @property
    def is_ended(self) -> bool:
        """True if the peer has called ``end``, or is gone; messages may still be unread."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
