"""Digests over the payloads of a layout's buckets, and their trailers."""

from __future__ import annotations

import torch
import xxhash

from weft.contract.errors import UnsupportedError
from weft.contract.manifest import TRAILER_BYTES, WSUM64, XXH3_64, Manifest, check_trailer
from weft.transport.digest import tensor_digest


def payload_digest(payload: torch.Tensor, algorithm: int) -> int:
    """Digest of a uint8 tensor, on whatever device it lies; blocks until that is done.

    Raises:
        UnsupportedError: This side does not know the algorithm, or not on this device.
    """
    if algorithm == WSUM64:
        return tensor_digest(payload)
    if algorithm != XXH3_64:
        raise UnsupportedError(f"digest algorithm {algorithm} is not known here; update this side")
    if payload.device.type != "cpu":
        raise UnsupportedError(f"xxh3_64 cannot be computed on {payload.device}; use wsum64")
    return xxhash.xxh3_64_intdigest(payload.numpy().data)


def verify_bucket(wire: torch.Tensor, manifest: Manifest, index: int, nonce: int) -> int:
    """Check a bucket that has arrived against its trailer; returns its payload's digest.

    Raises:
        DigestMismatchError: Other bytes arrived than were sent.
    """
    bucket = manifest.buckets[index]
    digest = payload_digest(wire[: bucket.payload_bytes], manifest.digest_algorithm)
    end = bucket.payload_bytes + TRAILER_BYTES
    check_trailer(
        wire[bucket.payload_bytes : end].cpu().numpy().data,
        digest=digest,
        nonce=nonce,
        bucket=index,
        payload_bytes=bucket.payload_bytes,
    )
    return digest


def run_digest(content: torch.Tensor, first_byte: int) -> int:
    """What some bytes of a bucket's payload add to its ``WSUM64`` digest, modulo 2^64."""
    return tensor_digest(content, first_byte=first_byte)
