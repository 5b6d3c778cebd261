"""Policies that an operator forgets: nothing of them is served again, and no number used twice."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.unit.coordinator.decisions.machine import DIGEST, Machine
from weft_rl.contract.names import AdapterVersions, PolicyVersion, VersionVector
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.decisions.state.replica_state import replica_state
from weft_rl.coordinator.decisions.state.values import Phase, ReplicaState


def _v(name: str) -> PolicyVersion:
    return PolicyVersion.parse(name)


def _pushed(*replica_ids: str, pushes: int = 2) -> Machine:
    """A pool that serves math, of which nobody is the owner any more."""
    m = Machine().pool(*(replica_ids or ("r0", "r1")))
    m.acquire("math")
    for _ in range(pushes):
        m.run_to(Phase.COMMITTED)
    _release(m)
    return m


def _release(m: Machine, policy: str = "math") -> None:
    m.do(events.ReleasePolicy(next(m.ids), policy, m.tokens.pop(policy)))


def _forget(m: Machine, policy: str = "math", *, force: bool = False) -> int:
    ticket = next(m.ids)
    m.do(events.ForgetPolicy(ticket, policy, force))
    return ticket


def _retired(m: Machine, replica_id: str, **changes: Any) -> None:
    """Answer the order to drop versions as a replica would."""
    replica = m.state.replicas[replica_id]
    vector = dataclasses.replace(replica.vector, adapters=changes.pop("adapters", {}))
    m.do(events.RetireAnswered(replica_id, replica.incarnation, vector))


def test_its_versions_leave_every_replica_with_what_the_name_stands_for() -> None:
    m = _pushed()
    answer = m.answer(_forget(m))
    assert answer == effects.RetiredAnswer((_v("math@1"), _v("math@2")))
    orders = {call.replica_id: call for call in m.found(effects.CallRetire)}
    assert set(orders) == {"r0", "r1"}
    assert orders["r0"].versions == (_v("math@1"), _v("math@2"))
    assert orders["r0"].ended_policies == ("math",)
    retired = [save.version for save in m.found(effects.SaveRetired) if save.durable]
    assert retired == [_v("math@1"), _v("math@2")], "before anybody is told"
    assert "math" not in m.state.policies
    assert "math" not in m.state.vector.adapters
    for replica_id in orders:
        _retired(m, replica_id)
        assert replica_state(m.state, m.state.replicas[replica_id]) is ReplicaState.READY
    m.pass_time(5.0)
    assert not m.found(effects.CallRetire)


def test_a_replica_that_was_away_drops_it_when_it_is_back() -> None:
    m = _pushed()
    m.pass_time(7.0, beats=False)
    _forget(m)
    math = {"math": AdapterVersions((1, 2), 2)}
    held = {"math@1": DIGEST.value, "math@2": DIGEST.value}
    m.register("r1", vector=VersionVector(adapters=math), held=held, spilled=["math@1"])
    m.pass_time(1.5)
    (order,) = [call for call in m.ever(effects.CallRetire) if call.replica_id == "r1"][-1:]
    assert (order.versions, order.ended_policies) == ((_v("math@1"), _v("math@2")), ("math",))
    assert "math" not in m.state.policies, "what comes back late begins nothing"
    m.says.clear()
    _retired(m, "r1")
    m.pass_time(3.0)
    spilled = [call for call in m.ever(effects.CallRetire) if call.versions == (_v("math@1"),)]
    assert spilled, "what it has spilled goes, too"


def test_a_later_push_of_the_name_goes_on_above_its_numbers() -> None:
    m = _pushed()
    token = m.state.policies["math"].fencing_token
    _forget(m)
    m = _restarted(m)
    m.acquire("math")
    assert m.tokens["math"] == token + 1
    push = m.run_to(Phase.COMMITTED)
    assert m.transfer(push).policy_version == _v("math@3")
    assert m.state.vector.adapters["math"] == AdapterVersions((3,), 3)
    assert not m.state.policies["math"].forgotten
    assert not m.state.forgotten
    before = len(m.ever(effects.CallRetire))
    m.pass_time(3.0)
    assert not m.ever(effects.CallRetire)[before:]


def _restarted(m: Machine) -> Machine:
    """The same pool from what was saved, whose replicas have registered again."""
    saved = {save.policy.name: save.policy for save in m.ever(effects.SavePolicy)}
    state = m.state
    m.state = PoolState(
        settings=state.settings,
        generation=state.generation + 1,
        fingerprint=state.fingerprint,
        epoch_counter=state.epoch_counter,
        policies={k: p for k, p in saved.items() if not p.forgotten},
        forgotten={k: p for k, p in saved.items() if p.forgotten},
    )
    for replica_id in state.replicas:
        m.register(replica_id)
    m.do(events.ReferenceKnown(state.fingerprint))
    return m


def test_a_lease_that_brings_no_version_leaves_it_forgotten() -> None:
    m = _pushed()
    _forget(m)
    m.acquire("math")
    push = m.begin()
    m.do(events.AbortTransfer(next(m.ids), f"t{push}", "math", m.tokens["math"], "no"))
    _release(m)
    assert "math" not in m.state.policies
    assert m.state.forgotten["math"].last_version == 3, "the number was used"
    m.acquire("math")
    m.pass_time(20.0, renews=False)
    assert "math" not in m.state.policies
    m.acquire("math")
    assert m.answer(_forget(m, force=True)) == effects.RetiredAnswer(())
    assert "math" not in m.state.policies


def test_what_is_owned_is_forgotten_by_force_alone() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    push = m.run_to(Phase.STAGING)
    waiter = m.await_end(push)
    error = m.error(_forget(m))
    assert error.reason == "POLICY_OWNED"
    assert error.metadata == {"holder": "t1"}
    assert "--force" in error.message
    m.answer(_forget(m, force=True))
    assert m.error(waiter).reason == "LEASE_FENCED"
    assert m.transfer(push).phase is Phase.ABORTED
    renewal = next(m.ids)
    m.do(events.RenewLease(renewal, "math", m.tokens["math"]))
    assert m.error(renewal).reason == "LEASE_FENCED"


def test_what_replicas_switch_to_is_waited_for() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    push = m.run_to(Phase.COMMITTING)
    assert m.error(_forget(m, force=True)).reason == "TRANSFER_UNDER_WAY"
    m.answer_commits(push)
    m.answer(_forget(m, force=True))


def test_a_rollback_that_waits_ends() -> None:
    m = _pushed("r0")
    m.acquire("code")
    m.run_to(Phase.STAGING, "code")
    rollback = m.roll_back("math", 1)
    m.answer(_forget(m))
    assert m.error(rollback).reason == "TRANSFER_ABORTED"


@pytest.mark.parametrize("phase", [Phase.FORMING, Phase.COMMITTING])
def test_a_clone_of_it_ends_and_its_target_drops_it(phase: Phase) -> None:
    m = _pushed("r0")
    m.register("r1")
    m.pass_time(0.5)
    (clone,) = m.answer_look_ups()
    if phase is Phase.COMMITTING:
        m.attend_all(clone)
        m.prepare_all(clone)
        m.stage_all(clone)
    m.answer(_forget(m))
    if phase is Phase.COMMITTING:
        vector = VersionVector(adapters={"math": AdapterVersions((1,), 1)})
        m.do(events.CommitAnswered(f"t{clone}", "r1", "i1", vector, 0.0, None))
        m.pass_time(3.0)
        (order,) = [call for call in m.ever(effects.CallRetire) if call.replica_id == "r1"][-1:]
        assert order.ended_policies == ("math",)
    m.pass_time(3.0)
    assert not m.state.transfers
    assert not m.look_ups()


def test_it_is_idempotent_and_says_what_it_does_not_know() -> None:
    m = _pushed("r0")
    m.answer(_forget(m))
    assert m.answer(_forget(m)) == effects.RetiredAnswer(())
    assert m.error(_forget(m, "nobody")).reason == "POLICY_UNKNOWN"
    error = m.error(m.roll_back("math", 1))
    assert error.reason == "POLICY_UNKNOWN"
    assert "forgotten" in error.message


def test_the_base_stays_and_the_ways_out_are_named() -> None:
    m = Machine().pool("r0")
    m.acquire("base")
    m.run_to(Phase.COMMITTED, "base")
    error = m.error(_forget(m, "base", force=True))
    assert error.reason == "UNSUPPORTED"
    assert "weft rollback base --to 0" in error.message
    assert "weft base --rebind" in error.message


def test_pins_and_retention_end_with_it() -> None:
    m = _pushed("r0")
    m.do(events.Pin(next(m.ids), PolicyVersion("math", 1), True, m.record(_v("math@1"))))
    m.do(events.SetRetention(next(m.ids), "math", 9))
    m.answer(_forget(m))
    assert effects.SavePin(_v("math@1"), False) in m.last
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    assert m.state.policies["math"].pinned == ()
    assert m.state.policies["math"].retain == 0


def test_a_catalog_that_is_behind_leaps_for_what_it_has_forgotten() -> None:
    m = _pushed("r0")
    _forget(m)
    m.register("r1", last_generation=5, last_coordinator_id="another")
    assert m.state.forgotten["math"].last_version > 1000
    assert "math" not in m.state.policies


def test_what_was_pushed_again_in_a_catalog_that_is_lost_is_adopted() -> None:
    m = _pushed("r0")
    _forget(m)
    math = {"math": AdapterVersions((9,), 9)}
    m.register("r1", vector=VersionVector(adapters=math), held={"math@9": DIGEST.value})
    m.pass_time(6.0)
    assert m.describe_held() == [_v("math@9")]
    assert m.state.vector.adapters["math"] == AdapterVersions((9,), 9)
    assert not m.state.policies["math"].forgotten


def test_what_is_known_of_other_policies_stays() -> None:
    m = _pushed("r0")
    versions = {name: PolicyVersion(name, 7) for name in ("math", "code")}
    m.state = dataclasses.replace(
        m.state,
        conflicts={version: {b"a": ("r0",)} for version in versions.values()},
        lost=dict.fromkeys(versions, 7),
    )
    _forget(m)
    assert list(m.state.conflicts) == [versions["code"]]
    assert m.state.lost == {"code": 7}
