"""What the commands take where nothing is said is what their config says."""

import dataclasses
import inspect

import pytest
import typer.main

from rollout_side.config import AgentConfig, RolloutConfig
from rollout_side.vllm_engine.launch import open_engine
from trainer_side import Publisher, PushOptions
from weft_rl.cli.main import app
from weft_rl.cli.push import parse_require
from weft_rl.coordinator.config import CoordinatorConfig
from weft_rl.coordinator.decisions.state.pool import PoolSettings
from weft_rl.rpc.security.credentials import VARIABLES
from weft_rl.telemetry.config import TelemetryConfig

COMMANDS = typer.main.get_command(app).commands
#: Options that have no default in a config: required there, or of the command alone.
OWN = {
    "catalog",
    "log_level",
    "log_format",
    "json_output",
    "coordinator",
    "replica_id",
    "path",
    "policy",
    "trainer_id",
    *VARIABLES,
}


def defaults_of(config):
    return {
        field.name: field.default
        for field in dataclasses.fields(config)
        if field.default is not dataclasses.MISSING
    }


def options_of(command):
    return {p.name: p.default for p in COMMANDS[command].params if p.name not in OWN | {"help"}}


def in_bytes(name, value):
    """An option in GiB as the config's in bytes."""
    if name.endswith("_gib"):
        return name.removesuffix("_gib") + "_bytes", value * 2**30
    return name, value


@pytest.mark.parametrize(
    ("command", "config"),
    [
        ("coordinator", defaults_of(CoordinatorConfig) | defaults_of(TelemetryConfig)),
        (
            "rollout",
            defaults_of(AgentConfig) | defaults_of(RolloutConfig) | defaults_of(TelemetryConfig),
        ),
    ],
)
def test_every_options_default_is_the_configs(command, config):
    options = dict(in_bytes(name, value) for name, value in options_of(command).items())
    assert options == {name: config[name] for name in options}


def test_the_defaults_of_weft_push_are_the_publishers():
    publisher = inspect.signature(Publisher).parameters
    of_a_push = inspect.signature(Publisher.push_adapter).parameters
    options = options_of("push")
    options["timeout_seconds"] = options.pop("timeout")
    options["require"] = parse_require(options["require"])
    assert options.pop("base") == of_a_push["base"].default
    of_a_base = inspect.signature(Publisher.push_base).parameters
    assert options.pop("draft") is of_a_base["draft"].default
    assert PushOptions(**{name: options.pop(name) for name in ("cast", "check_finite")}) == (
        PushOptions()
    )
    assert options == {name: publisher[name].default for name in options}


def test_every_command_looks_for_the_coordinator_where_it_listens():
    found = {
        name: param.default
        for name, command in COMMANDS.items()
        for param in command.params
        if param.name == "coordinator"
    }
    assert len(found) > 10
    assert set(found.values()) == {CoordinatorConfig.listen}


def test_what_decisions_depend_on_is_as_the_coordinators_config_says(tmp_path):
    assert CoordinatorConfig(catalog=tmp_path / "weft.db").settings == PoolSettings()


def test_an_engine_is_opened_as_the_replicas_config_says():
    config = defaults_of(RolloutConfig)
    given = inspect.signature(open_engine).parameters
    names = ("staging", "backend", "base_copies", "vllm_defaults", "allow_unversioned_changes")
    for name in names:
        assert given[name].default == config[name]
