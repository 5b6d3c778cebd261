"""Buckets as they travel where nothing goes beside them: payload and tail in one buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft_rl.contract.manifest import Run
from weft_rl.transport.wire.buckets import BucketOptions, SealedBucket, seal_bucket, write_tail


def seal_wire(
    wire: torch.Tensor,
    payload_bytes: int,
    nonce: int,
    index: int,
    digests: Sequence[int],
    runs: Sequence[Run] | None = None,
) -> SealedBucket:
    """``seal_bucket``, and the tail in its place."""
    return put_tail(wire, seal_bucket(payload_bytes, nonce, index, digests, runs))


def put_tail(wire: torch.Tensor, sealed: SealedBucket) -> SealedBucket:
    """The tail of a bucket in its place, as a backend puts it there."""
    write_tail(wire, BucketOptions(False, wire.numel() - sealed.payload_bytes, sealed.tail))
    return sealed
