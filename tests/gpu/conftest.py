"""What the tests on GPUs have compared, as a table at the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.report import table

Note = Callable[[str, str, str], None]
_ROWS: list[tuple[str, str, str]] = []


@pytest.fixture
def note() -> Note:
    """Takes a row: the model, what was done to it, and what was found."""

    def take(model: str, done: str, found: str) -> None:
        _ROWS.append((model, done, found))

    return take


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the rows."""
    if _ROWS:
        terminalreporter.write_line("")
        terminalreporter.write_line(table(("model", "pushed", "found"), _ROWS))
