"""What all commands have in common."""

import logging
import os
import typing
from pathlib import Path
from unittest import mock

import grpc
import pytest
import typer.main
from typer.testing import CliRunner

from weft_rl import __version__, logs
from weft_rl.cli.console.output import exit_code, rate
from weft_rl.cli.main import app, run
from weft_rl.contract.errors import REASONS, InvalidNameError, WeftError, error_from_reason

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
    def answered(reason):
        error = error_from_reason(reason, "x")
        error.__cause__ = grpc.RpcError()  # as what a server said is raised
        return exit_code(error)

    codes = {reason: answered(reason) for reason in REASONS}
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


#: What is asked of nobody, because it cannot be meant.
MISUSES = [
    "nonsense",
    "status --nonsense",
    "status -c nonsense",
    "status --interval 0",
    "routes -c host:port",
    "versions a/b",
    "versions --limit 0",
    "transfers --limit -1",
    "transfers --purpose nonsense",
    "events --limit 0",
    "push nowhere --policy math",
    "push . --policy a/b",
    "push . --policy math --require 0",
    "push . --policy math --require some",
    "push . --policy math --timeout 0",
    "push . --policy math --trainer-id a/b",
    "push . --policy math --base maybe",
    "verify nowhere --policy math",
    "rollback math",
    "rollback a/b --to 1",
    "rollback math --to -1",
    "rollback math --to 100000000000000000000",
    "pin a/b 3",
    "pin math 0",
    "pin math",
    "pin math@x",
    "pin math@100000000000000000000",
    "retire math",
    "retire a/b@3",
    "retain math -1",
    "retain a/b 3",
    "retain math 1000000000000",
    "forget a/b",
    "cordon a/b",
    "uncordon a/b",
    "drain a/b",
    "coordinator --retain-versions 0",
    "coordinator --lease-seconds 0",
    "coordinator --listen nonsense",
    "coordinator --metrics nonsense",
    "coordinator --health nonsense",
    "coordinator --metrics-auth",
    "coordinator --log-level loud",
    "coordinator --lost-after-seconds 1",
    "coordinator --tls-cert nowhere.pem",
    "coordinator --access nowhere.toml",
    "rollout",
    "rollout --enable-lora -- model",
    "rollout --http-port 65536 -- model",
    "rollout --replica-id a/b -- model",
    "rollout --listen nonsense -- model",
    "rollout --http-url nonsense -- model",
]


@pytest.mark.parametrize("line", MISUSES)
def test_what_is_misused_ends_with_2_and_asks_nobody(line, monkeypatch, capfd, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["weft", *line.split()])
    monkeypatch.setattr(logs, "_write", lambda *_: logging.Logger("of this test"))
    # Options of credentials are kept in the environment.
    monkeypatch.setenv("WEFT_COORDINATOR", "127.0.0.1:1")  # asked, it would be 3
    with mock.patch.dict(os.environ), pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 2, capfd.readouterr().err
    said = capfd.readouterr().err
    assert said.strip()
    assert "Traceback" not in said


@pytest.mark.parametrize("spelling", ["--version", "-h", "--help", "status -h", "rollout -h"])
def test_what_is_asked_of_the_command_itself(spelling, monkeypatch, capfd):
    monkeypatch.setattr("sys.argv", ["weft", *spelling.split()])
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 0
    said = capfd.readouterr().out.lstrip()
    assert said.startswith(f"weft {__version__}\n" if spelling == "--version" else "Usage: ")


@pytest.mark.parametrize(
    ("num_bytes", "seconds", "said"),
    [
        (8_700_000, 0.007, "1.24 GB/s"),
        (12_000, 0.01, "1.20 MB/s"),
        (50, 0.1, "500 B/s"),
        (5, 0.0, ""),
        (0, 1.0, ""),
        (7 * 10**9, 0.5, "14.0 GB/s"),
    ],
)
def test_a_rate_has_digits_to_show(num_bytes, seconds, said):
    assert rate(num_bytes, seconds) == said


def _numbers():
    """Every command that ends, with each parameter of it that is a number."""
    for name in sorted(set(COMMANDS) - SERVING):
        hints = typing.get_type_hints(COMMANDS[name].callback)
        for param in COMMANDS[name].params:
            if {int, float} & {hints.get(param.name), *typing.get_args(hints.get(param.name))}:
                yield name, param.name


@pytest.mark.parametrize(("name", "number"), [*_numbers()])
@pytest.mark.parametrize("given", [str(10**20), "9" * 5000, "1e300", "nan", "-1"])
def test_no_number_is_too_long_for_a_typed_error(name, number, given, tmp_path):
    """Nobody answers here: what is taken ends with that."""
    line, hints = [name, "-c", "127.0.0.1:1"], typing.get_type_hints(COMMANDS[name].callback)
    for param in COMMANDS[name].params:
        is_option = param.param_type_name == "option"
        if param.name == number:
            line += [param.opts[0], given] if is_option else ["--", given]
        elif param.required or (number == "number" and param.name == "name"):
            some = {Path: str(tmp_path), int: "1"}.get(hints[param.name], "m")
            line += [param.opts[0], some] if is_option else [some]
    ended = CliRunner().invoke(app, line)
    assert isinstance(ended.exception, SystemExit | WeftError), (line, repr(ended.exception))


@pytest.mark.parametrize("asked", [f"math@{10**20}", "math@" + "9" * 5000])
@pytest.mark.parametrize("name", ["pin", "retire"])
def test_nor_is_a_versions_name(name, asked):
    ended = CliRunner().invoke(app, [name, asked, "-c", "127.0.0.1:1"])
    assert isinstance(ended.exception, InvalidNameError)


def test_an_option_of_vllm_before_the_dashes_is_told_where_it_goes():
    ended = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["rollout", "--enable-lora", "--", "m"])
    assert ended.exit_code == 2
    assert "--enable-lora is no option of weft rollout" in ended.output
    assert "Options of vLLM go after --, as in: weft rollout -- MODEL --enable-lora" in ended.output
