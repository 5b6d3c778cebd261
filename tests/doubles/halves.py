"""A send plan of two senders that could hold any layout."""

from __future__ import annotations

from weft_rl.contract.manifest import (
    ALIGN_BYTES,
    Manifest,
    SendPlan,
    WireBucket,
    align_up,
    make_send_plan,
)


def in_halves(manifest: Manifest) -> SendPlan:
    """Each has half of every bucket, in one run."""
    wires = []
    for index, bucket in enumerate(manifest.buckets):
        first = align_up(bucket.payload_bytes // 2)
        rest = max(ALIGN_BYTES, bucket.payload_bytes - first)
        wires += [WireBucket(0, index, first, 1), WireBucket(1, index, rest, 1)]
    return make_send_plan(2, wires)
