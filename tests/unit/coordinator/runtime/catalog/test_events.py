"""Events in the catalog: those of former coordinators are there, and their number has a bound."""

from __future__ import annotations

from pathlib import Path

from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.state.effects import Announce, EventKind, SaveEvent
from weft_rl.coordinator.decisions.state.event_kinds import MAX_KEPT
from weft_rl.coordinator.runtime.catalog.database import Catalog


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


def test_a_long_message_is_cut(catalog_path: Path) -> None:
    catalog = Catalog.open(catalog_path)
    catalog.apply([SaveEvent(1e9, Announce(EventKind.REPLICA_LOST, "r0", "x" * 10_000))])
    (past,) = catalog.snapshot().events
    assert past.event.message == "x" * 2000
    catalog.close()
