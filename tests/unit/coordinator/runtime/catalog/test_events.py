"""Events in the catalog: those of former coordinators are there, and their number has a bound."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.replica_report import OutOfService
from weft_rl.coordinator.decisions.state.effects import (
    Announce,
    EventKind,
    SaveEvent,
    SaveOutOfService,
)
from weft_rl.coordinator.decisions.state.event_kinds import MAX_KEPT
from weft_rl.coordinator.runtime.catalog import database
from weft_rl.coordinator.runtime.catalog.database import Catalog, CatalogError
from weft_rl.coordinator.runtime.catalog.tables import EVENTS, Rows


def _event(number: int, kind: EventKind = EventKind.REPLICA_READY) -> SaveEvent:
    return SaveEvent(1e9 + number, Announce(kind, f"r{number}", "x"))


def test_events_are_read_back_in_order_by_the_next(catalog_path: Path) -> None:
    moved = Announce(EventKind.TRANSFER_ABORTED, "t-1", "why", PolicyVersion("math", 3))
    written = [_event(0), SaveEvent(1e9 + 1.5, moved), _event(2, EventKind.REPLICA_LOST)]
    catalog = Catalog.open(catalog_path)
    catalog.apply(written[:2])
    catalog.apply(written[2:])
    catalog.close()
    catalog = Catalog.open(catalog_path)
    assert catalog.snapshot().events == tuple(written)
    catalog.close()


def test_of_failures_and_of_others_the_last_are_kept_over_restarts(catalog_path: Path) -> None:
    catalog = Catalog.open(catalog_path)
    failures = [_event(n, EventKind.REPLICA_LOST) for n in range(MAX_KEPT + 2)]
    catalog.apply(failures)
    catalog.close()
    catalog = Catalog.open(catalog_path)
    others = [_event(n + MAX_KEPT + 2) for n in range(MAX_KEPT + 3)]
    catalog.apply(others)
    catalog.apply([_event(5_000, EventKind.REPLICA_LOST)])
    kept = (*failures[3:], *others[3:], _event(5_000, EventKind.REPLICA_LOST))
    assert catalog.snapshot().events == kept
    catalog.close()
    catalog = Catalog.open(catalog_path)  # the count of its rows is right
    assert catalog.snapshot().events == kept
    catalog.close()


def test_a_replica_that_flaps_drops_no_outcome_of_a_push(catalog_path: Path) -> None:
    catalog = Catalog.open(catalog_path)
    pushes = [
        SaveEvent(1e9, Announce(EventKind.TRANSFER_ABORTED, "t-1", "", PolicyVersion("math", 1))),
        SaveEvent(1e9, Announce(EventKind.TRANSFER_COMMITTED, "t-2", "", PolicyVersion("math", 2))),
    ]
    catalog.apply(pushes)
    for kind in (EventKind.REPLICA_LOST, EventKind.REPLICA_READY, EventKind.REPLICA_ASLEEP):
        catalog.apply([_event(n, kind) for n in range(MAX_KEPT + 1)])
    past = catalog.snapshot().events
    assert past[:2] == tuple(pushes)
    assert len(past) == 2 + 2 * MAX_KEPT
    catalog.close()


def test_a_kind_that_a_later_weft_wrote_is_kept_and_passed_over(catalog_path: Path) -> None:
    catalog = Catalog.open(catalog_path)
    catalog.apply([_event(0)])
    row = (2, 1e9, "replica_sings", "r1", "la", None, None)
    Rows(catalog._connection).put(EVENTS, row)
    catalog.close()
    catalog = Catalog.open(catalog_path)
    assert catalog.snapshot().events == (_event(0),)
    catalog.apply([_event(3)])
    assert catalog.snapshot().events == (_event(0), _event(3))
    assert row in Rows(catalog._connection).select(EVENTS, {})
    catalog.close()


def test_a_transaction_that_failed_leaves_the_bound_of_events(
    catalog_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "MAX_KEPT", 3)
    catalog = Catalog.open(catalog_path)
    catalog.apply([_event(n) for n in range(3)])
    (pages,) = catalog._connection.execute("PRAGMA page_count").fetchone()
    catalog._connection.execute(f"PRAGMA max_page_count={pages}")
    big = SaveOutOfService("r0", OutOfService("x" * 1_000_000))
    with pytest.raises(CatalogError, match="the disk is full"):
        catalog.apply([_event(3), _event(4), big])
    assert catalog.snapshot().events == (_event(0), _event(1), _event(2))
    catalog.apply([_event(5)])
    assert catalog.snapshot().events == (_event(1), _event(2), _event(5))
    catalog.close()


def test_a_long_message_is_cut(catalog_path: Path) -> None:
    catalog = Catalog.open(catalog_path)
    catalog.apply([SaveEvent(1e9, Announce(EventKind.REPLICA_LOST, "r0", "x" * 10_000))])
    (past,) = catalog.snapshot().events
    assert past.event.message == "x" * 2000
    catalog.close()
