"""The help of every command: in groups, each summary on one line, no word broken at 80 columns."""

from __future__ import annotations

import re

import pytest
import typer
from typer.testing import CliRunner

from weft_rl.cli.main import app

COMMANDS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def helped(*words: str, width: int) -> str:
    ended = CliRunner(env={"COLUMNS": str(width)}).invoke(app, [*words, "--help"])
    assert ended.exit_code == 0, ended.output
    return ended.stdout


def test_commands_are_in_groups_and_each_has_one_line() -> None:
    rows = [line for line in helped(width=80).splitlines() if re.match(r"│ [a-z]", line)]
    assert sorted(row.split()[1] for row in rows) == COMMANDS
    assert all(row.rstrip(" │").endswith(".") for row in rows), rows
    groups = re.findall(r"╭─ (.+?) ─+╮", helped(width=80))
    assert groups == [
        "Options", "Servers", "Pool", "Versions and policies", "Replicas", "This machine",
    ]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_no_word_of_the_help_is_broken_at_80_columns(command: str) -> None:
    narrow, wide = (set(re.findall(r"[^\s│╭╮╰╯─]+", helped(command, width=w))) for w in (80, 400))
    assert narrow == wide
