"""What ``weft coordinator`` and ``weft rollout`` do before they serve."""

import resource
import typing
from dataclasses import replace
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

import rollout_side.service.main
import weft_rl.coordinator.server
from rollout_side.config import AgentConfig, RolloutConfig
from weft_rl.cli import servers
from weft_rl.cli.main import app
from weft_rl.contract.errors import WeftError
from weft_rl.coordinator.config import CoordinatorConfig
from weft_rl.descriptors import WANTED
from weft_rl.telemetry.config import TelemetryConfig

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

    monkeypatch.setattr(servers, "configure_logging", lambda *_: None)
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
    for name, command in (("coordinator", servers.coordinator), ("rollout", servers.rollout)):
        for option, kind in typing.get_type_hints(command).items():
            if kind in (int, float):
                yield name, f"--{option.replace('_', '-')}"


@pytest.fixture
def served(monkeypatch):
    """The configs that servers are run with, which begin nothing."""
    configs = []

    async def serve(config, **_):
        configs.append(config)

    monkeypatch.setattr(servers, "configure_logging", lambda *_: None)
    monkeypatch.setattr(servers, "raise_file_limit", lambda: None)
    monkeypatch.setattr(weft_rl.coordinator.server, "serve", serve)
    monkeypatch.setattr(
        rollout_side.service.main, "run", lambda config, **_: configs.append(config)
    )
    return configs


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("coordinator", {}),
        (
            "coordinator --catalog a.db --retain-versions 9 --stall-seconds 1.5 --recover",
            {
                "catalog": Path("a.db"),
                "retain_versions": 9,
                "stall_seconds": 1.5,
                "recover": True,
            },
        ),
        (
            "coordinator --metrics 127.0.0.1:0 --metrics-auth --insecure",
            {
                "telemetry": TelemetryConfig(metrics="127.0.0.1:0", metrics_auth=True),
                "insecure": True,
            },
        ),
    ],
)
def test_a_coordinators_config_is_of_its_options(line, changed, served):
    assert CliRunner().invoke(app, line.split()).exit_code == 0
    assert served == [CoordinatorConfig(**changed)]


@pytest.mark.parametrize(
    ("line", "of_agent", "changed"),
    [
        ("", {}, {}),
        (
            "-c weft:1 --replica-id a --unready-after-seconds 9 --http-url http://a",
            {
                "coordinator": "weft:1",
                "replica_id": "a",
                "unready_after_seconds": 9.0,
                "http_url": "http://a",
            },
            {},
        ),
        (
            "--adapter-memory-gib 0.5 --staging in-place --base-copies 0 --access a --traces",
            {},
            {
                "adapter_memory_bytes": 2**29,
                "staging": "in-place",
                "base_copies": 0,
                "access": Path("a"),
                "telemetry": TelemetryConfig(traces=True),
            },
        ),
    ],
)
def test_a_replicas_config_is_of_its_options(line, of_agent, changed, served):
    result = CliRunner().invoke(app, ["rollout", *line.split(), "--", "MODEL", "--seed", "1"])
    assert result.exit_code == 0, result.output
    agent = AgentConfig(**{"coordinator": CoordinatorConfig.listen} | of_agent)
    (config,) = served
    agent = replace(agent, incarnation=config.agent.incarnation)
    assert config == RolloutConfig(agent=agent, vllm_args=["MODEL", "--seed", "1"], **changed)


@pytest.mark.parametrize(("name", "option"), [*_numbers()])
@pytest.mark.parametrize("given", [str(10**20), "9" * 5000, "1e300", "nan", "-1"])
def test_no_number_is_too_long_for_a_typed_error(name, option, given, served):
    result = CliRunner().invoke(app, [name, option, given, *["--", "MODEL"] * (name == "rollout")])
    assert isinstance(result.exception, SystemExit | WeftError), repr(result.exception)
    assert not served
