"""What ``weft coordinator`` and ``weft rollout`` do before they serve."""

import resource
import typing

import pytest
from typer.testing import CliRunner

import rollout_side.service.main
import weft_rl.coordinator.server
from weft_rl.cli.main import app
from weft_rl.cli.servers import coordinator, rollout
from weft_rl.cli.servers.descriptors import WANTED
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
        monkeypatch.setattr(module, "allow_descriptors", lambda: None)
    monkeypatch.setattr(weft_rl.coordinator.server, "serve", serve)
    monkeypatch.setattr(rollout_side.service.main, "run", lambda config, **_: served.append(config))
    result = CliRunner().invoke(app, [name, option, given, *["--", "MODEL"] * (name == "rollout")])
    assert isinstance(result.exception, SystemExit | WeftError), repr(result.exception)
    assert not served
