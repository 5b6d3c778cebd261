"""One coordinator a file, by whatever name; and files that cannot be made."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from weft_rl.coordinator.decisions.state.effects import SaveEpoch
from weft_rl.coordinator.runtime.catalog.database import Catalog, CatalogError

_HOLDER = """
import sys
from weft_rl.coordinator.runtime.catalog.database import Catalog
from weft_rl.contract.errors import WeftError
try:
    catalog = Catalog.open(sys.argv[1])
except WeftError as error:
    print(error.reason, flush=True)
else:
    print("open", flush=True)
    sys.stdin.read()
    catalog.close()
"""


@contextmanager
def _process(path: Path) -> Iterator[str]:
    """What another process that opens the catalog says; it keeps it open."""
    child = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child.stdin, child.stdout:
        yield child.stdout.readline().strip()
        child.stdin.close()
        assert child.wait(10) == 0


def _reason(path: Path) -> str:
    try:
        Catalog.open(path).close()
    except CatalogError as error:
        return error.reason
    return "open"


def _names(path: Path) -> list[str]:
    """Names of the files beside a catalog that hold something."""
    return sorted(p.name for p in path.parent.iterdir() if p.stat().st_size)


def test_no_second_process_by_any_name(catalog_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    by_symlink, by_folder = folder / "link.db", tmp_path / "other"
    by_symlink.symlink_to(catalog_path)
    by_folder.symlink_to(tmp_path)
    by_link = folder / "hard.db"
    with _process(catalog_path) as said:
        assert said == "open"
        os.link(catalog_path, by_link)
        for name in (catalog_path, by_symlink, by_folder / catalog_path.name, by_link):
            assert _reason(name) == "CATALOG_LOCKED", name
            with _process(name) as said:
                assert said == "CATALOG_LOCKED", name
    assert _reason(by_link) == "CATALOG_LINKED"
    assert _reason(catalog_path) == "CATALOG_LINKED"
    by_link.unlink()
    assert _reason(by_symlink) == "open"


def test_a_refused_second_one_costs_the_first_neither_lock(catalog_path: Path) -> None:
    """Closing any descriptor of a file ends this process's fcntl locks, which are SQLite's."""
    catalog = Catalog.open(catalog_path)
    catalog._connection.execute("BEGIN IMMEDIATE")
    for _ in range(2):
        assert _reason(catalog_path) == "CATALOG_LOCKED"
    probe = (
        "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute('BEGIN IMMEDIATE')"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe, str(catalog_path)], capture_output=True, text=True
    )
    assert "database is locked" in done.stderr
    catalog._connection.execute("COMMIT")
    catalog_path.read_bytes()  # costs SQLite its locks, and us nothing
    with _process(catalog_path) as said:
        assert said == "CATALOG_LOCKED"
    catalog.close()
    assert _reason(catalog_path) == "open"


def test_it_is_free_once_it_is_closed_or_could_not_be_opened(catalog_path: Path) -> None:
    assert _reason(catalog_path) == "open"
    with closing(sqlite3.connect(catalog_path)) as other:
        other.execute("PRAGMA user_version=999")
    for _ in range(2):
        assert _reason(catalog_path) == "CATALOG_OTHER_SCHEMA"
    with _process(catalog_path) as said:
        assert said == "CATALOG_OTHER_SCHEMA"


def test_of_two_that_create_it_one_gets_it(catalog_path: Path) -> None:
    with _process(catalog_path) as first, _process(catalog_path) as second:
        assert sorted([first, second]) == ["CATALOG_LOCKED", "open"]
    assert _names(catalog_path) == [catalog_path.name]


def test_what_a_killed_one_left_unfinished_is_made_anew(catalog_path: Path) -> None:
    for name in (f"{catalog_path}.new", f"{catalog_path}.new-journal"):
        Path(name).write_bytes(b"half a catalog" * 1000)
    assert _reason(catalog_path) == "open"
    assert _names(catalog_path) == [catalog_path.name]


def test_a_symbolic_link_to_nothing_leads_to_a_new_catalog(tmp_path: Path) -> None:
    link, real = tmp_path / "link.db", tmp_path / "made" / "real.db"
    link.symlink_to(real)
    assert _reason(link) == "open"
    assert real.is_file()
    assert link.is_symlink()


@pytest.mark.parametrize("where", ["file/catalog.db", "folder", "loop"])
def test_a_path_that_leads_to_no_file(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    before = sorted(tmp_path.rglob("*"))
    assert _reason(tmp_path / where) in ("CATALOG_UNWRITABLE", "NOT_A_CATALOG")
    assert sorted(tmp_path.rglob("*")) == before


def _move_away(path: Path) -> None:
    path.rename(path.with_name("moved"))


def _replace(path: Path) -> None:
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    copy.replace(path)


@pytest.mark.parametrize("spoil", [Path.unlink, _move_away, _replace])
def test_what_is_removed_or_replaced_in_use_is_noticed_and_written_no_more(
    catalog_path: Path, spoil: Callable[[Path], None]
) -> None:
    catalog = Catalog.open(catalog_path)
    catalog.apply([SaveEpoch(1)])
    catalog.check()
    spoil(catalog_path)
    for ask in (catalog.check, lambda: catalog.apply([SaveEpoch(2)])):
        with pytest.raises(CatalogError) as refused:
            ask()
        assert refused.value.reason == "CATALOG_GONE"
    with _process(catalog_path) as said:
        assert said == "CATALOG_LOCKED", "nobody else starts there while it lives"
    catalog.close()


def test_a_journal_that_is_removed_between_two_writes_costs_nothing(catalog_path: Path) -> None:
    catalog = Catalog.open(catalog_path)
    catalog.apply([SaveEpoch(1)])
    Path(f"{catalog_path}-journal").unlink()
    catalog.apply([SaveEpoch(2)])
    catalog.close()
    again = Catalog.open(catalog_path)
    assert again.snapshot().epoch == 2
    again.close()


def test_one_whose_files_were_all_removed_leaves_those_of_the_next_alone(
    catalog_path: Path,
) -> None:
    first = Catalog.open(catalog_path)
    for path in catalog_path.parent.iterdir():
        path.unlink()
    second = Catalog.open(catalog_path)
    second.apply([SaveEpoch(7)])
    with pytest.raises(CatalogError):
        first.apply([SaveEpoch(1)])
    first.close()
    with _process(catalog_path) as said:
        assert said == "CATALOG_LOCKED"
    second.apply([SaveEpoch(8)])
    second.close()
    third = Catalog.open(catalog_path)
    assert third.snapshot().epoch == 8
    third.close()
