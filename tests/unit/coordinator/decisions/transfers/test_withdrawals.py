"""Versions that no replica can switch to: undone at once, later, or never."""

from __future__ import annotations

import dataclasses

import pytest

from tests.unit.coordinator.decisions.machine import (
    DIRTY,
    GONE,
    LOAD_FAILED,
    Machine,
    saved_versions,
)
from weft_rl.contract.names import PolicyVersion, VersionVector
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.replica_state import explain_state
from weft_rl.coordinator.decisions.state.values import Failure, Phase, ReplicaState, VersionState

REFUSALS = [
    LOAD_FAILED,
    Failure("NOT_STAGED", "nothing is staged", {}),
    Failure("INVALID_NAME", "'math' is the name of the base model here", {}),
    Failure("DIGEST_MISMATCH", "other bytes are staged", {}),
    Failure("STAGING_FULL", "no memory", {}),
]


def _committing(
    policy: str = "math", *, former: int = 1, **capabilities: object
) -> tuple[Machine, int, int]:
    m = Machine()
    for name in ("r0", "r1"):
        m.register(name, **capabilities)
    m.do(events.ReferenceKnown("f" * 64))
    m.base_copies = 2
    m.acquire(policy)
    for _ in range(former):
        m.run_to(Phase.COMMITTED, policy)
    ticket = m.run_to(Phase.COMMITTING, policy)
    return m, ticket, m.await_end(ticket)


def _state(m: Machine, version: str) -> VersionState:
    record = m.record(PolicyVersion.parse(version))
    assert record is not None
    return record.state


def _standings(m: Machine) -> list[ReplicaState]:
    return [explain_state(m.state, replica)[0] for replica in m.state.replicas.values()]


@pytest.mark.parametrize("policy", ["math", "base"])
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda failure: failure.reason)
def test_what_every_replica_refuses_has_failed(policy: str, refusal: Failure) -> None:
    m, ticket, waiter = _committing(policy)
    m.answer_commits(ticket, r0=refusal, r1=LOAD_FAILED)
    error = m.error(waiter)
    assert (error.reason, error.metadata["cause"]) == ("LOAD_FAILED", refusal.reason)
    assert (error.metadata["withdrawn"], error.metadata["dirty"]) == ("true", "false")
    assert (
        f"{refusal.message} [{refusal.reason}]; it is withdrawn, {policy}@1 stays" in error.message
    )
    record = saved_versions(m)[-1]
    assert (record.state, str(record.version)) == (VersionState.FAILED, f"{policy}@2")
    assert record.failure is not None
    assert refusal.reason in record.failure.message
    assert m.found(effects.SaveVersion)[-1].durable
    assert m.state.policies[policy].served_version == 1
    assert m.state.policies[policy].versions == (1,)
    assert _standings(m) == [ReplicaState.READY] * 2
    assert not m.ever(effects.SaveRetired)
    # Its number is never used again, and nobody goes back to it.
    assert "every replica refused it" in m.error(m.roll_back(policy, 2)).message
    again = m.run_to(Phase.COMMITTED, policy)
    assert str(m.transfer(again).policy_version) == f"{policy}@3"


def test_the_first_version_of_an_adapter_leaves_nothing_behind() -> None:
    m, ticket, waiter = _committing(former=0)
    m.answer_commits(ticket, r0=REFUSALS[2], r1=REFUSALS[2])
    assert m.error(waiter).metadata["withdrawn"] == "true"
    assert m.state.vector == VersionVector()
    assert _standings(m) == [ReplicaState.READY] * 2


@pytest.mark.parametrize(
    "unsigned",
    [
        GONE,
        Failure("STAGING_FULL", "the answer was too large for gRPC", {}),
        Failure("LOAD_FAILED", "no", {"incarnation": "another process"}),
    ],
)
def test_an_answer_that_the_process_did_not_sign_is_not_definite(unsigned: Failure) -> None:
    m, ticket, waiter = _committing()
    m.answer_commit(ticket, "r0", LOAD_FAILED)
    m.do(events.CommitAnswered(f"t{ticket}", "r1", "i1", None, 0.0, unsigned))
    assert m.error(waiter).metadata["withdrawn"] == "false"
    assert _state(m, "math@2") is VersionState.COMMITTED
    assert m.state.policies["math"].served_version == 2


@pytest.mark.parametrize("policy", ["math", "base"])
@pytest.mark.parametrize("other", [GONE, DIRTY])
def test_one_that_is_silent_or_dirty_is_waited_for(policy: str, other: Failure) -> None:
    m, ticket, _ = _committing(policy)
    m.answer_commits(ticket, r0=LOAD_FAILED, r1=other)
    m.pass_time(2)
    assert _state(m, f"{policy}@2") is VersionState.COMMITTED
    m.answer_discard(ticket, "r0")  # whoever has refused has said so
    assert _state(m, f"{policy}@2") is VersionState.COMMITTED
    m.answer_discard(ticket, "r1")
    assert _state(m, f"{policy}@2") is VersionState.FAILED
    assert m.found(effects.SavePolicy)[-1].policy.served_version == 1
    assert m.state.policies[policy].served_version == 1
    assert m.transfer(ticket).phase is Phase.ABORTED
    assert not m.state.unserved
    assert _standings(m)[0] is ReplicaState.READY
    assert not m.ever(effects.SaveRetired)
    m.pass_time(10)
    assert not m.state.republish or policy == "base"


def test_one_that_serves_it_after_all_ends_the_wait() -> None:
    m, ticket, _ = _committing()
    m.answer_commits(ticket, r0=LOAD_FAILED, r1=GONE)
    replica = m.state.replicas["r1"]
    vector = replica.vector.with_adapter(PolicyVersion("math", 2))
    m.do(events.DiscardAnswered("r1", f"t{ticket}", "i1", vector))
    assert _state(m, "math@2") is VersionState.COMMITTED
    m.now += 2
    m.beat("r1", version_vector=vector)
    assert not m.state.unserved
    m.answer_discard(ticket, "r1")
    assert _state(m, "math@2") is VersionState.COMMITTED
    assert _standings(m) == [ReplicaState.PENDING_WEIGHTS, ReplicaState.READY]


def test_a_late_refusal_counts_and_one_of_a_former_process_does_not() -> None:
    m, ticket, _ = _committing()
    m.answer_commits(ticket, r0=LOAD_FAILED, r1=GONE)
    stranger = Failure("LOAD_FAILED", "no", {"incarnation": "i0"})
    m.do(events.CommitAnswered(f"t{ticket}", "r1", "i0", None, 0.0, stranger))
    assert _state(m, "math@2") is VersionState.COMMITTED
    m.answer_commit(ticket, "r1", LOAD_FAILED)
    assert _state(m, "math@2") is VersionState.FAILED


def test_one_that_was_restarted_reports_as_it_registers() -> None:
    m, ticket, _ = _committing()
    m.answer_commit(ticket, "r0", LOAD_FAILED)
    m.do(events.Leave(0, "r1", "i1"))
    m.pass_time(1)
    assert _state(m, "math@2") is VersionState.COMMITTED
    m.register("r1", "i2")
    assert _state(m, "math@2") is VersionState.FAILED
    assert m.state.policies["math"].served_version == 1


def test_one_that_was_restarted_and_has_spilled_it_is_not_undone() -> None:
    m, ticket, _ = _committing()
    m.answer_commit(ticket, "r0", LOAD_FAILED)
    m.do(events.Leave(0, "r1", "i1"))
    m.register("r1", "i2", spilled=["math@2", "math@1"])
    m.pass_time(1)
    assert _state(m, "math@2") is VersionState.COMMITTED
    assert m.state.unserved


def test_a_base_that_was_loaded_in_place_does_not_go_back() -> None:
    m = Machine()
    m.register("r0", loads_in_place=True)
    m.do(events.ReferenceKnown("f" * 64))
    m.acquire("base")
    m.run_to(Phase.COMMITTED, "base")
    ticket = m.run_to(Phase.STAGING, "base")
    transfer = m.transfer(ticket)
    m.do(events.RankLoadDue(transfer.group_id, transfer.transfer_id, 1))
    m.stage_all(ticket)
    waiter = m.await_end(ticket)
    m.answer_commits(ticket, r0=DIRTY)
    assert "what it replaced is gone" in m.error(waiter).message
    m.answer_discard(ticket, "r0")
    assert _state(m, "base@2") is VersionState.COMMITTED
    m.pass_time(6)
    assert m.state.republish["base"].is_asked


def test_a_base_whose_former_version_nobody_has_does_not_go_back() -> None:
    m, ticket, _ = _committing("base", former=0)
    m.answer_commits(ticket, r0=DIRTY, r1=DIRTY)
    m.answer_discard(ticket, "r0")
    m.do(events.CommitAnswered("", "r0", "i1", None, 0.0, None))
    m.pass_time(1)
    m.answer_discard(ticket, "r1")
    assert _state(m, "base@1") is VersionState.COMMITTED
    m.pass_time(6)
    assert m.state.republish["base"].is_asked


@pytest.mark.parametrize("policy", ["math", "base"])
def test_a_later_version_that_is_served_ends_the_wait(policy: str) -> None:
    m, ticket, _ = _committing(policy)
    m.answer_commits(ticket, r0=LOAD_FAILED, r1=GONE)
    m.run_to(Phase.COMMITTED, policy)
    m.answer_discard(ticket, "r1")
    m.pass_time(1)
    assert not m.state.unserved
    assert m.state.policies[policy].served_version == 3
    if policy == "base":
        assert [str(s.version) for s in m.ever(effects.SaveRetired)] == ["base@2", "base@1"]
    else:
        assert _state(m, "math@2") is VersionState.FAILED
        assert m.state.policies["math"].versions == (1, 3)


@pytest.mark.parametrize("policy", ["math", "base"])
def test_two_in_a_row_go_back_to_what_was_served_last(policy: str) -> None:
    m, first, _ = _committing(policy)
    m.answer_commits(first, r0=LOAD_FAILED, r1=GONE)
    second = m.run_to(Phase.COMMITTING, policy)
    m.answer_discard(first, "r1")
    assert _state(m, f"{policy}@2") is VersionState.COMMITTED  # it may be gone back to
    m.answer_commits(second, r0=LOAD_FAILED, r1=GONE)
    m.answer_discard(second, "r1")
    m.do(events.Tick())
    assert _state(m, f"{policy}@2") is VersionState.FAILED
    assert _state(m, f"{policy}@3") is VersionState.FAILED
    assert m.state.policies[policy].served_version == 1
    assert m.state.policies[policy].versions == (1,)
    assert _standings(m) == [ReplicaState.READY] * 2


def test_what_may_be_gone_back_to_is_kept_meanwhile() -> None:
    m = Machine(retain_versions=1).pool("r0")
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    ticket = m.run_to(Phase.COMMITTING)
    m.answer_commits(ticket, r0=GONE)
    m.pass_time(5)
    assert not m.ever(effects.CallRetire)
    m.do(events.Retire(77, PolicyVersion("math", 1), m.record(PolicyVersion("math", 1))))
    assert m.error(77).reason == "TRANSFER_UNDER_WAY"
    m.do(events.SetRetention(78, "math", 1))
    assert m.state.policies["math"].versions == (1, 2)
    m.answer_discard(ticket, "r0")
    assert m.state.policies["math"].versions == (1,)


def test_they_are_bounded() -> None:
    m = Machine().pool("r0")
    for number in range(70):
        m.acquire(f"p{number}")
        m.answer_commits(m.run_to(Phase.COMMITTING, f"p{number}"), r0=GONE)
        m.beat("r0", version_vector=VersionVector())
    assert len(m.state.unserved) == 64


def test_what_failed_may_be_given_up_and_its_staged_bytes_are_dropped() -> None:
    m, ticket, _ = _committing()
    m.answer_commits(ticket, r0=LOAD_FAILED, r1=LOAD_FAILED)
    m.do(events.AbortTransfer(88, f"t{ticket}", "math", m.tokens["math"], "late"))
    assert isinstance(m.answer(88), effects.EmptyAnswer)
    m.state = dataclasses.replace(m.state, history={})
    failed = {f"t{ticket}": m.record(PolicyVersion("math", 2))}
    vector = m.state.replicas["r0"].vector
    m.beat("r0", version_vector=vector, staged=failed)
    assert [call.transfer_id for call in m.found(effects.CallDiscard)] == [f"t{ticket}"]
    assert not m.state.transfers


def test_what_was_retired_by_order_does_not_fail_later() -> None:
    m, ticket, _ = _committing()
    m.answer_commits(ticket, r0=LOAD_FAILED, r1=GONE)
    m.run_to(Phase.COMMITTED)
    m.do(events.Retire(77, PolicyVersion("math", 2), m.record(PolicyVersion("math", 2))))
    m.answer(77)
    m.answer_discard(ticket, "r1")
    assert not m.state.unserved
    assert _state(m, "math@2") is VersionState.COMMITTED  # and SaveRetired since
    assert effects.SaveRetired(PolicyVersion("math", 2), durable=True) in m.all


def test_a_base_that_is_gone_back_to_is_committed_though_a_rollback_to_it_had_failed() -> None:
    """The rollback that failed has retired it, before what it was from was withdrawn."""
    m, ticket, _ = _committing("base")
    m.answer_commits(ticket, r0=LOAD_FAILED, r1=DIRTY)
    back = m.roll_back("base", 1)
    retired = Failure("NOT_RETAINED", "no copy of base@1 is held here", {})
    m.answer_commits(back, r0=retired, r1=retired)
    assert m.state.policies["base"].served_version == 2
    for name in ("r0", "r1"):
        m.answer_discard(ticket, name)
    assert _state(m, "base@2") is VersionState.FAILED
    assert m.state.policies["base"].served_version == 1
    saved = [s for s in m.all if isinstance(s, effects.SaveRetired | effects.SaveCommitted)]
    assert saved[-1] == effects.SaveCommitted(PolicyVersion("base", 1))
