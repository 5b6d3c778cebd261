"""Runs: what a bucket carries when its sender chooses as it packs, and not the manifest.

A manifest lays a version out, whoever sent it and in whatever order its tensors came. A
transfer that *carries runs* has as many buckets as the manifest, of the same payloads, but
fills them in an order of its own: after its trailer each bucket lists its runs, and a receiver
puts each where it belongs in the layout. So sizes and counts are known before the first byte,
and what is staged cannot be told from what came in the manifest's own order.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from weft.contract.errors import DigestMismatchError, InvalidManifestError
from weft.contract.manifest import ALIGN_BYTES, TRAILER_BYTES, WSUM64, Manifest, align_up

_COUNT = struct.Struct("<Q")
_RUN = struct.Struct("<QQQ")


@dataclass(frozen=True, slots=True)
class Run:
    """Contiguous bytes of a layout: a bucket of it, where in its payload, and how many; all
    of them multiples of ``ALIGN_BYTES``, padding included."""

    bucket: int
    offset_bytes: int
    num_bytes: int

    @property
    def end_bytes(self) -> int:
        """Where in its bucket it ends."""
        return self.offset_bytes + self.num_bytes


def run_wire_sizes(manifest: Manifest) -> tuple[int, ...]:
    """Bytes on the wire of each bucket of a transfer that carries runs; O(tensors).

    Payload and trailer, and room for as many runs as the layout's smallest tensors would make,
    and one that is cut at either end.
    """
    smallest = sorted(align_up(slot.meta.num_bytes) for slot in manifest.tensors)
    ends = list(accumulate(smallest))
    return tuple(
        align_up(
            bucket.payload_bytes
            + TRAILER_BYTES
            + _COUNT.size
            + _RUN.size * (bisect_right(ends, bucket.payload_bytes) + 2)
        )
        for bucket in manifest.buckets
    )


def check_carries_runs(manifest: Manifest) -> None:
    """Refuse a layout whose buckets cannot be filled in any order; O(tensors).

    Raises:
        InvalidManifestError: Its digest does not add up, or something lies in its payloads
            beside tensors and their padding.
    """
    if manifest.digest_algorithm != WSUM64:
        raise InvalidManifestError("buckets that carry runs need a layout digested by wsum64")
    if manifest.total_bytes != sum(align_up(s.meta.num_bytes) for s in manifest.tensors):
        raise InvalidManifestError("buckets that carry runs need a layout without gaps")


def joined(runs: Iterable[tuple[Run, int]]) -> list[tuple[Run, int]]:
    """The same runs and digests, those that continue one another as one."""
    done: list[tuple[Run, int]] = []
    for run, digest in runs:
        last, before = done[-1] if done else (None, 0)
        if last and (last.bucket, last.end_bytes) == (run.bucket, run.offset_bytes):
            longer = Run(last.bucket, last.offset_bytes, last.num_bytes + run.num_bytes)
            done[-1] = (longer, (before + digest) % 2**64)
        else:
            done.append((run, digest))
    return done


def pack_runs(runs: Sequence[Run]) -> bytes:
    """The list that follows a bucket's trailer: how many, then three numbers each.

    Source: docs/protocol.md, A bucket that carries runs.
    """
    packed = [_RUN.pack(run.bucket, run.offset_bytes, run.num_bytes) for run in runs]
    return _COUNT.pack(len(runs)) + b"".join(packed)


def unpack_runs(table: bytes | memoryview, manifest: Manifest, bucket: int) -> list[Run]:
    """The runs of a bucket that has arrived, if they can be its.

    Args:
        table: What follows the trailer; may be longer than the list.
        manifest: The layout that they belong in.
        bucket: Of the transfer.

    Raises:
        DigestMismatchError: They are not as long as the payload, or lie elsewhere than in
            the layout.
    """
    count = _COUNT.unpack_from(table)[0]
    room = (len(table) - _COUNT.size) // _RUN.size
    if not 1 <= count <= room:
        raise DigestMismatchError(f"bucket {bucket} lists {count} runs; it has room for {room}")
    end = _COUNT.size + count * _RUN.size
    runs = [Run(*fields) for fields in _RUN.iter_unpack(table[_COUNT.size : end])]
    for run in runs:
        if (
            run.bucket >= len(manifest.buckets)
            or not run.num_bytes
            or run.offset_bytes % ALIGN_BYTES
            or run.num_bytes % ALIGN_BYTES
            or run.end_bytes > manifest.buckets[run.bucket].payload_bytes
        ):
            raise DigestMismatchError(f"bucket {bucket} lists {run}, which is not of its layout")
    given = sum(run.num_bytes for run in runs)
    if given != manifest.buckets[bucket].payload_bytes:
        raise DigestMismatchError(
            f"bucket {bucket} lists runs of {given} bytes; its payload has "
            f"{manifest.buckets[bucket].payload_bytes}"
        )
    return runs


def bucket_sums(manifest: Manifest, runs: Iterable[tuple[Run, int]]) -> list[int]:
    """Digests of a layout's own buckets, from those of the runs that they came in.

    Args:
        manifest: The layout; its digest is WSUM64, whose parts add up.
        runs: Of all buckets, in any order, with the digest of each at its place.

    Raises:
        InvalidManifestError: They do not cover every byte once; names the first place.
    """
    sums = [0] * len(manifest.buckets)
    ends = [0] * len(manifest.buckets)
    for run, digest in sorted(runs, key=lambda of: (of[0].bucket, of[0].offset_bytes)):
        if run.offset_bytes != ends[run.bucket]:
            what = "came twice" if run.offset_bytes < ends[run.bucket] else "did not come"
            place = min(run.offset_bytes, ends[run.bucket])
            raise InvalidManifestError(f"byte {place} of bucket {run.bucket} {what}")
        ends[run.bucket] = run.end_bytes
        sums[run.bucket] = (sums[run.bucket] + digest) % 2**64
    for index, bucket in enumerate(manifest.buckets):
        if ends[index] != bucket.payload_bytes:
            raise InvalidManifestError(f"byte {ends[index]} of bucket {index} did not come")
    return sums
