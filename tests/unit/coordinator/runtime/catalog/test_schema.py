"""Catalogs of earlier schemas, and of today's from before: everything is in them."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.unit.coordinator.runtime.catalog.kept import write_kept
from weft_rl.contract.checkpoint import FileDigest
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import DataType
from weft_rl.coordinator.decisions.state.effects import (
    Announce,
    EventKind,
    SaveEvent,
    SaveOutOfService,
    SavePin,
    SavePolicy,
)
from weft_rl.coordinator.decisions.state.pool import Policy
from weft_rl.coordinator.decisions.state.replica import OutOfService
from weft_rl.coordinator.decisions.state.values import (
    AdapterSpec,
    BoundCheckpoint,
    ContentDigest,
    Failure,
    PolicyKind,
    ReplicaState,
    VersionRecord,
    VersionState,
)
from weft_rl.coordinator.runtime.catalog import schema
from weft_rl.coordinator.runtime.catalog.database import (
    APPLICATION_ID,
    Catalog,
    CatalogError,
    Snapshot,
)


def test_a_newer_schema_is_refused(catalog_path: Path) -> None:
    with sqlite3.connect(catalog_path) as newer:
        newer.execute(f"PRAGMA application_id={APPLICATION_ID}")
        newer.execute("PRAGMA user_version=999")
        newer.execute("CREATE TABLE meta (x)")
    newer.close()
    with pytest.raises(CatalogError) as refused:
        Catalog.open(catalog_path)
    assert refused.value.reason == "CATALOG_TOO_NEW"


@pytest.mark.parametrize("older_schema", [1, 2, 3])
def test_an_older_schema_gets_what_it_lacks(catalog_path: Path, older_schema: int) -> None:
    with sqlite3.connect(catalog_path) as older:
        older.executescript("".join(schema._STEPS[:older_schema]))
        older.execute("INSERT INTO meta VALUES (3, 4, 'f', 'Tiny')")
        columns = "name, kind, last_version, fencing_token, served_version"
        older.execute(f"INSERT INTO policies ({columns}) VALUES ('math', 2, 5, 6, 0)")
        older.execute(f"PRAGMA application_id={APPLICATION_ID}")
        older.execute(f"PRAGMA user_version={older_schema}")
    older.close()
    catalog = Catalog.open(catalog_path)
    order = OutOfService(ReplicaState.CORDONED, "why")
    catalog.apply([SavePin(PolicyVersion("math", 1), True), SaveOutOfService("r0", order)])
    catalog.close()
    again = Catalog.open(catalog_path)
    known = again.snapshot()
    again.close()
    assert (known.generation, known.out_of_service) == (5, {"r0": order})
    assert (known.policies[0].last_version, known.policies[0].pinned) == (5, (1,))


_KILLED_IN_WAL_MODE = """
import os, signal, sqlite3, sys
from weft_rl.coordinator.runtime.catalog.tables import META, POLICIES, Rows
catalog = sqlite3.connect(sys.argv[1], isolation_level=None)
catalog.execute("PRAGMA journal_mode=WAL")
rows = Rows(catalog)
catalog.execute("BEGIN IMMEDIATE")
rows.change(META, {}, epoch=77)
rows.put(POLICIES, ("late", 2, 5, 6, 0, 0))
catalog.execute("COMMIT")
os.kill(os.getpid(), signal.SIGKILL)
"""


def _leave_a_log(catalog_path: Path) -> Path:
    """Until its catalog's journal was a rollback journal, a coordinator that was killed left it."""
    Catalog.open(catalog_path).close()
    child = subprocess.run([sys.executable, "-c", _KILLED_IN_WAL_MODE, str(catalog_path)])
    assert child.returncode == -signal.SIGKILL
    assert b"late" not in catalog_path.read_bytes()
    return Path(f"{catalog_path}-wal")


@pytest.mark.parametrize("is_copied", [False, True])
def test_what_an_earlier_weft_left_in_a_write_ahead_log_is_read(
    catalog_path: Path, is_copied: bool
) -> None:
    _leave_a_log(catalog_path)
    if is_copied:  # a copy of catalog and log, without the shared memory of the killed one
        os.unlink(f"{catalog_path}-shm")
    for generation in (2, 3):
        catalog = Catalog.open(catalog_path)
        known = catalog.snapshot()
        assert (known.generation, known.epoch) == (generation, 77)
        assert [policy.name for policy in known.policies] == ["late"]
        assert not Path(f"{catalog_path}-wal").exists()
        catalog.close()
        assert b"late" in catalog_path.read_bytes(), "a copy of the file alone is whole"


def test_a_write_ahead_log_that_may_be_damaged_is_warned_of(
    catalog_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLite drops what is damaged of it, and says nothing."""
    log = _leave_a_log(catalog_path)
    assert not caplog.records
    content = bytearray(log.read_bytes())
    content[100] ^= 1  # in the first frame
    log.write_bytes(content)
    Path(f"{catalog_path}-shm").unlink()
    catalog = Catalog.open(catalog_path)
    assert catalog.snapshot().policies == ()
    (warning,) = caplog.records
    assert str(log) in warning.getMessage()
    catalog.close()
    Catalog.open(catalog_path).close()
    assert len(caplog.records) == 1


def test_a_catalog_in_wal_mode_that_another_program_has_open_is_refused(
    catalog_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Catalog.open(catalog_path).close()
    monkeypatch.setattr(schema, "WAIT_SECONDS", 0.05)
    other = sqlite3.connect(catalog_path, isolation_level=None)
    other.execute("PRAGMA journal_mode=WAL")
    other.execute("SELECT * FROM meta").fetchall()
    with pytest.raises(CatalogError) as refused:
        Catalog.open(catalog_path)
    assert refused.value.reason == "CATALOG_LOCKED"
    other.close()
    Catalog.open(catalog_path).close()


def test_a_catalog_of_schema_3_is_taken_over_whole(catalog_path: Path) -> None:
    write_kept(catalog_path, 3)
    for generation in (2, 3):
        catalog = Catalog.open(catalog_path)
        known = catalog.snapshot()
        assert (known.generation, known.epoch, known.fingerprint) == (generation, 9, "f00d")
        assert known.out_of_service == {
            "replica-1": OutOfService(ReplicaState.CORDONED, "new disk")
        }
        base, math = known.policies
        assert (base.last_version, base.served_version, base.versions) == (2, 2, (2,))
        assert (math.last_version, math.served_version, math.versions) == (4, 3, (2, 3))
        assert (math.fencing_token, math.pinned, math.retain) == (7, (2,), 2)
        versions = catalog.list_versions("math", 9, 9)
        assert [r.state for r in versions] == [
            VersionState.ABORTED,
            VersionState.COMMITTED,
            VersionState.COMMITTED,
            VersionState.RETIRED,
        ]
        assert versions[0].failure == Failure("DEADLINE", "späť: the push's time was up")
        assert versions[1] == catalog.find_request("t1", "q-math-3")
        assert versions[1].content_digest == ContentDigest(1, b"\x00\xff digest", 256)
        assert versions[1].adapter is not None
        assert versions[1].adapter.config_digest == bytes(range(32))
        catalog.close()


def _of_schema_4(version: PolicyVersion, state: VersionState) -> VersionRecord:
    """A record as the kept catalog has it, of a version that nothing is peculiar to."""
    number = version.version
    is_base, is_there = version.policy == "base", state is not VersionState.ABORTED
    adapter = AdapterSpec(
        '{"peft_type": "LORA", "r": 8, "lora_alpha": 16}',
        bytes(range(32)),
        "f00d",
        number - 2 if number > 1 else None,
    )
    digest = ContentDigest(2 if is_base else 1, b"\x00\xff digest", 256 * number)
    return VersionRecord(
        version=version,
        state=state,
        trainer_id="t1",
        request_id=f"q-{version.policy}-{number}",
        transfer_id=f"t-{version.policy}-{number}",
        layout_digest=f"layout-{version.policy}".encode(),
        create_time=1763700000.25 + number,
        commit_time=1763700001.5 + number if is_there else 0.0,
        content_digest=digest if is_there else None,
        adapter=None if is_base else adapter,
    )


def test_a_catalog_of_schema_4_opens_with_everything_in_it(catalog_path: Path) -> None:
    write_kept(catalog_path, 4)
    base, math = (partial(PolicyVersion, name) for name in ("base", "math"))
    late = Failure("DEADLINE", "späť: the push's time was up")
    unserved = Failure("LOAD_FAILED", "no replica could load it [CAPACITY]")
    restarted = Failure(
        "TRANSFER_ABORTED", "the coordinator restarted while the push was under way"
    )
    retired, committed = VersionState.RETIRED, VersionState.COMMITTED
    aborted = VersionState.ABORTED
    failed = replace(
        _of_schema_4(math(5), VersionState.FAILED),
        commit_time=0.0,
        content_digest=ContentDigest(1, b"5 digest", 1280),
        failure=unserved,
    )
    code = replace(
        _of_schema_4(PolicyVersion("code", 1_000_001), committed),
        trainer_id="t2",
        adapter=AdapterSpec("{}", b"c" * 32, "f00d", 0),
    )
    records = {
        "base": [_of_schema_4(base(2), committed), _of_schema_4(base(1), retired)],
        "code": [code],
        "math": [
            replace(_of_schema_4(math(6), aborted), failure=restarted),
            failed,
            replace(_of_schema_4(math(4), aborted), failure=late),
            _of_schema_4(math(3), committed),
            _of_schema_4(math(2), committed),
            _of_schema_4(math(1), retired),
        ],
        "never-pushed": [],
    }
    policies = (
        Policy("base", PolicyKind.BASE, 2, 1, 2, (2,), pinned=(2,)),
        Policy(
            "code", PolicyKind.ADAPTER, 1_000_001, 2, 1_000_001, (1_000_001,),
            trained_on={1_000_001: 0},
        ),
        Policy(
            "math", PolicyKind.ADAPTER, 6, 8, 3, (2, 3),
            pinned=(2,), retain=3, trained_on={2: 0, 3: 1},
        ),
        Policy("never-pushed", PolicyKind.ADAPTER, 0, 3, 0),
    )  # fmt: skip
    checkpoint = BoundCheckpoint(
        digest=b"\1" * 32,
        base_dtype=DataType.BFLOAT16,
        quantization="fp8",
        replica_id="replica-0",
        files=(
            FileDigest("model-1.safetensors", b"\2" * 32),
            FileDigest("späť.safetensors", b"\3" * 32),
        ),
    )
    withdrawn = {
        "replica-1": OutOfService(ReplicaState.CORDONED, "new disk"),
        "replica-2": OutOfService(ReplicaState.QUARANTINED, "odd answers"),
    }
    for generation in (8, 9):  # as it was left, and as this Weft leaves it
        catalog = Catalog.open(catalog_path)
        assert catalog.snapshot() == Snapshot(
            generation, 9, "f00d", "TinyForCausalLM", 1_000_000, policies, withdrawn, checkpoint,
            base_contents=dict.fromkeys((1, 2), b"layout-base\x00\xff digest"),
        )  # fmt: skip
        for policy, versions in records.items():
            assert catalog.list_versions(policy, 2_000_000, 99) == versions
            for record in versions:
                assert catalog.find_request(record.trainer_id, record.request_id) == record
                assert catalog.find_transfer(record.transfer_id) == record
        catalog.close()


def test_a_catalog_of_schema_5_knows_what_was_forgotten(catalog_path: Path) -> None:
    write_kept(catalog_path, 5)
    for generation in (9, 10):
        catalog = Catalog.open(catalog_path)
        known = catalog.snapshot()
        assert known.generation == generation
        code = next(policy for policy in known.policies if policy.name == "code")
        assert code == Policy("code", PolicyKind.ADAPTER, 1_000_001, 2, forgotten=True)
        assert [p.name for p in known.policies if p.forgotten] == ["code"]
        (version,) = catalog.list_versions("code", 2_000_000, 9)
        assert version.state is VersionState.RETIRED
        catalog.apply([SavePolicy(code)])
        catalog.close()
    catalog = Catalog.open(catalog_path)
    catalog.apply([SavePolicy(replace(code, forgotten=False))])
    assert not [p for p in catalog.snapshot().policies if p.forgotten]
    catalog.close()


def test_a_catalog_of_schema_6_has_no_events_yet_and_takes_them(catalog_path: Path) -> None:
    write_kept(catalog_path, 6)
    catalog = Catalog.open(catalog_path)
    known = catalog.snapshot()
    assert (known.generation, known.events) == (10, ())
    assert known.as_started == {b"\x05" * 32}
    assert [p.name for p in known.policies if p.forgotten] == ["code"]
    lost = SaveEvent(1e9, Announce(EventKind.REPLICA_LOST, "replica-1", "no heartbeat"))
    catalog.apply([lost])
    catalog.close()
    catalog = Catalog.open(catalog_path)
    assert catalog.snapshot().events == (lost,)
    catalog.close()


def test_a_catalog_of_schema_4_that_is_damaged_is_not_brought_up_to_date(
    catalog_path: Path,
) -> None:
    write_kept(catalog_path, 4)
    with sqlite3.connect(catalog_path) as damaged:
        damaged.execute("UPDATE policies SET last_version=1 WHERE name='math'")
    damaged.close()
    before = catalog_path.read_bytes()
    for _ in range(2):
        with pytest.raises(CatalogError) as refused:
            Catalog.open(catalog_path)
        assert refused.value.reason == "CATALOG_DAMAGED"
        assert "policies math" in refused.value.message
    assert catalog_path.read_bytes() == before
