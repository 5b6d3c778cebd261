"""What ``weft coordinator`` and ``weft rollout`` do before they serve."""

import resource
import typing

import pytest
import typer.main
from typer.testing import CliRunner

import rollout_side.service.main
import weft_rl.coordinator.server
from weft_rl.cli import coordinator, rollout
from weft_rl.cli.main import app
from weft_rl.cli.server_options import WANTED
from weft_rl.contract.errors import WeftError

FEW = 512


@pytest.fixture
def limits():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, before[1]))
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("args", [["coordinator"], ["rollout", "--", "MODEL"]], ids=" ".join)
def test_a_server_may_open_as_many_files_as_the_system_lets_it(args, limits, monkeypatch):
    """A replica has one open for each version of an adapter, and some for each trainer's group."""
    seen = []

    async def serve(*_args, **_kwargs):
        seen.append(resource.getrlimit(resource.RLIMIT_NOFILE))

    def run(*_args, **_kwargs):
        seen.append(resource.getrlimit(resource.RLIMIT_NOFILE))
        return "done"

    for module in (coordinator, rollout):
        monkeypatch.setattr(module, "configure_logging", lambda *_: None)
    monkeypatch.setattr(weft_rl.coordinator.server, "serve", serve)
    monkeypatch.setattr(rollout_side.service.main, "run", run)
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    hard = limits[1]
    most = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    assert most > FEW
    assert seen == [(most, hard)]


def test_the_help_of_a_replica_begins_with_the_options_that_most_set():
    """The others follow under headings of their own."""
    options = typer.main.get_command(app).commands["rollout"].params
    first = [option.name for option in options if not option.rich_help_panel]
    assert len([*first, "help"]) <= 12
    assert {"coordinator", "replica_id", "http_port"} <= {*first}
    said = CliRunner().invoke(app, ["rollout", "--help"]).output
    headings = dict.fromkeys(o.rich_help_panel or "Options" for o in options)
    places = [said.index(f"─ {heading} ─") for heading in headings]
    assert places == sorted(places)
    assert len(places) == 7


def _numbers():
    for name, command in (("coordinator", coordinator.coordinator), ("rollout", rollout.rollout)):
        for option, kind in typing.get_type_hints(command).items():
            if kind in (int, float):
                yield name, f"--{option.replace('_', '-')}"


@pytest.mark.parametrize(("name", "option"), [*_numbers()])
@pytest.mark.parametrize("given", [str(10**20), "9" * 5000, "1e300", "nan", "-1"])
def test_no_number_is_too_long_for_a_typed_error(name, option, given, monkeypatch):
    served = []

    async def serve(config, **_):
        served.append(config)

    for module in (coordinator, rollout):
        monkeypatch.setattr(module, "configure_logging", lambda *_: None)
        monkeypatch.setattr(module, "raise_file_limit", lambda: None)
    monkeypatch.setattr(weft_rl.coordinator.server, "serve", serve)
    monkeypatch.setattr(rollout_side.service.main, "run", lambda config, **_: served.append(config))
    result = CliRunner().invoke(app, [name, option, given, *["--", "MODEL"] * (name == "rollout")])
    assert isinstance(result.exception, SystemExit | WeftError), repr(result.exception)
    assert not served
