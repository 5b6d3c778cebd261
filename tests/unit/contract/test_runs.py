"""What buckets carry when they list it: any parts of tensors, which cover all of them once."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_rl.contract.errors import DigestMismatchError, InvalidManifestError
from weft_rl.contract.manifest import (
    ALIGN_BYTES,
    TRAILER_BYTES,
    Bucket,
    Run,
    TensorSlot,
    carried_sizes,
    check_coverage,
    check_gapless,
    make_manifest,
    pack_runs,
    plan_buckets,
    unpack_runs,
    why_not,
    wire_size,
)
from weft_rl.contract.tensors import DataType, TensorMeta


def matrix(rows: int, columns: int, name: str = "w", dtype: DataType = DataType.INT64):
    return TensorMeta(name, dtype, (rows, columns))


def elements(run: Run) -> list[int]:
    """What it holds, row by row."""
    return [
        run.first + row * run.stride + i for row in range(run.repeats) for i in range(run.count)
    ]


@st.composite
def tilings(draw: st.DrawFn) -> tuple[list[TensorMeta], list[Run]]:
    """Tensors, each cut at random into contiguous runs, or into runs and slices of a grid."""
    metas, runs = [], []
    for index in range(draw(st.integers(1, 3))):
        rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 6))
        metas.append(matrix(rows, columns, f"t{index}"))
        row_cuts = sorted({0, rows, *draw(st.lists(st.integers(0, rows), max_size=2))})
        for top, bottom in pairwise(row_cuts):
            kind = draw(st.sampled_from(["contiguous", "columns"]))
            first, end = top * columns, bottom * columns
            if kind == "contiguous":
                inside = draw(st.lists(st.integers(first, end), max_size=2))
                cuts = sorted({first, end, *inside})
                runs += [Run(index, a, b - a) for a, b in pairwise(cuts)]
                continue
            cuts = sorted({0, columns, *draw(st.lists(st.integers(0, columns), max_size=2))})
            for a, b in pairwise(cuts):
                if b - a == columns or bottom - top == 1:
                    runs += [Run(index, r * columns + a, b - a) for r in range(top, bottom)]
                else:
                    runs.append(Run(index, first + a, b - a, columns, bottom - top))
    return metas, runs


@given(tilings(), st.randoms())
def test_any_tiling_covers_every_element_once(tiling, random) -> None:
    metas, runs = tiling
    random.shuffle(runs)
    assert not any(why_not(run, metas[run.tensor]) for run in runs)
    check_coverage(metas, runs)
    some = random.choice(runs)
    left = list(runs)
    left.remove(some)
    with pytest.raises(InvalidManifestError, match="did not come"):
        check_coverage(metas, left)
    with pytest.raises(InvalidManifestError, match="came twice"):
        check_coverage(metas, [*runs, some])


@given(st.integers(1, 40), st.integers(2, 7), st.data())
def test_it_says_of_any_runs_what_counting_every_element_says(size, stride, data) -> None:
    meta = matrix(1, size)

    def run() -> Run:
        first = data.draw(st.integers(0, size - 1))
        repeats = data.draw(st.integers(1, 5))
        count = data.draw(st.integers(1, stride - 1 if repeats > 1 else size))
        return Run(0, first, count, stride if repeats > 1 else 0, repeats)

    runs = [run() for _ in range(data.draw(st.integers(1, 5)))]
    runs = [run for run in runs if not why_not(run, meta)]
    counted = Counter(element for run in runs for element in elements(run))
    wrong = {element: counted[element] for element in range(size) if counted[element] != 1}
    if not wrong:
        check_coverage([meta], runs)
        return
    with pytest.raises(InvalidManifestError) as raised:
        check_coverage([meta], runs)
    _, place, *_ = raised.value.message.split()
    assert "twice" in raised.value.message if wrong[int(place)] else "not come" in str(raised.value)


def test_rows_of_a_slice_that_reach_into_the_next_are_told() -> None:
    meta = matrix(4, 10)
    # columns 8, 9 and 0 of the next row, four times but for the end; and what is left
    runs = [Run(0, 0, 8), Run(0, 8, 3, 10, 3), Run(0, 11, 7, 10, 3), Run(0, 38, 2)]
    check_coverage([meta], runs)
    with pytest.raises(InvalidManifestError, match="element 8 of tensor 'w' came twice"):
        check_coverage([meta], [Run(0, 0, 12), *runs[1:]])


def test_a_tensor_that_did_not_come_is_named() -> None:
    metas = [matrix(2, 2, name) for name in "abc"]
    for missing, name in enumerate("abc"):
        runs = [Run(i, 0, 4) for i in range(3) if i != missing]
        with pytest.raises(InvalidManifestError, match=f"element 0 of tensor '{name}' did not"):
            check_coverage(metas, runs)


def test_slices_of_one_tensor_have_one_stride() -> None:
    runs = [Run(0, 0, 1, 2, 4), Run(0, 1, 1, 4, 2), Run(0, 3, 1, 4, 2)]
    with pytest.raises(InvalidManifestError, match="strides 2 and 4"):
        check_coverage([matrix(2, 4)], runs)


def test_long_slices_are_not_checked_row_by_row() -> None:
    """A trillion rows: it would never end."""
    meta = matrix(10**12, 64)
    check_coverage([meta], [Run(0, 0, 32, 64, 10**12), Run(0, 32, 32, 64, 10**12)])


SIZE = 700


def test_a_table_is_read_as_it_was_written() -> None:
    metas = [TensorMeta("a", DataType.UINT8, (SIZE,)), matrix(4, 64, "b")]
    manifest = plan_buckets(metas)
    runs = [Run(0, 0, 300), Run(1, 8, 8, 64, 4), Run(0, 300, 400)]
    payload = 512 + 256 + (768 - 256)
    assert sum(run.payload_bytes(m) for run, m in zip(runs, (1, 8, 1), strict=True)) == payload
    table = pack_runs(runs)
    assert unpack_runs(table + b"\7" * 100, manifest, payload, 0) == runs
    assert payload + TRAILER_BYTES + len(table) <= wire_size(payload, 3).wire_bytes
    assert wire_size(payload, 3).wire_bytes % ALIGN_BYTES == 0


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        ([], "lists 0 runs"),
        ([Run(0, 0, 300)], "runs of 512 bytes"),
        ([Run(7, 0, 768)], "of 2 tensors"),
        ([Run(0, 256, SIZE)], "700 elements"),
        ([Run(0, 0, SIZE), Run(0, 0, 0)], "700 elements"),
        ([Run(0, 0, SIZE, 0, 0)], "700 elements"),
        ([Run(0, 0, SIZE, 8)], "has stride 0"),
        ([Run(0, 0, 8, 8, 2)], "contiguous"),
        ([Run(0, 4, 8, 16, 2)], "multiples of 8"),
        ([Run(0, 0, 8, 20, 2)], "multiples of 8"),
        ([Run(0, 0, 12, 16, 2)], "multiples of 8"),
        ([Run(0, 2**63, 768)], "700 elements"),
        ([Run(0, 0, 8, 2**62, 2**60)], "700 elements"),
    ],
    ids=str,
)
def test_a_table_that_cannot_be_right_is_refused(runs: list[Run], why: str) -> None:
    metas = [TensorMeta("a", DataType.UINT8, (SIZE,)), matrix(4, 64, "b")]
    with pytest.raises(DigestMismatchError, match=why):
        unpack_runs(pack_runs(runs), plan_buckets(metas), 768, 0)


def test_a_table_that_is_cut_off_is_refused() -> None:
    manifest = plan_buckets([TensorMeta("a", DataType.UINT8, (SIZE,))])
    with pytest.raises(DigestMismatchError, match="room"):
        unpack_runs(pack_runs([Run(0, 0, SIZE)])[:-1], manifest, 768, 0)


def test_buckets_of_any_order_have_room_for_the_runs_of_the_smallest_tensors() -> None:
    metas = [
        TensorMeta(f"t.{i}.w", DataType.UINT8, (size,)) for i, size in enumerate((10, 300, 600))
    ]
    manifest = plan_buckets(metas, 512)
    assert [size.payload_bytes for size in carried_sizes(manifest)] == [256, 512, 768]
    assert carried_sizes(manifest)[1] == wire_size(512, 1 + 2)
    assert carried_sizes(manifest)[2] == wire_size(768, 2 + 2)


def test_a_layout_that_runs_cannot_fill_is_refused() -> None:
    meta = TensorMeta("w", DataType.UINT8, (SIZE,))
    check_gapless(plan_buckets([meta]))
    gap = make_manifest([TensorSlot(meta, 0, ALIGN_BYTES)], [Bucket(4 * ALIGN_BYTES, 1)])
    with pytest.raises(InvalidManifestError, match="gaps"):
        check_gapless(gap)
