"""Shared by the coordinator's tests."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

_SCHEMA_3 = Path(__file__).with_name("catalog_schema_3.sql")


@pytest.fixture
def catalog_path(tmp_path: Path) -> Path:
    return tmp_path / "catalog.db"


def write_schema_3(path: Path) -> None:
    """Write the catalog that a Weft of schema 3 left."""
    with closing(sqlite3.connect(path)) as catalog:
        catalog.executescript(_SCHEMA_3.read_text())
