"""What nobody holds any more: whose owner is asked, when, and until when."""

from __future__ import annotations

import dataclasses

from tests.unit.coordinator.decisions.machine import Machine
from weft_rl.contract.names import AdapterVersions, VersionVector
from weft_rl.coordinator.decisions.policies.republishing import publish_again_version
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.values import Phase, ReplicaState

AFTER_SECONDS = 5.0


def _lost(*policies: str) -> Machine:
    """A pool of one that came back empty."""
    m = Machine(publish_again_after_seconds=AFTER_SECONDS).pool("r0")
    for policy in policies:
        m.acquire(policy)
        m.run_to(Phase.COMMITTED, policy)
    m.do(events.Leave(0, "r0", "i1"))
    m.register("r0", "i2")
    return m


def _told(m: Machine, policy: str) -> int:
    """What a renewal says."""
    ticket = next(m.ids)
    m.do(events.RenewLease(ticket, policy, m.tokens[policy]))
    answer = m.answer(ticket)
    return answer.publish_again_version


def _announced(m: Machine) -> list[str]:
    return [e.subject for e in m.ever(effects.Announce) if e.kind == "publish_again_wanted"]


def test_the_owner_is_asked_once_it_lasts_and_until_it_has_pushed() -> None:
    m = _lost("base", "math")
    m.pass_time(AFTER_SECONDS - 1)
    assert (_told(m, "base"), _told(m, "math")) == (0, 0)
    m.pass_time(2)
    assert (_told(m, "base"), _told(m, "math")) == (1, 1)
    m.pass_time(20)
    assert _announced(m) == ["base@1", "math@1"]
    m.run_to(Phase.COMMITTED, "base")
    m.run_to(Phase.COMMITTED, "math")
    m.pass_time(1)
    assert (_told(m, "base"), _told(m, "math")) == (0, 0)
    assert not m.state.republish


def test_who_acquires_the_policy_is_told_at_once() -> None:
    m = _lost("math")
    m.pass_time(AFTER_SECONDS + 1)
    m.do(events.ReleasePolicy(0, "math", m.tokens["math"]))
    assert publish_again_version(m.state, "math") == 1
    ticket = m.acquire("math", trainer="t2")
    answer = m.answer(ticket)
    assert answer.publish_again_version == 1


def test_a_replica_that_comes_back_with_a_copy_ends_it() -> None:
    m = _lost("base")
    m.pass_time(AFTER_SECONDS + 1)
    assert _told(m, "base") == 1
    m.register("r1", spilled=("base@1",))
    m.pass_time(1)
    assert _told(m, "base") == 0


def test_what_only_a_replica_that_is_kept_out_holds_is_asked_for() -> None:
    m = Machine(publish_again_after_seconds=AFTER_SECONDS).pool("r0")
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    m.do(events.Cordon(0, "r0", "answers nonsense", no_pushes=True))
    m.pass_time(AFTER_SECONDS + 1)
    assert _told(m, "math") == 0, "nobody lacks it"
    m.register("r1")
    m.pass_time(AFTER_SECONDS + 1)
    assert _told(m, "math") == 1
    m.do(events.Uncordon(0, "r0"))
    m.pass_time(1)
    assert _told(m, "math") == 0


def test_a_short_absence_is_nobodys_business() -> None:
    m = _lost("base")
    m.pass_time(AFTER_SECONDS - 2)
    m.register("r1", retained=(1,))
    m.pass_time(AFTER_SECONDS)
    m.do(events.Leave(0, "r1", "i1"))
    m.pass_time(AFTER_SECONDS - 2)
    assert not _announced(m)
    m.pass_time(3)
    assert _announced(m) == ["base@1"]


def test_what_is_served_without_a_copy_is_not_asked_for_until_somebody_lacks_it() -> None:
    m = Machine().pool("r0")
    m.base_copies = 0
    m.acquire("base")
    m.run_to(Phase.COMMITTED, "base")
    m.pass_time(20)
    assert not m.state.republish
    m.register("r1")
    m.pass_time(20)
    assert _announced(m) == ["base@1"]


def test_an_older_version_of_an_adapter_is_not_asked_for() -> None:
    m = Machine().pool("r0", "r1")
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    for replica_id in ("r0", "r1"):
        m.do(events.Leave(0, replica_id, "i1"))
    m.register("r2")
    m.run_to(Phase.COMMITTED)
    m.pass_time(20)
    assert not _announced(m), "math@2 is held, and math@1 cannot be published again"


def test_standing_says_who_brings_it_back() -> None:
    m = _lost("math")
    m.pass_time(AFTER_SECONDS + 1)
    _, why = m.standing("r0")
    who = "its owner t1 is asked to publish it again"
    assert why == f"lacks math@1, which no replica in contact holds: {who}"
    (said,) = [e for e in m.ever(effects.Announce) if e.kind == "publish_again_wanted"]
    assert who in said.message


# -- what nobody owns is lost --------------------------------------------------------


def _release(m: Machine, *policies: str) -> None:
    for policy in policies:
        m.do(events.ReleasePolicy(0, policy, m.tokens.pop(policy)))


def _kinds(m: Machine, policy: str) -> list[str]:
    return [
        e.kind.value
        for e in m.ever(effects.Announce)
        if e.kind.value.startswith("policy_") and e.subject.startswith(policy)
    ]


def test_what_nobody_owns_keeps_nobody_from_being_ready() -> None:
    m = _lost("math", "code")
    _release(m, "math")
    m.pass_time(AFTER_SECONDS - 1)
    state, why = m.standing("r0")
    assert state is ReplicaState.PENDING_WEIGHTS
    assert "nobody owns it now, push it again, or end it: weft forget math" in why
    m.pass_time(2)
    assert m.state.lost == {"math": 1}
    assert _kinds(m, "math") == ["policy_lost"]
    state, why = m.standing("r0")
    assert (state, "code@1" in why, "math" in why) == (ReplicaState.PENDING_WEIGHTS, True, False)
    _release(m, "code")
    m.pass_time(1)
    assert m.standing("r0")[0] is ReplicaState.READY
    assert not m.state.vector.adapters
    assert publish_again_version(m.state, "math") == 1, "whoever takes it is asked"
    m.pass_time(30)
    assert _kinds(m, "math") == ["policy_lost"]


def test_the_lease_that_has_run_out_counts_as_none() -> None:
    m = _lost("math")
    m.pass_time(AFTER_SECONDS + 1)
    assert not m.state.lost
    m.pass_time(15.0, renews=False)
    assert m.state.lost == {"math": 1}


def test_a_holder_that_comes_back_revives_it() -> None:
    m = _lost("math")
    _release(m, "math")
    m.pass_time(AFTER_SECONDS + 1)
    m.register("r1", vector=VersionVector(adapters={"math": AdapterVersions((1,), 1)}))
    m.pass_time(0.5)
    assert not m.state.lost
    assert _kinds(m, "math") == ["policy_lost", "policy_found"]
    assert m.standing("r1")[0] is ReplicaState.READY
    assert m.standing("r0")[0] is ReplicaState.PENDING_WEIGHTS
    (clone,) = m.answer_look_ups()
    m.finish(clone)
    assert m.standing("r0")[0] is ReplicaState.READY


def test_a_push_revives_it_and_a_lease_alone_does_not() -> None:
    m = _lost("math")
    _release(m, "math")
    m.pass_time(AFTER_SECONDS + 1)
    m.acquire("math", trainer="t2")
    m.pass_time(3)
    assert m.standing("r0")[0] is ReplicaState.READY, "its trainer has only begun"
    push = m.run_to(Phase.COMMITTING)
    assert m.state.vector.adapters["math"].alias == 2
    m.answer_commits(push)
    m.pass_time(1)
    assert not m.state.lost
    assert not m.state.republish
    assert m.standing("r0")[0] is ReplicaState.READY


def test_one_that_is_forgotten_is_lost_no_more() -> None:
    m = _lost("math")
    _release(m, "math")
    m.pass_time(AFTER_SECONDS + 1)
    m.do(events.ForgetPolicy(7, "math", False))
    m.answer(7)
    m.pass_time(1)
    assert not m.state.lost
    assert _kinds(m, "math") == ["policy_lost", "policy_forgotten"]


def test_a_name_that_stands_for_a_former_version_is_not_ready() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    m.run_to(Phase.COMMITTED)
    m.do(events.Leave(0, "r0", "i1"))
    m.register("r0", "i2", vector=VersionVector(adapters={"math": AdapterVersions((1,), 1)}))
    m.register("r1")
    _release(m, "math")
    m.pass_time(AFTER_SECONDS + 1)
    assert m.state.lost == {"math": 2}
    assert m.standing("r1")[0] is ReplicaState.READY
    state, why = m.standing("r0")
    assert state is ReplicaState.PENDING_WEIGHTS
    assert "or go back: weft rollback math --to 1" in why
    m.answer_commits(m.roll_back("math", 1))
    m.pass_time(0.5)
    assert not m.state.lost
    assert m.standing("r0")[0] is ReplicaState.READY
    (clone,) = m.answer_look_ups()
    m.finish(clone)
    assert m.standing("r1")[0] is ReplicaState.READY


def test_after_a_restart_replicas_have_time_to_come_back() -> None:
    m = _lost("math")
    _release(m, "math")
    m.state = dataclasses.replace(m.state, restart_over_at=m.now + 10.0)
    m.pass_time(9.0)
    assert m.standing("r0")[0] is ReplicaState.PENDING_WEIGHTS
    m.pass_time(2.0)
    assert m.standing("r0")[0] is ReplicaState.READY


def test_a_base_that_is_lost_keeps_replicas_out_until_the_pool_goes_back() -> None:
    m = _lost("base", "math")
    _release(m, "base", "math")
    m.pass_time(AFTER_SECONDS + 1)
    assert m.state.lost == {"base": 1, "math": 1}
    state, why = m.standing("r0")
    assert state is ReplicaState.PENDING_WEIGHTS, "it has base@0, which is not what base stands for"
    assert "weft rollback base --to 0" in why
    back = m.roll_back("base", 0)
    assert [call.replica_id for call in m.found(effects.CallSwitch)] == ["r0"]
    m.answer_commits(back)
    m.pass_time(1)
    assert m.state.vector.base == 0
    assert m.state.lost == {"math": 1}
    assert m.standing("r0")[0] is ReplicaState.READY


def test_an_adapter_is_lost_though_the_one_replica_waits_for_a_base() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    m.do(events.Leave(0, "r0", "i1"))
    m.register("r0", "i2", dirty_reason="the engine broke")
    m.pass_time(AFTER_SECONDS + 1)
    assert not m.state.lost
    assert not _announced(m), "its owner could not push it"
    _release(m, "math")
    m.pass_time(AFTER_SECONDS + 1)
    assert m.state.lost == {"math": 1}


def test_a_base_that_replicas_serve_without_a_copy_is_not_lost() -> None:
    m = Machine().pool("r0")
    m.base_copies = 0
    m.acquire("base")
    m.run_to(Phase.COMMITTED, "base")
    _release(m, "base")
    m.register("r1")
    m.pass_time(20)
    assert _announced(m) == ["base@1"]
    assert not m.state.lost
    assert m.standing("r0")[0] is ReplicaState.READY


def test_what_only_a_replica_that_is_kept_out_holds_is_lost_until_it_is_back() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    _release(m, "math")
    m.do(events.Cordon(0, "r0", "answers nonsense", no_pushes=True))
    m.register("r1")
    m.pass_time(AFTER_SECONDS + 1)
    assert m.standing("r1")[0] is ReplicaState.READY
    m.do(events.Uncordon(0, "r0"))
    m.pass_time(1)
    assert not m.state.lost
