"""Wire buckets of several senders: however a version was cut, what is staged is the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_side.memory.segment import HostSegment
from rollout_side.memory.versions import PartialTransfer, bucket_starts
from rollout_side.receive.incoming_buckets import (
    ReceiveRing,
    StagingSink,
    arrival_buffers,
)
from tests.doubles.wire import seal_wire
from weft_rl.contract.errors import DigestMismatchError
from weft_rl.contract.manifest import (
    Manifest,
    Run,
    SendPlan,
    WireBucket,
    make_send_plan,
    plan_buckets,
)
from weft_rl.contract.tensors import DataType, TensorMeta
from weft_rl.transport.digests.wsum64 import part_digests, tensor_digest
from weft_rl.transport.group import CPU
from weft_rl.transport.wire.buckets import ArrivedBucket, run_parts, tensor_sums

NONCE = 7
SHAPES = ((13, 24), (100,), (7, 16), (3,))


def layout() -> Manifest:
    metas = [TensorMeta(f"t.{i}.w", DataType.FLOAT32, shape) for i, shape in enumerate(SHAPES)]
    return plan_buckets(metas, 2048)


def cut(index: int, shape: tuple[int, ...], at: int) -> tuple[Run, Run]:
    """A tensor in two: by columns where ``at`` is even and it has some, else anywhere."""
    if len(shape) == 2 and at % 2 == 0:
        rows, columns = shape
        first = 2 + at % (columns - 3) // 2 * 2
        return Run(index, 0, first, columns, rows), Run(
            index, first, columns - first, columns, rows
        )
    num = 1
    for dim in shape:
        num *= dim
    first = 1 + at % (num - 1)
    return Run(index, 0, first), Run(index, first, num - first)


def planned(manifest: Manifest, cuts: list[int]) -> tuple[SendPlan, list[list[Run]]]:
    halves = [cut(i, shape, at) for i, (shape, at) in enumerate(zip(SHAPES, cuts, strict=True))]
    wires, carried = [], []
    for bucket in range(len(manifest.buckets)):
        for sender in range(2):
            runs = [halves[i][sender] for i in manifest.tensors_by_bucket[bucket]]
            size = sum(run.payload_bytes(4) for run in runs)
            wires.append(WireBucket(sender, bucket, size, len(runs)))
            carried.append(runs)
    return make_send_plan(2, wires), carried


def packed(manifest: Manifest, tensors: list[torch.Tensor], runs: list[Run]) -> torch.Tensor:
    payload = torch.zeros(sum(run.payload_bytes(4) for run in runs), dtype=torch.uint8)
    for run, part in zip(runs, run_parts(manifest, runs), strict=True):
        rows = (
            tensors[run.tensor]
            .view(-1)[run.first : run.end]
            .as_strided((run.repeats, run.count), (run.stride or run.count, 1))
        )
        at = part.at + (0 if run.repeats > 1 else run.first * 4 - run.begin_bytes(4))
        content = rows.contiguous().view(torch.uint8).view(-1)
        payload[at : at + content.numel()] = content
    return payload


def fill(wire: torch.Tensor, manifest: Manifest, index: int, payload: torch.Tensor,
         runs: list[Run]) -> None:  # fmt: skip
    wire[: payload.numel()] = payload
    digests = part_digests(payload, run_parts(manifest, runs))
    seal_wire(wire, payload.numel(), NONCE, index, digests, runs)


def receiving(
    manifest: Manifest, plan: SendPlan, *, copies: bool = False
) -> tuple[PartialTransfer, ReceiveRing]:
    segment = HostSegment.allocate(manifest.wire_bytes)
    segment.data.fill_(0xAB)  # it was used before
    partial = PartialTransfer("t1", "trainer", manifest, segment, [], lists_runs=True)
    sink = StagingSink(partial, segment.data, CPU)
    if copies:  # as to a GPU
        buffers = arrival_buffers(plan, 2, CPU)
        return partial, ReceiveRing(manifest, plan, sink, buffers, 2, CPU)
    return partial, ReceiveRing(manifest, plan, sink, arrival_buffers(plan, 2, CPU), 2)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=4, max_size=4), st.booleans())
def test_whatever_was_cut_lies_whole_in_the_segment(cuts: list[int], copies: bool) -> None:
    manifest = layout()
    plan, carried = planned(manifest, cuts)
    tensors = [torch.randn(shape) for shape in SHAPES]
    partial, buffers = receiving(manifest, plan, copies=copies)
    for index, runs in enumerate(carried):
        fill(buffers.wire(index), manifest, index, packed(manifest, tensors, runs), runs)
        buffers.accept(index, NONCE)()
        buffers.wire(index).fill_(0xCD)  # it may be received in again
        assert buffers.sink.num_kept == index + 1
    starts, data = bucket_starts(manifest), partial.segment.data
    for slot, tensor in zip(manifest.tensors, tensors, strict=True):
        begin = starts[slot.bucket] + slot.offset_bytes
        end = begin + slot.meta.num_bytes
        assert data[begin:end].equal(tensor.view(-1).view(torch.uint8))
        assert not data[end : begin + -(-slot.meta.num_bytes // 256) * 256].any()
    sums = tensor_sums(
        manifest,
        [run for bucket in partial.verified for run in bucket.runs],
        [digest for bucket in partial.verified for digest in bucket.digests],
    )
    assert sums == [tensor_digest(t.view(-1).view(torch.uint8)) for t in tensors]


def test_what_is_placed_is_what_was_verified_though_its_sender_changes_it() -> None:
    manifest = layout()
    plan, carried = planned(manifest, [2, 1, 2, 1])  # columns, which no kernel places
    tensors = [torch.randn(shape) for shape in SHAPES]
    partial, buffers = receiving(manifest, plan)
    for index, runs in enumerate(carried):
        lent = torch.zeros_like(buffers.wire(index))
        fill(lent, manifest, index, packed(manifest, tensors, runs), runs)
        end = buffers.accept(index, NONCE, ArrivedBucket(lent))
        lent.fill_(0xCD)
        end()
    starts, data = bucket_starts(manifest), partial.segment.data
    for slot, tensor in zip(manifest.tensors, tensors, strict=True):
        begin = starts[slot.bucket] + slot.offset_bytes
        assert data[begin : begin + slot.meta.num_bytes].equal(tensor.view(-1).view(torch.uint8))


def test_runs_of_another_bucket_than_planned_are_refused() -> None:
    manifest = layout()
    plan, carried = planned(manifest, [1, 1, 1, 1])
    assert len(manifest.buckets) > 1
    _, buffers = receiving(manifest, SendPlan(1, (replace(plan.buckets[0], bucket=1),)))
    tensors = [torch.randn(shape) for shape in SHAPES]
    payload = packed(manifest, tensors, carried[0])
    fill(buffers.wire(0), manifest, 0, payload, carried[0])
    with pytest.raises(DigestMismatchError, match="its plan says 1"):
        buffers.accept(0, NONCE)()


def test_each_sender_has_buffers_of_its_own_which_are_used_in_turn() -> None:
    plan = make_send_plan(
        2, [WireBucket(s, b, 256 * (s + 1), 1) for b in range(3) for s in range(2)]
    )
    buffers = arrival_buffers(plan, 2, CPU)
    addresses = [buffers[index].data_ptr() for index in range(6)]
    assert len(set(addresses)) == 4
    assert addresses[4:] == addresses[:2], "a sender's third is where its first was"
    assert [buffers[index].numel() for index in range(2)] == [512, 768]
