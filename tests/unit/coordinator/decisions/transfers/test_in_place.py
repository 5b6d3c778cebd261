"""Replicas that load a base as it comes: when they are told to, and what a failure costs."""

from __future__ import annotations

from typing import Any

from tests.unit.coordinator.decisions.machine import (
    CAPABILITIES,
    DIGEST,
    GONE,
    LOAD_FAILED,
    Machine,
    saved_versions,
)
from weft_rl.contract.manifest import WSUM64
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.replica_report import ReplicaReport
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.values import (
    ContentDigest,
    Failure,
    Phase,
    ReplicaState,
    VersionState,
)

BASE_1 = PolicyVersion("base", 1)


def _pool(*in_place: str, staged: tuple[str, ...] = ()) -> Machine:
    """A pool of replicas that load in place, and of others; a trainer owns the base."""
    m = Machine(publish_again_after_seconds=1.0)
    for replica_id in in_place:
        m.register(replica_id, loads_in_place=True)
    for replica_id in staged:
        m.register(replica_id)
    m.do(events.ReferenceKnown(CAPABILITIES.base_fingerprint))
    m.acquire("base")
    return m


def _loading(m: Machine, **changes: Any) -> int:
    """A base whose receivers all have their buffers full."""
    ticket = m.run_to(Phase.STAGING, "base", **changes)
    _say_due(m, ticket)
    return ticket


def _say_due(m: Machine, ticket: int) -> None:
    transfer = m.transfer(ticket)
    for rank in range(1, m.state.groups[transfer.group_id].size):
        m.do(events.RankLoadDue(transfer.group_id, transfer.transfer_id, rank))


def _beat(m: Machine, replica_id: str, dirty_reason: str = "") -> effects.HeartbeatAnswer:
    ticket = next(m.ids)
    replica = m.state.replicas[replica_id]
    beat = events.Heartbeat(
        ticket,
        replica_id,
        "i1",
        ReplicaReport(
            version_vector=replica.vector, retained_base_versions=(), dirty_reason=dirty_reason
        ),
    )
    m.do(beat)
    answer = m.answer(ticket)
    assert isinstance(answer, effects.HeartbeatAnswer)
    return answer


def test_they_are_told_when_they_say_so_and_others_are_not() -> None:
    m = _pool("r0", staged=("r1",))
    ticket = m.begin("base")
    m.attend_all(ticket)
    _say_due(m, ticket)  # nothing flows yet
    m.prepare_all(ticket)
    assert not m.ever(effects.CallLoad)
    _say_due(m, ticket)
    (load,) = m.ever(effects.CallLoad)
    assert (load.replica_id, load.version, load.timeout_seconds) == ("r0", BASE_1, 60.0)
    assert not [r for r in saved_versions(m) if r.state is VersionState.COMMITTED]


def test_adapters_are_staged_everywhere() -> None:
    m = _pool("r0")
    m.acquire("math")
    ticket = m.run_to(Phase.STAGING)
    _say_due(m, ticket)
    assert not m.ever(effects.CallLoad)


def test_before_they_are_told_a_push_that_ends_costs_nothing() -> None:
    m = _pool("r0", "r1")
    ticket = m.run_to(Phase.STAGING, "base")
    m.do(events.RankGone(m.transfer(ticket).group_id, 1, "its stream broke"))
    assert m.transfer(ticket).phase is Phase.ABORTED  # it requires all
    assert m.standing("r1") == (ReplicaState.READY, "")
    failure = m.transfer(ticket).failure
    assert failure
    assert "dirty" not in failure.metadata


def test_they_need_no_room_for_a_copy() -> None:
    m = Machine()
    m.register("r0", loads_in_place=True, staging_capacity_bytes=0)
    m.do(events.ReferenceKnown(CAPABILITIES.base_fingerprint))
    m.acquire("base")
    m.run_to(Phase.COMMITTED, "base")


def test_a_heartbeat_that_says_so_meanwhile_is_no_reason_to_quarantine() -> None:
    m = _pool("r0")
    ticket = _loading(m)
    m.now += 5.0
    assert _beat(m, "r0", "base@1 is being loaded in place").ready
    assert m.standing("r0")[0] is ReplicaState.READY
    m.stage_all(ticket)
    assert _beat(m, "r0", "base@1 is being loaded in place").ready
    m.answer_commits(ticket)
    assert m.transfer(ticket).served_by == {"r0"}
    assert _beat(m, "r0").ready


def test_a_sender_that_dies_costs_them_their_weights_and_nobody_else() -> None:
    m = _pool("r0", staged=("r1",))
    ticket = _loading(m)
    waiter = m.await_end(ticket)
    m.do(events.RankGone(m.transfer(ticket).group_id, 0, "its stream broke"))
    assert saved_versions(m)[-1].state is VersionState.ABORTED
    error = m.error(waiter)
    assert (error.reason, error.metadata["dirty"]) == ("PEER_GONE", "true")
    assert "r0 had begun to load it in place" in error.message
    at, why = m.standing("r0")
    assert at is ReplicaState.QUARANTINED
    assert why.startswith("base@1 was not loaded whole: t1 is gone")
    assert m.standing("r1") == (ReplicaState.READY, "")
    assert {c.replica_id for c in m.ever(effects.CallDiscard)} == {"r0", "r1"}


def test_one_that_had_not_begun_says_so_and_is_ready() -> None:
    m = _pool("r0")
    ticket = _loading(m)
    m.do(events.RankGone(m.transfer(ticket).group_id, 0, "its stream broke"))
    assert not _beat(m, "r0").ready  # it may have been on its way before
    m.now += 2.0
    assert _beat(m, "r0").ready


def test_the_loss_of_one_does_not_cost_the_others_their_weights() -> None:
    """``require="all"`` is asked when the push begins."""
    m = _pool("r0", "r1")
    ticket = _loading(m)
    m.do(events.RankGone(m.transfer(ticket).group_id, 1, "its stream broke"))
    assert m.transfer(ticket).targets == ("r1",)
    assert "not loaded whole" in m.state.replicas["r0"].dirty_reason
    m.attend_all(ticket)
    m.prepare_all(ticket)
    _say_due(m, ticket)
    assert [c.replica_id for c in m.found(effects.CallLoad)] == ["r1"]
    m.stage_all(ticket)
    m.answer_commits(ticket)
    assert m.transfer(ticket).phase is Phase.COMMITTED
    assert m.standing("r1") == (ReplicaState.READY, "")


def test_the_last_one_is_lost_with_the_push() -> None:
    m = _pool("r0")
    ticket = _loading(m)
    m.do(events.RankGone(m.transfer(ticket).group_id, 1, "its stream broke"))
    assert m.transfer(ticket).phase is Phase.ABORTED


def test_a_receiver_that_fails_is_lost_and_the_push_goes_on() -> None:
    m = _pool("r0", "r1")
    ticket = _loading(m)
    group_id = m.transfer(ticket).group_id
    m.do(events.RankFailed(group_id, f"t{ticket}", 2, "LOAD_FAILED", "the engine broke"))
    assert m.transfer(ticket).targets == ("r0",)
    assert "the engine broke" in m.state.replicas["r1"].dirty_reason


def test_a_sender_that_fails_ends_the_push() -> None:
    m = _pool("r0", "r1")
    ticket = _loading(m)
    m.do(events.RankFailed(m.transfer(ticket).group_id, f"t{ticket}", 0, "X", "no more"))
    assert m.transfer(ticket).phase is Phase.ABORTED


def test_one_that_cannot_load_is_lost() -> None:
    m = _pool("r0", "r1")
    ticket = _loading(m)
    m.do(events.LoadAnswered(f"t{ticket}", "r0", None))
    m.do(events.LoadAnswered(f"t{ticket}", "r1", GONE))
    assert m.transfer(ticket).targets == ("r0",)
    m.do(events.LoadAnswered(f"t{ticket}", "r1", GONE))  # said twice
    assert m.transfer(ticket).targets == ("r0",)


def test_an_answer_that_comes_too_late_changes_nothing() -> None:
    m = _pool("r0")
    ticket = m.run_to(Phase.COMMITTING, "base")
    m.do(events.LoadAnswered(f"t{ticket}", "r0", GONE))
    assert m.transfer(ticket).phase is Phase.COMMITTING
    m.do(events.LoadAnswered("unknown", "r0", GONE))


def test_other_bytes_at_one_rank_end_the_push() -> None:
    m = _pool("r0")
    ticket = _loading(m)
    m.stage(ticket, 0)
    m.stage(ticket, 1, ContentDigest(WSUM64, b"\2" * 8, DIGEST.size_bytes))
    failure = m.transfer(ticket).failure
    assert failure
    assert failure.reason == "DIGEST_MISMATCH"
    assert "out of service" in failure.message


def test_the_owner_is_asked_for_what_all_have_lost() -> None:
    m = _pool("r0")
    m.base_copies = 0
    m.run_to(Phase.COMMITTED, "base")
    ticket = _loading(m)
    m.do(events.RankGone(m.transfer(ticket).group_id, 0, "its stream broke"))
    m.pass_time(2.0)
    asked = [a for a in m.ever(effects.Announce) if a.kind == "publish_again_wanted"]
    assert [a.subject for a in asked] == ["base@1"]
    assert "is asked to publish it again" in m.standing("r0")[1]


def test_what_came_whole_is_committed_though_the_coordinator_died() -> None:
    """Its new life is told of the transfer; the weights are mixed until its commit."""
    m = _pool("r0")
    m.run_to(Phase.COMMITTED, "base")
    record = m.record(BASE_1)
    dirty = "base@1 is being loaded in place"
    m.do(events.Leave(next(m.ids), "r0", "i1"))
    m.register("r0", loads_in_place=True, dirty_reason=dirty, incarnation="i2")
    staged = {"t-old": record}
    m.beat(
        "r0", "i2", ticket=next(m.ids), retained_base_versions=(), dirty_reason=dirty, staged=staged
    )
    (call,) = m.found(effects.CallCommit)
    assert record is not None
    assert (call.transfer_id, call.version) == (record.transfer_id, BASE_1)


def test_a_commit_that_fails_leaves_it_out_of_service() -> None:
    m = _pool("r0")
    ticket = m.run_to(Phase.COMMITTING, "base")
    dirty = Failure("LOAD_FAILED", "the engine broke", {**LOAD_FAILED.metadata, "dirty": "true"})
    m.answer_commits(ticket, r0=dirty)
    assert m.standing("r0")[0] is ReplicaState.QUARANTINED


def test_a_push_that_is_to_be_checked_does_not_go_where_it_is_loaded_before() -> None:
    m = _pool("r0", staged=("r1",))
    error = m.error(m.begin("base", check_finite=True))
    assert error.reason == "UNSUPPORTED"
    assert "check_finite: replica 'r0' loads a base in place" in error.message
    assert not m.ever(effects.SaveVersion)  # and burns no version
    m.acquire("math")
    assert m.transfer(m.begin("math", check_finite=True)).version == 1  # adapters are staged


def test_a_base_in_no_order_is_not_loaded_in_place() -> None:
    m = Machine()
    m.register("r0", loads_in_place=True)
    m.do(events.ReferenceKnown("f" * 64))
    m.acquire("base")
    error = m.error(m.begin("base", carries_runs=True))
    assert error.reason == "UNSUPPORTED"
    assert "metadata=" in error.message
