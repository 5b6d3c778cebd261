"""What a release refuses; that it builds, and builds the same twice, is the wheel test's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from release.__main__ import check_same, main, version_of
from release.changelog import ReleaseError, section

CHANGELOG = """# Changelog

## 0.3.0 (unreleased)

- Not yet.

## 0.2.0 (2026-12-01)

- One.
- Two,
  of two lines.

## 0.1.0 (2026-11-01)

"""


def tree(folder: Path, code: str = "0.2.0", chart: str = "0.2.0", app: str = "0.2.0") -> Path:
    (folder / "weft_rl").mkdir(parents=True)
    (folder / "helm" / "weft").mkdir(parents=True)
    (folder / "weft_rl" / "__init__.py").write_text(f'import os\n\n__version__ = "{code}"\n')
    (folder / "helm" / "weft" / "Chart.yaml").write_text(
        f"apiVersion: v2\nname: weft\nversion: {chart}\nappVersion: {app}\n"
    )
    return folder


def test_the_notes_are_the_section_of_the_version() -> None:
    assert section(CHANGELOG, "0.2.0") == "- One.\n- Two,\n  of two lines.\n"


@pytest.mark.parametrize(
    ("version", "why"),
    [("0.3.0", "has no date for 0.3.0"), ("0.1.0", "says nothing of"), ("0.2", "has no heading")],
)
def test_a_version_that_the_changelog_does_not_tell_of_is_refused(version: str, why: str) -> None:
    with pytest.raises(ReleaseError, match=why):
        section(CHANGELOG, version)


def test_code_chart_and_tag_say_one_version(tmp_path: Path) -> None:
    assert version_of("v0.2.0", tree(tmp_path / "same")) == "0.2.0"
    with pytest.raises(ReleaseError, match=r"weft_rl/__init__.py says 0.2.0, version of helm/"):
        version_of("v0.3.0", tmp_path / "same")
    with pytest.raises(ReleaseError, match=r": appVersion of helm/weft/Chart.yaml says 0.1.0$"):
        version_of("v0.2.0", tree(tmp_path / "other", app="0.1.0"))
    with pytest.raises(ReleaseError, match="no v"):
        version_of("0.2.0", tmp_path / "same")


def test_builds_that_differ_are_named(tmp_path: Path) -> None:
    for folder, text in (("first", "a"), ("second", "b")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.whl").write_text("same")
        (tmp_path / folder / "weft.tgz").write_text(text)
    (tmp_path / "second" / "more.md").write_text("")
    with pytest.raises(ReleaseError, match=r"differ in more\.md, weft\.tgz$"):
        check_same(tmp_path / "first", tmp_path / "second")
    check_same(tmp_path / "first", tmp_path / "first")


def test_a_tag_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["release", "v9.9.9", "--helm", "helm"])
    assert main() == 1
    assert capsys.readouterr().err.startswith("release: git log fails: ")
    assert not (tmp_path / "build").exists()
