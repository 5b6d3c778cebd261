"""Buckets from a GPU to a GPU by way of the host's memory, without a network or an engine: buffers
are overwritten as soon as they may be, and nothing of that is found in what was staged."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import pytest
import torch

from rollout_side.memory.segment import DeviceSegment, HostSegment
from rollout_side.memory.versions import PartialTransfer, bucket_starts
from rollout_side.receive.incoming_buckets import ReceiveRing, StagingSink, arrival_buffers
from tests.doubles.wire import put_tail
from tests.gpu.conftest import Note
from trainer_side.deltas.committed_copy import CommittedCopy
from trainer_side.deltas.copy_reader import copy_reader
from trainer_side.deltas.delta_push import DeltaPush, compare, delta_packing
from trainer_side.packing.packer import PackedBuckets, Packer, PackerCache
from trainer_side.pushes.rank_push import RankPushFactory
from trainer_side.ranks.ranks import OneRank
from trainer_side.sources.source import CastRule, tensor_source
from weft_rl.contract.tensors import DataType
from weft_rl.transport.digests.wsum64 import digests_of
from weft_rl.transport.group import CPU, on_device
from weft_rl.transport.wire.changes import EncodedChanges, apply_changes, packed_places

DRY = "WEFT_GPU_DRY_RUN" in os.environ  # the same on the CPU: for writing this file
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() and not DRY, reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(120),
]
DEVICE = CPU if DRY else torch.device("cuda", 0)
_NONCE, _ROUNDS = 7, 4


def _tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return tensors for a dozen buckets of 8 MiB; some fill no block of the digest."""
    shapes = [(n % 7 + 1, 4096 * 96 + n % 3 * 8) for n in range(40)] + [(3,), (129,)]
    return {
        f"layers.{n}.weight": torch.randn(shape, device=DEVICE, dtype=dtype)
        for n, shape in enumerate(shapes)
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["as it is", "cast"])
def test_what_is_staged_is_what_was_packed(dtype: torch.dtype, note: Note) -> None:
    tensors = _tensors(dtype)
    source = tensor_source(tensors, CastRule(served=DataType.BFLOAT16), "test")
    push = RankPushFactory(OneRank(), 2**23).weights_push(source, "stream")
    manifest, plan = push.packing.manifest, push.plan
    allocate = HostSegment.allocate if DRY else lambda size: DeviceSegment.allocate(size, DEVICE)
    data, starts = allocate(manifest.wire_bytes).data, bucket_starts(manifest)
    buffers = arrival_buffers(plan, 2, CPU, locked=not DRY)
    packer = Packer(push.packing, backend="stream")
    assert all(each.is_pinned() is not DRY for each in [*packer.buffers, *buffers.values()])
    push.copy = copy = CommittedCopy(push.packing, DEVICE)
    for number in range(_ROUNDS):
        for tensor in tensors.values():
            tensor.normal_()
        packed = PackedBuckets(packer, push, _NONCE, False, PackerCache(CPU))
        partial = PartialTransfer("t", "trainer", manifest, HostSegment.allocate(1), [])
        sink = StagingSink(partial, data, DEVICE)
        ring = ReceiveRing(manifest, plan, sink, buffers, 2, DEVICE)
        for nth in range(len(plan.buckets)):
            put_tail(packed.wire(nth), packed.make(nth, lambda: None))
            with on_device(DEVICE):
                ring.wire(nth).copy_(packed.wire(nth))
                packed.wire(nth).fill_(0xCD)
                ring.accept(nth, _NONCE)()
                ring.wire(nth).fill_(0xAB)
        for slot, tensor in zip(manifest.tensors, tensors.values(), strict=True):
            wanted = tensor.to(torch.bfloat16).view(-1).view(torch.uint8)
            begin = starts[slot.bucket] + slot.offset_bytes
            assert torch.equal(data[begin : begin + wanted.numel()], wanted), number
            kept = copy.payload(slot.bucket)[slot.offset_bytes :][: wanted.numel()]
            assert torch.equal(kept, wanted), number
    size = f"{_ROUNDS} times {manifest.total_bytes / 1e6:.0f} MB"
    note("tensors", f"{size} in {len(plan.buckets)} buckets by the host", "bitwise the same")


def test_a_copy_follows_a_delta_of_many_buckets(note: Note) -> None:
    """By as few launches as their changes allow, wherever its buckets lie."""
    tensors = _tensors(torch.bfloat16)
    source = tensor_source(tensors, CastRule(served=DataType.BFLOAT16), "test")
    push = RankPushFactory(OneRank(), 2**23).weights_push(source, "stream")
    push.copy = copy = CommittedCopy(push.packing, DEVICE)
    packer = Packer(push.packing, device=DEVICE)
    num_buckets = len(push.plan.buckets)

    def send() -> None:
        packed = PackedBuckets(packer, push, _NONCE, False, PackerCache(DEVICE))
        for nth in range(num_buckets):
            packed.make(nth, lambda: None)

    send()
    copy.committed(b"12345678")
    for number, share in enumerate((0.0001, 0.01, 0.3)):
        for tensor in tensors.values():
            is_changed = torch.rand(tensor.shape, device=DEVICE) < share
            tensor += is_changed * torch.randn(tensor.shape, device=DEVICE, dtype=tensor.dtype)
        changes = compare(push, copy, DEVICE, finite=False)
        packing = delta_packing(push.packing, copy.content_digest, changes.sizes)
        digest = b"%08d" % number
        DeltaPush(push, packing, changes, copy, share).committed(digest)
        assert copy.content_digest == digest
        followed = [copy.payload(nth).cpu() for nth in range(num_buckets)]
        send()
        for nth, payload in enumerate(followed):
            assert torch.equal(payload, copy.payload(nth).cpu()), (number, nth)
        copy.committed(digest)
    note("tensors", f"3 deltas of {num_buckets} buckets", "the copy follows, bitwise")


@pytest.mark.parametrize("is_ordered", [True, False], ids=["in order", "in no order"])
def test_an_iterator_is_compared_as_it_comes(is_ordered: bool, note: Note) -> None:
    """In one memory, which is used again for each tensor."""
    tensors = _tensors(torch.bfloat16)
    source = tensor_source(tensors, CastRule(served=DataType.BFLOAT16), "test")
    push = RankPushFactory(OneRank(), 2**23).weights_push(source, "stream")
    copy = CommittedCopy(push.packing, DEVICE)
    order = [*range(len(tensors))]
    if not is_ordered:
        random.Random(1).shuffle(order)
    memory = torch.empty(max(t.numel() for t in tensors.values()), device=DEVICE)
    found: Sequence[EncodedChanges] = ()
    for compares in (False, True):
        reader = copy_reader(copy, DEVICE, finite=True, compares=compares)
        copy.open()
        for index in order:
            arrived = memory[: (given := [*tensors.values()][index]).numel()]
            arrived.copy_(given.reshape(-1))
            reader.take(index, arrived)
        found = reader.changes()
        copy.close()
        copy.committed(b"12345678")
        if not compares:
            before = [copy.payload(nth).clone() for nth in range(len(push.plan.buckets))]
            for tensor in tensors.values():
                tensor += torch.rand(tensor.shape, device=DEVICE) < 0.01
    assert push.packing.runs is not None
    assert list(reader.digests()) == digests_of([*tensors.values()])
    for old, runs, own in zip(before, push.packing.runs, found, strict=True):
        sizes, nth = push.packing.itemsizes(runs), push.packing.runs.index(runs)
        apply_changes(own.payload, runs, sizes, old, packed_places(runs, sizes))
        assert torch.equal(old, copy.payload(nth))
    note("tensors", f"an iterator of {len(order)} tensors", "its changes and copy, bitwise")
