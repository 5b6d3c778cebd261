"""The tiny model that fake replicas serve and fake trainers push: its facts, no tensors."""

from __future__ import annotations

import json
from typing import Any

from weft_rl.contract.capabilities import Capabilities
from weft_rl.contract.manifest import Manifest, plan_buckets
from weft_rl.contract.tensors import DataType, Reference, TensorMeta
from weft_rl.v1 import types_pb2

BF16 = DataType.BFLOAT16
REFERENCE = Reference(
    "TinyForCausalLM",
    (
        TensorMeta("model.embed_tokens.weight", BF16, (64, 16)),
        TensorMeta("model.layers.0.self_attn.q_proj.weight", BF16, (16, 16)),
        TensorMeta("model.layers.0.mlp.up_proj.weight", BF16, (32, 16)),
        TensorMeta("model.norm.weight", DataType.FLOAT32, (16,)),
    ),
)


def capabilities_of(reference: Reference, **changes: Any) -> Capabilities:
    """Those of an engine that serves ``reference`` and adapters of it."""
    settings: dict[str, Any] = {
        "engine_version": "0.26",
        "base_fingerprint": reference.fingerprint,
        "architecture": reference.architecture,
        "base_dtype": BF16,
        "adapter_dtype": BF16,
        "lora_enabled": True,
        "max_lora_rank": 16,
        "lora_modules": ("q_proj", "up_proj"),
        "staging_capacity_bytes": 1 << 30,
        "adapter_capacity_bytes": 1 << 30,
    }
    return Capabilities(**settings | changes)


CAPABILITIES = capabilities_of(REFERENCE)
BASE_MANIFEST = plan_buckets(REFERENCE.tensors, 2048)
_Q = "base_model.model.model.layers.0.self_attn.q_proj"
ADAPTER_METAS = (
    TensorMeta(f"{_Q}.lora_A.weight", BF16, (4, 16)),
    TensorMeta(f"{_Q}.lora_B.weight", BF16, (16, 4)),
)
ADAPTER_MANIFEST = plan_buckets(ADAPTER_METAS)
ADAPTER_CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def adapter_spec(**changes: Any) -> types_pb2.AdapterSpec:
    """An adapter of the tiny model; changes go into its config."""
    return types_pb2.AdapterSpec(
        config_json=json.dumps({**ADAPTER_CONFIG, **changes}),
        base_fingerprint=REFERENCE.fingerprint,
    )


def content_digest(manifest: Manifest, value: bytes = b"\1" * 8) -> types_pb2.ContentDigest:
    """What a rank says that it computed."""
    return types_pb2.ContentDigest(
        algorithm=types_pb2.DIGEST_ALGORITHM_WSUM64, value=value, size_bytes=manifest.total_bytes
    )
