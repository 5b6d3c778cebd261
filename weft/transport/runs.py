"""Sealing and opening buckets that carry runs.

The digest in such a bucket's trailer covers the list of its runs and the digest of each at its
place in the layout, so that the payload is digested once, for the wire and for the version.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from weft.contract.layout_runs import Run, pack_runs, unpack_runs
from weft.contract.manifest import TRAILER_BYTES, Manifest, check_trailer, pack_trailer
from weft.transport.payload import run_digest

#: A run and its digest at its place.
DigestedRun = tuple[Run, int]


def seal_runs(
    wire: torch.Tensor, payload_bytes: int, nonce: int, index: int, runs: Sequence[DigestedRun]
) -> int:
    """Write a bucket's trailer and the list of its runs behind its payload.

    Args:
        wire: uint8, the bucket as it travels, its payload in place.
        payload_bytes, nonce, index: For the trailer.
        runs: What the payload consists of, in order.

    Returns:
        The digest in its trailer.
    """
    table = pack_runs([run for run, _ in runs])
    digest = _wire_digest(table, [of for _, of in runs])
    tail = pack_trailer(digest, nonce, index, payload_bytes) + table
    end = payload_bytes + len(tail)
    wire[payload_bytes:end] = torch.frombuffer(bytearray(tail), dtype=torch.uint8)
    return digest


def open_runs(
    wire: torch.Tensor, manifest: Manifest, index: int, nonce: int
) -> tuple[int, list[DigestedRun]]:
    """Check a bucket that has arrived; what its trailer holds, and its runs, in order.

    Raises:
        DigestMismatchError: Other bytes arrived than were sent.
    """
    size = manifest.buckets[index].payload_bytes
    tail = wire[size:].cpu().numpy().tobytes()
    table = tail[TRAILER_BYTES:]
    runs = unpack_runs(table, manifest, index)
    digested: list[DigestedRun] = []
    at = 0
    for run in runs:
        content = wire[at : at + run.num_bytes]
        digested.append((run, run_digest(content, run.offset_bytes)))
        at += run.num_bytes
    digest = _wire_digest(pack_runs(runs), [of for _, of in digested])
    check_trailer(
        tail[:TRAILER_BYTES], digest=digest, nonce=nonce, bucket=index, payload_bytes=size
    )
    return digest, digested


def _wire_digest(table: bytes, digests: Sequence[int]) -> int:
    joined = b"".join(digest.to_bytes(8, "little") for digest in digests)
    return xxhash.xxh3_64_intdigest(table + joined)
