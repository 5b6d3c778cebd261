"""Sealing and verification of buckets, and the options of their travel.

A bucket's trailer digests the digests of what it carries, each of its part of a tensor at its
place: so the payload is read once, for the wire and for the version.

Source: docs/protocol.md, A bucket on the wire.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import xxhash

from weft_rl.containers import LruMapping
from weft_rl.contract.errors import DigestMismatchError
from weft_rl.contract.manifest import (
    TRAILER_BYTES,
    Manifest,
    Run,
    align_up,
    check_coverage,
    check_trailer,
    pack_runs,
    pack_trailer,
    unpack_runs,
)
from weft_rl.contract.tensors import TensorMeta
from weft_rl.transport.digests.copies import PlacedRange, copied_words, copy_digesting, copy_words
from weft_rl.transport.digests.host_copy import HostCopy
from weft_rl.transport.digests.kernel import CopiedWords
from weft_rl.transport.digests.wsum64 import Digests, Part, joined, start_digests


class BucketOptions(NamedTuple):
    """Options of sending or receiving a bucket; by default whole, from buffer to buffer."""

    borrows: bool = False
    """True if the bytes of a receive may stay in the sender's memory, to be read there."""
    tail_bytes: int = 0
    """Number of last bytes that are sent from the host, and wanted there."""
    tail: bytes = b""
    """Beginning of these last bytes in a send; they are not in the buffer yet. Whoever knows them
    has waited for all before them, as the digest in them asks for. So a backend that carries them
    beside the buffer waits for nothing more."""
    on_kept: Callable[[], None] | None = None
    """Callback of a send, on any thread, once every receiver has said that it keeps the bucket,
    where a backend carries that (``Operation.is_kept``)."""
    is_dropped: bool = False
    """True if nobody reads what a receive brings: its bytes may stay where they are, and its buffer
    is never written where they do."""


WHOLE = BucketOptions()


class ArrivedBucket(NamedTuple):
    """Way in which a bucket has arrived; by default whole, in its buffer."""

    lent: torch.Tensor | None = None
    """Its bytes in the sender's memory, to be read there until they are given back; they are not in
    the buffer. Without its tail, where that came beside them."""
    tail: bytes | None = None
    """Its last bytes that were asked for, or those of them that were sent; None where they are in
    the buffer, unread."""


IN_ITS_BUFFER = ArrivedBucket()


def write_tail(buffer: torch.Tensor, options: BucketOptions) -> None:
    """Write the beginning of a buffer's last bytes; on a GPU the thread waits for its turn
    there."""
    if tail := options.tail:
        begin = buffer.numel() - options.tail_bytes
        buffer[begin : begin + len(tail)] = torch.frombuffer(bytearray(tail), dtype=torch.uint8)


def whole_parts(manifest: Manifest, index: int) -> list[Part]:
    """List the tensors of a layout's bucket, where they lie in its payload."""
    slots = [manifest.tensors[i] for i in manifest.tensors_by_bucket[index]]
    return [Part(slot.offset_bytes, align_up(slot.meta.num_bytes)) for slot in slots]


@dataclass(frozen=True)
class _WholeBucket:
    """A bucket of a layout as it travels whole."""

    parts: list[Part]

    @cached_property
    def words(self) -> tuple[CopiedWords, ...] | None:
        """Words of its tensors, at the places that they have; see ``copied_words``."""
        return copied_words(self.parts, [PlacedRange(p.at, 0, p.num_bytes) for p in self.parts])


def _whole(manifest: Manifest, index: int) -> _WholeBucket:
    """Return a layout's bucket as it travels whole. It is kept, since the next version has the
    same: making it takes as long as copying an adapter."""
    key = manifest.layout_digest, index
    with _known_lock:
        known = _known_wholes.get(key)
    if known is None:
        known = _WholeBucket(whole_parts(manifest, index))
        with _known_lock:
            _known_wholes.put(key, known)
    return known


def run_parts(manifest: Manifest, runs: Iterable[Run]) -> list[Part]:
    """List the parts of runs that lie one behind the other, as a payload holds them."""
    parts: list[Part] = []
    at = 0
    for run in runs:
        size = manifest.tensors[run.tensor].meta.dtype.itemsize_bytes
        is_slice = run.repeats > 1
        part = Part(
            at,
            run.payload_bytes(size),
            run.begin_bytes(size),
            run.count * size if is_slice else 0,
            run.stride * size,
        )
        parts.append(part)
        at += part.num_bytes
    return parts


class SealedBucket(NamedTuple):
    """Digest, size and tail of a bucket that is ready to be sent."""

    digest: int
    """Digest in its trailer."""
    payload_bytes: int
    tail: bytes
    """Bytes that follow the payload as it travels: the trailer, and the list of its runs if it
    lists them. There may be more room than that."""


def seal_bucket(
    payload_bytes: int,
    nonce: int,
    index: int,
    digests: Sequence[int],
    runs: Sequence[Run] | None = None,
) -> SealedBucket:
    """Compute the digest and the tail that travel with a bucket's payload
    (``SideGroup.broadcast``).

    Args:
        payload_bytes, nonce, index: Values of the trailer.
        digests: Digests of its tensors, or of its runs, in order.
        runs: Runs that the payload consists of; None where these are the layout's tensors.
    """
    table = b"" if runs is None else pack_runs(runs)
    digest = xxhash.xxh3_64_intdigest(table + joined(digests))
    tail = pack_trailer(digest, nonce, index, payload_bytes) + table
    return SealedBucket(digest, payload_bytes, tail)


def verify_bucket(wire: torch.Tensor, manifest: Manifest, index: int, nonce: int) -> list[int]:
    """Check a layout's bucket that has arrived; return the digests of its tensors, in order.

    Raises:
        DigestMismatchError: Other bytes arrived than were sent.
    """
    return start_bucket(wire, manifest, index, nonce)()


def start_bucket(
    wire: torch.Tensor,
    manifest: Manifest,
    index: int,
    nonce: int,
    arrived: ArrivedBucket = IN_ITS_BUFFER,
) -> Callable[[], list[int]]:
    """Begin ``verify_bucket``; return a function that ends it. In between a GPU works on it, on the
    calling thread's current stream.

    Args:
        arrived: Way of arrival; what was lent is copied to ``wire`` as it is digested, each word
            read once.
    """
    lent = arrived.lent
    size = manifest.buckets[index].payload_bytes
    whole, digests = _whole(manifest, index), None
    if lent is not None:
        if lent.is_cuda:
            digests = copy_words(lent[:size], whole.words, wire)
        else:
            digests = Digests(copy_digesting(lent[:size], whole.parts, wire[:size]))
        rest = 0 if digests is None else size
        wire[rest:size].copy_(lent[rest:size], non_blocking=True)
    digests = digests or start_digests(wire[:size], whole.parts)
    tail = _start_tail(wire, size, arrived)

    def end() -> list[int]:
        found = digests.wait()
        digest = xxhash.xxh3_64_intdigest(joined(found))
        check_trailer(
            tail()[:TRAILER_BYTES], digest=digest, nonce=nonce, bucket=index, payload_bytes=size
        )
        return found

    return end


class BucketMemory(NamedTuple):
    """Memory in which buckets of a layout are put together from runs."""

    data: torch.Tensor
    """Memory for them: uint8, 1-D, contiguous."""
    starts: Sequence[int]
    """First byte in it of each bucket of the layout."""


class VerifiedBucket(NamedTuple):
    """Contents of a bucket that lists its runs, once it has been checked."""

    runs: Sequence[Run]
    digests: list[int]
    """Digest of each run."""
    is_placed: bool
    """True if the runs were copied to their places, too."""


def verify_runs(
    wire: torch.Tensor, payload_bytes: int, manifest: Manifest, index: int, nonce: int
) -> VerifiedBucket:
    """Check a bucket that lists its runs; see ``start_runs``."""
    return start_runs(wire, payload_bytes, manifest, index, nonce)()


def start_runs(
    wire: torch.Tensor,
    payload_bytes: int,
    manifest: Manifest,
    index: int,
    nonce: int,
    *,
    bucket: int | None = None,
    into: BucketMemory | None = None,
    arrived: ArrivedBucket = IN_ITS_BUFFER,
) -> Callable[[], VerifiedBucket]:
    """Begin to check a bucket that lists its runs; return a function that ends it. In between a GPU
    works on it, on the calling thread's current stream.

    Runs are copied to their places where that can be done in the same reading: before it is
    known whether they are what was sent. Where it cannot, what was lent is copied to ``wire``
    first: a sender could change what was verified, and is placed after.

    Args:
        wire: uint8, as it arrived.
        payload_bytes: Size that its payload must have.
        manifest: The layout that its runs belong in.
        index, nonce: Values that its trailer must have.
        bucket: Bucket of the layout that its runs must lie in; None for any.
        into: Memory of the runs' places.
        arrived: Way of arrival; what was lent is read until the returned function has ended.

    Raises:
        DigestMismatchError: Other bytes arrived than were sent, or runs that its plan does not
            name, of which nothing was copied.
    """
    tail = _start_tail(wire, payload_bytes, arrived)()
    listed = _listed(tail[TRAILER_BYTES:], manifest, payload_bytes, index, bucket)
    content = wire if arrived.lent is None else arrived.lent
    payload, copied = content[:payload_bytes], None
    if into is not None:
        copied = copy_words(payload, listed.words_into(into.starts), into.data)
    if copied is None and arrived.lent is not None:
        payload = wire[:payload_bytes].copy_(payload, non_blocking=True)
    digests = copied or start_digests(payload, listed.parts)

    def end() -> VerifiedBucket:
        found = digests.wait()
        check_trailer(
            tail[:TRAILER_BYTES],
            digest=xxhash.xxh3_64_intdigest(pack_runs(listed.runs) + joined(found)),
            nonce=nonce,
            bucket=index,
            payload_bytes=payload_bytes,
        )
        return VerifiedBucket(listed.runs, found, copied is not None)

    return end


class ChangedRuns(NamedTuple):
    """Contents of a delta's bucket, once it has been checked."""

    runs: Sequence[Run]
    changes: torch.Tensor
    """Coded changes of the runs, uint8; a copy of this process."""


def start_changes(
    wire: torch.Tensor,
    payload_bytes: int,
    manifest: Manifest,
    index: int,
    nonce: int,
    arrived: ArrivedBucket = IN_ITS_BUFFER,
) -> Callable[[], ChangedRuns]:
    """Begin to check a delta's bucket; return a function that ends it. See ``start_runs``, whose
    arguments these are. A copy is checked, so that nobody can change it afterwards.

    Raises:
        DigestMismatchError: Other bytes arrived than were sent, or runs of another layout.
    """
    tail = _start_tail(wire, payload_bytes, arrived)()
    runs = unpack_runs(tail[TRAILER_BYTES:], manifest, None, index)
    content = wire if arrived.lent is None else arrived.lent
    changes = content[:payload_bytes].clone()
    digests = start_digests(changes, changes_parts(payload_bytes))

    def end() -> ChangedRuns:
        digest = xxhash.xxh3_64_intdigest(pack_runs(runs) + joined(digests.wait()))
        check_trailer(
            tail[:TRAILER_BYTES],
            digest=digest,
            nonce=nonce,
            bucket=index,
            payload_bytes=payload_bytes,
        )
        return ChangedRuns(runs, changes)

    return end


def changes_parts(payload_bytes: int) -> list[Part]:
    """Return the parts that a delta's payload is digested by: one, as if it were a tensor."""
    return [Part(0, payload_bytes)]


def _check_bucket(runs: Sequence[Run], owns: Sequence[int], index: int, bucket: int | None) -> None:
    """Refuse runs that lie in another bucket of the layout than the plan says."""
    for run, own in zip(runs, owns, strict=True):
        if bucket is not None and own != bucket:
            raise DigestMismatchError(
                f"bucket {index} lists {run}, which lies in bucket {own} of the layout; its "
                f"plan says {bucket}"
            )


def _start_tail(
    wire: torch.Tensor, payload_bytes: int, arrived: ArrivedBucket
) -> Callable[[], bytes]:
    """Begin to bring the bytes that follow a bucket's payload to the host; return a function that
    ends it and returns them."""
    if (tail := arrived.tail) is not None:
        return lambda: tail
    content = wire if arrived.lent is None else arrived.lent
    fetched = HostCopy(content[payload_bytes:], arrived=True)
    return lambda: fetched.wait().numpy().tobytes()


class _Listed(NamedTuple):
    """The runs of a bucket, and what follows from them."""

    runs: list[Run]
    parts: list[Part]
    places: list[tuple[int, PlacedRange]]
    """Place of each run: its bucket of the layout, and where in that it belongs."""
    words: LruMapping[tuple[int, ...], tuple[CopiedWords, ...] | None]
    """Results of ``words_into``."""

    def words_into(self, starts: Sequence[int]) -> tuple[CopiedWords, ...] | None:
        """Return the words to copy if the layout's buckets begin at ``starts``; see
        ``copied_words``. Results are kept: finding them takes longer than the copying."""
        key = tuple(starts[bucket] for bucket in sorted({bucket for bucket, _ in self.places}))
        with _known_lock:
            if key not in self.words:
                places = [place._replace(at=place.at + starts[b]) for b, place in self.places]
                self.words.put(key, copied_words(self.parts, places))
            return self.words.get(key)


def _listed(
    table: bytes, manifest: Manifest, payload_bytes: int, index: int, bucket: int | None
) -> _Listed:
    """Read the runs that a bucket lists, and check that it may; kept, since the next version's list
    is the same."""
    key = (manifest.layout_digest, table, payload_bytes, index, bucket)
    with _known_lock:
        known = _known.get(key)
    if known is None:
        runs = unpack_runs(table, manifest, payload_bytes, index)
        places = [_place(manifest, run) for run in runs]
        _check_bucket(runs, [own for own, _ in places], index, bucket)
        known = _Listed(runs, run_parts(manifest, runs), places, LruMapping(_MAX_STARTS))
        with _known_lock:
            _known.put(key, known)
    return known


# Targets that buckets are put together in at a time: a segment, or memory for one bucket each.
_MAX_STARTS = 4
_known: LruMapping[tuple[bytes, bytes, int, int, int | None], _Listed] = LruMapping(128)
_known_wholes: LruMapping[tuple[bytes, int], _WholeBucket] = LruMapping(128)
_known_lock = threading.Lock()


def _place(manifest: Manifest, run: Run) -> tuple[int, PlacedRange]:
    slot = manifest.tensors[run.tensor]
    size, num_bytes = slot.meta.dtype.itemsize_bytes, slot.meta.num_bytes
    end = run.end * size
    # The zeros that follow a tensor go with its last run.
    end = align_up(end) if end == num_bytes else end
    return slot.bucket, PlacedRange(slot.offset_bytes, run.first * size, end)


def tensor_sums(manifest: Manifest, runs: Sequence[Run], digests: Sequence[int]) -> list[int]:
    """Add up the digests of a version's tensors from those of the runs that it came in, in any
    order.

    Raises:
        InvalidManifestError: They do not cover every element once; names a place.
    """
    return _sums([slot.meta for slot in manifest.tensors], runs, digests)


def bucket_sums(
    manifest: Manifest, bucket: int, runs: Sequence[Run], digests: Sequence[int]
) -> list[int]:
    """Add up the digests of the tensors of one bucket of the layout, from runs that lie in it; see
    ``tensor_sums``."""
    tensors = manifest.tensors_by_bucket[bucket]
    places = {tensor: nth for nth, tensor in enumerate(tensors)}
    own = [run._replace(tensor=places[run.tensor]) for run in runs]
    return _sums([manifest.tensors[tensor].meta for tensor in tensors], own, digests)


def _sums(metas: Sequence[TensorMeta], runs: Sequence[Run], digests: Sequence[int]) -> list[int]:
    check_coverage(metas, runs)
    sums = [0] * len(metas)
    for run, digest in zip(runs, digests, strict=True):
        sums[run.tensor] = (sums[run.tensor] + digest) % 2**64
    return sums


def in_manifest_order(manifest: Manifest, by_bucket: Sequence[Sequence[int]]) -> list[int]:
    """Put the digests of a version's tensors, given for each bucket of its layout, into one
    list."""
    ordered = [0] * len(manifest.tensors)
    for tensors, digests in zip(manifest.tensors_by_bucket, by_bucket, strict=True):
        for tensor, digest in zip(tensors, digests, strict=True):
            ordered[tensor] = digest
    return ordered
