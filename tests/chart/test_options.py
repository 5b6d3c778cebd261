"""Every option and variable that the templates give is one that the programs have."""

import json
import re
import subprocess
import sys
import typing

import pytest
import typer.main

from tests.chart.rendering import BY_TOKENS, PROFILES, ROOT, args, containers, render
from weft_rl.cli.main import app
from weft_rl.rpc.security.access import Role, parse_access

SCHEMA = json.loads((ROOT / "helm/weft/values.schema.json").read_text())
COMMANDS = typer.main.get_command(app).commands


def options_of(command):
    """Its options, by each of their names."""
    return {name: option for option in COMMANDS[command].params for name in option.opts}


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(
    ("pod", "command"), [("-coordinator", "coordinator"), ("-replicas", "rollout")]
)
def test_every_option_that_is_given_is_one_of_the_programs(profile, pod, command):
    container = render(profile).container(pod)
    assert container["command"] == ["weft", command]
    known = options_of(command)
    given = args(container)
    assert len(given) > 10
    unknown = {name for name in given if name not in known}
    assert unknown == set()
    for name, value in given.items():
        assert known[name].is_flag != bool(value), name


def test_every_option_of_the_programs_can_be_set_but_for_the_dangerous_one():
    templates = "".join(path.read_text() for path in (ROOT / "helm/weft/templates").glob("*"))
    for command, never in {
        "coordinator": set(),
        "rollout": {"--allow-unversioned-changes"},
    }.items():
        names = {name for name in options_of(command) if name.startswith("--")}
        unset = {name for name in names if not re.search(rf"- {name}\b", templates)}
        assert unset - {"--token"} == never


def test_between_them_the_profiles_give_every_option_of_the_templates():
    templates = "".join(
        path.read_text() for path in (ROOT / "helm/weft/templates").glob("*") if path.is_file()
    )
    written = set(re.findall(r"^\s*- (--[a-z][a-z0-9-]*)", templates, re.MULTILINE))
    rendered = set()
    for profile in PROFILES:
        for _, pod in render(profile).pods():
            for container in containers(pod["spec"]):
                rendered |= {arg.partition("=")[0] for arg in container.get("args", [])}
    assert written - rendered == set()


@pytest.mark.parametrize("profile", PROFILES)
def test_every_variable_of_weft_is_one_that_the_programs_read(profile):
    read = {option.envvar for option in COMMANDS["push"].params}
    assert "WEFT_COORDINATOR" in read
    for name, pod in render(profile).pods():
        for container in containers(pod["spec"]):
            given = {v["name"] for v in container.get("env", []) if v["name"].startswith("WEFT_")}
            assert given <= read, name


def test_the_programs_take_the_choices_of_the_values():
    known = options_of("rollout")
    kinds = typing.get_type_hints(COMMANDS["rollout"].callback)
    for option, place in {
        "--staging": ("replicas", "staging"),
        "--backend": ("replicas", "backend"),
        "--log-format": ("logFormat",),
        "--log-level": ("logLevel",),
    }.items():
        schema = SCHEMA
        for key in place:
            schema = schema["properties"][key]
        taken = typing.get_args(kinds[known[option].name]) or known[option].help
        assert all(choice in taken for choice in schema["enum"]), taken


@pytest.mark.parametrize("profile", [profile for profile in PROFILES if profile != "cpu"])
def test_the_rules_are_ones_that_servers_take(profile):
    text = render(profile).of("ConfigMap", "-access")["data"]["access.toml"]
    access = parse_access(text)
    assert access.by_certificate == (profile not in BY_TOKENS)
    if access.by_certificate:
        options = args(render(profile).container("-replicas"))
        pod = options["--advertise-host"].replace("$(POD_NAME)", "weft-replicas-0")
        coordinator = options["--coordinator"].rpartition(":")[0]
        assert access.identify([pod], None).roles == {Role.REPLICA}
        assert access.identify([coordinator], None).roles == {Role.COORDINATOR, Role.INSPECT}


def test_the_schema_has_the_roles_that_the_comment_names():
    """All that there are but the pool's own, which the chart gives its own processes."""
    identity = SCHEMA["properties"]["access"]["properties"]["identities"]["items"]
    roles = set(identity["properties"]["roles"]["items"]["enum"])
    assert roles == {*map(str, Role)} - {"coordinator", "replica"}
    text = (ROOT / "helm/weft/values.yaml").read_text()
    said = re.search(r"`roles` of ([a-z, ]+), and for publish", text)
    assert set(said[1].split(", ")) == roles


def test_the_doctor_needs_no_more_than_the_coordinators_install():
    """This environment is such a one: without torch, vLLM, and what these bring along."""
    done = subprocess.run(
        [sys.executable, "-m", "weft_rl", "doctor", "--json", "--coordinator=127.0.0.1:1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr  # nobody listens there
    findings = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
    assert {"tcp", "interfaces", "backends", "vllm", "memory"} <= findings.keys()
    assert "not installed" in findings["vllm"]["says"]
    assert "shm" not in findings
