"""Figures of CI: which of them warn."""

from __future__ import annotations

import json

from benchmarks.figures import STORED, compare


def test_a_figure_that_grew_by_more_than_a_fifth_warns() -> None:
    stored = {"push": 10.0, "listing": 10.0, "memory": 10.0}
    measured = {"push": 12.1, "listing": 11.9, "memory": 5.0}
    assert compare(stored, measured) == ["push: 12.1, 21% more than 10"]


def test_a_figure_that_is_not_stored_warns() -> None:
    (warning,) = compare({}, {"push": 1.0})
    assert "--write" in warning


def test_what_is_stored_says_where_it_was_measured() -> None:
    stored = json.loads(STORED.read_text())
    hardware, versions, command = stored["measured"]
    assert hardware.startswith("hardware: ")
    assert "torch" in versions
    assert "benchmarks.figures --write" in command
    assert all(compare(stored["figures"], {name: 1e9}) for name in stored["figures"])
