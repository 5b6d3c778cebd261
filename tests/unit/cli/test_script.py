"""The ``weft`` script in an environment that lacks an extra."""

import subprocess
import sys

import pytest

WITHOUT = """\
import sys
sys.modules[sys.argv.pop(1)] = None
from weft_cli.__main__ import main
main()
"""


def run(package, *arguments):
    """How the script ends where a module cannot be imported, and what it says."""
    command = [sys.executable, "-c", WITHOUT, package, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(
    ("package", "arguments", "extra"),
    [
        ("typer", ["status"], "coordinator"),
        ("torch", ["push", ".", "--policy", "math"], "trainer"),
        ("torch", ["verify", ".", "--policy", "math"], "trainer"),
        ("torch", ["rollout", "--", "model"], "rollout"),
    ],
)
def test_a_command_says_which_extra_brings_what_it_lacks(package, arguments, extra):
    wanted = f"weft: this command needs {package}, which is not installed: "
    assert run(package, *arguments) == (1, f"{wanted}pip install 'weft-rl[{extra}]'\n")


def test_a_module_of_no_extra_is_no_advice():
    status, said = run("sqlite3", "coordinator", "--catalog", "never.db")
    assert status == 1
    assert "Traceback" in said
    assert "pip install" not in said
