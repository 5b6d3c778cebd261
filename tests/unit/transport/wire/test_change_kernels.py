"""Tables that the kernels of changes work from."""

from __future__ import annotations

import pytest

from weft_rl.contract.manifest import Run
from weft_rl.transport.wire.change_kernels import place_rows, run_rows
from weft_rl.transport.wire.changes import RunPlace, packed_places

RUNS = (Run(0, 0, 1), Run(1, 1000, 40_000), Run(2, 7, 10, 100, 3), Run(3, 3, 16384))
ITEMSIZES = (8, 2, 4, 1)


def test_runs_lie_where_a_payload_holds_them() -> None:
    rows = run_rows(RUNS, ITEMSIZES)
    packed = packed_places(RUNS, ITEMSIZES)
    assert [row[0] for row in rows] == [place.at for place in packed]
    assert [row[1] for row in rows] == [0, 1, 4, 5], "blocks do not span runs"
    assert [row[2:4] for row in rows] == [(1, 8), (40_000, 2), (30, 4), (16384, 1)]
    assert rows[2][4:7] == (7, 10, 100)


def test_places_up_to_the_last_byte_are_taken() -> None:
    runs, sizes = (Run(0, 0, 25),), (2,)
    place = RunPlace(4, 10, 30)  # rows of 10, 10 and 5
    end = 4 + 2 * (2 * 30 + 5)
    assert place_rows(runs, sizes, (place,), end) == [(4, 10, 30, 0)]
    with pytest.raises(ValueError, match="not within memory"):
        place_rows(runs, sizes, (place,), end - 1)
    overlapping = RunPlace(0, 10, 1)
    assert place_rows(runs, sizes, (overlapping,), 2 * 11)
    with pytest.raises(ValueError, match="not within memory"):
        place_rows(runs, sizes, (overlapping,), 2 * 11 - 1)


@pytest.mark.parametrize("place", [RunPlace(-2, 25), RunPlace(1, 25), RunPlace(0, 5, -1)])
def test_places_that_cannot_be_are_refused(place: RunPlace) -> None:
    with pytest.raises(ValueError, match="not within memory"):
        place_rows((Run(0, 0, 25),), (2,), (place,), 10**6)
