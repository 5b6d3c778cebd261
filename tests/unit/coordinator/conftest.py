"""Shared by the coordinator's tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def catalog_path(tmp_path: Path) -> Path:
    return tmp_path / "catalog.db"
