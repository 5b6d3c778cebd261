"""Messages between the ranks of a replica about a base that is loaded in place.

A manifest travels as the protos have it.
"""

from __future__ import annotations

import contextlib
import struct
import typing
from dataclasses import dataclass
from typing import Annotated, Final, TypeVar

from google.protobuf.message import DecodeError

from rollout_side.memory.segment import SegmentRef
from weft_rl.contract.errors import PeerUnavailableError, WeftError, error_from_reason
from weft_rl.contract.manifest import MAX_TENSORS, Manifest
from weft_rl.ipc.bytes_codec import BytesCodec, bytes_codec, register
from weft_rl.ipc.connection import Codec, Connection, PeerError, PeerGoneError, PeerTimeoutError
from weft_rl.rpc.manifest_codec import manifest_from_chunks, manifest_to_chunks
from weft_rl.v1 import types_pb2

_T = TypeVar("_T")
# A million tensors of 128 characters each, and what is said of them beside.
_MAX_LAYOUT = 2**29


@dataclass(frozen=True)
class LoadRequest:
    """First message of a rank: the transfer that it loads."""

    transfer_id: Annotated[str, 1_024]
    rank: int


@dataclass(frozen=True)
class Layout:
    """Answer to ``LoadRequest``: the layout of the version."""

    manifest: Manifest


@dataclass(frozen=True)
class Buffers:
    """Buffers that the next buckets lie in; earlier ones are not used again."""

    refs: Annotated[tuple[SegmentRef, ...], 256]


@dataclass(frozen=True)
class Arrived:
    """Bucket that may be read until ``Loaded``."""

    number: int
    """Number of its buffer."""
    digests: Annotated[tuple[int, ...], MAX_TENSORS]


@dataclass(frozen=True)
class Working:
    """Report of a rank that it is still loading."""


@dataclass(frozen=True)
class Loaded:
    """Report of a rank that it is done with the bucket."""


@dataclass(frozen=True)
class Complete:
    """Last message of a rank: its loader is done with all buckets."""


@dataclass(frozen=True)
class Failed:
    """Last message of either side: its error. Each rank says for itself whether weights are
    mixed."""

    reason: Annotated[str, 256]
    message: Annotated[str, 65_536]

    def error(self) -> WeftError:
        """Return the error that the other side raised."""
        return error_from_reason(self.reason, self.message, {})


@dataclass(frozen=True)
class Follow:
    """First message of a rank whose weights take deltas: the elements that lie there."""

    rank: int
    layout_digest: Annotated[bytes, 32]
    counts: Annotated[tuple[int, ...], MAX_TENSORS]
    """Shards of each tensor."""
    shards: tuple[int, ...]
    """The four numbers of each shard."""


@dataclass(frozen=True)
class Offered:
    """Delta that a rank is to read against its weights."""

    transfer_id: Annotated[str, 1_024]
    version: Annotated[str, 1_024]
    base: Annotated[bytes, 32]
    """Content digest of the base that it changes."""
    runs: tuple[int, ...]
    """The five numbers of each run."""
    counts: tuple[int, ...]
    """Runs of each payload."""
    sizes: tuple[int, ...]
    """Bytes of each payload."""
    ref: SegmentRef
    """Payloads, one behind the other; not there any more after ``RankSums``."""


@dataclass(frozen=True)
class RankSums:
    """Answer to ``Offered``: sums of what lies at the rank; see ``HeldChanges``."""

    sums: tuple[int, ...]


@dataclass(frozen=True)
class Settled:
    """Digests of the version that the delta makes at all ranks: the rank is to keep its part."""

    content_digest: Annotated[bytes, 32]
    digests: Annotated[tuple[int, ...], MAX_TENSORS]


@dataclass(frozen=True)
class KeptDelta:
    """Answer to ``Settled``: the rank can apply it at the commit."""


Message = (
    LoadRequest
    | Layout
    | Buffers
    | Arrived
    | Working
    | Loaded
    | Complete
    | Failed
    | Follow
    | Offered
    | RankSums
    | Settled
    | KeptDelta
)


@dataclass(frozen=True)
class _Chunks:
    chunks: tuple[bytes, ...]


def _pack_manifest(manifest: Manifest) -> bytes:
    chunks = (chunk.SerializeToString() for chunk in manifest_to_chunks(manifest))
    return bytes_codec(_Chunks).pack(_Chunks(tuple(chunks)))


def _unpack_manifest(content: bytes) -> Manifest:
    chunks = bytes_codec(_Chunks).unpack(content).chunks
    try:
        return manifest_from_chunks(map(types_pb2.ManifestChunk.FromString, chunks))
    except DecodeError as error:
        raise ValueError(str(error)) from error


register(Manifest, BytesCodec(_pack_manifest, _unpack_manifest, _MAX_LAYOUT))


def unpacked(value: type[_T], content: bytes) -> _T:
    """Decode what another process of the replica has packed.

    Raises:
        PeerUnavailableError: The bytes are no such thing.
        InvalidManifestError, CapacityError: A manifest that cannot be right.
    """
    try:
        return bytes_codec(value).unpack(content)
    except (struct.error, ValueError) as error:
        raise PeerUnavailableError(f"garbled {value.__name__}: {error}") from error


MESSAGES: Final = Codec[Message](
    b"WEFR",
    4,
    dict(enumerate(typing.get_args(Message), 1)),
)


class RankConnection(Connection[Message]):
    """Connection between two ranks of a replica. One thread uses it; any may call ``fail`` and
    ``shut``."""

    def say(self, message: Message) -> None:
        """Send a message; raises as ``hear`` does if the other side has gone."""
        try:
            self.send(message)
        except PeerTimeoutError as error:
            raise PeerUnavailableError(str(error)) from error
        except PeerGoneError:
            with contextlib.suppress(PeerGoneError):
                while True:  # what it said before it went
                    self._next()
            raise

    def hear(self, *kinds: type[_T]) -> _T:
        """Receive a message of these kinds; block until it comes, or the other side is gone.

        Raises:
            PeerGoneError: The other side has gone; or ``shut`` was called.
            WeftError: The error that the other side has failed with.
            PeerUnavailableError: The bytes are half a message, no message, or one of another kind.
        """
        message = self._next()
        if isinstance(message, kinds):
            return message
        raise PeerUnavailableError(f"{self.peer} has said {type(message).__name__} out of turn")

    def _next(self) -> Message:
        try:
            message, _ = self.receive()
        except PeerGoneError:
            raise
        except PeerError as error:
            raise PeerUnavailableError(str(error)) from error
        if isinstance(message, Failed):
            raise message.error()
        return message

    def fail(self, error: WeftError) -> None:
        """Send the error that has ended this side, and shut the connection; the other side may be
        gone."""
        with contextlib.suppress(PeerError):
            self.send(Failed(error.reason, error.message))
        self.shut()
