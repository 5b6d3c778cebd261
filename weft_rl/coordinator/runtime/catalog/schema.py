"""Schema of the catalog: creation of a new file, migration of an older one, checks of both.

Nothing in a file is believed before it is checked.
"""

from __future__ import annotations

import sqlite3
from itertools import islice
from pathlib import Path
from typing import Final

from weft_rl.coordinator.runtime.catalog.errors import CatalogError, damaged
from weft_rl.coordinator.runtime.catalog.tables import (
    BASES_AS_STARTED,
    COUNTS,
    FORGOTTEN_POLICIES,
    OWNERS_AND_SLEEPS,
    PAST_EVENTS,
    Rows,
)

#: "WEFT": tells a Weft catalog from any other SQLite file.
APPLICATION_ID: Final = 0x57454654

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
_NUMBER_FLOOR: Final = """
ALTER TABLE meta ADD COLUMN number_floor INTEGER NOT NULL DEFAULT 0;
"""
# Until then what the pool served was taken for what an adapter was trained on.
_PROVENANCE: Final = """
ALTER TABLE meta ADD COLUMN base_checkpoint TEXT NOT NULL DEFAULT '';
UPDATE versions SET adapter_trained_on = NULL;
"""
#: Schema n is the first n of these; an older catalog gets what it lacks.
_STEPS: Final = (
    _SCHEMA,
    _PINS,
    _RETENTION_AND_WITHDRAWN,
    _NUMBER_FLOOR + _PROVENANCE + COUNTS,
    FORGOTTEN_POLICIES,
    BASES_AS_STARTED,
    PAST_EVENTS,
    OWNERS_AND_SLEEPS,
)
SCHEMA_VERSION: Final = len(_STEPS)
#: Longest that opening a catalog waits for another program that has it open.
WAIT_SECONDS: Final = 5.0
#: From this one on rows have checksums, and tables counts.
_SEALED_SCHEMA: Final = 4
#: Problems that are looked for; a file that is no database any more has one a page.
_MAX_PROBLEMS: Final = 1000


def connect(path: Path) -> sqlite3.Connection:
    """Open a connection that waits ``WAIT_SECONDS`` for others, and for the disk at commits."""
    connection = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, timeout=WAIT_SECONDS
    )
    connection.execute("PRAGMA synchronous=EXTRA")
    return connection


def create(path: Path) -> None:
    """Create an empty catalog; on disk when it returns."""
    connection = connect(path)
    try:
        connection.executescript(
            f"BEGIN;{''.join(_STEPS)}"
            "INSERT INTO meta (generation, epoch, fingerprint, architecture) VALUES (0, 0, '', '');"
            f"PRAGMA application_id={APPLICATION_ID};PRAGMA user_version={SCHEMA_VERSION};"
        )
        Rows(connection).seal()
        connection.execute("COMMIT")
    finally:
        connection.close()


def check(connection: sqlite3.Connection, path: Path) -> None:
    """Check that a catalog is whole, and migrate an older one to this schema; O(rows).

    Raises:
        CatalogError: It is something else, damaged, or a newer Weft's.
        sqlite3.Error: It cannot even be read.
    """
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (schema,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise CatalogError(
            f"{path} is a SQLite file, but not a Weft catalog: give --catalog another path"
        )
    if schema > SCHEMA_VERSION:
        raise CatalogError(
            f"{path} has schema {schema}, this Weft knows {SCHEMA_VERSION}: use a newer Weft",
            reason="CATALOG_TOO_NEW",
        )
    found = connection.execute(f"PRAGMA integrity_check({_MAX_PROBLEMS})").fetchall()
    if found != [("ok",)]:
        problems = [f"its structure ({text.splitlines()[-1]})" for (text,) in found]
        raise damaged(path, problems)
    rows = Rows(connection)
    if schema < SCHEMA_VERSION:
        connection.executescript(f"BEGIN IMMEDIATE;{''.join(_STEPS[schema:])}")
        _check_rows(rows, path, sealed=schema >= _SEALED_SCHEMA)
        if schema < _SEALED_SCHEMA:
            rows.seal()
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        connection.execute("COMMIT")
    _check_rows(rows, path, sealed=True)


def _check_rows(rows: Rows, path: Path, *, sealed: bool) -> None:
    if problems := [*islice(rows.problems(sealed=sealed), _MAX_PROBLEMS)]:
        raise damaged(path, problems)
