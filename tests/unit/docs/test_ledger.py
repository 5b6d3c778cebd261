"""Each replay of tests/ledger.md names a test, a seed or a case that exists."""

from __future__ import annotations

import re

import pytest

from tests.fault.strikes import CASES
from tests.unit.docs.pages import ROOT

_DECISIONS = "tests/unit/coordinator/decisions/"
_ROWS = [
    line.strip("| ").split(" | ")
    for line in (ROOT / "tests" / "ledger.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| bug ")
]
_REPLAYS = [(row[0], replay) for row in _ROWS for replay in re.findall(r"`([^`]+)`", row[-1])]


def test_each_row_has_a_replay() -> None:
    assert len(_ROWS) > 30
    assert {row[0] for row in _ROWS} == {bug for bug, _ in _REPLAYS}


@pytest.mark.parametrize(("bug", "replay"), _REPLAYS, ids=lambda text: text[-60:])
def test_the_replay_exists(bug: str, replay: str) -> None:
    if test := re.fullmatch(r"pytest ([\w/]+\.py)::(\w+)", replay):
        path = test[1].replace("decisions/", _DECISIONS, test[1].startswith("decisions/"))
        assert f"def {test[2]}(" in (ROOT / path).read_text()
    elif seed := re.fullmatch(r"python -m tests\.sim --seed (\d+) --trace", replay):
        (found,) = re.findall(
            r"^FOUND = \(([^)]+)\)", (ROOT / "tests/sim/test_sim.py").read_text(), re.M
        )
        assert seed[1] in re.findall(r"\d+", found)
    elif words := re.fullmatch(r"python -m tests\.fault (.+)", replay):
        wanted = [a or b for a, b in re.findall(r'"([^"]+)"|(\S+)', words[1])]
        assert any(all(word in " ".join(case) for word in wanted) for case in CASES)
    else:
        assert re.fullmatch(r"python -m tests\.fuzz --seconds \d+ --seed \d+", replay), bug
