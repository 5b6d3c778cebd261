"""Buckets as they travel: whole tensors, or parts that they list; any change is found."""

from __future__ import annotations

import pytest
import torch

from tests.doubles.wire import seal_wire
from weft_rl.contract.errors import DigestMismatchError, InvalidManifestError
from weft_rl.contract.manifest import (
    TRAILER_BYTES,
    Manifest,
    Run,
    align_up,
    plan_buckets,
    wire_size,
)
from weft_rl.contract.tensors import DataType, TensorMeta
from weft_rl.transport.digests.wsum64 import part_digests, tensor_digest
from weft_rl.transport.wire.buckets import (
    run_parts,
    tensor_sums,
    verify_bucket,
    verify_runs,
    whole_parts,
)

METAS = [
    TensorMeta("a.0.w", DataType.UINT8, (700,)),
    TensorMeta("a.0.s", DataType.FLOAT32, ()),
    TensorMeta("a.1.w", DataType.BFLOAT16, (20, 64)),
]
NONCE = 5


def layout() -> Manifest:
    return plan_buckets(METAS, 1024)


def contents() -> list[torch.Tensor]:
    """The bytes of each tensor."""
    generator = torch.Generator().manual_seed(3)
    sizes = [meta.num_bytes for meta in METAS]
    return [torch.randint(0, 256, (n,), generator=generator, dtype=torch.uint8) for n in sizes]


def whole_bucket(manifest: Manifest, index: int) -> torch.Tensor:
    """A sealed bucket of whole tensors."""
    bucket = manifest.buckets[index]
    wire = torch.zeros(bucket.wire_bytes, dtype=torch.uint8)
    for tensor in manifest.tensors_by_bucket[index]:
        slot = manifest.tensors[tensor]
        wire[slot.offset_bytes : slot.offset_bytes + slot.meta.num_bytes] = contents()[tensor]
    digests = part_digests(wire[: bucket.payload_bytes], whole_parts(manifest, index))
    seal_wire(wire, bucket.payload_bytes, NONCE, index, digests)
    return wire


#: Unaligned cuts, a scalar, one byte each side of a block's edge, columns of a matrix.
RUNS = [
    Run(2, 8, 56, 64, 20),
    Run(0, 0, 255),
    Run(1, 0, 1),
    Run(0, 255, 2),
    Run(2, 0, 8, 64, 20),
    Run(0, 257, 443),
]


def run_bucket(manifest: Manifest, index: int, runs: list[Run]) -> tuple[torch.Tensor, int]:
    """A sealed bucket that lists runs; and how long its payload is."""
    parts = run_parts(manifest, runs)
    size = wire_size(sum(part.num_bytes for part in parts), len(runs))
    wire = torch.zeros(size.wire_bytes, dtype=torch.uint8)
    for run, part in zip(runs, parts, strict=True):
        item = METAS[run.tensor].dtype.itemsize_bytes
        rows = [run.first + row * run.stride for row in range(run.repeats)]
        own = torch.cat([contents()[run.tensor][r * item : (r + run.count) * item] for r in rows])
        at = part.at + (0 if run.repeats > 1 else run.first * item - part.first_byte)
        wire[at : at + own.numel()] = own
    digests = part_digests(wire[: size.payload_bytes], parts)
    seal_wire(wire, size.payload_bytes, NONCE, index, digests, runs)
    return wire, size.payload_bytes


def test_the_digests_of_a_bucket_are_those_of_its_tensors() -> None:
    manifest = layout()
    found = [verify_bucket(whole_bucket(manifest, i), manifest, i, NONCE) for i in range(2)]
    assert [*found[0], *found[1]] == [tensor_digest(content) for content in contents()]


def test_runs_add_up_to_the_same_digests_however_it_was_cut() -> None:
    manifest = layout()
    wires = [run_bucket(manifest, 0, RUNS[:4]), run_bucket(manifest, 1, RUNS[4:])]
    runs, digests = [], []
    for index, (wire, size) in enumerate(wires):
        own, their_digests, _ = verify_runs(wire, size, manifest, index, NONCE)
        runs += own
        digests += their_digests
    assert runs == RUNS
    assert tensor_sums(manifest, runs, digests) == [tensor_digest(c) for c in contents()]
    with pytest.raises(InvalidManifestError, match=r"element 257 of tensor 'a\.0\.w' did not come"):
        tensor_sums(manifest, runs[:-1], digests[:-1])


def test_a_changed_byte_of_payload_or_trailer_is_found() -> None:
    manifest = layout()
    size = manifest.buckets[0].payload_bytes
    for place in [*range(0, size, 97), *range(size, size + TRAILER_BYTES)]:
        wire = whole_bucket(manifest, 0)
        wire[place] ^= 1
        with pytest.raises(DigestMismatchError):
            verify_bucket(wire, manifest, 0, NONCE)
    wire = whole_bucket(manifest, 0)
    wire[size + TRAILER_BYTES :] = 255  # means nothing
    verify_bucket(wire, manifest, 0, NONCE)
    with pytest.raises(DigestMismatchError, match="nonce"):
        verify_bucket(wire, manifest, 0, NONCE + 1)


def test_a_changed_byte_of_runs_or_their_list_is_found() -> None:
    manifest = layout()
    wire, size = run_bucket(manifest, 0, RUNS)
    read = size + TRAILER_BYTES + 8 + 40 * len(RUNS)
    for place in [*range(0, size, 97), *range(size, read)]:
        changed = wire.clone()
        changed[place] ^= 1
        with pytest.raises(DigestMismatchError):
            verify_runs(changed, size, manifest, 0, NONCE)
    wire[read:] = 255  # means nothing
    verify_runs(wire, size, manifest, 0, NONCE)


def test_contiguous_runs_keep_their_phase_and_slices_are_dense() -> None:
    parts = run_parts(layout(), RUNS)
    assert [part.first_byte for part in parts] == [16, 0, 0, 0, 0, 256]
    assert [part.num_bytes for part in parts] == [align_up(20 * 56 * 2), 256, 256, 512, 512, 512]
    assert [(part.row_bytes, part.stride_bytes) for part in parts][:2] == [(112, 128), (0, 0)]
