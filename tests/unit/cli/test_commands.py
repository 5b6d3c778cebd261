"""What all commands have in common."""

import pytest
import typer.main
from typer.testing import CliRunner

from weft.contract.errors import REASONS, error_from_reason
from weft_cli.main import app
from weft_cli.output import exit_code

COMMANDS = typer.main.get_command(app).commands
#: These run until they are stopped; what they say is their log.
SERVING = {"coordinator", "rollout", "demo"}


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - SERVING))
def test_every_command_that_ends_speaks_to_programs(name):
    options = {spelling for p in COMMANDS[name].params for spelling in p.opts}
    assert "--json" in options


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_says_what_its_arguments_are(name):
    for param in COMMANDS[name].params:
        if param.param_type_name == "argument":
            assert param.metavar, param.name


def test_codes_tell_what_may_be_tried_again():
    codes = {reason: exit_code(error_from_reason(reason, "x")) for reason in REASONS}
    assert {r for r, code in codes.items() if code == 3} == {
        "COORDINATOR_AWAY",
        "COORDINATOR_UNREACHABLE",
    }
    assert [r for r, code in codes.items() if code == 4] == ["DEADLINE"]
    assert set(codes.values()) == {1, 3, 4}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands(shell):
    variables = {
        "_WEFT_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": "weft tra",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "COMP_WORDS": "weft tra",
        "COMP_CWORD": "1",
    }
    ended = CliRunner().invoke(app, [], prog_name="weft", env=variables)
    assert "transfers" in ended.output
    assert "versions" not in ended.output
