"""What each kind of event is about, and which ones one line tells."""

from __future__ import annotations

from tests.unit.coordinator.decisions.machine import Machine
from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.change import Change
from weft_rl.coordinator.decisions.state.effects import Announce, EventKind
from weft_rl.coordinator.decisions.state.event_kinds import (
    DETAILS,
    FAILURES,
    KEPT_WITH,
    TONE,
    TOPIC,
    TOPICS,
)
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.runtime.watchers import story
from weft_rl.v1 import inspect_pb2


def test_each_kind_has_one_topic_and_the_protos_have_it_too() -> None:
    assert sorted(kind for kinds in TOPICS.values() for kind in kinds) == sorted(EventKind)
    names = {name.removeprefix("EVENT_KIND_") for name, _ in inspect_pb2.EventKind.items()}
    assert names - {"UNSPECIFIED"} == {kind.name for kind in EventKind}
    assert all(kind in TOPICS[TOPIC[kind]] for kind in EventKind)


def test_a_failure_is_never_a_detail_and_is_bad() -> None:
    assert not FAILURES & DETAILS
    assert {kind for kind in EventKind if TONE[kind] == "bad"} == FAILURES
    assert {kind for kind in EventKind if KEPT_WITH[kind].startswith("failures of ")} == FAILURES
    for kind in EventKind:
        if kind.name.endswith(("LOST", "FAILED", "ABORTED", "QUARANTINED", "SUSPECT", "CONFLICT")):
            assert kind in FAILURES


def test_replicas_are_kept_apart_from_pushes_and_failures_from_the_others() -> None:
    pushes = {KEPT_WITH[kind] for kind in TOPICS["pushes"] - DETAILS}
    replicas = {KEPT_WITH[kind] for kind in TOPICS["replicas"]}
    assert pushes == {"pushes", "failures of pushes"}
    assert replicas == {"replicas", "failures of replicas"}
    assert KEPT_WITH[EventKind.REPLICA_ASLEEP] == KEPT_WITH[EventKind.REPLICA_READY] == "replicas"


def test_what_was_ordered_is_no_failure() -> None:
    m = Machine().pool("r0", "r1", "r2")
    m.do(events.Cordon(900, "r0", "new disk", no_pushes=True))
    (ordered,) = [e for e in m.last if isinstance(e, Announce) and e.subject == "r0"]
    assert (ordered.kind, TONE[ordered.kind]) == (EventKind.REPLICA_OUT_OF_SERVICE, "plain")
    m.do(events.Drain(901, "r1", 30.0, "maintenance"))
    for name, kind in (("r1", EventKind.REPLICA_LEFT), ("r2", EventKind.REPLICA_LOST)):
        m.do(events.Leave(902, name, "i1"))
        (left,) = [e for e in m.last if isinstance(e, Announce) and e.subject == name]
        assert left.kind is kind
    assert TONE[EventKind.REPLICA_LEFT] == "plain"
    m.register("r3", dirty_reason="a load failed")
    (mixed,) = [e for e in m.last if isinstance(e, Announce) and e.subject == "r3"]
    assert (mixed.kind, TONE[mixed.kind]) == (EventKind.REPLICA_QUARANTINED, "bad")


def test_a_push_and_the_end_of_its_version_are_one_story() -> None:
    moved = PolicyVersion("math", 3)
    told = [
        Announce(EventKind.TRANSFER_BEGUN, "t-1", "math@3 by trainer a", moved),
        Announce(EventKind.TRANSFER_STAGED, "t-1", "math@3", moved),
        Announce(EventKind.TRANSFER_COMMITTED, "t-1", "math@3 served", moved),
        Announce(EventKind.VERSION_RETIRED, "math@3", "", moved),
    ]
    assert {story(event) for event in told} == {"math@3"}


def test_who_is_lost_on_the_way_is_told_by_itself() -> None:
    lost = Announce(EventKind.TRANSFER_REFORMED, "t-1", "", PolicyVersion("math", 3))
    assert (story(lost), TONE[lost.kind]) == ("", "bad")
    failed = Announce(EventKind.CLONE_FAILED, "t-2", "", PolicyVersion("math", 3))
    begun = Announce(EventKind.CLONE_BEGUN, "t-2", "", PolicyVersion("math", 3))
    assert story(failed) == story(begun) == "t-2"
    # A story has one failure at most, which ends it: a line shows that, and hides no other.
    ends = {EventKind.TRANSFER_ABORTED, EventKind.CLONE_FAILED, EventKind.RESTORE_FAILED}
    assert {kind for kind in FAILURES if story(Announce(kind, "math@3", ""))} == ends


def test_events_say_which_policy_they_concern() -> None:
    change = Change(PoolState(), 0.0)
    change.announce(EventKind.LEASE_ACQUIRED, "math", "")
    change.announce(EventKind.POLICY_LOST, "math@3", "")
    change.announce(EventKind.REPLICA_LOST, "replica-1", "")
    concerned = [effect.concerns for effect in change.effects if isinstance(effect, Announce)]
    assert concerned == [PolicyVersion("math", 0), PolicyVersion("math", 3), None]
