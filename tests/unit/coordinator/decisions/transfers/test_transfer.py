"""From a formed group to the end, and every way it can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.unit.coordinator.decisions.machine import (
    DIGEST,
    DIRTY,
    GONE,
    LOAD_FAILED,
    Machine,
    saved_versions,
)
from weft_rl.contract.names import PolicyVersion, VersionVector
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.effects import SendAbort
from weft_rl.coordinator.decisions.state.replica_state import explain_state
from weft_rl.coordinator.decisions.state.values import (
    ContentDigest,
    Phase,
    ReplicaState,
    VersionState,
)


def _pushing(phase: Phase, *replica_ids: str, **settings: float) -> tuple[Machine, int, int]:
    """A machine, a push that has come so far, and somebody who awaits it."""
    m = Machine(**settings).pool(*(replica_ids or ("r0", "r1")))
    m.acquire("math")
    ticket = m.run_to(phase)
    return m, ticket, m.await_end(ticket)


def _is_aborted(m: Machine, ticket: int) -> None:
    """Nothing changed: durable in the end, told to all, dropped everywhere."""
    transfer = m.transfer(ticket)
    assert transfer.phase is Phase.ABORTED
    assert saved_versions(m)[-1].state is VersionState.ABORTED
    assert m.ever(SendAbort)[-1].transfer_id == f"t{ticket}"
    assert m.ever(effects.DropGroup)[-1].group_id == transfer.group_id
    assert not m.state.groups
    assert not m.state.vector.adapters
    assert not m.ever(effects.CallCommit)


def test_the_order_of_a_push() -> None:
    m = Machine().pool("r0", "r1")
    m.acquire("math")
    ticket = m.begin()
    assert m.answered(ticket)  # so that the sender can join
    group_id = m.transfer(ticket).group_id
    m.do(events.RankAttends(group_id, 1))
    m.do(events.RankAttends(group_id, 2))
    assert not m.ever(effects.SendPrepare)
    m.do(events.RankAttends(group_id, 0))
    assert len(m.found(effects.SendPrepare)) == 1
    m.do(events.RankPrepared(group_id, f"t{ticket}", 1))
    assert not m.ever(effects.SendStart)
    m.do(events.RankPrepared(group_id, f"t{ticket}", 2))
    assert len(m.found(effects.SendStart)) == 1
    m.stage(ticket, 0)
    m.stage(ticket, 1)
    assert not m.ever(effects.CallCommit)
    m.stage(ticket, 2)
    kinds = [type(e) for e in m.last]
    assert kinds.index(effects.SaveVersion) < kinds.index(effects.CallCommit)
    assert [s.durable for s in m.found(effects.SaveVersion)] == [True]
    waiter = m.await_end(ticket)
    m.answer_commit(ticket, "r0")
    assert not m.answered(waiter)
    m.answer_commit(ticket, "r1")
    assert m.answer(waiter) == m.transfer(ticket)
    assert m.transfer(ticket).pause_seconds == 0.5
    assert m.state.vector.adapters["math"].alias == 1


def test_staged_twice_counts_once() -> None:
    m, ticket, _ = _pushing(Phase.STAGING)
    for _ in range(3):
        m.stage(ticket, 1)
    assert m.transfer(ticket).phase is Phase.STAGING


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_differing_digest_aborts(rank: int) -> None:
    m, ticket, waiter = _pushing(Phase.STAGING)
    for other in {0, 1, 2} - {rank}:
        m.stage(ticket, other)
    m.stage(ticket, rank, replace(DIGEST, value=b"\2" * 8))
    assert m.error(waiter).reason == "DIGEST_MISMATCH"
    _is_aborted(m, ticket)


def test_a_wrong_size_aborts() -> None:
    m, ticket, waiter = _pushing(Phase.STAGING)
    m.stage(ticket, 1, replace(DIGEST, size_bytes=1))
    assert m.error(waiter).reason == "DIGEST_MISMATCH"
    assert m.error(waiter).metadata["member"] == "r0"


@pytest.mark.parametrize("phase", [Phase.FORMING, Phase.STAGING])
@pytest.mark.parametrize(("rank", "member"), [(0, "t1"), (2, "r1")])
def test_a_broken_stream_names_its_member(phase: Phase, rank: int, member: str) -> None:
    m, ticket, waiter = _pushing(phase)
    m.do(events.RankGone(m.transfer(ticket).group_id, rank, "its stream broke"))
    error = m.error(waiter)
    assert (error.reason, error.metadata["member"]) == ("PEER_GONE", member)
    _is_aborted(m, ticket)
    assert {c.replica_id for c in m.ever(effects.CallDiscard)} == {"r0", "r1"}


def test_a_broken_stream_after_the_commit_point_only_ends_the_group() -> None:
    m, ticket, waiter = _pushing(Phase.COMMITTING)
    m.do(events.RankGone(m.transfer(ticket).group_id, 0, "its stream broke"))
    m.answer_commits(ticket)
    assert m.answered(waiter)
    assert m.transfer(ticket).phase is Phase.COMMITTED
    assert not m.state.groups


def test_the_one_that_died_is_named_not_the_one_that_noticed() -> None:
    m, ticket, waiter = _pushing(Phase.STAGING)
    group_id = m.transfer(ticket).group_id
    m.do(events.RankFailed(group_id, f"t{ticket}", 0, "PEER_GONE", "connection reset"))
    m.do(events.RankGone(group_id, 0, "it closed its stream"))
    m.do(events.RankFailed(group_id, f"t{ticket}", 1, "PEER_GONE", "connection reset"))
    assert not m.answered(waiter)
    m.do(events.RankGone(group_id, 2, "its stream broke"))
    assert m.error(waiter).metadata["member"] == "r1"


def test_an_accusation_alone_ends_it_soon() -> None:
    m, ticket, waiter = _pushing(Phase.STAGING)
    group_id = m.transfer(ticket).group_id
    m.do(events.RankFailed(group_id, f"t{ticket}", 1, "PEER_GONE", "connection reset"))
    m.pass_time(1)
    assert m.error(waiter).reason == "PEER_GONE"


def test_a_rank_tells_its_own_reason() -> None:
    m, ticket, waiter = _pushing(Phase.STAGING)
    m.do(events.RankFailed(m.transfer(ticket).group_id, f"t{ticket}", 1, "STAGING_FULL", "no room"))
    error = m.error(waiter)
    assert (error.reason, error.metadata["member"]) == ("STAGING_FULL", "r0")
    _is_aborted(m, ticket)


@pytest.mark.parametrize("phase", [Phase.FORMING, Phase.STAGING])
def test_a_lost_replica_aborts(phase: Phase) -> None:
    m, _, waiter = _pushing(phase)
    for _ in range(30):
        m.now += 0.25
        m.beat("r0")
        m.do(events.RenewLease(0, "math", 1))
        m.do(events.Tick())
    assert m.error(waiter).metadata["member"] == "r1"


def test_a_replica_that_cannot_be_told_to_join_is_gone() -> None:
    m, ticket, waiter = _pushing(Phase.FORMING)
    m.do(events.JoinAnswered(f"t{ticket}", "r1", GONE))
    assert (m.error(waiter).reason, m.error(waiter).metadata["member"]) == ("PEER_GONE", "r1")


@pytest.mark.parametrize(
    ("phase", "prepared", "what"),
    [
        (Phase.FORMING, False, "t1, r0, r1 did not join the group"),
        (Phase.FORMING, True, "r0, r1 did not get ready"),
        (Phase.STAGING, True, "t1, r0, r1 did not finish"),
    ],
)
def test_a_deadline_names_who_is_missing(phase: Phase, prepared: bool, what: str) -> None:
    m, ticket, waiter = _pushing(phase, stall_seconds=1e9)
    if prepared and phase is Phase.FORMING:
        m.attend_all(ticket)
    m.pass_time(61)
    error = m.error(waiter)
    assert error.reason == "DEADLINE"
    assert what in error.message
    _is_aborted(m, ticket)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (lambda i, t: events.AbortTransfer(i, t, "math", 1, "no"), "given up by its trainer: no"),
        (lambda i, t: events.CancelTransfer(i, t, "no"), "cancelled by an operator: no"),
        (events.CancelTransfer, "cancelled by an operator: no reason given"),
    ],
)
@pytest.mark.parametrize("phase", [Phase.FORMING, Phase.STAGING])
def test_an_abort_is_idempotent_until_the_commit(
    order: Callable[[int, str], events.Call], message: str, phase: Phase
) -> None:
    m, ticket, waiter = _pushing(phase)
    for i in (60, 61):
        m.do(order(i, f"t{ticket}"))
        assert isinstance(m.answer(i), effects.EmptyAnswer)
    assert (m.error(waiter).reason, m.error(waiter).message) == ("TRANSFER_ABORTED", message)
    done = m.run_to(Phase.COMMITTING)
    m.do(order(62, f"t{done}"))
    assert m.error(62).reason == "ALREADY_COMMITTED"
    m.do(order(63, "t9"))
    assert m.error(63).reason == "TRANSFER_UNKNOWN"


def test_a_token_of_another_policy_gives_up_nothing() -> None:
    m, ticket, _ = _pushing(Phase.STAGING)
    m.acquire("code", "t2")
    assert m.tokens["code"] == m.tokens["math"]  # every policy counts its own
    m.do(events.AbortTransfer(60, f"t{ticket}", "code", m.tokens["code"], "mine"))
    assert m.error(60).reason == "LEASE_FENCED"
    assert m.transfer(ticket).phase is Phase.STAGING


@pytest.mark.parametrize(
    "digest",
    [
        replace(DIGEST, algorithm=1),
        replace(DIGEST, algorithm=0),
        replace(DIGEST, size_bytes=DIGEST.size_bytes + 1),
    ],
)
def test_a_digest_that_cannot_be_of_the_layout_is_no_agreement(digest: ContentDigest) -> None:
    m, ticket, waiter = _pushing(Phase.STAGING)
    for rank in range(m.state.groups[m.transfer(ticket).group_id].size):
        m.stage(ticket, rank, digest)
    assert m.error(waiter).reason == "DIGEST_MISMATCH"
    _is_aborted(m, ticket)


def test_unknown_transfers() -> None:
    m = Machine()
    m.do(events.AwaitTransfer(1, "nope"))
    m.do(events.AbortTransfer(2, "nope", "math", 1, ""))
    assert m.error(1).reason == m.error(2).reason == "TRANSFER_UNKNOWN"


def test_late_words_of_an_ended_transfer_are_ignored() -> None:
    m, ticket, _ = _pushing(Phase.STAGING)
    group_id = m.transfer(ticket).group_id
    m.do(events.AbortTransfer(60, f"t{ticket}", "math", 1, ""))
    before = m.state
    for event in (
        events.RankStaged(group_id, f"t{ticket}", 1, DIGEST),
        events.RankPrepared(group_id, f"t{ticket}", 1),
        events.RankFailed(group_id, f"t{ticket}", 1, "INTERNAL", ""),
        events.RankGone(group_id, 1, ""),
        events.RankAttends(group_id, 1),
        events.JoinAnswered(f"t{ticket}", "r0", GONE),
    ):
        assert m.do(event) == []
        assert m.state == before


def test_one_replica_that_does_not_switch_leaves_service() -> None:
    m, ticket, waiter = _pushing(Phase.COMMITTING)
    m.answer_commits(ticket, r1=GONE)
    assert m.answered(waiter)
    assert m.transfer(ticket).phase is Phase.COMMITTED
    assert m.standing("r0")[0] is ReplicaState.READY
    assert m.standing("r1")[0] is ReplicaState.PENDING_WEIGHTS


def test_a_replica_lost_after_the_commit_point_is_not_waited_for() -> None:
    m, ticket, waiter = _pushing(Phase.COMMITTING)
    m.answer_commit(ticket, "r0")
    m.do(events.Leave(60, "r1", "i1"))
    assert m.answered(waiter)
    m.answer_commit(ticket, "r1")  # late: changes nothing
    assert m.transfer(ticket).served_by == {"r0"}


def test_when_nobody_can_load_it_the_commit_is_undone() -> None:
    m = Machine().pool("r0", "r1")
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    ticket = m.run_to(Phase.COMMITTING)
    waiter = m.await_end(ticket)
    m.answer_commits(ticket, r0=LOAD_FAILED, r1=LOAD_FAILED)
    error = m.error(waiter)
    assert (error.reason, error.metadata["dirty"]) == ("LOAD_FAILED", "false")
    assert m.transfer(ticket).phase is Phase.ABORTED
    assert saved_versions(m)[-1].state is VersionState.FAILED
    assert m.found(effects.SaveVersion)[-1].durable
    assert m.state.vector.adapters["math"].alias == 1
    assert m.state.policies["math"].last_version == 2
    for replica in m.state.replicas.values():
        assert explain_state(m.state, replica)[0] is ReplicaState.READY


@pytest.mark.parametrize("other", [GONE, DIRTY])
def test_when_somebody_may_hold_it_the_commit_stands(other: object) -> None:
    m, ticket, waiter = _pushing(Phase.COMMITTING)
    m.answer_commits(ticket, r0=LOAD_FAILED, r1=other)  # type: ignore[arg-type]
    assert m.error(waiter).reason == "LOAD_FAILED"
    assert m.transfer(ticket).phase is Phase.COMMITTED
    assert m.state.vector.adapters["math"].alias == 1
    assert m.standing("r0")[0] is ReplicaState.PENDING_WEIGHTS


def test_awaiting_an_ended_transfer_answers_at_once() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    done = m.run_to(Phase.COMMITTED)
    assert m.answer(m.await_end(done)) == m.transfer(done)


def test_history_is_bounded() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    group_id = ""
    for _ in range(105):
        group_id = m.transfer(m.run_to(Phase.COMMITTED, group_id=group_id)).group_id
    assert len(m.state.history) == 100
    assert not m.state.transfers


def test_the_longest_pause_of_its_replicas_is_that_of_the_push() -> None:
    m = Machine().pool("r0", "r1")
    m.acquire("math")
    ticket = m.run_to(Phase.COMMITTING)
    vector = VersionVector().with_adapter(PolicyVersion("math", 1), 1)
    for name, seconds in (("r0", 0.7), ("r1", 0.2)):
        m.do(events.CommitAnswered(f"t{ticket}", name, "i1", vector, seconds, None, (), False))
    assert m.transfer(ticket).pause_seconds == 0.7


def test_the_deadline_of_a_push_is_watched_behind_one_that_waits() -> None:
    m = Machine().pool("r0")
    m.acquire("code")
    m.begin("code", min_replicas=2)  # waits for a second replica
    m.acquire("math")
    ticket = m.begin(timeout=5)
    m.pass_time(6)
    failure = m.transfer(ticket).failure
    assert failure is not None
    assert failure.reason == "DEADLINE"


def test_the_ranks_of_a_member_are_those_of_its_receivers() -> None:
    m = Machine()
    for name, num_receivers in (("r0", 2), ("r1", 3)):
        m.register(name, num_receivers=num_receivers)
    m.do(events.ReferenceKnown("f" * 64))
    m.acquire("math")
    ticket = m.begin()
    m.pass_time(0.25)
    group = m.state.groups[m.transfer(ticket).group_id]
    firsts = [member.first_rank for member in group.members]
    assert [list(group.ranks_from(first)) for first in firsts] == [[1, 2], [3, 4, 5]]


def test_who_asks_late_hears_how_a_push_failed() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    ticket = m.begin(timeout=5)
    m.pass_time(6)
    assert m.error(m.await_end(ticket)).reason == "DEADLINE"
    m.do(events.AwaitTransfer(99, "nobody's"))
    assert m.error(99).reason == "TRANSFER_UNKNOWN"
