"""Messages between members on one host, over a Unix socket that keeps their bounds.

They have fixed sizes but for the tail that goes along with ``Ready``.

Source: docs/protocol.md, One-sided.
"""

from __future__ import annotations

import itertools
import socket
from dataclasses import dataclass
from typing import Annotated, Final

from weft_rl.ipc.bytes_codec import U32
from weft_rl.ipc.connection import Codec, Connection, PeerError

#: Grows with each change that an older peer would not understand.
VERSION: Final = 1
#: What goes along with ``Ready`` at most: a socket holds as many as a sender has under way.
MAX_TAIL_BYTES: Final = 16_384
SECRET_BYTES: Final = 32
_Secret = Annotated[bytes, f"{SECRET_BYTES}s"]
_Gpu = Annotated[bytes, "16s"]
_Handle = Annotated[bytes, "64s"]


class OneSidedError(PeerError):
    """Failure of a member that is not who it should be, or of memory that cannot be shared. A
    ``SideGroup`` makes its own typed error of it, as it does of other libraries'
    RuntimeErrors."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Introduction of a receiver to the sender."""

    rank: U32
    secret: _Secret
    """Secret whose digest the group's store has."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """Admission of a receiver by the sender, with the secret that shows it to be the group's."""

    secret: _Secret


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
    gpu: _Gpu
    """UUID of the GPU."""
    handle: _Handle
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
    tail: Annotated[bytes, MAX_TAIL_BYTES] = b""
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

    content: _Secret


@dataclass(frozen=True, slots=True)
class TryDevice:
    """Request to read the beginning of an allocation on a GPU."""

    num_bytes: int
    gpu: _Gpu
    handle: _Handle


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


MESSAGES: Final = Codec[Message](
    b"WEFT",
    VERSION,
    {
        1: Hello, 2: Welcome, 3: Export, 4: Withdraw, 5: Ready, 6: Taken, 7: Try, 8: Tried,
        9: ExportDevice, 10: Withdrawn, 11: TryDevice, 12: Left, 13: Kept,
    },
    with_descriptor=(Export, Try),
)  # fmt: skip


class MemberConnection(Connection[Message]):
    """Connection to another process of this user's on this host.

    Args:
        connected: Socket, owned from now on.

    Raises:
        PeerError: The peer is another user's; the socket is closed.
    """

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(connected, MESSAGES)
