"""Catalogs of another schema, which are refused, and of today's: everything is in them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.coordinator.runtime.catalog.kept import RECORDS, SNAPSHOT, write_kept
from weft_rl.coordinator.decisions.state.effects import SavePolicy
from weft_rl.coordinator.runtime.catalog.database import SCHEMA_VERSION, Catalog, CatalogError


@pytest.mark.parametrize("other", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_another_schema_is_refused_and_left_alone(catalog_path: Path, other: int) -> None:
    write_kept(catalog_path)
    with closing(sqlite3.connect(catalog_path)) as changed:
        changed.execute(f"PRAGMA user_version={other}")
    before = catalog_path.read_bytes()
    with pytest.raises(CatalogError, match="start the Weft that wrote it") as refused:
        Catalog.open(catalog_path)
    assert refused.value.reason == "CATALOG_OTHER_SCHEMA"
    assert catalog_path.read_bytes() == before


def test_every_table_is_read_back(catalog_path: Path) -> None:
    write_kept(catalog_path)
    for generation in (2, 3):
        catalog = Catalog.open(catalog_path)
        assert catalog.snapshot() == replace(SNAPSHOT, generation=generation)
        for policy, records in RECORDS.items():
            assert catalog.list_versions(policy, 2_000_000, 99) == records
            for record in records:
                assert catalog.find_request(record.trainer_id, record.request_id) == record
                assert catalog.find_transfer(record.transfer_id) == record
        catalog.close()


def test_a_policy_is_forgotten_until_it_is_pushed_again(catalog_path: Path) -> None:
    write_kept(catalog_path)
    catalog = Catalog.open(catalog_path)
    (code,) = [policy for policy in catalog.snapshot().policies if policy.forgotten]
    catalog.apply([SavePolicy(code)])
    assert [p.name for p in catalog.snapshot().policies if p.forgotten] == ["code"]
    catalog.apply([SavePolicy(replace(code, forgotten=False))])
    assert not [p for p in catalog.snapshot().policies if p.forgotten]
    catalog.close()
