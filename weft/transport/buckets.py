"""Sealing and verifying buckets.

A bucket's trailer digests the digests of what it carries, each of its part of a tensor at its
place: so the payload is read once, for the wire and for the version.

Source: docs/protocol.md, A bucket on the wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import xxhash

from weft.contract.layout.manifest import (
    TRAILER_BYTES,
    Manifest,
    align_up,
    check_trailer,
    pack_trailer,
)
from weft.contract.layout.runs import Run, check_coverage, pack_runs, unpack_runs
from weft.contract.layout.tensors import TensorMeta
from weft.transport.digest import Part, joined, part_digests


def whole_parts(manifest: Manifest, index: int) -> list[Part]:
    """The tensors of a layout's bucket, where they lie in its payload."""
    slots = [manifest.tensors[i] for i in manifest.tensors_by_bucket[index]]
    return [Part(slot.offset_bytes, align_up(slot.meta.num_bytes)) for slot in slots]


def run_parts(manifest: Manifest, runs: Iterable[Run]) -> list[Part]:
    """Runs one behind the other, as a payload holds them."""
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


def seal_bucket(
    wire: torch.Tensor,
    payload_bytes: int,
    nonce: int,
    index: int,
    digests: Sequence[int],
    runs: Sequence[Run] | None = None,
) -> int:
    """Write a bucket's trailer, and the list of its runs if it lists them, behind its payload.

    Args:
        wire: uint8, the bucket as it travels, its payload in place.
        payload_bytes, nonce, index: For the trailer.
        digests: Of its tensors, or of its runs, in order.
        runs: What the payload consists of; None where that is the layout's tensors.

    Returns:
        The digest in its trailer.
    """
    table = b"" if runs is None else pack_runs(runs)
    digest = xxhash.xxh3_64_intdigest(table + joined(digests))
    tail = pack_trailer(digest, nonce, index, payload_bytes) + table
    end = payload_bytes + len(tail)
    wire[payload_bytes:end] = torch.frombuffer(bytearray(tail), dtype=torch.uint8)
    return digest


def verify_bucket(wire: torch.Tensor, manifest: Manifest, index: int, nonce: int) -> list[int]:
    """Check a layout's bucket that has arrived; the digests of its tensors, in order.

    Raises:
        DigestMismatchError: Other bytes arrived than were sent.
    """
    size = manifest.buckets[index].payload_bytes
    digests = part_digests(wire[:size], whole_parts(manifest, index))
    trailer = wire[size : size + TRAILER_BYTES].cpu().numpy().data
    digest = xxhash.xxh3_64_intdigest(joined(digests))
    check_trailer(trailer, digest=digest, nonce=nonce, bucket=index, payload_bytes=size)
    return digests


def verify_runs(
    wire: torch.Tensor, payload_bytes: int, manifest: Manifest, index: int, nonce: int
) -> tuple[list[Run], list[int]]:
    """Check a bucket that lists its runs; these in order, and the digest of each.

    Args:
        wire: uint8, as it arrived.
        payload_bytes: That it must have.
        manifest: The layout that its runs belong in.
        index, nonce: That its trailer must say.

    Raises:
        DigestMismatchError: Other bytes arrived than were sent.
    """
    tail = wire[payload_bytes:].cpu().numpy().tobytes()
    runs = unpack_runs(tail[TRAILER_BYTES:], manifest, payload_bytes, index)
    digests = part_digests(wire[:payload_bytes], run_parts(manifest, runs))
    check_trailer(
        tail[:TRAILER_BYTES],
        digest=xxhash.xxh3_64_intdigest(pack_runs(runs) + joined(digests)),
        nonce=nonce,
        bucket=index,
        payload_bytes=payload_bytes,
    )
    return runs, digests


def tensor_sums(manifest: Manifest, runs: Sequence[Run], digests: Sequence[int]) -> list[int]:
    """Digests of a version's tensors, from those of the runs that it came in, in any order.

    Raises:
        InvalidManifestError: They do not cover every element once; names a place.
    """
    return _sums([slot.meta for slot in manifest.tensors], runs, digests)


def bucket_sums(
    manifest: Manifest, bucket: int, runs: Sequence[Run], digests: Sequence[int]
) -> list[int]:
    """As ``tensor_sums`` of the tensors of one bucket of the layout, from runs that lie in it."""
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
    """Digests of a version's tensors, from those of each of its layout's buckets."""
    ordered = [0] * len(manifest.tensors)
    for tensors, digests in zip(manifest.tensors_by_bucket, by_bucket, strict=True):
        for tensor, digest in zip(tensors, digests, strict=True):
            ordered[tensor] = digest
    return ordered
