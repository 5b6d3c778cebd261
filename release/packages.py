"""Sdist and wheel, byte for byte the same for the same files."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from release.changelog import ReleaseError

#: What builds them: another version may write other bytes.
BUILD_TOOLS: Final = ("build==1.6.1", "setuptools==84.2.1", "twine==7.0.0")


def make_tools(folder: Path) -> Path:
    """Make an environment with ``BUILD_TOOLS``; return its interpreter."""
    run([sys.executable, "-m", "venv", folder])
    python = folder / "bin" / "python"
    run([python, "-m", "pip", "install", "-q", *BUILD_TOOLS])
    return python


def run(command: Sequence[str | Path], **environment: str) -> None:
    """Run a command, which says something only if it fails, and sees nothing by PYTHONPATH.

    Raises:
        ReleaseError: It fails; has what it printed.
    """
    ended = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": "", **environment},
        umask=0o022,
    )
    if ended.returncode:
        raise ReleaseError(f"{' '.join(map(str, command))} fails:\n{ended.stdout}")


def build(source: Path, out: Path, tools: Path, seconds: int) -> tuple[Path, Path]:
    """Build the sdist of a source tree, and from it the wheel; return their paths.

    Args:
        source: Files of the release and no others.
        out: Directory for both, which is made.
        tools: Interpreter of ``make_tools``.
        seconds: Time that every file gets, since 1970.
    """
    with tempfile.TemporaryDirectory() as work:
        _run_build(tools, source, Path(work), "--sdist", seconds)
        (made,) = Path(work).iterdir()
        out.mkdir(parents=True, exist_ok=True)
        sdist = out / made.name
        _repack(made, sdist, seconds)
        unpacked = Path(work) / "unpacked"
        with tarfile.open(sdist) as archive:
            archive.extractall(unpacked, filter="data")
        (tree,) = unpacked.iterdir()
        _run_build(tools, tree, out, "--wheel", seconds)
    (wheel,) = out.glob("*.whl")
    return sdist, wheel


def _run_build(tools: Path, source: Path, out: Path, kind: str, seconds: int) -> None:
    command: list[str | Path] = [
        tools,
        "-m",
        "build",
        "-q",
        "--no-isolation",
        kind,
        "-o",
        out,
        source,
    ]
    run(command, SOURCE_DATE_EPOCH=str(seconds))


def _repack(source: Path, target: Path, seconds: int) -> None:
    """Write an archive anew: in order, without owners, with one time and plain modes."""
    with (
        tarfile.open(source) as old,
        target.open("wb") as file,
        gzip.GzipFile("", "wb", mtime=seconds, fileobj=file) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old, key=lambda member: member.name):
            member.mtime, member.uid, member.gid = seconds, 0, 0
            member.uname = member.gname = ""
            is_open = member.isdir() or member.mode & 0o100
            member.mode = 0o755 if is_open else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isreg() else None)
