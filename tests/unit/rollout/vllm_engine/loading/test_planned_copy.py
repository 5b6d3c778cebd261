"""Joined copies: fewer, and the same bytes at the same places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_side.vllm_engine.loading.copy_plan import PlannedCopy, joined, launch

BF16, F32, F8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def made_by(pieces: Sequence[PlannedCopy], parameters: Sequence[torch.Tensor]) -> list[Any]:
    """Return what parameters of zeros hold after the copies."""
    size = 8 + max(
        (p.offset + sum((n - 1) * s for n, s in zip(p.shape, p.stride, strict=True)) + 1)
        * p.target.element_size()
        for p in pieces
    )
    wire = torch.arange(256 + size // 8 * 8 + 8, dtype=torch.int64).to(torch.uint8)[256:]
    for parameter in parameters:
        parameter.view(torch.uint8).zero_()
    launch((piece.target, piece.source(wire)) for piece in pieces)
    return [parameter.view(torch.uint8).tolist() for parameter in parameters]


def whole(target: torch.Tensor, offset: int) -> PlannedCopy:
    """Return the copy of a whole tensor in row-major order."""
    shape = tuple(target.shape)
    return PlannedCopy(target, offset, shape, torch.empty(shape, device="meta").stride())


def experts(order: str, first: int = 0, count: int = 8, size: int = 6) -> Any:
    """Return parameters of stacked experts, and copies into them in an order of g, u and d."""
    w13 = torch.zeros(count, 2 * size, 8, dtype=BF16)
    w2 = torch.zeros(count, 8, size, dtype=BF16)
    targets = {"g": w13[:, :size], "u": w13[:, size:], "d": w2}
    parts = [targets[letter][expert] for expert in range(count) for letter in order]
    pieces = [whole(part, nth * 8 * size) for nth, part in enumerate(parts)]
    return [w13, w2], pieces[first:]


@pytest.mark.parametrize("order", ["gud", "dgu", "gdu", "ugd"])
@pytest.mark.parametrize("first", [0, 1, 2], ids="from its {}. on".format)
def test_all_experts_of_a_layer_are_a_few_copies(order: str, first: int) -> None:
    parameters, pieces = experts(order, first)
    expected = made_by(pieces, parameters)
    found = joined(pieces)
    assert made_by(found, parameters) == expected
    # A bucket may begin in the middle of an expert; and up may lie before gate on the wire.
    assert len(found) <= (3 if order != "ugd" else 2 * 8 + 1) + first


def test_rows_are_copied_in_words_of_8_bytes() -> None:
    _, pieces = experts("gud", size=12)
    assert {piece.target.dtype for piece in joined(pieces)} == {torch.int64}


@pytest.mark.parametrize(
    "piece",
    [
        whole(torch.zeros(3, 5, dtype=BF16), 0),
        whole(torch.zeros(4, 8, dtype=BF16), 2),
        whole(torch.zeros(4, 10, dtype=BF16)[:, :8], 0),
        whole(torch.zeros(9, 8, dtype=BF16).view(-1)[1:65], 0),
        whole(torch.zeros((), dtype=F32), 0),
        PlannedCopy(torch.zeros(4, 8, dtype=BF16), 0, (4, 8), (1, 4)),
        PlannedCopy(torch.zeros(4, 8, dtype=BF16), 0, (4, 8), (0, 0)),
    ],
    ids=["odd rows", "odd begin", "odd distance", "odd place", "scalar", "transposed", "expanded"],
)
def test_what_is_no_multiple_of_8_bytes_is_copied_as_it_is(piece: PlannedCopy) -> None:
    assert joined([piece]) == [piece]


def test_columns_of_a_larger_tensor_are_copied_in_words() -> None:
    target = torch.zeros(4, 8, dtype=BF16)
    piece = PlannedCopy(target, 8, (4, 8), (16, 1))
    (found,) = joined([piece])
    assert (found.shape, found.stride, found.offset) == ((4, 2), (4, 1), 2)
    assert made_by([found], [target]) == made_by([piece], [target])


def test_copies_into_different_parameters_stay_apart() -> None:
    targets = [torch.zeros(4, 4, dtype=F32) for _ in range(3)]
    assert len(joined([whole(t, 16 * nth) for nth, t in enumerate(targets)])) == 3


@given(st.data())
def test_joined_copies_do_the_same(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([BF16, F32, F8, torch.int64]))
    count, rows, width = (data.draw(st.integers(1, high)) for high in (6, 5, 9))
    pad = data.draw(st.integers(0, 3))
    parameter = torch.zeros(count, rows, width + pad, dtype=F32).to(dtype)
    parts = [parameter[e, :, :width] for e in range(count)]
    if rows > 1 and data.draw(st.booleans()):  # in two, as gate and up are
        at = data.draw(st.integers(1, rows - 1))
        parts = [half for part in parts for half in (part[:at], part[at:])]
    parts = data.draw(st.permutations(parts))
    parts = parts[: data.draw(st.integers(1, len(parts)))]
    pieces, offset = [], data.draw(st.integers(0, 4))
    for part in parts:
        if data.draw(st.booleans()):
            offset += data.draw(st.sampled_from([0, 1, 4, 64]))
        strides = data.draw(st.sampled_from(["rows", "columns", "one"]))
        n, m = part.shape
        stride = {"rows": (m, 1), "columns": (1, n), "one": (0, 0)}[strides]
        pieces.append(PlannedCopy(part, offset, (n, m), stride))
        offset += n * m
    expected = made_by(pieces, [parameter])
    assert made_by(joined(pieces), [parameter]) == expected
