"""Generated requests against a live coordinator and replica; see ``tests.fuzz.run``. Many
more at a time: make fuzz SECONDS=600."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.run import METHODS
from tests.fuzz.session import fuzz


@pytest.mark.parametrize("seed", [1, 2])
def test_no_request_does_harm(tmp_path: Path, seed: int) -> None:
    report = fuzz(tmp_path, seed=seed, num_calls=1_000)
    assert not report.found, "\n\n".join(report.found)
    called = {outcome.split(" ")[0] for outcome in report.outcomes}
    assert len(called) > 0.9 * len(METHODS)
    answered = sum(n for outcome, n in report.outcomes.items() if outcome.endswith(" OK"))
    assert 0.1 < answered / report.num_calls < 0.9
