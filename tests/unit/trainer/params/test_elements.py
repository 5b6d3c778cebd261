"""Parts of a parameter that ranks hold: what lies in each block, where it lies."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_side.params.dtensor import MeshSplit, cells_of
from trainer_side.params.elements import HeldRun
from trainer_side.params.sharded import Sharded, held_by


@st.composite
def _cases(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[HeldRun, ...], list[tuple[int, int]]]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    mesh = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    splits = [MeshSplit(draw(st.integers(0, len(shape) - 1))) for _ in mesh]
    cells = cells_of(shape, mesh, splits)
    assert cells is not None
    runs = tuple(HeldRun(cell.places[0], *each) for cell in cells for each in cell.slices)
    numel = prod(shape)
    ends = sorted({0, numel, *draw(st.sets(st.integers(0, numel), max_size=5))})
    blocks = [block for block in pairwise(ends) if draw(st.booleans())]
    return shape, runs, blocks


@settings(max_examples=300, deadline=None)
@given(_cases())
def test_blocks_are_put_together_of_what_each_rank_holds_of_them(
    case: tuple[tuple[int, ...], tuple[HeldRun, ...], list[tuple[int, int]]],
) -> None:
    shape, runs, blocks = case
    whole = torch.arange(prod(shape), dtype=torch.float32).view(shape)
    made = [torch.full((end - begin,), -1.0) for begin, end in blocks]
    for rank in sorted({run.rank for run in runs}):
        local = torch.cat([run.of(whole).reshape(-1) for run in runs if run.rank == rank])
        parts = held_by(Sharded(whole.shape, whole.dtype, runs, local), rank).cut(blocks)
        for part, out in zip(parts, made, strict=True):
            own = [run for run in part.runs if run.rank == rank]
            for number, run in enumerate(own):
                assert (run.repeats > 1) == (run.stride > 0)
                held = part.held(number)
                assert held.numel() == run.size
                assert torch.all(run.of(out) == -1)  # each element once
                run.of(out).copy_(held.view(run.shape))
    for out, (begin, end) in zip(made, blocks, strict=True):
        assert torch.equal(out, whole.view(-1)[begin:end])
