"""``python -m release v0.2.0``: what is released of a tag, built twice, compared and checked.

Writes sdist, wheel, chart, the changelog's section and their SHA-256 into ``build/release/TAG``.
Only the commit of the tag counts, not the files of the checkout.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from release.changelog import ReleaseError, section
from release.packages import build, make_tools, run

_PACKAGES = ("rollout_side", "trainer_side", "weft_rl")


def version_of(tag: str, source: Path) -> str:
    """Return the version of a tag, ``v0.2.0``, once the code and the chart say the same.

    Raises:
        ReleaseError: One of them says another.
    """
    version = tag.removeprefix("v")
    chart = (source / "helm" / "weft" / "Chart.yaml").read_text()
    said = {
        "weft_rl/__init__.py": _found(
            r'^__version__ = "(.+)"$', (source / "weft_rl" / "__init__.py").read_text()
        ),
        "version of helm/weft/Chart.yaml": _found(r"^version: (.+)$", chart),
        "appVersion of helm/weft/Chart.yaml": _found(r"^appVersion: (.+)$", chart),
    }
    other = [f"{where} says {found}" for where, found in said.items() if found != version]
    if other or not tag.startswith("v"):
        raise ReleaseError(f"the tag {tag} is of another version: {', '.join(other) or 'no v'}")
    return version


def release(repository: Path, tag: str, out: Path, helm: str | None) -> list[Path]:
    """Build what is released of a tag twice, check it, and write it; return the files.

    Args:
        repository: Git repository that has the tag.
        out: Directory for the files; what was there is removed.
        helm: Program that packages the chart; without one there is no chart.

    Raises:
        ReleaseError: The tag is not ready, or two builds differ.
    """
    seconds = int(_git(repository, "log", "-1", "--format=%ct", tag).decode())
    with tempfile.TemporaryDirectory(prefix="weft-release-") as name:
        work = Path(name)
        tools = make_tools(work / "tools")
        for number in ("first", "second"):
            source, made = work / number / "source", work / number / "made"
            _check_out(repository, tag, source)
            _make(source, tag, made, tools, seconds, helm)
        check_same(work / "first" / "made", work / "second" / "made")
        _check(work / "first" / "source", made, version_of(tag, source), tools)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(made, out)
    sums = "".join(f"{_sha256(path)}  {path.name}\n" for path in sorted(out.iterdir()))
    (out / "SHA256SUMS").write_text(sums)
    return sorted(out.iterdir())


def check_same(first: Path, second: Path) -> None:
    """Compare the files of two builds.

    Raises:
        ReleaseError: Some differ; names them.
    """
    names = {path.name for folder in (first, second) for path in folder.iterdir()}
    differing = [name for name in sorted(names) if not _are_same(first / name, second / name)]
    if differing:
        raise ReleaseError(f"two builds of one tag differ in {', '.join(differing)}")


def _make(source: Path, tag: str, out: Path, tools: Path, seconds: int, helm: str | None) -> None:
    version = version_of(tag, source)
    notes = section((source / "CHANGELOG.md").read_text(), version)
    build(source, out, tools, seconds)
    (out / f"weft-{version}.md").write_text(notes)
    if helm is not None:
        command: list[str | Path] = [
            sys.executable,
            source / "helm" / "package.py",
            "--helm",
            helm,
            "--out",
            out,
        ]
        run(command, SOURCE_DATE_EPOCH=str(seconds))


def _check(source: Path, made: Path, version: str, tools: Path) -> None:
    """Check that the packages hold every file of the tag and are what an index takes, and that the
    wheel can be installed."""
    sdist, wheel = made / f"weft_rl-{version}.tar.gz", made / f"weft_rl-{version}-py3-none-any.whl"
    run([tools, "-m", "twine", "--no-color", "check", "--strict", sdist, wheel])
    wanted = {
        str(path.relative_to(source))
        for package in _PACKAGES
        for path in (source / package).rglob("*")
        if path.is_file() and "protos" not in path.relative_to(source).parts
    }
    with tarfile.open(sdist) as archive:
        _check_holds(sdist, wanted, (n.partition("/")[2] for n in archive.getnames()))
    with zipfile.ZipFile(wheel) as zipped:
        _check_holds(wheel, wanted, zipped.namelist())
    run([tools, "-m", "pip", "install", "-q", "--no-deps", wheel])
    code = f"import weft_rl; assert weft_rl.__version__ == {version!r}"
    run([tools, "-P", "-c", code])


def _check_holds(package: Path, wanted: set[str], names: Iterable[str]) -> None:
    if missing := sorted(wanted - {*names}):
        raise ReleaseError(f"{package.name} lacks {', '.join(missing[:8])}")


def _check_out(repository: Path, tag: str, to: Path) -> None:
    archive = _git(repository, "-c", "tar.umask=0022", "archive", "--format=tar", tag)
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(to, filter="tar")


def _git(repository: Path, *words: str) -> bytes:
    ended = subprocess.run(["git", "-C", repository, *words], capture_output=True, check=False)
    if ended.returncode:
        raise ReleaseError(f"git {words[0]} fails: {ended.stderr.decode().strip()}")
    return ended.stdout


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1] if found else "nothing"


def _are_same(first: Path, second: Path) -> bool:
    return first.exists() and second.exists() and first.read_bytes() == second.read_bytes()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> int:
    """Release a tag of the repository that this is run in."""
    parser = argparse.ArgumentParser(prog="python -m release", description=main.__doc__)
    parser.add_argument("tag", help="such as v0.2.0")
    parser.add_argument("--helm", required=True, help="the program that packages the chart")
    parser.add_argument("--out", type=Path, help="by default build/release/TAG")
    options = parser.parse_args()
    out = options.out or Path("build/release") / options.tag
    try:
        files = release(Path(), options.tag, out, options.helm)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    for path in files:
        print(f"{path.stat().st_size:>10,}  {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
