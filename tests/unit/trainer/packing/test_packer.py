"""Ranks that each pack what they hold: together it is what one rank would have sent."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle, pairwise
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.doubles.shards import held_push
from tests.doubles.wire import put_tail
from trainer_side.packing import packer as packer_module
from trainer_side.packing.packer import Packer
from trainer_side.params.elements import Elements, HeldRun
from trainer_side.params.sharded import Sharded, held_by
from trainer_side.ranks.ranks import OneRank
from trainer_side.sources.source import CastRule, Source, tensor_source
from weft_rl.contract.errors import NotFiniteError
from weft_rl.contract.manifest import Manifest, Run, check_coverage, plan_buckets
from weft_rl.contract.tensors import DataType
from weft_rl.transport.digests.wsum64 import tensor_digest
from weft_rl.transport.group import CPU
from weft_rl.transport.wire.buckets import tensor_sums, verify_runs

_NONCE = 77


class _Rank(OneRank):
    """One of several."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


class _Whole(Source):
    """A source of whole tensors that ranks hold parts of."""

    is_collective, description = True, "test"

    def __init__(self, tensors: dict[str, torch.Tensor], served: DataType) -> None:
        self._source = tensor_source(tensors, CastRule(served=served), "test")
        self.metas = self._source.metas

    def read(self, first: int, count: int, views: Sequence[torch.Tensor] | None) -> None:
        self._source.read(first, count, views)


def _rank_elements(
    tensors: dict[str, torch.Tensor], runs: Sequence[Sequence[HeldRun]], rank: int
) -> list[Elements | None]:
    found: list[Elements | None] = []
    for tensor, own in zip(tensors.values(), runs, strict=True):
        if not own:
            found.append(None)
            continue
        parts = [run.of(tensor).reshape(-1) for run in own if run.rank == rank]
        local = torch.cat(parts) if parts else None
        found.append(held_by(Sharded(tensor.shape, tensor.dtype, tuple(own), local), rank))
    return found


def _sent(
    tensors: dict[str, torch.Tensor],
    runs: Sequence[Sequence[HeldRun]],
    num_ranks: int,
    served: DataType,
    capacity_bytes: int,
    *,
    aside: bool,
) -> tuple[Manifest, list[Run], dict[int, torch.Tensor], list[int]]:
    """Return what receivers make of it: the tensors' bytes, and their digests as the senders add
    them up.

    Args:
        aside: Pack as elements on a GPU are packed, in a buffer beside those that are sent.
    """
    source = _Whole(tensors, served)
    manifest = plan_buckets(source.metas, capacity_bytes)
    received = {i: torch.zeros(m.num_bytes, dtype=torch.uint8) for i, m in enumerate(source.metas)}
    totals = [0] * len(source.metas)
    seen: list[Run] = []
    digests: list[int] = []
    sent: list[Run] = []
    for rank in range(num_ranks):
        own = held_push(source, _rank_elements(tensors, runs, rank), _Rank(rank), manifest)
        own.prepare()
        sender, packing = own.sender, own.packing
        if sender is None:
            continue
        sent += [run for bucket in packing.runs or () for run in bucket]
        packer = Packer(packing)
        for buffer in packer.buffers:
            buffer.fill_(255)
        for nth, index in enumerate(packing.plan.sent_by(sender)):
            with _packed_aside() if aside else nullcontext():
                packed = packer.pack(nth, own, _NONCE)
            assert (packed.payload.data_ptr() != packer.wire(nth).data_ptr()) == aside
            for run, digest in zip(packed.runs, packed.digests, strict=True):
                totals[run.tensor] = (totals[run.tensor] + digest) % 2**64
            put_tail(packer.wire(nth), packed.sealed)
            wire, size = packer.wire(nth), packing.plan.buckets[index].payload_bytes
            assert wire.numel() == packing.plan.wire_bytes(index)
            came, parts, _ = verify_runs(wire, size, manifest, index, _NONCE)
            _place(manifest, wire, came, received)
            seen += came
            digests += parts
    assert tensor_sums(manifest, seen, digests) == totals
    return manifest, sent, received, totals


def _packed_aside() -> AbstractContextManager[object]:
    """Let a packer take this host for a GPU, but for the packer that it makes there."""
    found = cycle([CPU, None])
    return patch.object(packer_module, "gpu_of", lambda reader, runs: next(found))


def _place(
    manifest: Manifest, wire: torch.Tensor, runs: Sequence[Run], received: dict[int, torch.Tensor]
) -> None:
    at = 0
    for run in runs:
        size = manifest.tensors[run.tensor].meta.dtype.itemsize_bytes
        begin = at + run.first * size - run.begin_bytes(size)
        own = wire[begin : begin + run.num_elements * size].view(run.repeats, -1)
        whole = received[run.tensor]
        stride = (run.stride * size, 1)
        whole.as_strided((run.repeats, run.count * size), stride, run.first * size).copy_(own)
        at += run.payload_bytes(size)


@st.composite
def _held(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], list[list[HeldRun]], int]:
    num_ranks = draw(st.integers(1, 4))
    tensors: dict[str, torch.Tensor] = {}
    runs: list[list[HeldRun]] = []
    for number in range(draw(st.integers(1, 5))):
        rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 40)) * 4
        generator = torch.Generator().manual_seed(number)
        tensors[f"layers.{number}.weight"] = torch.randn(rows, columns, generator=generator)
        numel = rows * columns
        kind = draw(st.sampled_from(["cut", "columns", "one", "gathered"]))
        if kind == "cut":
            cuts = sorted(draw(st.sets(st.integers(1, numel), max_size=3)) | {0, numel})
            ends = pairwise(cuts)
            own = [HeldRun(draw(st.integers(0, num_ranks - 1)), a, b - a) for a, b in ends]
        elif kind == "columns" and rows > 1 and columns > 4:
            cut = draw(st.integers(1, columns // 4 - 1)) * 4
            ranks = [draw(st.integers(0, num_ranks - 1)) for _ in range(2)]
            own = [
                HeldRun(ranks[0], 0, cut, columns, rows),
                HeldRun(ranks[1], cut, columns - cut, columns, rows),
            ]
        elif kind == "gathered":
            own = []
        else:
            own = [HeldRun(draw(st.integers(0, num_ranks - 1)), 0, numel)]
        runs.append(own)
    return tensors, runs, num_ranks


@settings(max_examples=60, deadline=None)
@given(
    _held(),
    st.sampled_from([DataType.FLOAT32, DataType.BFLOAT16]),
    st.sampled_from([512, 8192]),
    st.booleans(),
)
def test_what_ranks_pack_is_every_tensor_once(
    case: tuple[dict[str, torch.Tensor], list[list[HeldRun]], int],
    served: DataType,
    capacity_bytes: int,
    aside: bool,
) -> None:
    tensors, runs, num_ranks = case
    manifest, sent, received, totals = _sent(
        tensors, runs, num_ranks, served, capacity_bytes, aside=aside
    )
    check_coverage(
        [slot.meta for slot in manifest.tensors],
        sent,
    )
    for index, tensor in enumerate(tensors.values()):
        want = tensor.to(getattr(torch, served.torch_name)).reshape(-1).view(torch.uint8)
        assert torch.equal(received[index], want)
        assert totals[index] == tensor_digest(want)


def test_what_is_not_finite_is_found_in_its_tensor() -> None:
    tensor = torch.zeros(2, 128)
    tensor[1, 3] = float("nan")
    tensors = {"layers.0.weight": tensor}
    source: Source = _Whole(tensors, DataType.FLOAT32)
    manifest = plan_buckets(source.metas)
    runs = [[HeldRun(0, 0, 100), HeldRun(1, 100, 156)]]
    for rank in (0, 1):
        elements = _rank_elements(tensors, runs, rank)
        own = held_push(_Whole(tensors, DataType.FLOAT32), elements, _Rank(rank), manifest)
        packer = Packer(own.packing)
        if rank == 0:
            packer.pack(0, own, _NONCE, finite=True)
            continue
        with pytest.raises(NotFiniteError, match=r"layers\.0\.weight"):
            packer.pack(0, own, _NONCE, finite=True)


def test_held_buckets_move_as_they_are() -> None:
    tensors = {f"layers.{i}.weight": torch.randn(8, 64) for i in range(5)}
    runs = [[HeldRun(0, 0, 512)] for _ in range(5)]
    source = _Whole(tensors, DataType.FLOAT32)
    manifest = plan_buckets(source.metas, 2048)
    own = held_push(source, _rank_elements(tensors, runs, 0), _Rank(0), manifest)
    packer = Packer(own.packing)
    for nth in range(3):
        packer.pack(nth, own, _NONCE)
    before = [packer.wire(nth).clone() for nth in (1, 2)]
    old = {buffer.data_ptr() for buffer in packer.buffers}
    packer.move(range(1, 3))
    assert not old & {buffer.data_ptr() for buffer in packer.buffers}
    assert all(torch.equal(packer.wire(n), b) for n, b in zip((1, 2), before, strict=True))
