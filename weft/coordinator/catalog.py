"""The durable catalog: which versions were ever assigned, and what became of them.

SQLite in WAL mode with ``synchronous=FULL``, so that a transaction that has
returned survives a power cut. One coordinator owns a catalog: a lock on a file
beside it is held as long as it is open. Writes come from one thread (the
driver's), reads from another connection.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from weft.contract.errors import WeftError
from weft.contract.names import PolicyVersion
from weft.coordinator.effects import (
    Save,
    SaveCommitted,
    SaveEpoch,
    SavePin,
    SavePolicy,
    SavePool,
    SaveRetired,
    SaveVersion,
    SaveWithdrawn,
)
from weft.coordinator.replica import Withdrawn
from weft.coordinator.state import Policy
from weft.coordinator.values import (
    AdapterSpec,
    ContentDigest,
    Failure,
    PolicyKind,
    Standing,
    VersionRecord,
    VersionState,
)

#: "WEFT": tells a Weft catalog from any other SQLite file.
APPLICATION_ID: Final = 0x57454654
_RESTARTED: Final = "the coordinator restarted while the push was under way"

_SCHEMA: Final = """
CREATE TABLE meta (
  generation INTEGER NOT NULL, epoch INTEGER NOT NULL,
  fingerprint TEXT NOT NULL, architecture TEXT NOT NULL
);
CREATE TABLE policies (
  name TEXT PRIMARY KEY, kind INTEGER NOT NULL, last_version INTEGER NOT NULL,
  fencing_token INTEGER NOT NULL, served_version INTEGER NOT NULL
);
CREATE TABLE versions (
  policy TEXT NOT NULL, version INTEGER NOT NULL, state INTEGER NOT NULL,
  trainer_id TEXT NOT NULL, request_id TEXT NOT NULL, transfer_id TEXT NOT NULL,
  layout_digest BLOB NOT NULL, create_time REAL NOT NULL, commit_time REAL NOT NULL,
  digest_algorithm INTEGER, digest_value BLOB, digest_size_bytes INTEGER,
  adapter_config TEXT, adapter_config_digest BLOB, adapter_base TEXT, adapter_trained_on INTEGER,
  failure_reason TEXT, failure_message TEXT,
  PRIMARY KEY (policy, version)
);
CREATE UNIQUE INDEX versions_by_request ON versions (trainer_id, request_id);
CREATE UNIQUE INDEX versions_by_transfer ON versions (transfer_id);
CREATE INDEX versions_by_state ON versions (state);
"""
_PINS: Final = """
CREATE TABLE pins (
  policy TEXT NOT NULL, version INTEGER NOT NULL, PRIMARY KEY (policy, version)
);
"""
_RETENTION_AND_WITHDRAWN: Final = """
ALTER TABLE policies ADD COLUMN retain INTEGER NOT NULL DEFAULT 0;
CREATE TABLE withdrawn (
  replica_id TEXT PRIMARY KEY, standing INTEGER NOT NULL, reason TEXT NOT NULL
);
"""
#: Schema n is the first n of these; an older catalog gets what it lacks.
_STEPS: Final = (_SCHEMA, _PINS, _RETENTION_AND_WITHDRAWN)
SCHEMA_VERSION: Final = len(_STEPS)


class CatalogError(WeftError):
    """The catalog cannot be used; ``NOT_A_CATALOG``, ``CATALOG_TOO_NEW`` or ``CATALOG_LOCKED``."""

    status = "FAILED_PRECONDITION"
    default_reason = "NOT_A_CATALOG"


@dataclass(frozen=True)
class Snapshot:
    """What a coordinator starts from."""

    generation: int
    epoch: int
    fingerprint: str
    architecture: str
    policies: tuple[Policy, ...]
    withdrawn: Mapping[str, Withdrawn]


class Catalog:
    """An open catalog; close it to let another coordinator have it."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self._lock_fd = lock_fd
        self._write = _connect(path)
        self._read = self._write

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Catalog:
        """Open or create a catalog and count a new generation; blocks for a few fsyncs.

        Versions that were on their way become ABORTED: their bytes are gone.

        Raises:
            CatalogError: Another coordinator has it, it is something else, or a
                newer Weft wrote it.
        """
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        catalog: Catalog | None = None
        lock_fd = _lock(file)
        try:
            catalog = cls(file, lock_fd)
            catalog._prepare(file)
            catalog._read = _connect(file)
        except BaseException as error:
            if catalog is not None:
                catalog._write.close()
            os.close(lock_fd)
            if isinstance(error, sqlite3.DatabaseError):
                raise CatalogError(f"{file} is not a Weft catalog: {error}") from error
            raise
        return catalog

    def _prepare(self, file: Path) -> None:
        write = self._write
        (application,) = write.execute("PRAGMA application_id").fetchone()
        (schema,) = write.execute("PRAGMA user_version").fetchone()
        (tables,) = write.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables and application != APPLICATION_ID:
            raise CatalogError(f"{file} is a SQLite file, but not a Weft catalog")
        if schema > SCHEMA_VERSION:
            raise CatalogError(
                f"{file} has schema {schema}, this Weft knows {SCHEMA_VERSION}: use a newer Weft",
                reason="CATALOG_TOO_NEW",
            )
        write.execute("PRAGMA journal_mode=WAL")
        write.execute("PRAGMA synchronous=FULL")
        if schema < SCHEMA_VERSION:
            missing = "".join(_STEPS[schema if tables else 0 :])
            first = "" if tables else "INSERT INTO meta VALUES (0, 0, '', '');"
            write.executescript(
                f"BEGIN;{missing}{first}PRAGMA application_id={APPLICATION_ID};"
                f"PRAGMA user_version={SCHEMA_VERSION};COMMIT;"
            )
        with _Transaction(write):
            write.execute("UPDATE meta SET generation = generation + 1")
            write.execute(
                "UPDATE versions SET state=?, failure_reason='TRANSFER_ABORTED', failure_message=? "
                "WHERE state=?",
                (VersionState.ABORTED, _RESTARTED, VersionState.STAGING),
            )
            # A base has one version; a restart can come before the older one is marked.
            write.execute(
                "UPDATE versions SET state=? WHERE state=? AND policy='base' AND version != "
                "(SELECT served_version FROM policies WHERE name='base')",
                (VersionState.RETIRED, VersionState.COMMITTED),
            )

    def snapshot(self) -> Snapshot:
        """What is known at the start."""
        generation, epoch, fingerprint, architecture = self._read.execute(
            "SELECT generation, epoch, fingerprint, architecture FROM meta"
        ).fetchone()
        held: dict[str, list[int]] = {}
        for name, version in self._read.execute(
            "SELECT policy, version FROM versions WHERE state=? ORDER BY version",
            (VersionState.COMMITTED,),
        ):
            held.setdefault(name, []).append(version)
        pins: dict[str, list[int]] = {}
        for name, version in self._read.execute(
            "SELECT policy, version FROM pins ORDER BY version"
        ):
            pins.setdefault(name, []).append(version)
        policies = tuple(
            Policy(
                name,
                PolicyKind(kind),
                last,
                token,
                served,
                tuple(held.get(name, ())),
                pinned=tuple(pins.get(name, ())),
                retain=retain,
            )
            for name, kind, last, token, served, retain in self._read.execute(
                "SELECT name, kind, last_version, fencing_token, served_version, retain "
                "FROM policies ORDER BY name"
            )
        )
        withdrawn = {
            replica_id: Withdrawn(Standing(standing), reason)
            for replica_id, standing, reason in self._read.execute(
                "SELECT replica_id, standing, reason FROM withdrawn ORDER BY replica_id"
            )
        }
        return Snapshot(
            generation,
            epoch,
            fingerprint,
            architecture,
            policies,
            withdrawn,
        )

    def apply(self, saves: Sequence[Save]) -> None:
        """Write all of ``saves`` in one transaction; on disk when it returns.

        Called by the writer thread alone.
        """
        with _Transaction(self._write):
            for save in saves:
                self._apply_one(save)

    def _apply_one(self, save: Save) -> None:
        execute = self._write.execute
        match save:
            case SavePool():
                execute(
                    "UPDATE meta SET fingerprint=?, architecture=?",
                    (save.fingerprint, save.architecture),
                )
            case SaveEpoch():
                execute("UPDATE meta SET epoch=?", (save.epoch,))
            case SavePolicy(policy=p):
                execute(
                    "INSERT OR REPLACE INTO policies VALUES (?,?,?,?,?,?)",
                    (p.name, p.kind, p.last_version, p.fencing_token, p.served_version, p.retain),
                )
            case SaveVersion():
                self._save_version(save.record)
            case SaveRetired(version=v):
                self._set_state(v, VersionState.RETIRED)
            case SaveCommitted(version=v):
                self._set_state(v, VersionState.COMMITTED)
            case SavePin(version=v, pinned=True):
                execute("INSERT OR REPLACE INTO pins VALUES (?,?)", (v.policy, v.version))
            case SavePin(version=v):
                execute("DELETE FROM pins WHERE policy=? AND version=?", (v.policy, v.version))
            case SaveWithdrawn(replica_id=name, order=None):
                execute("DELETE FROM withdrawn WHERE replica_id=?", (name,))
            case SaveWithdrawn(replica_id=name, order=Withdrawn() as order):
                execute(
                    "INSERT OR REPLACE INTO withdrawn VALUES (?,?,?)",
                    (name, int(order.standing), order.reason),
                )

    def _save_version(self, record: VersionRecord) -> None:
        """Insert a version's row, or replace its own; never another's.

        Raises:
            sqlite3.IntegrityError: Another version has this request or transfer.
        """
        row = _to_row(record)
        key = (record.version.policy, record.version.version)
        where = "policy=? AND version=? AND trainer_id=? AND request_id=? AND transfer_id=?"
        own = (*key, record.trainer_id, record.request_id, record.transfer_id)
        self._write.execute(f"DELETE FROM versions WHERE {where}", own)
        marks = ",".join("?" * len(row))
        self._write.execute(f"INSERT INTO versions VALUES ({marks})", row)

    def _set_state(self, version: PolicyVersion, state: VersionState) -> None:
        self._write.execute(
            "UPDATE versions SET state=? WHERE policy=? AND version=?",
            (state, version.policy, version.version),
        )

    def find_request(self, trainer_id: str, request_id: str) -> VersionRecord | None:
        """The version that a trainer's request made, if any."""
        return self._find("trainer_id=? AND request_id=?", (trainer_id, request_id))

    def find_version(self, version: PolicyVersion) -> VersionRecord | None:
        """A version's record."""
        found = self.list_versions(version.policy, version.version + 1, 1)
        return found[0] if found and found[0].version == version else None

    def find_transfer(self, transfer_id: str) -> VersionRecord | None:
        """The version that a transfer brought, if any."""
        return self._find("transfer_id=?", (transfer_id,))

    def _find(self, where: str, values: tuple[str, ...]) -> VersionRecord | None:
        row = self._read.execute(f"SELECT * FROM versions WHERE {where}", values).fetchone()
        return _from_row(row) if row else None

    def list_versions(self, policy: str, before: int, limit: int) -> list[VersionRecord]:
        """Versions of a policy below ``before``, newest first."""
        rows = self._read.execute(
            "SELECT * FROM versions WHERE policy=? AND version<? ORDER BY version DESC LIMIT ?",
            (policy, before, limit),
        )
        return [_from_row(row) for row in rows]

    def close(self) -> None:
        """Close it and let go of the lock; the writer thread must be idle."""
        self._read.close()
        self._write.close()
        os.close(self._lock_fd)


class _Transaction:
    """BEGIN IMMEDIATE, then COMMIT, or ROLLBACK when the body raises."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._connection.execute("COMMIT" if kind is None else "ROLLBACK")


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    connection.execute("PRAGMA synchronous=FULL")
    return connection


def _lock(path: Path) -> int:
    fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise CatalogError(
            f"{path} is in use by another coordinator: stop that one, or give this one a "
            "catalog of its own",
            reason="CATALOG_LOCKED",
        ) from None
    return fd


def _to_row(record: VersionRecord) -> tuple[Any, ...]:
    digest, adapter, failure = record.content_digest, record.adapter, record.failure
    return (
        record.version.policy,
        record.version.version,
        int(record.state),
        record.trainer_id,
        record.request_id,
        record.transfer_id,
        record.layout_digest,
        record.create_time,
        record.commit_time,
        *((digest.algorithm, digest.value, digest.size_bytes) if digest else (None,) * 3),
        *(
            (
                adapter.config_json,
                adapter.config_digest,
                adapter.base_fingerprint,
                adapter.trained_on_base_version,
            )
            if adapter
            else (None,) * 4
        ),
        *((failure.reason, failure.message) if failure else (None,) * 2),
    )


def _from_row(row: Sequence[Any]) -> VersionRecord:
    return VersionRecord(
        version=PolicyVersion(row[0], row[1]),
        state=VersionState(row[2]),
        trainer_id=row[3],
        request_id=row[4],
        transfer_id=row[5],
        layout_digest=row[6],
        create_time=row[7],
        commit_time=row[8],
        content_digest=ContentDigest(*row[9:12]) if row[9] is not None else None,
        adapter=AdapterSpec(*row[12:16]) if row[12] is not None else None,
        failure=Failure(row[16], row[17]) if row[16] is not None else None,
    )
