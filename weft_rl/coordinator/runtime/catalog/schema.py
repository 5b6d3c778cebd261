"""Schema of the catalog: creation of a new file, and checks of one that is there.

Nothing in a file is believed before it is checked.
"""

from __future__ import annotations

import sqlite3
from itertools import islice
from pathlib import Path
from typing import Final

from weft_rl.coordinator.runtime.catalog.errors import CatalogError, damaged
from weft_rl.coordinator.runtime.catalog.tables import Rows

#: "WEFT": tells a Weft catalog from any other SQLite file.
APPLICATION_ID: Final = 0x57454654

#: Grows with each change of ``TABLES``.
SCHEMA_VERSION: Final = 2
#: Longest that opening a catalog waits for another program that has it open.
WAIT_SECONDS: Final = 5.0
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
        connection.execute("BEGIN")
        Rows(connection).create()
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        connection.execute("COMMIT")
    finally:
        connection.close()


def check(connection: sqlite3.Connection, path: Path) -> None:
    """Check that a catalog is whole, and of this schema; O(rows).

    Raises:
        CatalogError: It is something else, damaged, or of another schema.
        sqlite3.Error: It cannot even be read.
    """
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (schema,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise CatalogError(
            f"{path} is a SQLite file, but not a Weft catalog: give --catalog another path"
        )
    if schema != SCHEMA_VERSION:
        raise CatalogError(
            f"{path} has schema {schema}, and this Weft has {SCHEMA_VERSION}: start the Weft that "
            "wrote it, or give --catalog another path and --recover, so that replicas tell what "
            "they hold",
            reason="CATALOG_OTHER_SCHEMA",
        )
    found = connection.execute(f"PRAGMA integrity_check({_MAX_PROBLEMS})").fetchall()
    if found != [("ok",)]:
        problems = [f"its structure ({text.splitlines()[-1]})" for (text,) in found]
        raise damaged(path, problems)
    if problems := [*islice(Rows(connection).problems(), _MAX_PROBLEMS)]:
        raise damaged(path, problems)
