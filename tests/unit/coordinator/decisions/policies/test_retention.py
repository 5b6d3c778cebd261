"""Old versions leave, first the replicas, then the catalog."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.coordinator.decisions.machine import LOAD_FAILED, Machine
from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.values import Phase
from weft_rl.coordinator.runtime.catalog.database import Catalog


def _after(pushes: int, **settings: int) -> Machine:
    m = Machine(**settings).pool("r0", "r1")
    m.acquire("math")
    group_id = ""
    for _ in range(pushes):
        group_id = m.transfer(m.run_to(Phase.COMMITTED, group_id=group_id)).group_id
    return m


def _answer(m: Machine, call: effects.CallRetire, *, keeps: int = 0) -> None:
    vector = m.state.replicas[call.replica_id].vector
    for version in call.versions:
        if version.version != keeps:
            vector = vector.without_adapter(version)
    m.do(events.RetireAnswered(call.replica_id, call.incarnation, vector))


def test_an_answer_that_was_overtaken_by_a_newer_one_changes_nothing() -> None:
    m = _after(1)
    served = m.state.replicas["r0"].vector
    newer = replace(served.without_adapter(PolicyVersion("math", 1)), revision=7)
    m.do(events.RetireAnswered("r0", "i1", newer))
    for overtaken in (replace(served, revision=6), replace(served, revision=0)):
        m.do(events.RetireAnswered("r0", "i1", overtaken))
        m.pass_time(5.0)
        m.beat("r0", version_vector=overtaken)
        assert not m.state.replicas["r0"].vector.holds(PolicyVersion("math", 1))
    m.do(events.RetireAnswered("r0", "i1", replace(served, revision=8)))
    assert m.state.replicas["r0"].vector.holds(PolicyVersion("math", 1))


def test_versions_beyond_the_retention_are_retired_everywhere() -> None:
    m = _after(3, retain_versions=2)
    calls = m.found(effects.CallRetire)
    assert {(c.replica_id, c.versions) for c in calls} == {
        ("r0", (PolicyVersion("math", 1),)),
        ("r1", (PolicyVersion("math", 1),)),
    }
    _answer(m, calls[0])
    m.pass_time(0.5)
    assert not m.ever(effects.SaveRetired)
    _answer(m, calls[1])
    m.pass_time(0.5)
    assert [s.version for s in m.ever(effects.SaveRetired)] == [PolicyVersion("math", 1)]
    assert m.state.policies["math"].versions == (2, 3)
    m.pass_time(5)
    assert len(m.ever(effects.CallRetire)) == 2


def test_asked_again_while_a_request_still_uses_it() -> None:
    m = _after(2, retain_versions=1)
    for call in m.found(effects.CallRetire):
        _answer(m, call, keeps=1)
    before = len(m.ever(effects.CallRetire))
    m.pass_time(2)
    assert len(m.ever(effects.CallRetire)) > before
    assert m.state.policies["math"].versions == (1, 2)


def test_an_unanswered_request_is_repeated_but_not_often() -> None:
    m = _after(2, retain_versions=1)
    m.pass_time(6.5)
    assert 6 <= len(m.ever(effects.CallRetire)) <= 8


def test_a_lost_replica_holds_nothing_back() -> None:
    m = _after(2, retain_versions=1)
    (call,) = [c for c in m.found(effects.CallRetire) if c.replica_id == "r0"]
    _answer(m, call)
    m.do(events.Leave(5, "r1", "i1"))
    m.pass_time(2)
    assert m.state.policies["math"].versions == (2,)


def test_nothing_is_retired_for_a_version_that_may_be_undone() -> None:
    m = _after(2, retain_versions=2)
    ticket = m.run_to(Phase.COMMITTING)
    m.pass_time(2)
    assert not m.found(effects.CallRetire)
    m.answer_commits(ticket, r0=LOAD_FAILED, r1=LOAD_FAILED)
    m.pass_time(2)
    assert not m.ever(effects.CallRetire)
    assert m.state.policies["math"].versions == (1, 2)


def test_what_an_undone_version_replaced_is_not_retired_though_nobody_holds_it() -> None:
    m = Machine(retain_versions=1).pool("r0")
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    m.do(events.Leave(5, "r0", "i1"))
    m.register("r1")
    ticket = m.run_to(Phase.COMMITTING)
    m.pass_time(2)
    m.answer_commits(ticket, r1=LOAD_FAILED)
    policy = m.state.policies["math"]
    assert (policy.served_version, policy.versions) == (1, (1,))
    assert not m.ever(effects.SaveRetired)


def test_what_an_alias_stands_for_is_never_retired() -> None:
    m = Machine(retain_versions=1).pool("r0", "r1")
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    ticket = m.run_to(Phase.COMMITTING)
    m.answer_commits(ticket, r1=LOAD_FAILED)  # r1 still serves math@1
    m.pass_time(3)
    assert {c.replica_id for c in m.ever(effects.CallRetire)} == {"r0"}
    assert 1 in m.state.policies["math"].versions


def test_a_base_is_superseded_by_the_next() -> None:
    m = Machine().pool("r0")
    m.acquire("base")
    m.run_to(Phase.COMMITTED, "base")
    assert not m.ever(effects.SaveRetired)
    m.run_to(Phase.COMMITTED, "base")
    assert [s.version for s in m.ever(effects.SaveRetired)] == [PolicyVersion("base", 1)]
    assert m.state.policies["base"].versions == (2,)


def _retire_now(m: Machine, version: int, policy: str = "math") -> int:
    ticket = next(m.ids)
    record = m.record(PolicyVersion(policy, version))
    m.do(events.Retire(ticket, PolicyVersion(policy, version), record))
    return ticket


def test_an_operator_retires_a_version_that_would_be_kept() -> None:
    m = _after(3)
    m.answer(_retire_now(m, 2))
    assert m.found(effects.SaveRetired) == [
        effects.SaveRetired(PolicyVersion("math", 2), durable=True)
    ]
    assert m.state.policies["math"].versions == (1, 3)
    assert {c.versions for c in m.found(effects.CallRetire)} == {(PolicyVersion("math", 2),)}
    m.answer(_retire_now(m, 2))
    assert not m.found(effects.SaveRetired)


def test_what_an_operator_cannot_retire() -> None:
    m = _after(2)
    m.acquire("base")
    m.run_to(Phase.COMMITTED, "base")
    m.do(events.Pin(0, PolicyVersion("math", 1), True, m.record(PolicyVersion("math", 1))))
    for version, policy, reason in (
        (1, "math", "VERSION_IN_USE"),
        (2, "math", "VERSION_IN_USE"),
        (9, "math", "VERSION_UNKNOWN"),
        (1, "no", "POLICY_UNKNOWN"),
        (1, "base", "UNSUPPORTED"),
    ):
        assert m.error(_retire_now(m, version, policy)).reason == reason
    assert not m.ever(effects.SaveRetired)


@pytest.mark.parametrize("rolls_back", [False, True])
def test_what_the_pool_may_go_back_to_is_not_retired(rolls_back: bool) -> None:
    m = _after(3)
    ticket = m.roll_back("math", 1) if rolls_back else m.run_to(Phase.COMMITTING)
    assert m.error(_retire_now(m, 3)).reason == "TRANSFER_UNDER_WAY"
    m.answer(_retire_now(m, 2))
    m.answer_commits(ticket, r0=LOAD_FAILED, r1=LOAD_FAILED)
    policy = m.state.policies["math"]
    assert (policy.served_version, policy.versions) == (3, (1, 3))
    m.answer_commits(m.roll_back("math", 1))
    m.answer(_retire_now(m, 3))


@pytest.mark.parametrize("rolls_back", [False, True])
def test_a_new_retention_keeps_what_the_pool_may_go_back_to(rolls_back: bool) -> None:
    m = _after(1, retain_versions=1)
    if rolls_back:
        record = m.record(PolicyVersion("math", 1))
        m.do(events.Pin(0, PolicyVersion("math", 1), True, record))
        m.run_to(Phase.COMMITTED)
        m.answer_commits(m.roll_back("math", 1))
        m.do(events.Pin(0, PolicyVersion("math", 1), False, record))
        ticket = m.roll_back("math", 2)
    else:
        ticket = m.run_to(Phase.COMMITTING)
    m.answer(_retain(m, 4))
    m.answer_commits(ticket, r0=LOAD_FAILED, r1=LOAD_FAILED)
    policy = m.state.policies["math"]
    assert policy.served_version == 1
    assert 1 in policy.versions
    assert not m.ever(effects.SaveRetired)


def _retain(m: Machine, num_versions: int, policy: str = "math") -> int:
    ticket = next(m.ids)
    m.do(events.SetRetention(ticket, policy, num_versions))
    return ticket


def test_a_policy_keeps_as_many_as_it_was_told(catalog_path: Path) -> None:
    m = _after(3, retain_versions=2)
    assert m.answer(_retain(m, 4)) == effects.RetentionAnswer(4)
    assert m.state.policies["math"].versions == (2, 3), "what was being retired stays so"
    for call in m.ever(effects.CallRetire):
        _answer(m, call)
    m.run_to(Phase.COMMITTED)
    m.run_to(Phase.COMMITTED)
    m.pass_time(5)
    assert m.state.policies["math"].versions == (2, 3, 4, 5)
    catalog = Catalog.open(catalog_path)
    catalog.apply([e for e in m.all if isinstance(e, effects.Save)])
    (math,) = catalog.snapshot().policies
    catalog.close()
    assert (math.retain, math.versions) == (4, (2, 3, 4, 5))


def test_fewer_retires_the_others_now() -> None:
    m = _after(3)
    m.answer(_retain(m, 1))
    assert {c.versions for c in m.found(effects.CallRetire)} == {
        (PolicyVersion("math", 1), PolicyVersion("math", 2))
    }
    assert m.answer(_retain(m, 0)) == effects.RetentionAnswer(4)
    assert m.state.policies["math"].versions == (3,)


def test_retention_that_cannot_be_set() -> None:
    m = _after(1)
    m.acquire("base")
    for number, policy, reason in (
        (2, "no", "POLICY_UNKNOWN"),
        (2, "base", "UNSUPPORTED"),
        (-1, "math", "INVALID_REQUEST"),
        (1001, "math", "INVALID_REQUEST"),
    ):
        assert m.error(_retain(m, number, policy)).reason == reason


def test_an_alias_at_a_lost_replica_holds_nothing_back() -> None:
    m = Machine(retain_versions=1).pool("r0", "r1")
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    m.answer_commits(m.run_to(Phase.COMMITTING), r1=LOAD_FAILED)  # r1 still serves math@1
    lost = replace(m.state.replicas["r1"], lost=True)
    m.state = replace(m.state, replicas={**m.state.replicas, "r1": lost})
    m.pass_time(1)
    _answer(m, m.ever(effects.CallRetire)[0])
    m.pass_time(1)
    assert m.state.policies["math"].versions == (2,)
