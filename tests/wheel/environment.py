"""A virtual environment of its own, used as a stranger's."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path


def run(*command: str | Path, cwd: Path | None = None, fails: bool = False) -> str:
    """What a command prints: to its output, or, of one that ends with status 1, to its errors.

    Nothing of the tree reaches it: neither PYTHONPATH nor the working directory.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [str(word) for word in command],
        cwd=cwd, env=kept, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    if ended.returncode != int(fails):
        raise RuntimeError(
            f"{' '.join(map(str, command))} ended with {ended.returncode}:\n"
            f"{ended.stdout}{ended.stderr}"
        )
    return ended.stderr if fails else ended.stdout


def interpreter(version: str) -> Path:
    """The interpreter of a version of Python, such as "3.12": on PATH, or of pyenv.

    Raises:
        RuntimeError: There is none on this machine.
    """
    name = f"python{version}"
    folders = [*os.environ.get("PATH", "").split(os.pathsep)]
    folders += sorted(map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin")))
    for folder in folders:
        found = shutil.which(name, path=folder)
        with contextlib.suppress(RuntimeError):  # a shim of pyenv's, for a version not chosen
            if found and run(found, "-c", "import sys; print(sys.version)").startswith(version):
                return Path(found)
    raise RuntimeError(f"there is no {name} on this machine: install it, or say --python")


class Environment:
    """Made empty, with pip alone.

    Args:
        root: Where; its folder is made.
        cwd: Working directory of what is called in it.
        python: Interpreter that it is made with; by default this one.
    """

    def __init__(
        self, root: Path, *, cwd: Path | None = None, python: str | Path = sys.executable
    ) -> None:
        run(python, "-m", "venv", root)
        self._bin, self._cwd = root / "bin", cwd or root

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self._bin / "python"

    def script(self, name: str) -> Path:
        """A script that is installed there."""
        return self._bin / name

    def install(self, package: str, *options: str, otherwise: str | None = None) -> None:
        """Install with pip; from the index ``otherwise``, too, if the usual one lacks it."""
        install = (self.python, "-m", "pip", "install", "-q", "--no-compile", *options, package)
        try:
            run(*install, cwd=self._cwd)
        except RuntimeError:
            if otherwise is None:
                raise
            run(*install, "--extra-index-url", otherwise, cwd=self._cwd)

    def call(self, script: str, *args: str) -> str:
        """What a script of it prints."""
        return run(self.script(script), *args, cwd=self._cwd)

    def refused(self, script: str, *args: str) -> str:
        """What a script of it says as it ends with status 1: one line, no traceback."""
        said = run(self.script(script), *args, cwd=self._cwd, fails=True)
        assert said.count("\n") == 1, said
        return said

    def has(self, *modules: str) -> bool:
        """Whether any of these can be imported there."""
        code = "import sys; from importlib.util import find_spec; "
        code += "print(any(find_spec(name) for name in sys.argv[1:]))"
        return self.call("python", "-c", code, *modules) == "True\n"

    def distributions(self) -> set[str]:
        """The names of what is installed."""
        listed = json.loads(run(self.python, "-m", "pip", "list", "--format", "json"))
        return {package["name"].lower().replace("_", "-") for package in listed}

    def closure(self, name: str) -> set[str]:
        """The names of what an installed distribution needs, itself included."""
        found: set[str] = set()
        todo = [name]
        while todo:
            found.add(package := todo.pop())
            shown = run(self.python, "-m", "pip", "show", package).splitlines()
            (needs,) = (line for line in shown if line.startswith("Requires:"))
            named = {n.strip().lower().replace("_", "-") for n in needs[9:].split(",")}
            todo += named - found - {""}
        return found
