"""Messages between members on one host, over a Unix socket that keeps their bounds.

They have fixed sizes but for the tail that goes along with ``Ready``.

Source: docs/protocol.md, One-sided.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
from dataclasses import astuple, dataclass
from typing import Final

from weft_rl.ipc.connection import Codec, Connection, Kind, PeerError

#: Grows with each change that an older peer would not understand.
VERSION: Final = 1
#: What goes along with ``Ready`` at most: a socket holds as many as a sender has under way.
MAX_TAIL_BYTES: Final = 16_384
SECRET_BYTES: Final = 32


class OneSidedError(PeerError):
    """Failure of a member that is not who it should be, or of memory that cannot be shared. A
    ``SideGroup`` makes its own typed error of it, as it does of other libraries'
    RuntimeErrors."""


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


_READY: Final = struct.Struct("<QQQQH")


def _pack_ready(ready: Ready) -> bytes:
    *fields, _ = astuple(ready)
    return _READY.pack(*fields, len(ready.tail)) + ready.tail


def _unpack_ready(content: bytes) -> Ready:
    sequence, export_id, first_byte, num_bytes, tail_bytes = _READY.unpack_from(content)
    tail = content[_READY.size :]
    if len(tail) != tail_bytes:
        raise ValueError(f"a tail of {len(tail):,} bytes")
    return Ready(sequence, export_id, first_byte, num_bytes, tail)


def _fixed(message: type[Message], form: str, *, has_descriptor: bool = False) -> Kind[Message]:
    """Make the encoding of a message whose fields have fixed sizes."""
    body = struct.Struct(form)
    return Kind(
        message,
        body.size,
        lambda each: body.pack(*astuple(each)),
        lambda content: message(*body.unpack(content)),
        has_descriptor,
    )


MESSAGES: Final = Codec[Message](
    b"WEFT",
    VERSION,
    {
        1: _fixed(Hello, "<I32s"),
        2: _fixed(Welcome, "<32s"),
        3: _fixed(Export, "<QQ", has_descriptor=True),
        4: _fixed(Withdraw, "<Q"),
        5: Kind(Ready, _READY.size + MAX_TAIL_BYTES, _pack_ready, _unpack_ready),
        6: _fixed(Taken, "<Q"),
        7: _fixed(Try, "<Q", has_descriptor=True),
        8: _fixed(Tried, "<32s"),
        9: _fixed(ExportDevice, "<QQ16s64s"),
        10: _fixed(Withdrawn, "<Q"),
        11: _fixed(TryDevice, "<Q16s64s"),
        12: _fixed(Left, "<"),
        13: _fixed(Kept, "<Q"),
    },
)


class MemberConnection(Connection[Message]):
    """Connection to another process of this user's on this host.

    Args:
        connected: Socket, owned from now on.

    Raises:
        PeerError: The peer is another user's; the socket is closed.
    """

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(connected, MESSAGES)

    def hear(self, timeout_seconds: float | None = None) -> Message:
        """Receive a message; a descriptor that comes along is closed. Raises as ``receive``."""
        message, fd = self.receive(timeout_seconds)
        if fd is not None:
            os.close(fd)
        return message
