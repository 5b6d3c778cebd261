"""Versions as a receiver would have staged them, to be spilled."""

from __future__ import annotations

from pathlib import Path

import torch

from rollout_side.memory.segment import HostSegment
from rollout_side.memory.versions import (
    BaseChanges,
    BucketContents,
    StagedVersion,
    bucket_starts,
    tensors_in,
)
from weft_rl.contract.manifest import Manifest, plan_buckets, whole_runs
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import DataType, TensorMeta
from weft_rl.transport.digests.wsum64 import content_digest, tensor_digest
from weft_rl.transport.wire.changes import encode_changes

FINGERPRINT = "f" * 64
CONFIG = '{"peft_type": "LORA", "r": 4}'


def held(version: str, metas: list[TensorMeta], bucket_bytes: int = 4096) -> StagedVersion:
    """A version as a receiver would have staged it, with values of its own."""
    manifest = plan_buckets(metas, bucket_bytes)
    segment = HostSegment.allocate(manifest.wire_bytes)
    starts, generator = bucket_starts(manifest), torch.Generator().manual_seed(len(metas))
    for slot in manifest.tensors:
        at = starts[slot.bucket] + slot.offset_bytes
        values = torch.randint(0, 2, (slot.meta.num_bytes,), generator=generator)
        segment.data[at : at + slot.meta.num_bytes] = values.to(torch.uint8)
    parsed = PolicyVersion.parse(version)
    return StagedVersion(f"t-{version}", parsed, manifest, segment, _digest(manifest, segment))


def changed(old: StagedVersion, version: str, num_changes: int = 9) -> StagedVersion:
    """A base as a receiver would have staged it from a delta of another one."""
    manifest, parsed = old.manifest, PolicyVersion.parse(version)
    segment = HostSegment.allocate(manifest.wire_bytes)
    segment.data.copy_(old.segment.data)
    generator = torch.Generator().manual_seed(parsed.version)
    for _, tensor in tensors_in(manifest, segment.data):
        flat = tensor.view(-1).view(torch.uint8)
        flat[torch.randint(0, flat.numel(), (num_changes,), generator=generator)] ^= 1
    buckets, starts = list[BucketContents](), bucket_starts(manifest)
    for bucket, runs in enumerate(whole_runs(manifest)):
        part = slice(starts[bucket], starts[bucket] + manifest.buckets[bucket].payload_bytes)
        sizes = [manifest.tensors[run.tensor].meta.dtype.itemsize_bytes for run in runs]
        coded = encode_changes(old.segment.data[part], segment.data[part], [*runs], sizes)
        buckets.append(BucketContents([*runs], [], coded.payload))
    changes = [*old.changes, BaseChanges(old.content_digest, tuple(buckets))]
    digest = _digest(manifest, segment)
    return StagedVersion(f"t-{version}", parsed, manifest, segment, digest, changes=changes)


def _digest(manifest: Manifest, segment: HostSegment) -> bytes:
    digests = [
        tensor_digest(content.reshape(-1).view(torch.uint8))
        for _, content in tensors_in(manifest, segment.data)
    ]
    return content_digest(digests)


def flip(path: Path, at: int) -> None:
    """Change a bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


BASE = [
    TensorMeta("model.embed.weight", DataType.BFLOAT16, (50, 7)),
    TensorMeta("model.layers.0.scale", DataType.FLOAT32, ()),
    TensorMeta("model.layers.0.odd", DataType.INT8, (3,)),
    TensorMeta("model.layers.0.weight", DataType.FLOAT32, (33, 5)),
    TensorMeta("model.layers.1.fp8", DataType.FLOAT8_E4M3FN, (5, 3)),
    TensorMeta("model.norm.weight", DataType.BFLOAT16, (129,)),
]
#: Large enough that changes of it are a small part.
LARGE = [
    TensorMeta("model.embed.weight", DataType.BFLOAT16, (128, 250)),
    TensorMeta("model.layers.0.odd", DataType.INT8, (301,)),
    TensorMeta("model.layers.0.weight", DataType.FLOAT32, (33, 500)),
    TensorMeta("model.layers.1.fp8", DataType.FLOAT8_E4M3FN, (100, 31)),
]
