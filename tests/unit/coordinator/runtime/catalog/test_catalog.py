"""What survives: restarts, kill -9, other people's files."""

from __future__ import annotations

import dataclasses
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from weft_rl.contract.adapter_config import AdapterSpec
from weft_rl.contract.errors import WeftError
from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.state.effects import (
    SaveEpoch,
    SavePolicy,
    SavePolicyDropped,
    SavePool,
    SaveRetired,
    SaveVersion,
)
from weft_rl.coordinator.decisions.state.pool import Policy
from weft_rl.coordinator.decisions.state.values import (
    ContentDigest,
    Failure,
    PolicyKind,
    VersionRecord,
    VersionState,
)
from weft_rl.coordinator.runtime.catalog import database, schema
from weft_rl.coordinator.runtime.catalog.database import Catalog, CatalogError


def _record(version: int, state: VersionState, policy: str = "math") -> VersionRecord:
    return VersionRecord(
        version=PolicyVersion(policy, version),
        state=state,
        trainer_id="t1",
        request_id=f"q-{policy}-{version}",
        transfer_id=f"t-{policy}-{version}",
        layout_digest=b"layout",
        create_time=1.5,
        commit_time=2.5,
        content_digest=ContentDigest(1, b"digest", 256),
        adapter=AdapterSpec("{}", "base", 3),
        failure=Failure("DEADLINE", "late") if state is VersionState.ABORTED else None,
    )


def _policy(last: int, served: int, name: str = "math") -> Policy:
    kind = PolicyKind.BASE if name == "base" else PolicyKind.ADAPTER
    return Policy(name, kind, last, 7, served)


def test_everything_is_there_again(catalog_path: Path) -> None:
    catalog = Catalog.open(catalog_path)
    assert catalog.snapshot().generation == 1
    records = [_record(v, VersionState.COMMITTED) for v in (1, 2, 3)]
    records.append(_record(4, VersionState.ABORTED))
    catalog.apply([SavePool("f", "Tiny"), SaveEpoch(9), SavePolicy(_policy(4, 3))])
    catalog.apply([SaveVersion(record) for record in records])
    catalog.apply([SaveRetired(PolicyVersion("math", 1))])
    catalog.close()
    again = Catalog.open(catalog_path)
    known = again.snapshot()
    assert (known.generation, known.epoch, known.fingerprint, known.architecture) == (
        2,
        9,
        "f",
        "Tiny",
    )
    (policy,) = known.policies
    assert (policy.last_version, policy.fencing_token, policy.served_version) == (4, 7, 3)
    assert policy.versions == (2, 3)
    assert again.find_request("t1", "q-math-4") == records[3]
    assert again.find_transfer("t-math-2") == records[1]
    assert again.find_transfer("nope") is None
    assert [r.version.version for r in again.list_versions("math", 4, 2)] == [3, 2]
    again.close()


def test_what_was_on_its_way_is_aborted_at_open(catalog_path: Path) -> None:
    catalog = Catalog.open(catalog_path)
    catalog.apply([SaveVersion(_record(1, VersionState.STAGING))])
    catalog.close()
    again = Catalog.open(catalog_path)
    record = again.find_transfer("t-math-1")
    assert record is not None
    assert record.state is VersionState.ABORTED
    assert record.failure is not None
    assert record.failure.reason == "TRANSFER_ABORTED"
    assert "restarted" in record.failure.message
    again.close()


def test_the_newest_transfers_are_known_again(catalog_path: Path) -> None:
    catalog = Catalog.open(catalog_path)
    records = [
        dataclasses.replace(_record(i, VersionState.COMMITTED), create_time=float(i))
        for i in range(1, 12)
    ]
    catalog.apply([SaveVersion(record) for record in records])
    catalog.close()
    catalog = Catalog.open(catalog_path)
    newest = catalog.list_versions("math", 12, 3)
    assert newest == records[:-4:-1]
    assert [catalog.find_transfer(record.transfer_id) for record in newest] == newest
    catalog.close()


def test_an_older_base_is_retired_at_open(catalog_path: Path) -> None:
    catalog = Catalog.open(catalog_path)
    catalog.apply(
        [SavePolicy(_policy(2, 2, "base"))]
        + [SaveVersion(_record(v, VersionState.COMMITTED, "base")) for v in (1, 2)]
    )
    catalog.close()
    again = Catalog.open(catalog_path)
    assert again.snapshot().policies[0].versions == (2,)
    again.close()


_WRITER = """
import sys
import threading
from weft_rl.coordinator.runtime.catalog.database import Catalog
from weft_rl.coordinator.decisions.state.effects import SavePolicy
from weft_rl.coordinator.decisions.state.pool import (Policy)
from weft_rl.coordinator.decisions.state.values import (PolicyKind)
catalog = Catalog.open(sys.argv[1])
version = max((p.last_version for p in catalog.snapshot().policies), default=0)
while True:
    version += 1
    catalog.apply([SavePolicy(Policy("math", PolicyKind.ADAPTER, version))])
    print(version, flush=True)
"""


def test_no_told_version_is_forgotten_by_kill_9(catalog_path: Path) -> None:
    told = 0
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(catalog_path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        with child.stdout:
            first = int(child.stdout.readline())
            assert first > told  # never assigned twice
            for _ in range(20):
                told = int(child.stdout.readline())
            child.send_signal(signal.SIGKILL)
            told = max([told, *(int(line) for line in child.stdout if line.endswith("\n"))])
        child.wait()
        catalog = Catalog.open(catalog_path)  # the lock died with its holder
        assert catalog.snapshot().policies[0].last_version >= told
        catalog.close()


def test_a_catalog_that_cannot_be_read_is_said_so(
    catalog_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.05)
    catalog = Catalog.open(catalog_path)
    other = sqlite3.connect(catalog_path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(WeftError, match="the catalog cannot be read: database is locked") as failed:
        catalog.list_versions("math", 9, 9)
    assert failed.value.reason == "INTERNAL", "the coordinator is there"
    other.execute("COMMIT")
    assert catalog.list_versions("math", 9, 9) == []
    other.close()
    catalog.close()


def test_a_write_waits_for_a_program_that_reads_longer_than_opening_does(
    catalog_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "WAIT_SECONDS", 0.05)
    catalog = Catalog.open(catalog_path)
    other = sqlite3.connect(catalog_path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN")
    other.execute("SELECT * FROM meta").fetchall()
    ending = threading.Timer(0.5, other.close)
    ending.start()
    catalog.apply([SaveEpoch(7)])
    ending.join()
    assert catalog.snapshot().epoch == 7
    catalog.close()


def test_two_coordinators_cannot_share_one(catalog_path: Path) -> None:
    catalog = Catalog.open(catalog_path)
    with pytest.raises(CatalogError) as refused:
        Catalog.open(catalog_path)
    assert refused.value.reason == "CATALOG_LOCKED"
    catalog.close()
    Catalog.open(catalog_path).close()


@pytest.mark.parametrize("content", ["text", "sqlite"])
def test_other_files_are_refused_and_left_alone(catalog_path: Path, content: str) -> None:
    if content == "text":
        catalog_path.write_text("These are my notes, not a database. " * 100)
    else:
        with sqlite3.connect(catalog_path) as other:
            other.execute("CREATE TABLE mine (x)")
        other.close()
    before = catalog_path.read_bytes()
    with pytest.raises(CatalogError) as refused:
        Catalog.open(catalog_path)
    assert refused.value.reason == "NOT_A_CATALOG"
    assert catalog_path.read_bytes() == before


def test_a_transaction_is_all_or_nothing(catalog_path: Path) -> None:
    catalog = Catalog.open(catalog_path)
    unset = SaveVersion(dataclasses.replace(_record(1, VersionState.COMMITTED), request_id=None))
    with pytest.raises(CatalogError, match="NOT NULL"):
        catalog.apply([SaveEpoch(5), unset])
    catalog.apply([SavePool("f", "Tiny")])
    assert catalog.snapshot().epoch == 0
    catalog.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"version": PolicyVersion("code", 1), "transfer_id": "t-new"},
        {"version": PolicyVersion("code", 1), "request_id": "q-new"},
        {"transfer_id": "t-new"},
        {"request_id": "q-new"},
    ],
    ids=["its request", "its transfer", "its number", "its number, by another request"],
)
def test_no_save_overwrites_the_row_of_another_version(
    catalog_path: Path, changes: dict[str, Any]
) -> None:
    catalog = Catalog.open(catalog_path)
    first = _record(1, VersionState.COMMITTED)
    catalog.apply([SaveVersion(first)])
    with pytest.raises(CatalogError, match="UNIQUE"):
        catalog.apply([SaveEpoch(5), SaveVersion(dataclasses.replace(first, **changes))])
    assert catalog.find_version(first.version) == first
    assert catalog.find_request(first.trainer_id, first.request_id) == first
    assert catalog.snapshot().epoch == 0
    catalog.close()


def test_a_policy_that_was_dropped_leaves_its_tokens_alone(catalog_path: Path) -> None:
    catalog = Catalog.open(catalog_path)
    catalog.apply([SavePolicy(Policy(f"exp-{i}", PolicyKind.ADAPTER, 0, 3 + i)) for i in range(3)])
    catalog.apply([SavePolicyDropped("exp-0", 3), SavePolicyDropped("exp-2", 5)])
    catalog.close()
    again = Catalog.open(catalog_path)
    known = again.snapshot()
    again.close()
    assert [policy.name for policy in known.policies] == ["exp-1"]
    assert known.token_floor == 5
