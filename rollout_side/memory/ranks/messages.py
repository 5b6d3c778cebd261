"""Messages between the ranks of a replica about a base that is loaded in place.

Fields are little-endian; a manifest travels as the protos have it.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError

from rollout_side.memory.segment import DeviceRef, HostRef, SegmentRef
from rollout_side.memory.versions import StagedHandle
from weft_rl.contract.errors import PeerUnavailableError, WeftError, error_from_reason
from weft_rl.contract.manifest import MAX_TENSORS, Manifest
from weft_rl.contract.names import PolicyVersion
from weft_rl.ipc.connection import (
    Codec,
    Connection,
    Kind,
    PeerError,
    PeerGoneError,
    PeerTimeoutError,
)
from weft_rl.rpc.manifest_codec import manifest_from_chunks, manifest_to_chunks
from weft_rl.v1 import types_pb2

# Of texts, in bytes; a longer one is cut.
_MAX_ID, _MAX_REASON, _MAX_TEXT = 1_024, 256, 65_536
# Buffers of one side group, and the bytes that say where one of them is.
_MAX_REFS, _MAX_REF = 256, 4_096
_DIGEST_BYTES = 8
_T = TypeVar("_T")
# A million tensors of 128 characters each, and what is said of them beside.
_MAX_LAYOUT = 2**29


@dataclass(frozen=True)
class LoadRequest:
    """First message of a rank: the transfer that it loads."""

    transfer_id: str
    rank: int


@dataclass(frozen=True)
class Layout:
    """Answer to ``LoadRequest``: the layout of the version."""

    manifest: Manifest


@dataclass(frozen=True)
class Buffers:
    """Buffers that the next buckets lie in; earlier ones are not used again."""

    refs: Sequence[SegmentRef]


@dataclass(frozen=True)
class Arrived:
    """Bucket that may be read until ``Loaded``."""

    number: int
    """Number of its buffer."""
    digests: Sequence[int]


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

    reason: str
    message: str

    def error(self) -> WeftError:
        """Return the error that the other side raised."""
        return error_from_reason(self.reason, self.message, {})


Message = LoadRequest | Layout | Buffers | Arrived | Working | Loaded | Complete | Failed


def pack_manifest(manifest: Manifest) -> bytes:
    """Encode a manifest for another process of the replica."""
    return b"".join(_string(chunk.SerializeToString()) for chunk in manifest_to_chunks(manifest))


def unpack_manifest(content: bytes) -> Manifest:
    """Decode what ``pack_manifest`` returned.

    Raises:
        PeerUnavailableError: The bytes are no such thing.
        InvalidManifestError, CapacityError: A manifest that cannot be right.
    """
    return _decoded(content, "a manifest", lambda reader: manifest_from_chunks(_chunks(reader)))


def pack_handle(handle: StagedHandle) -> bytes:
    """Encode a staged version's handle for another rank."""
    version = handle.version
    texts = (handle.transfer_id.encode(), version.policy.encode(), handle.content_digest)
    return b"".join(
        [
            _VERSION.pack(version.version),
            *map(_string, texts),
            _pack_ref(handle.segment),
            pack_manifest(handle.manifest),
        ]
    )


def unpack_handle(content: bytes) -> StagedHandle:
    """Decode what ``pack_handle`` returned; raises as ``unpack_manifest``."""
    return _decoded(content, "a staged version", _unpack_handle)


def _unpack_handle(reader: _Reader) -> StagedHandle:
    (number,) = reader.fields(_VERSION)
    transfer_id, policy = reader.string().decode(), reader.string().decode()
    digest, segment = reader.string(), _unpack_ref(reader)
    version, manifest = PolicyVersion(policy, number), manifest_from_chunks(_chunks(reader))
    return StagedHandle(transfer_id, version, manifest, segment, digest)


def _decoded(content: bytes, what: str, unpack_from: Callable[[_Reader], _T]) -> _T:
    try:
        return _whole(content, unpack_from)
    except (struct.error, ValueError) as error:
        raise PeerUnavailableError(f"another rank says {what}, garbled: {error}") from error


def _whole(content: bytes, unpack_from: Callable[[_Reader], _T]) -> _T:
    """Return what is read of all of ``content``; raises as ``Kind.unpack``."""
    reader = _Reader(content)
    try:
        found = unpack_from(reader)
    except DecodeError as error:
        raise ValueError(str(error)) from error
    reader.end()
    return found


class _Reader:
    """Parser of a message's body."""

    def __init__(self, body: bytes) -> None:
        self._body, self._at = memoryview(body), 0

    @property
    def num_left(self) -> int:
        return len(self._body) - self._at

    def fields(self, form: struct.Struct) -> tuple[int, ...]:
        found: tuple[int, ...] = form.unpack_from(self._body, self._at)
        self._at += form.size
        return found

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > self.num_left:
            raise ValueError("it ends too early")
        self._at += num_bytes
        return bytes(self._body[self._at - num_bytes : self._at])

    def string(self) -> bytes:
        """Read bytes that ``_string`` has packed."""
        (num_bytes,) = self.fields(_LENGTH)
        return self.take(num_bytes)

    def end(self) -> None:
        if self.num_left:
            raise ValueError(f"{self.num_left:,} bytes too many")


_NUMBER = _LENGTH = struct.Struct("<I")
_VERSION = struct.Struct("<Q")
_WHERE = struct.Struct("<B")
_HOST = struct.Struct("<IIQ")
_DEVICE = struct.Struct("<IQQQQQ?")
_ON_HOST, _ON_DEVICE = 0, 1


def _string(content: bytes) -> bytes:
    return _LENGTH.pack(len(content)) + content


def _text(text: str, max_bytes: int) -> bytes:
    return text.encode("utf-8", "replace")[:max_bytes]


def _pack_wanted(message: LoadRequest) -> bytes:
    return _NUMBER.pack(message.rank) + _text(message.transfer_id, _MAX_ID)


def _unpack_wanted(reader: _Reader) -> LoadRequest:
    (rank,) = reader.fields(_NUMBER)
    return LoadRequest(reader.take(reader.num_left).decode(), rank)


def _pack_layout(message: Layout) -> bytes:
    return pack_manifest(message.manifest)


def _unpack_layout(reader: _Reader) -> Layout:
    return Layout(manifest_from_chunks(_chunks(reader)))


def _chunks(reader: _Reader) -> Iterator[types_pb2.ManifestChunk]:
    while reader.num_left:
        yield types_pb2.ManifestChunk.FromString(reader.string())


def _pack_buffers(message: Buffers) -> bytes:
    return b"".join(map(_pack_ref, message.refs))


def _unpack_buffers(reader: _Reader) -> Buffers:
    refs: list[SegmentRef] = []
    while reader.num_left:
        refs.append(_unpack_ref(reader))
        if len(refs) > _MAX_REFS:
            raise ValueError(f"more than {_MAX_REFS} buffers")
    return Buffers(refs)


def _pack_ref(ref: SegmentRef) -> bytes:
    if isinstance(ref, HostRef):
        return _WHERE.pack(_ON_HOST) + _HOST.pack(ref.pid, ref.fd, ref.num_bytes)
    assert isinstance(ref, DeviceRef)
    return (
        _WHERE.pack(_ON_DEVICE)
        + _DEVICE.pack(
            ref.device, ref.num_bytes, ref.first_byte, ref.storage_bytes, ref.storage_offset,
            ref.counter_offset, ref.event_sync,
        )
        + b"".join(map(_string, (ref.handle, ref.counter_handle, ref.event_handle)))
    )  # fmt: skip


def _unpack_ref(reader: _Reader) -> SegmentRef:
    (where,) = reader.fields(_WHERE)
    if where == _ON_HOST:
        return HostRef(*reader.fields(_HOST))
    if where != _ON_DEVICE:
        raise ValueError(f"memory of kind {where}")
    device, num_bytes, first_byte, storage_bytes, offset, counter_offset, event_sync = (
        reader.fields(_DEVICE)
    )
    return DeviceRef(
        device=device,
        num_bytes=num_bytes,
        first_byte=first_byte,
        storage_bytes=storage_bytes,
        storage_offset=offset,
        handle=reader.string(),
        counter_handle=reader.string(),
        counter_offset=counter_offset,
        event_handle=reader.string(),
        event_sync=bool(event_sync),
    )


def _pack_arrived(message: Arrived) -> bytes:
    digests = message.digests
    return _NUMBER.pack(message.number) + struct.pack(f"<{len(digests)}Q", *digests)


def _unpack_arrived(reader: _Reader) -> Arrived:
    (number,) = reader.fields(_NUMBER)
    count, odd = divmod(reader.num_left, _DIGEST_BYTES)
    if odd:
        raise ValueError("part of a digest")
    return Arrived(number, [*struct.unpack(f"<{count}Q", reader.take(reader.num_left))])


def _pack_failed(message: Failed) -> bytes:
    return _string(_text(message.reason, _MAX_REASON)) + _text(message.message, _MAX_TEXT)


def _unpack_failed(reader: _Reader) -> Failed:
    reason = reader.string().decode("utf-8", "replace")
    return Failed(reason, reader.take(reader.num_left).decode("utf-8", "replace"))


def _pack_nothing(message: Message) -> bytes:
    return b""


def _kind(
    message: type[Message],
    max_bytes: int,
    pack: Callable[[Any], bytes],
    unpack: Callable[[_Reader], Message],
) -> Kind[Message]:
    return Kind(message, max_bytes, pack, lambda body: _whole(body, unpack))


MESSAGES: Final = Codec[Message](
    b"WEFR",
    2,
    {
        1: _kind(LoadRequest, _NUMBER.size + _MAX_ID, _pack_wanted, _unpack_wanted),
        2: _kind(Layout, _MAX_LAYOUT, _pack_layout, _unpack_layout),
        3: _kind(Buffers, _MAX_REFS * _MAX_REF, _pack_buffers, _unpack_buffers),
        4: _kind(
            Arrived, _NUMBER.size + MAX_TENSORS * _DIGEST_BYTES, _pack_arrived, _unpack_arrived
        ),
        5: _kind(Working, 0, _pack_nothing, lambda _: Working()),
        6: _kind(Loaded, 0, _pack_nothing, lambda _: Loaded()),
        7: _kind(Complete, 0, _pack_nothing, lambda _: Complete()),
        8: _kind(Failed, _LENGTH.size + _MAX_REASON + _MAX_TEXT, _pack_failed, _unpack_failed),
    },
)


class RankConnection(Connection[Message]):
    """Connection between two ranks of a replica. One thread uses it; any may call ``fail`` and
    ``shut``."""

    def say(self, message: Message) -> None:
        """Send a message; raises as ``hear`` does if the other side has gone.

        Raises:
            PeerGoneError: The other side has gone.
            PeerUnavailableError: The other side reads nothing.
        """
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
