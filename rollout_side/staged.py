"""Versions as they lie in a worker's memory; ``store`` holds them.

Nothing here knows vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rollout_side.segment import Segment, SegmentRef
from weft.contract.manifest import Manifest
from weft.contract.names import BASE_POLICY, PolicyVersion


@dataclass(frozen=True)
class StagedVersion:
    """Bytes of one version, received whole and verified.

    ``segment`` holds the manifest's buckets one after the other, each with its
    trailer, so bucket ``i`` starts at the sum of ``wire_bytes`` before it.
    """

    transfer_id: str
    version: PolicyVersion
    manifest: Manifest
    segment: Segment
    content_digest: bytes
    bucket_digests: tuple[int, ...] = ()
    """On the rank that received; empty where it was adopted."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and view of every tensor, in manifest order; no copy.

        The views are of shared memory that a later push may reuse once this
        version was dropped: clone what must outlive it, and never write.
        """
        starts = bucket_starts(self.manifest)
        for slot in self.manifest.tensors:
            begin = starts[slot.bucket] + slot.offset_bytes
            raw = self.segment.data[begin : begin + slot.meta.num_bytes]
            dtype = getattr(torch, slot.meta.dtype.torch_name)
            yield slot.meta.name, raw.view(dtype).view(slot.meta.shape)


def bucket_starts(manifest: Manifest) -> list[int]:
    """First byte of each bucket in a segment."""
    starts, at = [], 0
    for bucket in manifest.buckets:
        starts.append(at)
        at += bucket.wire_bytes
    return starts


@dataclass(frozen=True)
class PartialTransfer:
    """Buckets of one version, verified from the first on; the rest is to come."""

    transfer_id: str
    trainer_id: str
    manifest: Manifest
    segment: Segment
    digests: list[int]
    """Of the verified buckets."""


@dataclass(frozen=True)
class StagedHandle:
    """A staged version as another worker of the same machine can adopt it; picklable."""

    transfer_id: str
    version: PolicyVersion
    manifest: Manifest
    segment: SegmentRef
    content_digest: bytes


@dataclass(frozen=True)
class AdapterEntry:
    """An adapter version that the engine may load at any time."""

    config_json: str
    staged: StagedVersion


def is_adapter(version: PolicyVersion) -> bool:
    """Whether a version is an adapter's, not the base's."""
    return version.policy != BASE_POLICY
