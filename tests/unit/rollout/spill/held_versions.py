"""Versions as a receiver would have staged them, to be spilled."""

from __future__ import annotations

import torch

from rollout_side.memory.segment import HostSegment
from rollout_side.memory.versions import StagedVersion, bucket_starts, tensors_in
from weft_rl.contract.manifest import plan_buckets
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import DataType, TensorMeta
from weft_rl.transport.digests.wsum64 import content_digest, tensor_digest

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
    digests = [
        tensor_digest(content.reshape(-1).view(torch.uint8))
        for _, content in tensors_in(manifest, segment.data)
    ]
    parsed = PolicyVersion.parse(version)
    return StagedVersion(f"t-{version}", parsed, manifest, segment, content_digest(digests))


BASE = [
    TensorMeta("model.embed.weight", DataType.BFLOAT16, (50, 7)),
    TensorMeta("model.layers.0.scale", DataType.FLOAT32, ()),
    TensorMeta("model.layers.0.odd", DataType.INT8, (3,)),
    TensorMeta("model.layers.0.weight", DataType.FLOAT32, (33, 5)),
    TensorMeta("model.layers.1.fp8", DataType.FLOAT8_E4M3FN, (5, 3)),
    TensorMeta("model.norm.weight", DataType.BFLOAT16, (129,)),
]
