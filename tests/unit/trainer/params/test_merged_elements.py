"""A weight that is merged where it lies is what one rank would have made of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.doubles.shards import OneOfSeveral
from trainer_side.params.elements import HeldElements, HeldRun
from trainer_side.params.merged_elements import (
    LoraFactors,
    MergedElements,
    WeightAddition,
    merge_block,
    merges_in_place,
)
from trainer_side.params.sharded import Sharded, held_by

_OUT, _IN, _R = 300, 72, 8


def _held(whole: torch.Tensor, runs: Sequence[HeldRun], rank: int) -> HeldElements:
    parts = [run.of(whole).reshape(-1) for run in runs if run.rank == rank]
    local = torch.cat(parts) if parts else None
    return held_by(Sharded(whole.shape, whole.dtype, tuple(runs), local), rank)


def _expected(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, dtype: torch.dtype
) -> torch.Tensor:
    """As one rank merges, in the rows that it merges at a time."""
    rows = 2**19 // _IN
    out = torch.empty(weight.shape, dtype=dtype)
    for first in range(0, len(weight), rows):
        part = slice(first, first + rows)
        out[part] = weight[part].float() + (b[part].float() @ a.float()) * scaling
    return out


_ROWS = [HeldRun(0, 0, 150 * _IN), HeldRun(1, 150 * _IN, 150 * _IN)]
_FLAT = [HeldRun(0, 0, 10_001), HeldRun(1, 10_001, 31), HeldRun(0, 10_032, _OUT * _IN - 10_032)]
_COLUMNS = [HeldRun(0, 0, 40, _IN, _OUT), HeldRun(1, 40, 32, _IN, _OUT)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("runs", "is_rows"), [(_ROWS, True), (_FLAT, False), (_COLUMNS, False)])
def test_each_rank_merges_its_own(runs: list[HeldRun], is_rows: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight, scaling = torch.randn(_OUT, _IN, dtype=dtype), 1.5
    a, b = torch.randn(_R, _IN, dtype=dtype), torch.randn(_OUT, _R, dtype=dtype)
    halves = {
        "a": [HeldRun(0, 0, a.numel() // 2), HeldRun(1, a.numel() // 2, a.numel() // 2)],
        "b": [HeldRun(1, 0, b.numel())],
    }
    metas = {"a": a.to("meta"), "b": b.to("meta")}
    given: dict[int, torch.Tensor] = {}
    merged = torch.empty_like(weight)
    for rank in (0, 1, 0):  # the first has now what the second gave
        ranks = OneOfSeveral(rank, 2, given)
        held = {"a": _held(a, halves["a"], rank), "b": _held(b, halves["b"], rank)}
        factors = LoraFactors(held, metas, ranks)
        assert "a" in factors
        factors.bring()
        if len(given) < 2:
            continue
        assert torch.equal(factors["a"], a)
        assert torch.equal(factors["b"], b)
        base, before = _held(weight, runs, rank), _held(weight, runs, rank)
        assert merges_in_place(base, _IN)
        own = MergedElements(base, WeightAddition(weight.shape, factors, "a", "b", scaling), rank)
        for number, run in enumerate(run for run in runs if run.rank == rank):
            assert own.held(number) is None
            out = torch.empty(run.size, dtype=dtype)
            own.fill(number, out)
            run.of(merged).copy_(out.view(run.shape))
            assert torch.equal(base.held(number), before.held(number))  # it is being trained
    want = _expected(weight, a, b, scaling, dtype)
    if is_rows:  # bit by bit
        assert torch.equal(merged, want)
    torch.testing.assert_close(
        merged, want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6
    )


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merge_rounds_once_and_leaves_the_weight_alone(
    dtype: torch.dtype, on_device: bool
) -> None:
    """As on a GPU, too: tests/gpu/test_merged.py is the same with its products."""
    torch.manual_seed(2)
    weight, before = (drawn := torch.randn(_OUT, _IN, dtype=dtype)), drawn.clone()
    a, b = torch.randn(_R, _IN), torch.randn(_OUT, _R)
    out = torch.empty_like(weight)
    merge_block(weight, out, b, a, 0.7, is_exact=False, on_device=on_device)
    assert torch.equal(weight, before)
    exact = weight.double() + 0.7 * (b.double() @ a.double())
    _, exponent = torch.frexp(exact)
    unit = torch.ldexp(torch.full_like(exact, torch.finfo(dtype).eps / 2), exponent)
    sums = 2.0**-20 * (weight.double().abs() + 0.7 * (b.double().abs() @ a.double().abs()))
    assert bool(((out.double() - exact).abs() <= unit + sums).all())


def test_slices_that_are_no_block_of_a_matrix_are_not_merged_in_place() -> None:
    whole = torch.zeros(4, 6)
    assert not merges_in_place(_held(whole, [HeldRun(0, 0, 2, 12, 2)], 0), 6)
    assert not merges_in_place(_held(whole, [HeldRun(0, 4, 4, 6, 2)], 0), 6)
    assert merges_in_place(_held(whole, [HeldRun(0, 4, 2, 6, 4)], 0), 6)


def test_factors_come_to_where_the_weight_is() -> None:
    """A rank that holds no part of any factor has them on the host."""
    a, b = torch.randn(_R, _IN), torch.randn(_OUT, _R)
    runs = {"a": [HeldRun(1, 0, a.numel())], "b": [HeldRun(1, 0, b.numel())]}
    given: dict[int, torch.Tensor] = {}
    for rank in (1, 0):
        held = {"a": _held(a, runs["a"], rank), "b": _held(b, runs["b"], rank)}
        metas = {"a": a.to("meta"), "b": b.to("meta")}
        factors = LoraFactors(held, metas, OneOfSeveral(rank, 2, given))
        factors.bring()
    assert factors["a"].device.type == "cpu"
    weight = torch.zeros(_OUT, _IN, device="meta")
    base = held_by(Sharded(weight.shape, weight.dtype, (HeldRun(0, 0, _OUT * _IN),), weight), 0)
    merged = MergedElements(base, WeightAddition(weight.shape, factors, "a", "b", 1.0), 0)
    out = torch.empty(_OUT * _IN, device="meta")
    merged.fill(0, out)
    assert out.device.type == "meta"
