"""Who is in the pool, who is ready, who is lost."""

from __future__ import annotations

import dataclasses

import pytest

from tests.unit.coordinator.decisions.machine import DIRTY, LOAD_FAILED, Machine
from weft_rl.contract.names import AdapterVersions, PolicyVersion, VersionVector
from weft_rl.contract.replica_report import ReplicaReport
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.replica_state import (
    eligible_targets,
    shared_backends,
)
from weft_rl.coordinator.decisions.state.values import Phase, ReplicaState


def test_first_replica_fixes_the_base_durably() -> None:
    m = Machine()
    answer = m.answer(m.register("r0"))
    assert answer.reference_wanted
    assert m.found(effects.SavePool) == [effects.SavePool("f" * 64, "Tiny")]
    error = m.error(m.register("r1", base_fingerprint="0" * 64))
    assert error.reason == "BASE_MISMATCH"
    assert set(error.metadata) == {"pool_fingerprint", "replica_fingerprint"}


def test_reference_is_wanted_once() -> None:
    m = Machine().pool("r0")
    answer = m.answer(m.register("r1"))
    assert not answer.reference_wanted


def test_backend_in_common() -> None:
    m = Machine().pool("r0")
    assert m.error(m.register("r1", backends=("nccl",))).reason == "BACKEND_MISMATCH"
    assert m.error(m.register("r2", backends=())).reason == "BACKEND_MISMATCH"


def test_a_pool_that_moves_its_weights_over_nccl_takes_no_replica_without() -> None:
    m = Machine()
    m.register("r0", backends=("nccl", "gloo"))
    error = m.error(m.register("r1", backends=("gloo",)))
    assert error.reason == "BACKEND_MISMATCH"
    assert "move over nccl" in error.message
    assert "--backend stream" in error.message
    assert isinstance(m.answer(m.register("r2", backends=("nccl", "gloo"))), effects.RegisterAnswer)


def test_a_pool_over_gloo_takes_a_replica_that_has_more() -> None:
    m = Machine().pool("r0")
    assert isinstance(m.answer(m.register("r1", backends=("nccl", "gloo"))), effects.RegisterAnswer)
    assert shared_backends(eligible_targets(m.state)) == ["gloo"]


def test_a_replica_elsewhere_is_not_refused_for_that() -> None:
    m = Machine()
    m.register("r0", backends=("one-sided", "gloo"))
    assert isinstance(m.answer(m.register("r1", backends=("gloo",))), effects.RegisterAnswer)
    assert shared_backends(eligible_targets(m.state)) == ["gloo"]
    alone = Machine()
    alone.register("r0", backends=("one-sided",))
    assert alone.error(alone.register("r1", backends=("gloo",))).reason == "BACKEND_MISMATCH"


def test_live_name_is_not_taken_over_until_it_is_silent() -> None:
    m = Machine().pool("r0")
    assert m.error(m.register("r0", "i2")).reason == "REQUEST_CONFLICT"
    m.now += 4.0
    m.answer(m.register("r0", "i2"))
    assert m.state.replicas["r0"].incarnation == "i2"


def test_same_process_registers_again() -> None:
    m = Machine().pool("r0")
    m.answer(m.register("r0"))


@pytest.mark.parametrize("name", ["", "a/b", "x" * 64])
def test_name(name: str) -> None:
    m = Machine()
    assert m.error(m.register(name)).reason == "INVALID_NAME"


def test_silence_loses_a_replica_and_it_must_register_again() -> None:
    m = Machine().pool("r0")
    m.pass_time(7, beats=False)
    assert m.standing("r0")[0] is ReplicaState.LOST
    m.beat("r0", ticket=9, version_vector=VersionVector())
    assert m.error(9).reason == "REPLICA_UNKNOWN"
    m.register("r0", "i2")
    assert m.standing("r0")[0] is ReplicaState.READY


def test_unknown_replica_or_other_process_cannot_beat() -> None:
    m = Machine().pool("r0")
    for i, (name, incarnation) in enumerate([("r9", "i1"), ("r0", "i9")]):
        m.beat(name, incarnation, ticket=90 + i)
        assert m.error(90 + i).reason == "REPLICA_UNKNOWN"


def test_lost_replica_is_forgotten_in_the_end() -> None:
    m = Machine(forget_after_seconds=20).pool("r0")
    m.pass_time(21, beats=False)
    assert not m.state.replicas


def test_readiness_is_the_version_vector() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    m.acquire("base")
    m.run_to(Phase.COMMITTED)
    m.run_to(Phase.COMMITTED, "base")
    assert m.standing("r0") == (ReplicaState.READY, "")
    m.register("r1")
    assert m.standing("r1") == (ReplicaState.PENDING_WEIGHTS, "lacks base@1, math@1")
    m.beat("r1", ticket=91, version_vector=VersionVector())
    lacking = (PolicyVersion("base", 1), PolicyVersion("math", 1))
    assert m.answer(91) == effects.HeartbeatAnswer(
        ready=False, coordinator_generation=1, lacking=lacking, epoch=2
    )
    vector = VersionVector(1, {"math": AdapterVersions((1,), 1)})
    assert m.beat("r1", version_vector=vector) == effects.HeartbeatAnswer(
        ready=True, coordinator_generation=1, epoch=2
    )
    assert [a.subject for a in m.found(effects.Announce) if a.kind == "replica_ready"] == ["r1"]


def test_no_flapping_between_the_commit_point_and_the_switch() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    ticket = m.run_to(Phase.COMMITTING)
    assert m.standing("r0")[0] is ReplicaState.READY
    m.answer_commits(ticket)
    pending = [a for a in m.ever(effects.Announce) if a.kind == "replica_pending_weights"]
    assert not pending


@pytest.mark.parametrize("policy", ["base", "math"])
def test_one_that_did_not_serve_the_version_before_is_not_ready_until_its_switch(
    policy: str,
) -> None:
    """A late joiner takes part in a push: a request that came to it before would find nothing."""
    m = Machine().pool("r0")
    m.acquire(policy)
    m.run_to(Phase.COMMITTED, policy)
    m.register("r1")
    ticket = m.run_to(Phase.COMMITTING, policy)
    assert "r1" in m.transfer(ticket).switching
    why = f"lacks {policy}@2, which it switches to now"
    assert m.standing("r0") == (ReplicaState.READY, "")
    assert m.standing("r1") == (ReplicaState.PENDING_WEIGHTS, why)
    m.pass_time(1.0)
    assert m.standing("r1") == (ReplicaState.PENDING_WEIGHTS, why)
    m.answer_commits(ticket)
    assert m.standing("r1") == (ReplicaState.READY, "")


def test_aliases_are_answered_until_the_switch_and_not_after_one_that_failed() -> None:
    m = Machine().pool("r0", "r1")
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    ticket = m.run_to(Phase.COMMITTING)
    m.now += 2.0
    before = m.state.replicas["r1"].vector
    assert m.beat("r1", version_vector=before) == effects.HeartbeatAnswer(
        ready=True, in_transfer=True, coordinator_generation=1, epoch=2
    )
    m.answer_commits(ticket, r1=LOAD_FAILED)
    m.now += 2.0
    answer = m.beat("r1", version_vector=before)
    assert answer.lacking == (PolicyVersion("math", 2),)


def test_heartbeat_from_before_the_switch_changes_nothing() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    m.now += 0.1
    assert m.beat("r0", version_vector=VersionVector()) == effects.HeartbeatAnswer(
        ready=True, coordinator_generation=1, epoch=1
    )
    m.now += 2.0
    m.beat("r0", ticket=94, version_vector=VersionVector())
    lacking = (PolicyVersion("math", 1),)
    assert m.answer(94) == effects.HeartbeatAnswer(
        ready=False, coordinator_generation=1, lacking=lacking, epoch=1
    )


def _with_dirty() -> Machine:
    m = Machine().pool("r0", "r1")
    m.acquire("base")
    m.acquire("math")
    ticket = m.run_to(Phase.COMMITTING, "base")
    m.answer_commits(ticket, r1=DIRTY)
    assert m.transfer(ticket).phase is Phase.COMMITTED
    assert m.standing("r1") == (ReplicaState.QUARANTINED, "the engine broke")
    return m


def test_one_that_says_it_is_dirty_is_not_told_ready_even_right_after_a_switch() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    vector = m.state.replicas["r0"].vector
    assert m.beat(
        "r0", version_vector=vector, dirty_reason="the engine broke"
    ) == effects.HeartbeatAnswer(ready=False, coordinator_generation=1, epoch=1)


def test_dirty_replica_is_quarantined_until_it_is_another_process() -> None:
    m = _with_dirty()
    m.register("r1")  # the same process
    assert m.standing("r1")[0] is ReplicaState.QUARANTINED
    m.now += 5
    m.register("r1", "i2")
    assert m.standing("r1")[0] is ReplicaState.PENDING_WEIGHTS


def test_only_a_base_is_pushed_to_a_dirty_replica_and_repairs_it() -> None:
    m = _with_dirty()
    assert m.transfer(m.run_to(Phase.COMMITTED)).targets == ("r0",)
    ticket = m.run_to(Phase.COMMITTED, "base")
    assert m.transfer(ticket).targets == ("r0", "r1")
    assert not m.state.replicas["r1"].dirty_reason
    assert m.standing("r1") == (ReplicaState.PENDING_WEIGHTS, "lacks math@1")


def test_what_a_dirty_replica_could_not_load_it_need_not_keep() -> None:
    m = _with_dirty()
    assert [c.replica_id for c in m.ever(effects.CallDiscard)] == ["r1"]


def test_agent_and_coordinator_agree_on_what_is_dirty() -> None:
    m = _with_dirty()
    beat = events.Heartbeat(
        0, "r1", "i1", ReplicaReport(version_vector=m.state.replicas["r1"].vector)
    )
    m.do(beat)  # on its way since before the load failed
    assert m.standing("r1")[0] is ReplicaState.QUARANTINED
    m.now += 3
    m.do(beat)
    assert m.standing("r1")[0] is ReplicaState.PENDING_WEIGHTS
    m.register("r2", dirty_reason="broken since the last coordinator")
    assert m.standing("r2")[0] is ReplicaState.QUARANTINED


def test_reason_of_a_failed_switch_is_told_until_the_next_one() -> None:
    m = Machine().pool("r0", "r1")
    m.acquire("math")
    ticket = m.run_to(Phase.COMMITTING)
    m.answer_commits(ticket, r1=LOAD_FAILED)
    assert m.standing("r1") == (
        ReplicaState.PENDING_WEIGHTS,
        "lacks math@1 (the engine said no)",
    )
    m.run_to(Phase.COMMITTED)
    assert m.standing("r1") == (ReplicaState.READY, "")


def test_leaving_twice_succeeds_and_a_stranger_cannot_make_it_leave() -> None:
    m = Machine().pool("r0")
    m.do(events.Leave(95, "r0", "i9"))
    assert "r0" in m.state.replicas
    m.do(events.Leave(96, "r0", "i1"))
    m.do(events.Leave(97, "r0", "i1"))
    assert "r0" not in m.state.replicas
    assert all(isinstance(m.answer(t), effects.EmptyAnswer) for t in (95, 96, 97))


def test_describe_target_waits_for_a_replica_and_its_reference() -> None:
    m = Machine()
    m.do(events.DescribeTarget(50, m.now + 10))
    m.do(events.DescribeTarget(51, m.now + 1))
    m.register("r0")
    assert not m.answered(50)
    m.pass_time(1.5)
    assert m.error(51).reason == "POOL_EMPTY"
    m.do(events.ReferenceKnown("f" * 64))
    assert isinstance(m.answer(50), effects.EmptyAnswer)
    assert not m.state.target_tickets


def test_a_reference_is_asked_for_where_a_replica_has_another_one() -> None:
    """All have restarted with other element types: the coordinator has not."""
    m = Machine()
    m.register("r0", reference_digest="old")
    m.do(events.ReferenceKnown("f" * 64, reference_digest="old"))
    assert m.state.references_known == {"old"}
    m.do(events.Leave(96, "r0", "i1"))
    answer = m.answer(m.register("r0", incarnation="i2", reference_digest="new"))
    assert answer.reference_wanted
    m.do(events.DescribeTarget(50, m.now + 10))
    assert not m.answered(50)
    m.do(events.ReferenceKnown("f" * 64, reference_digest="new"))
    assert isinstance(m.answer(50), effects.EmptyAnswer)
    assert m.state.references_known == {"new"}
    answer = m.answer(m.register("r1", reference_digest="new"))
    assert not answer.reference_wanted


def test_while_unlike_replicas_are_there_both_are_known() -> None:
    m = Machine()
    for name, digest in (("r0", "old"), ("r1", "new")):
        m.register(name, reference_digest=digest)
        m.do(events.ReferenceKnown("f" * 64, reference_digest=digest))
    assert m.state.references_known == {"old", "new"}


def test_a_replica_that_does_not_describe_its_base_is_waited_for_for_a_while() -> None:
    m = Machine().pool("r0")
    m.register("r1", reference_digest="new")
    m.do(events.DescribeTarget(50, m.now + 600, m.now + 3))
    m.pass_time(2.5)
    assert not m.answered(50)
    m.pass_time(1.0)
    assert isinstance(m.answer(50), effects.EmptyAnswer)


def test_drafts_of_replicas_that_are_gone_are_asked_for_again() -> None:
    m = Machine()
    m.register("r0", reference_digest="a", draft_fingerprint="d" * 64)
    m.do(events.ReferenceKnown("f" * 64, "d" * 64, "a"))
    m.do(events.Leave(96, "r0", "i1"))
    m.register("r1", reference_digest="b")
    m.do(events.ReferenceKnown("f" * 64, "", "b"))
    assert (m.state.references_known, m.state.drafts_known) == ({"b"}, {""})


def test_a_push_that_waits_for_a_reference_names_the_replica() -> None:
    m = Machine().pool("r0")
    m.register("r1", reference_digest="new")
    m.acquire("base")
    ticket = m.begin("base", answer_by=m.now + 2)
    m.pass_time(3.0)
    error = m.error(ticket)
    assert error.reason == "POOL_EMPTY"
    assert error.message.startswith("r1 has not described its base model; the push")


def test_the_tensors_of_a_draft_are_asked_for_too() -> None:
    m = Machine().pool("r0")
    answer = m.answer(m.register("r1", draft_fingerprint="d" * 64))
    assert answer.reference_wanted
    m.acquire("base")
    m.begin("base")
    (transfer,) = m.state.transfers.values()
    assert transfer.waits_for == "replicas"
    m.do(events.ReferenceKnown("f" * 64, "d" * 64))
    (transfer,) = m.state.transfers.values()
    assert transfer.waits_for != "replicas"
    assert m.state.drafts_known == {"", "d" * 64}


def test_a_push_that_waits_for_a_drafts_tensors_names_the_replica() -> None:
    m = Machine().pool("r0")
    m.register("r1", draft_fingerprint="d" * 64, draft_method="eagle3")
    m.acquire("base")
    ticket = m.begin("base", answer_by=m.now + 2)
    m.pass_time(3.0)
    error = m.error(ticket)
    assert error.reason == "POOL_EMPTY"
    said = "r1 has not described the model that drafts tokens there (eagle3); the push's time is up"
    assert error.message.startswith(said)


def test_the_coordinators_own_sleep_is_not_held_against_others() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    m.pass_time(1.0)
    m.now += 60.0  # stopped, or starved
    m.do(events.Tick())
    assert m.standing("r0")[0] is ReplicaState.READY
    lease = m.state.policies["math"].lease
    assert lease is not None
    assert lease.expires_at > m.now
    m.pass_time(30.0, beats=False, renews=False)  # awake, and they are silent
    assert m.standing("r0")[0] is ReplicaState.LOST
    assert "math" not in m.state.policies, "its lease has ended, and it never had a version"


def test_a_replica_may_register_again_with_other_backends_where_it_is_alone() -> None:
    m = Machine()
    m.register("r0", backends=("nccl",))
    assert isinstance(m.answer(m.register("r0", backends=("gloo",))), effects.RegisterAnswer)


def test_a_channel_is_closed_with_its_process() -> None:
    m = Machine().pool("r0")
    m.now += 4.0
    m.register("r0", "i2")
    assert m.found(effects.CloseChannel) == [effects.CloseChannel("r0:1")]
    m.pass_time(7, beats=False)
    assert len(m.ever(effects.CloseChannel)) == 2


def test_a_state_that_did_not_change_is_announced_once() -> None:
    m = Machine().pool("r0")
    m.pass_time(5)
    kinds = [e.kind for e in m.ever(effects.Announce) if e.subject == "r0"]
    assert len(kinds) == len(set(kinds))


def test_dirty_replicas_and_suspects_are_no_targets() -> None:
    m = Machine().pool("r0", "r1")
    dirty = m.state.replicas["r1"]
    m.register("r1", dirty_reason="mixed")
    assert [r.replica_id for r in eligible_targets(m.state)] == ["r0"]
    assert dirty.replica_id in m.state.replicas


def test_only_what_all_offer_is_shared() -> None:
    m = Machine()
    for name, backends in (("r0", ("nccl", "gloo")), ("r1", ("nccl", "gloo")), ("r2", ("gloo",))):
        m.register(name, backends=("nccl", "gloo"))
        offered = dataclasses.replace(m.state.replicas[name].capabilities, backends=backends)
        replicas = {
            **m.state.replicas,
            name: dataclasses.replace(m.state.replicas[name], capabilities=offered),
        }
        m.state = dataclasses.replace(m.state, replicas=replicas)
    assert shared_backends(eligible_targets(m.state)) == ["gloo"]
