"""Tables: no name, address or number is broken, however narrow the terminal is."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from weft_rl.cli.console.table import ColumnSpec, FittedTable, fitting_columns, listing_console

COLUMNS = (
    ColumnSpec("replica"),
    ColumnSpec("state", is_prose=True),
    ColumnSpec("address", rank=1),
    ColumnSpec("bytes", rank=2, is_number=True),
)
URL = "http://weft-replicas-0.weft-replicas.rl.svc:8000"
WHY = "it lacks math@3, which no replica in contact holds"


def printed(table: FittedTable, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue().splitlines()


def table_of(*rows: Sequence[str], notes: Sequence[str] = ()) -> FittedTable:
    table = FittedTable("replicas", COLUMNS, caption="and 7 more")
    for row in rows:
        table.add_row(*row, notes=[Text(note) for note in notes])
    return table


@pytest.mark.parametrize(
    ("width", "chosen"),
    [
        (19, None), (20, [0, 2]), (28, [0, 2]), (29, [0, 2, 3]), (38, [0, 2, 3]),
        (39, [0, 1, 2]), (48, [0, 1, 2, 3]),
    ],
)  # fmt: skip
def test_columns_get_room_by_their_rank(width: int, chosen: list[int] | None) -> None:
    """A later one that fits is not left out for one before it that does not."""
    assert fitting_columns([6, 16, 7, 6], [0, 1, 0, 2], width) == chosen


def test_what_does_not_fit_is_left_out_and_named() -> None:
    row = ("weft-replicas-0", "ready", URL, "16,400,000,000")
    wide = printed(table_of(row), 200)
    assert all(text in " ".join(wide) for text in row)
    assert not [line for line in wide if "--wide" in line]
    for width, left_out in ((80, "bytes"), (70, "address")):
        narrow = printed(table_of(row), width)
        shown = [text for text in row if text in " ".join(narrow)]
        assert shown == [
            text for text in row if text != {"bytes": row[3], "address": URL}[left_out]
        ]
        assert f"not shown: {left_out}; see --wide" in " ".join(narrow)
        assert max(map(len, narrow)) <= width


def test_prose_is_wrapped_between_words_and_notes_have_the_whole_width() -> None:
    lines = printed(table_of(("r0", WHY, URL, "1"), notes=["first", WHY]), 80)
    assert max(map(len, lines)) <= 80
    assert URL in " ".join(lines)
    assert lines[-2:] == ["r0: first", f"r0: {WHY}"]


def test_where_nothing_fits_each_row_is_a_block() -> None:
    name = "a" * 30 + "@1"
    lines = [line.rstrip() for line in printed(table_of((name, WHY, URL, "")), 42)]
    assert lines == [
        "replicas",
        name,
        "  state: it lacks math@3, which no replica",
        "  in contact holds",
        "  address:",
        "  " + URL[:40],
        "  " + URL[40:],
        "and 7 more",
    ]


@given(
    rows=st.lists(
        st.tuples(
            st.text("abc-@019.:/", min_size=1, max_size=70),
            st.lists(st.text("xyz", min_size=1, max_size=20), max_size=9).map(" ".join),
            st.text("abc-@019.:/", max_size=70),
            st.integers(0, 10**12).map("{:,}".format),
        ),
        min_size=1,
        max_size=4,
    ),
    width=st.sampled_from([80, 100, 120]),
)
def test_no_word_is_broken(rows: list[tuple[str, str, str, str]], width: int) -> None:
    lines = printed(table_of(*rows), width)
    assert max(map(len, lines)) <= width
    words = {word for row in rows for word in " ".join(row[:2]).split()}
    assert words <= {word for line in lines for word in line.split()}
    text = " ".join(lines)
    shown = "not shown" in text or all(row[2] in text for row in rows)
    assert shown, "the address is left out as a whole, or not at all"


_LISTING = """
from weft_rl.cli.console.table import listing_console
import sys
print(listing_console(wide=len(sys.argv) > 1).width)
"""


def _on_terminal(*args: str) -> str:
    """What the listing's console says on a terminal of 80 columns."""
    master, slave = os.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    subprocess.run(
        [sys.executable, "-c", _LISTING, *args], stdout=slave, stdin=slave, env=env, check=True,
        timeout=60,
    )  # fmt: skip
    os.close(slave)
    with os.fdopen(master) as terminal:
        return terminal.readline().strip()


def test_a_terminal_has_its_width_and_all_else_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _on_terminal() == "80"
    assert int(_on_terminal("--wide")) > 10_000
    monkeypatch.setenv("COLUMNS", "80")
    assert listing_console().width > 10_000


def test_a_list_of_nothing_is_a_sentence() -> None:
    assert printed(FittedTable("things", [ColumnSpec("name")], empty="nothing yet"), 80) == [
        "nothing yet"
    ]
