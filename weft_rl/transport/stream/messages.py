"""Messages between members of a stream group, and the entries by which they find each other.

Source: docs/protocol.md, Streams.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

from weft_rl.ipc.bytes_codec import U32, bytes_codec
from weft_rl.ipc.connection import Codec, PeerError

#: Grows with each change that an older peer would not understand.
VERSION: Final = 2
KEY_BYTES: Final = 16
SECRET_BYTES: Final = 32
#: Entries of ``Wants``, and bytes of a bitmap of the pieces of one bucket.
_MAX_BUCKETS: Final = 64
_MAX_BITMAP_BYTES: Final = 2**17
_MAX_RANKS: Final = 16_384
_Key = Annotated[bytes, f"{KEY_BYTES}s"]
_Secret = Annotated[bytes, f"{SECRET_BYTES}s"]
_Text = Annotated[str, 512]

#: Before each piece: see ``PieceHead``.
PIECE_HEAD: Final = struct.Struct("<QQII")
_LEAST_PIECE_BYTES: Final = 16 * 2**10
_MOST_PIECE_BYTES: Final = 256 * 2**10
_PIECES: Final = 256


def piece_bytes(num_bytes: int, num_receivers: int) -> int:
    """Return the size of the pieces of a bucket, all but the last.

    A chain takes the time of a piece longer for each receiver: so pieces are a small part of a
    bucket, and where there are many receivers all of these times together are no longer than one
    bucket's. But they are not so small that the work for each counts.
    """
    wanted = -(-num_bytes // max(_PIECES, num_receivers) // 4096) * 4096
    return max(_LEAST_PIECE_BYTES, min(_MOST_PIECE_BYTES, wanted))


#: ``LaneHello.nth`` of a connection that brings one bucket again, all of it.
AGAIN: Final = 2**32 - 1


class PieceHead(NamedTuple):
    """Head of a piece."""

    sequence: int
    """Number of the bucket in the lane."""
    num_bytes: int
    """Bytes of the bucket."""
    nth: int
    """Number of the piece in it."""
    coded_bytes: int = 0
    """Bytes that follow, fewer than the piece has, where it is coded; 0 where it comes as it is."""


class StreamError(PeerError):
    """Failure of a member that cannot be reached, or is not who it should be."""


@dataclass(frozen=True, slots=True)
class Place:
    """Entry of one member in the group's store: where it listens, and who it will show to be."""

    key: _Key
    """Key of the lane at this member: one listener serves all lanes of a process."""
    host: _Text
    port: U32
    fingerprint: Annotated[bytes, 32]
    """SHA-256 of the certificate that it shows; empty where it has none, and then nobody sends it
    encrypted bytes."""
    site: _Text
    """Label of the place where it runs; empty where none was given."""


@dataclass(frozen=True, slots=True)
class Station:
    """A member in the order of the chain."""

    rank: U32
    place: Place


@dataclass(frozen=True, slots=True)
class Chain:
    """Entry of the sender in the group's store: the order in which the bytes are passed on."""

    secret: _Secret
    """Secret by which members know each other."""
    stations: tuple[Station, ...]
    """Members in order; the sender is the first."""


PLACE: Final = bytes_codec(Place)
CHAIN: Final = bytes_codec(Chain)


@dataclass(frozen=True, slots=True)
class LaneHello:
    """Introduction of a connection by the receiver that opens it, readable by anybody."""

    key: _Key
    """Key of the lane at the member that is asked."""
    rank: U32
    hop: _Key
    """Number by which the connections of one attempt belong together."""
    nth: U32
    """0 of the connection for reports, from 1 on of those that bring pieces; or ``AGAIN``."""
    nonce: _Key


@dataclass(frozen=True, slots=True)
class Challenge:
    """Proof of the member that is asked, and its challenge to the other."""

    nonce: _Key
    proof: _Secret


@dataclass(frozen=True, slots=True)
class Proof:
    """Answer to the challenge."""

    proof: _Secret


@dataclass(frozen=True, slots=True)
class Held:
    """Pieces of a bucket that have arrived: a bit each, the lowest of a byte first."""

    sequence: int
    pieces: Annotated[bytes, _MAX_BITMAP_BYTES]


@dataclass(frozen=True, slots=True)
class Wants:
    """Request of a receiver for all that it lacks, from one bucket on; of ``AGAIN``, for that one
    alone."""

    first: int
    held: Annotated[tuple[Held, ...], _MAX_BUCKETS]


@dataclass(frozen=True, slots=True)
class Serves:
    """Answer to ``Wants``."""

    first: int
    """First bucket that is here still. The receiver asks another member if it lacks an earlier
    one."""


@dataclass(frozen=True, slots=True)
class KeptBucket:
    """Report that receivers have verified a bucket, and will not ask for it again in any group."""

    sequence: int
    ranks: Annotated[tuple[U32, ...], _MAX_RANKS]


Message = LaneHello | Challenge | Proof | Wants | Serves | KeptBucket

MESSAGES: Final = Codec[Message](
    b"WSTR", VERSION, {1: LaneHello, 2: Challenge, 3: Proof, 4: Wants, 5: Serves, 6: KeptBucket}
)
