"""What the commands take where nothing is said is what their config says."""

import inspect

import typer.main

from trainer_side import Publisher, PushOptions
from weft_rl.cli.main import app
from weft_rl.cli.push import parse_require
from weft_rl.coordinator.config import CoordinatorConfig
from weft_rl.coordinator.decisions.state.pool import PoolSettings
from weft_rl.rpc.security.credentials import VARIABLES

COMMANDS = typer.main.get_command(app).commands


def test_the_defaults_of_weft_push_are_the_publishers():
    publisher = inspect.signature(Publisher).parameters
    of_a_push = inspect.signature(Publisher.push_adapter).parameters
    options = {p.name: p.default for p in COMMANDS["push"].params}
    for name in ("json_output", "coordinator", "path", "policy", "trainer_id", *VARIABLES):
        del options[name]
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
