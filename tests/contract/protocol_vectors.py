"""The vectors of docs/protocol.md, made by the code that trainers and replicas run.

``make vectors`` writes docs/protocol_vectors.json anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.doubles.packing import SourcePacker
from tests.doubles.wire import put_tail, seal_wire
from weft_rl.contract.checkpoint import StoredTensor, checkpoint_digest
from weft_rl.contract.errors import CapacityError, InvalidNameError, WeftError
from weft_rl.contract.manifest import WSUM64, Manifest, Run, plan_buckets, wire_size
from weft_rl.contract.names import PolicyVersion, check_name, name_in_the_way
from weft_rl.contract.tensors import DataType, LinearModule, Reference, TensorMeta, base_fingerprint
from weft_rl.rpc.bounds import PROTOCOL_REVISION
from weft_rl.rpc.status import status_from_error
from weft_rl.transport.digests.wsum64 import content_digest, part_digests, tensor_digest
from weft_rl.transport.wire.buckets import run_parts, tensor_sums
from weft_rl.transport.wire.change_coding import encode_changes, packed_places

PATH = Path(__file__).parents[2] / "docs" / "protocol_vectors.json"

NONCE = 0x0123_4567_89AB_CDEF
#: Two layers, so two buckets of at most 512 bytes; the first has room between its tensors.
TENSORS = {
    "model.layers.0.mlp.up_proj.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3) / 4,
    "model.layers.0.mlp.up_proj.bias": torch.tensor([1.0, -2.5, 0.0], dtype=torch.bfloat16),
    "model.norm.step": torch.tensor(-2, dtype=torch.int64),
}
_CAPACITY_BYTES = 512
_MODULES = (LinearModule("layers.0.down", (2, 3), ("model.layers.0.down", "down")),)
#: One row of the weighted sum and a half, so that both of its weights change.
_LONG_BYTES = 6144 * 8


def long_payload() -> torch.Tensor:
    """The bytes that the vectors of digests describe by a rule: byte i is 7 i + 3 mod 256."""
    return ((torch.arange(_LONG_BYTES) * 7 + 3) % 256).to(torch.uint8)


def metas(tensors: dict[str, torch.Tensor] = TENSORS) -> list[TensorMeta]:
    """What tensors are called, and their shapes."""
    return [
        TensorMeta(name, DataType[str(t.dtype).removeprefix("torch.").upper()], tuple(t.shape))
        for name, t in tensors.items()
    ]


class _Tensors:
    """A ``Source`` of ``TENSORS``."""

    def read(self, first: int, count: int, into: list[torch.Tensor]) -> None:
        values = list(TENSORS.values())[first : first + count]
        for target, value in zip(into, values, strict=True):
            target.copy_(value)


def make() -> dict[str, Any]:
    """All vectors, as the file holds them."""
    return {
        "protocol_revision": PROTOCOL_REVISION,
        "pushes": [_push()],
        "shared_push": _shared_push(),
        "changes": _changes(),
        "digests": _digests(),
        "checkpoint": _checkpoint(),
        "fingerprint": {
            "architecture": "TinyForCausalLM",
            "tensors": [
                {"name": m.name, "dims": list(m.shape), "dtype": int(m.dtype)} for m in metas()
            ],
            "modules": [
                {"name": m.name, "dims": list(m.shape), "other_names": list(m.other_names)}
                for m in _MODULES
            ],
            "fingerprint": base_fingerprint("TinyForCausalLM", metas()),
            "reference_digest": Reference(
                "TinyForCausalLM", tuple(metas()), untold_modules=_MODULES
            ).details_digest,
        },
        "names": _names(),
        "errors": [
            _error(
                CapacityError(
                    "replica 'r0' has 0 bytes of staging memory free, this push needs 768",
                    metadata={"replica": "r0"},
                )
            ),
            _error(InvalidNameError("'../x' cannot name a policy")),
        ],
    }


def _push() -> dict[str, Any]:
    manifest = plan_buckets(metas(), _CAPACITY_BYTES)
    packer, digests, buckets = SourcePacker(_Tensors(), manifest), list[int](), []
    for index, bucket in enumerate(manifest.buckets):
        packed = packer.pack(index, NONCE)
        wire, sealed = packer.wire(index), packed.sealed
        put_tail(wire, sealed)
        digests += packed.digests
        buckets.append(
            {
                "payload_bytes": bucket.payload_bytes,
                "num_tensors": bucket.num_tensors,
                "digest": f"{sealed.digest:016x}",
                "trailer": bytes(wire[bucket.payload_bytes :][:32].tolist()).hex(),
                "wire": bytes(wire.tolist()).hex(),
            }
        )
    return {
        "digest_algorithm": WSUM64,
        "nonce": f"{NONCE:016x}",
        "tensors": _tensors(manifest, TENSORS),
        "tensor_digests": [f"{digest:016x}" for digest in digests],
        "buckets": buckets,
        "layout_digest": manifest.layout_digest.hex(),
        "content_digest": content_digest(digests).hex(),
        "total_bytes": manifest.total_bytes,
    }


#: Two senders hold a column each of the first tensor, and a part each of the second.
SHARED = {
    "model.layers.0.mlp.down_proj.weight": torch.arange(24, dtype=torch.float32).reshape(4, 6) - 9,
    "model.layers.0.mlp.down_proj.bias": torch.arange(200, dtype=torch.bfloat16) / 2,
}
_SHARES = (
    (Run(0, 0, 2, 6, 4), Run(1, 0, 130)),
    (Run(0, 2, 4, 6, 4), Run(1, 130, 70)),
)


def _shared_push() -> dict[str, Any]:
    manifest = plan_buckets(metas(SHARED), 1024)
    buckets, all_runs, all_digests = [], list[Run](), list[int]()
    for index, runs in enumerate(_SHARES):
        parts = run_parts(manifest, runs)
        size = wire_size(sum(part.num_bytes for part in parts), len(runs))
        wire = torch.zeros(size.wire_bytes, dtype=torch.uint8)
        for run, part in zip(runs, parts, strict=True):
            tensor = list(SHARED.values())[run.tensor]
            item = tensor.element_size()
            skip = run.first * item - part.first_byte
            rows = [run.first + row * run.stride for row in range(run.repeats)]
            own = torch.cat([tensor.flatten()[first : first + run.count] for first in rows])
            place = wire[part.at + skip :][: own.numel() * item]
            place.copy_(own.view(torch.uint8))
        digests = part_digests(wire[: size.payload_bytes], parts)
        sealed = seal_wire(wire, size.payload_bytes, NONCE, index, digests, runs)
        all_runs += runs
        all_digests += digests
        buckets.append(
            {
                "sender": index,
                "bucket": 0,
                "payload_bytes": size.payload_bytes,
                "runs": [list(run) for run in runs],
                "run_digests": [f"{digest:016x}" for digest in digests],
                "digest": f"{sealed.digest:016x}",
                "wire": bytes(wire.tolist()).hex(),
            }
        )
    tensor_digests = tensor_sums(manifest, all_runs, all_digests)
    return {
        "nonce": f"{NONCE:016x}",
        "tensors": _tensors(manifest, SHARED),
        "tensor_digests": [f"{digest:016x}" for digest in tensor_digests],
        "wire_buckets": buckets,
        "content_digest": content_digest(tensor_digests).hex(),
    }


#: Runs of two tensors of 2 and 8 bytes: one with changes of all kinds, one raw, one unchanged, and
#: a slice.
CHANGED_RUNS = (Run(0, 5, 150), Run(0, 155, 2), Run(0, 157, 3), Run(1, 1, 2, 4, 3))
_CHANGED_SIZES = (2, 2, 2, 8)
_STEPS = {7: 1, 8: -1, 20: 2, 21: -8, 60: 9, 61: -300, 140: 1, 155: 7, 156: 1234}
_WORD_STEPS = {1: -1, 5: 2**40, 10: 8}


def _changes() -> dict[str, Any]:
    old = [
        (torch.arange(160) * 411 % 65536 - 32768).to(torch.int16),
        torch.arange(12) * 2**59 + 7,
    ]
    new = [tensor.clone() for tensor in old]
    for tensor, steps in zip(new, (_STEPS, _WORD_STEPS), strict=True):
        tensor[list(steps)] += torch.tensor(list(steps.values()), dtype=tensor.dtype)
    before, after = _dense(old), _dense(new)
    encoded = encode_changes(before, after, CHANGED_RUNS, _CHANGED_SIZES)
    return {
        "runs": [list(run) for run in CHANGED_RUNS],
        "itemsizes": list(_CHANGED_SIZES),
        "old": [bytes(t.view(torch.uint8).tolist()).hex() for t in old],
        "new": [bytes(t.view(torch.uint8).tolist()).hex() for t in new],
        "payload": bytes(encoded.payload.tolist()).hex(),
        "num_changes": encoded.num_changes,
        "digest_changes": [f"{value:016x}" for value in encoded.sums],
    }


def _dense(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The dense payload of the runs that change."""
    pairs = list(zip(CHANGED_RUNS, _CHANGED_SIZES, strict=True))
    payload = torch.zeros(sum(r.payload_bytes(s) for r, s in pairs), dtype=torch.uint8)
    for (run, size), place in zip(pairs, packed_places(*zip(*pairs, strict=True)), strict=True):
        rows = [run.first + row * run.stride for row in range(run.repeats)]
        own = torch.cat([tensors[run.tensor][first : first + run.count] for first in rows])
        payload[place.at :][: own.numel() * size] = own.view(torch.uint8)
    return payload


def _tensors(manifest: Manifest, tensors: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    return [
        {
            "name": slot.meta.name,
            "dtype": int(slot.meta.dtype),
            "dims": list(slot.meta.shape),
            "bucket": slot.bucket,
            "offset_bytes": slot.offset_bytes,
            "values": tensors[slot.meta.name].double().flatten().tolist(),
        }
        for slot in manifest.tensors
    ]


def _digests() -> dict[str, Any]:
    payload = long_payload()
    return {
        "payload": "byte i is (7 i + 3) modulo 256",
        "num_bytes": len(payload),
        "wsum64": f"{tensor_digest(payload):016x}",
    }


def _checkpoint() -> dict[str, Any]:
    stored = []
    for meta in metas():
        content = TENSORS[meta.name].reshape(-1).view(torch.uint8)
        digest = tensor_digest(content)
        stored.append(
            (content, StoredTensor(meta.name, meta.dtype.safetensors_name, meta.shape, digest))
        )
    return {
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "dims": list(tensor.dims),
                "content": bytes(content.tolist()).hex(),
                "digest": f"{tensor.digest:016x}",
            }
            for content, tensor in stored
        ],
        "digest": checkpoint_digest(tensor for _, tensor in stored).hex(),
    }


_NAMES = ("math", "Qwen2.5-7B_lora", "7b", "a" * 63, "base", "")
_NO_NAMES = ("a" * 64, "-math", ".math", "a..b", "a/b", "math@17", "mäth", "a b")
_VERSIONS = ("math@17", "base@0", "a.b@007", "math", "@1", "math@", "math@-1", "math@+1", "a@b@1")
_SERVED = ("Qwen/Qwen2.5-7B", "math@17", "chat", "math@latest", "mathematics@1")


def _names() -> dict[str, Any]:
    return {
        "names": {name: _is_name(name) for name in (*_NAMES, *_NO_NAMES)},
        "versions": {text: _parsed(text) for text in _VERSIONS},
        "served_names": list(_SERVED),
        "in_the_way": {name: name_in_the_way(name, _SERVED) for name in ("math", "chat", "code")},
    }


def _is_name(name: str) -> bool:
    try:
        check_name(name, "policy")
    except InvalidNameError:
        return False
    return True


def _parsed(text: str) -> list[Any] | None:
    try:
        version = PolicyVersion.parse(text)
    except InvalidNameError:
        return None
    return [version.policy, version.version]


def _error(error: WeftError) -> dict[str, Any]:
    return {
        "status": error.status,
        "reason": error.reason,
        "message": error.message,
        "metadata": error.metadata,
        "grpc-status-details-bin": status_from_error(error)
        .SerializeToString(deterministic=True)
        .hex(),
    }


def main() -> None:
    """Write the file."""
    PATH.write_text(json.dumps(make(), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
