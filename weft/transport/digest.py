"""Digests over buckets, the same on every side.

Source of the algorithm: xxHash's XXH3 64-bit with seed 0 (weft.v1.DigestAlgorithm).
It finds accidents (a bucket lost, torn or reordered), not attacks.
"""

from __future__ import annotations

import torch
import xxhash

from weft.contract.errors import UnsupportedError
from weft.contract.manifest import XXH3_64


def payload_digest(payload: torch.Tensor, algorithm: int) -> int:
    """Digest of a uint8 CPU tensor; reads it once, without the interpreter's lock.

    Raises:
        UnsupportedError: This side does not know the algorithm.
    """
    if algorithm != XXH3_64:
        raise UnsupportedError(f"digest algorithm {algorithm} is not known here; update this side")
    return xxhash.xxh3_64_intdigest(payload.numpy().data)


def content_digest(bucket_digests: list[int]) -> bytes:
    """One digest over all buckets of a version; 8 bytes, big-endian.

    Source: protos/weft/v1/types.proto, ContentDigest.
    """
    joined = b"".join(digest.to_bytes(8, "little") for digest in bucket_digests)
    return xxhash.xxh3_64_digest(joined)
