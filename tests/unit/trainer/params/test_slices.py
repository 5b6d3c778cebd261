"""Wherever a mesh puts the elements of a tensor, each is in one place, and in order."""

from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer_side.params import dtensor
from trainer_side.params.dtensor import Cell, MeshSplit, Slice, cells_of
from weft_rl.contract.manifest import Run, check_coverage, why_not
from weft_rl.contract.tensors import DataType, TensorMeta


@st.composite
def placed(draw):
    """Shape, mesh shape and splits."""
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    split = st.none()
    if shape:
        split |= st.builds(MeshSplit, st.integers(0, len(shape) - 1), st.sampled_from([1, 1, 2, 3]))
    return shape, mesh, draw(st.lists(split, min_size=len(mesh), max_size=len(mesh)))


def chunk(tensor, count, part, dim):
    chunks = tensor.chunk(count, dim)
    return chunks[part] if part < len(chunks) else tensor.narrow(dim, 0, 0)


def local(shape, mesh, splits, coordinate):
    """The elements of one place, cut by torch one mesh dim after the other."""
    held = torch.arange(prod(shape)).view(shape)
    for split, size, part in zip(splits, mesh, coordinate, strict=True):
        if split is not None:
            pieces = [chunk(held, split.factor, n, split.dim) for n in range(split.factor)]
            held = torch.cat([chunk(p, size, part, split.dim) for p in pieces], split.dim)
    return held.flatten().tolist()


def elements(parts):
    return [
        part.begin + row * part.stride + n
        for part in parts
        for row in range(part.repeats)
        for n in range(part.numel)
    ]


@given(placed())
def test_every_element_is_where_torch_puts_it(case):
    shape, mesh, splits = case
    cells = cells_of(shape, mesh, splits)
    held = {place: cell for cell in cells for place in cell.places}
    for place, coordinate in enumerate(product(*map(range, mesh))):
        found = elements(held[place].slices) if place in held else []
        assert found == local(shape, mesh, splits, coordinate)
        assert place not in held or held[place].numel == len(found) > 0


@given(placed())
def test_cells_cover_every_element_once_in_runs_that_travel(case):
    """Of 8 bytes each, so that slices begin anywhere."""
    shape, mesh, splits = case
    meta = TensorMeta("w", DataType.INT64, tuple(shape))
    runs = [Run(0, *part) for cell in cells_of(shape, mesh, splits) for part in cell.slices]
    assert not any(why_not(run, meta) for run in runs)
    if prod(shape):
        check_coverage([meta], runs)
    assert sorted(e for run in runs for e in elements([Slice(*run[1:])])) == [*range(prod(shape))]


CASES = {
    "rows": ([8, 6], [2], [MeshSplit(0)], [Cell((0,), (Slice(0, 24),), 24),
                                       Cell((1,), (Slice(24, 24),), 24)]),
    "columns": ([8, 6], [2], [MeshSplit(1)], [Cell((0,), (Slice(0, 3, 6, 8),), 24),
                                          Cell((1,), (Slice(3, 3, 6, 8),), 24)]),
    "rows, replicated": ([8, 6], [2, 2], [None, MeshSplit(0)], [
        Cell((0, 2), (Slice(0, 24),), 24), Cell((1, 3), (Slice(24, 24),), 24)]),
    # FSDP2 over tensor parallelism: ranks 0 and 2 have the first half
    "rows twice": ([8, 6], [2, 2], [MeshSplit(0, 2), MeshSplit(0)], [
        Cell((0,), (Slice(0, 12),), 12), Cell((1,), (Slice(24, 12),), 12),
        Cell((2,), (Slice(12, 12),), 12), Cell((3,), (Slice(36, 12),), 12)]),
    "experts, and their columns": ([4, 2, 6], [2, 2], [MeshSplit(0), MeshSplit(2)], [
        Cell((0,), (Slice(0, 3, 6, 4),), 12), Cell((1,), (Slice(3, 3, 6, 4),), 12),
        Cell((2,), (Slice(24, 3, 6, 4),), 12), Cell((3,), (Slice(27, 3, 6, 4),), 12)]),
    "fewer rows than places": ([2, 6], [3], [MeshSplit(0)], [Cell((0,), (Slice(0, 6),), 6),
                                                         Cell((1,), (Slice(6, 6),), 6)]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_as_few_slices_as_can_be(case):
    shape, mesh, splits, expected = CASES[case]
    assert cells_of(shape, mesh, splits) == expected


def test_what_lies_in_too_many_pieces_is_left_whole(monkeypatch):
    """Both dims of each expert are cut: a slice for each expert and place."""
    monkeypatch.setattr(dtensor, "MAX_SLICES", 32)
    assert (
        sum(len(c.slices) for c in cells_of([8, 4, 6], [2, 2], [MeshSplit(1), MeshSplit(2)])) == 32
    )
    assert cells_of([9, 4, 6], [2, 2], [MeshSplit(1), MeshSplit(2)]) is None
    assert cells_of([10**12, 10**3, 10**3], [2, 2], [MeshSplit(1), MeshSplit(2)]) is None, "at once"
