"""The table of tests/states.md names tests that there are."""

from __future__ import annotations

import re

from tests.unit.docs.pages import ROOT


def test_each_state_has_a_test_that_there_is() -> None:
    text = (ROOT / "tests/states.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 30
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for row in rows:
        names = re.findall(r"`(test_\w+)`", row)
        assert names, row
        for name in names:
            assert re.search(rf"def {name}\b", tests), f"{name} is no test"
