"""Events that are kept; a slow reader of routes gets the newest list, and no other."""

from __future__ import annotations

import asyncio

import pytest

from weft_rl.contract.errors import PeerUnavailableError
from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.state.effects import Announce, EventKind, SaveEvent
from weft_rl.coordinator.decisions.state.event_kinds import MAX_KEPT
from weft_rl.coordinator.runtime.watchers import MAX_REMEMBERED, Feed, RouteFeed


def _event(subject: str, kind: EventKind = EventKind.REPLICA_READY) -> Announce:
    concerns = PolicyVersion.parse(subject) if "@" in subject else None
    return Announce(kind, subject, "", concerns)


def test_the_last_events_are_kept_and_since_when() -> None:
    feed = Feed(clock=lambda: 5.0)
    assert (feed.past(), feed.kept_since.seconds) == ([], 5)
    for i in range(MAX_KEPT):
        feed.publish(10.0 + i, _event(f"r{i}"))
    assert feed.kept_since.seconds == 5, "none is forgotten yet"
    feed.publish(10.0 + MAX_KEPT, _event("last"))
    past = feed.past()
    assert [kept.revision for kept in past] == [*range(MAX_KEPT + 1, 1, -1)]
    assert (past[0].subject, past[-1].subject) == ("last", "r1")
    assert feed.kept_since.seconds == 11
    assert [kept.subject for kept in feed.past(before=4)] == ["r2", "r1"]


def test_a_failure_stays_however_much_else_happens() -> None:
    feed = Feed(clock=lambda: 5.0)
    feed.publish(6.0, _event("r0", EventKind.REPLICA_LOST))
    for i in range(3 * MAX_KEPT):
        feed.publish(7.0 + i, _event(f"math@{i}", EventKind.VERSION_RETIRED))
        feed.publish(7.0 + i, _event(f"r{i}"))
    past = feed.past()
    assert past[-1].subject == "r0"
    assert len(past) == 1 + 2 * MAX_KEPT
    assert [kept.revision for kept in past] == sorted((k.revision for k in past), reverse=True)
    assert (past[1].policy, past[1].version) == ("math", 3 * MAX_KEPT - 1)


def test_events_of_former_coordinators_come_first_and_do_not_count_as_all() -> None:
    feed = Feed(
        clock=lambda: 50.0, former=[SaveEvent(7.0, _event("r0")), SaveEvent(8.0, _event("r1"))]
    )
    feed.publish(60.0, _event("r2"))
    assert [(k.revision, k.subject, k.time.seconds) for k in feed.past()] == [
        (3, "r2", 60), (2, "r1", 8), (1, "r0", 7),
    ]  # fmt: skip
    assert feed.kept_since.seconds == 50


async def test_lists_that_nobody_took_are_not_told() -> None:
    feed = RouteFeed()
    assert await feed.newer(-1) == 0
    waiting = asyncio.create_task(feed.newer(0))
    await asyncio.sleep(0)
    for _ in range(1000):
        feed.change(["r0"])
    assert await waiting == await feed.newer(0) == 1000


async def test_a_reader_is_told_of_every_replica_that_changed_since_and_of_no_other() -> None:
    feed = RouteFeed()
    assert feed.changed_since(-1) is None, "it knows nothing yet"
    for names in (["r0", "r1"], ["r2"], ["r0"]):
        feed.change(names)
    assert feed.changed_since(3) == []
    assert feed.changed_since(2) == ["r0"]
    assert sorted(feed.changed_since(1) or []) == ["r0", "r2"]
    assert sorted(feed.changed_since(0) or []) == ["r0", "r1", "r2"]


async def test_what_changed_long_ago_is_forgotten_and_told_as_a_whole_list() -> None:
    feed = RouteFeed()
    for i in range(MAX_REMEMBERED + 2):
        feed.change([f"r{i}"])
    assert feed.changed_since(1) is None
    assert len(feed.changed_since(2) or []) == MAX_REMEMBERED


async def test_the_end_is_told_to_those_who_wait() -> None:
    feed = RouteFeed()
    waiting, held = asyncio.create_task(feed.newer(0)), asyncio.create_task(feed.wait(60))
    await asyncio.sleep(0)
    feed.close()
    await asyncio.wait_for(held, 5)
    with pytest.raises(PeerUnavailableError):
        await waiting
