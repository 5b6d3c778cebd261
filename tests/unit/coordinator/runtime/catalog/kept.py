"""Catalogs that earlier Wefts left, kept as what sqlite3's ``.dump`` says of them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path


def write_kept(path: Path, schema: int) -> None:
    """Write the catalog that a Weft of that schema left."""
    dump = Path(__file__).with_name(f"schema_{schema}.sql").read_text()
    with closing(sqlite3.connect(path)) as catalog:
        catalog.executescript(dump)
