"""A damaged catalog is refused at the start, in one line, and left as it is."""

from __future__ import annotations

import random
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.unit.coordinator.runtime.catalog.kept import write_kept
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.replica_report import OutOfService
from weft_rl.coordinator.decisions.state.effects import SaveEpoch, SaveOutOfService, SavePolicy
from weft_rl.coordinator.decisions.state.pool import Policy
from weft_rl.coordinator.decisions.state.values import PolicyKind
from weft_rl.coordinator.runtime.catalog.database import Catalog, CatalogError
from weft_rl.coordinator.runtime.catalog.tables import POLICIES, VERSIONS, Rows, Table

_PAGE_BYTES = 4096


@pytest.fixture
def whole(catalog_path: Path) -> Path:
    """A catalog with something in every table."""
    write_kept(catalog_path)
    return catalog_path


def _refused(path: Path) -> CatalogError:
    before = path.read_bytes()
    with pytest.raises(CatalogError) as refused:
        Catalog.open(path)
    assert "\n" not in refused.value.message
    assert path.read_bytes() == before
    return refused.value


def _edit(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as catalog:
        for statement in statements:
            catalog.execute(statement)
        catalog.commit()


@pytest.mark.parametrize(
    ("edit", "lost"),
    [
        ("UPDATE versions SET state=2 WHERE policy='math' AND version=1", "versions math@1"),
        ("UPDATE versions SET adapter_config_json='{}' WHERE version=3", "versions math@3"),
        ("UPDATE versions SET layout_digest=x'00' WHERE version=2 AND policy='base'", "base@2"),
        ("UPDATE versions SET state=77 WHERE version=3", "versions math@3"),
        ("UPDATE versions SET policy=x'ff' WHERE version=3", "versions"),
        ("UPDATE policies SET last_version=1 WHERE name='math'", "policies math"),
        ("UPDATE policies SET kind=9 WHERE name='math'", "policies math"),
        ("UPDATE policies SET name='chat' WHERE name='math'", "policies chat"),
        ("UPDATE meta SET fingerprint='beef'", "the base model"),
        ("UPDATE withdrawn SET reason=''", "withdrawn replica-1"),
        ("UPDATE pins SET version=1", "pins math@1"),
        ("UPDATE meta SET checksum=x''", "meta"),
        ("DELETE FROM versions WHERE version=3", "versions has 5 rows and was left with 6"),
        ("DELETE FROM policies WHERE name='base'", "policies has 2 rows"),
        ("DELETE FROM pins", "pins has 0 rows"),
        ("DELETE FROM withdrawn", "withdrawn has 0 rows"),
        ("UPDATE policies SET forgotten=1 WHERE name='math'", "policies math"),
        ("DROP TABLE as_started", "its structure"),
        ("DELETE FROM meta", "meta has 0 rows"),
        ("INSERT INTO meta SELECT * FROM meta", "meta has 2 rows"),
        ("DELETE FROM counts WHERE name='pins'", "pins"),
        ("DROP TABLE pins", "its structure"),
        ("DROP TABLE counts", "its structure"),
        ("ALTER TABLE policies RENAME retain TO kept", "its structure"),
    ],
)
def test_what_is_lost_is_named(whole: Path, edit: str, lost: str) -> None:
    _edit(whole, edit)
    error = _refused(whole)
    assert error.reason == "CATALOG_DAMAGED"
    assert lost in error.message
    assert "put back a copy" in error.message


def test_many_losses_are_counted(whole: Path) -> None:
    _edit(whole, "UPDATE versions SET commit_time=0")
    error = _refused(whole)
    assert "and 2 more" in error.message
    assert error.metadata["num_problems"] == "5"  # one was never committed


@pytest.mark.parametrize(("table", "column"), [(VERSIONS, "state"), (POLICIES, "kind")])
def test_an_unknown_value_is_refused_though_its_checksum_is_right(
    whole: Path, table: Table, column: str
) -> None:
    with closing(sqlite3.connect(whole, isolation_level=None)) as catalog:
        Rows(catalog).change(table, {}, **{column: 77})
    error = _refused(whole)
    assert error.reason == "CATALOG_DAMAGED"
    assert f"{column} '77' means nothing" in error.message


def _known(path: Path) -> tuple[Any, ...]:
    catalog = Catalog.open(path)
    try:
        snapshot = catalog.snapshot()
        names = ("base", "math")
        return (
            snapshot.epoch,
            snapshot.fingerprint,
            snapshot.architecture,
            snapshot.policies,
            snapshot.out_of_service,
            [catalog.list_versions(name, 99, 99) for name in names],
            [catalog.find_request("t1", f"q-{name}-{n}") for name in names for n in range(5)],
            [catalog.find_transfer(f"t-{name}-{n}") for name in names for n in range(5)],
        )
    finally:
        catalog.close()


def _zero_page(data: bytearray, rng: random.Random) -> None:
    first = rng.randrange(len(data) // _PAGE_BYTES) * _PAGE_BYTES
    data[first : first + _PAGE_BYTES] = bytes(_PAGE_BYTES)


def _flip_bit(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _flip_in_header(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(100)] ^= 1 << rng.randrange(8)


def _cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


@pytest.mark.parametrize("damage", [_zero_page, _flip_bit, _flip_in_header, _cut])
def test_damage_anywhere_is_refused_or_changes_nothing(
    whole: Path, damage: Callable[[bytearray, random.Random], None]
) -> None:
    good, expected, rng = whole.read_bytes(), _known(whole), random.Random(11)
    reasons = set()
    for _ in range(40):
        for left in whole.parent.iterdir():
            left.unlink()
        data = bytearray(good)
        damage(data, rng)
        whole.write_bytes(data)
        try:
            assert _known(whole) == expected
        except CatalogError as error:
            reasons.add(error.reason)
    assert reasons & {"CATALOG_DAMAGED", "NOT_A_CATALOG"}


def test_an_emptied_file_is_no_new_catalog(whole: Path) -> None:
    whole.write_bytes(b"")
    assert _refused(whole).reason == "CATALOG_DAMAGED"


def test_a_full_disk_keeps_all_or_nothing(whole: Path) -> None:
    catalog = Catalog.open(whole)
    policies = catalog.snapshot().policies
    (pages,) = catalog._connection.execute("PRAGMA page_count").fetchone()
    catalog._connection.execute(f"PRAGMA max_page_count={pages}")
    many = OutOfService("x" * 100_000)
    with pytest.raises(CatalogError, match="the disk is full") as refused:
        catalog.apply(
            [
                SavePolicy(Policy("math", PolicyKind.ADAPTER, 99, 99, 99)),
                SaveEpoch(99),
                *(SaveOutOfService(f"r{i}", many) for i in range(100)),
            ]
        )
    assert refused.value.reason == "CATALOG_UNWRITABLE"
    assert refused.value.why == "the disk is full"
    assert (catalog.snapshot().policies, catalog.snapshot().epoch) == (policies, 9)
    assert list(catalog.snapshot().out_of_service) == ["replica-1"]
    catalog.apply([SaveEpoch(10)])  # the failure left no transaction open
    assert catalog.snapshot().epoch == 10
    catalog.close()
    assert _known(whole)[0] == 10


_FULL = """
import resource, sys
from weft_rl.coordinator.runtime.catalog.database import Catalog, CatalogError
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
try:
    Catalog.open(sys.argv[1])
except CatalogError as error:
    print(error.reason)
"""


@pytest.mark.parametrize(("new_room", "known_room"), [(0, 0), (30_000, 2_000)])
def test_no_room_at_the_start(tmp_path: Path, new_room: int, known_room: int) -> None:
    """No file may grow beyond its room: nothing is left behind, or all is as it was."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    fresh, known = tmp_path / "fresh" / "catalog.db", tmp_path / "known.db"
    write_kept(known)
    before = known.read_bytes()
    for path, room in ((fresh, new_room), (known, known_room)):
        done = subprocess.run(
            [sys.executable, "-c", _FULL, str(path), str(room)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == "CATALOG_UNWRITABLE", done.stderr
    assert not [*fresh.parent.iterdir()]
    assert known.read_bytes() == before
    Catalog.open(fresh).close()
    assert PolicyVersion("math", 3) in [r.version for r in _known(known)[5][1]]


def _left_by_a_crash(path: Path) -> None:
    """Leave a catalog and its journal as a coordinator does that is killed in a commit."""
    catalog = Catalog.open(path)
    catalog._connection.execute("PRAGMA cache_size=1")  # so pages are written before the commit
    order = OutOfService("x" * 5000)
    catalog._connection.execute("BEGIN IMMEDIATE")
    for save in [SaveEpoch(99), *(SaveOutOfService(f"r{i}", order) for i in range(50))]:
        catalog._apply_one(save)
    left = {p: p.read_bytes() for p in (path, _journal(path))}
    catalog._connection.execute("ROLLBACK")
    catalog.close()
    for file, data in left.items():
        file.write_bytes(data)


def _journal(path: Path) -> Path:
    return path.with_name(f"{path.name}-journal")


def test_a_transaction_that_a_crash_cut_short_is_undone(whole: Path) -> None:
    before = _known(whole)
    closed = whole.read_bytes()
    _left_by_a_crash(whole)
    assert whole.read_bytes() != closed
    assert _known(whole) == before
    assert not _journal(whole).stat().st_size


def test_without_its_journal_what_a_crash_cut_short_is_refused(whole: Path) -> None:
    _left_by_a_crash(whole)
    _journal(whole).unlink()
    assert _refused(whole).reason == "CATALOG_DAMAGED"


def test_a_journal_without_its_catalog_is_no_new_catalog(whole: Path) -> None:
    _left_by_a_crash(whole)
    left = _journal(whole)
    whole.unlink()
    with pytest.raises(CatalogError, match="the file is gone") as refused:
        Catalog.open(whole)
    assert refused.value.reason == "CATALOG_DAMAGED"
    assert left.exists(), "it is needed to put the catalog together again"
    assert not whole.exists()
