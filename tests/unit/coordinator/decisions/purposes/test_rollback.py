"""Going back to what is retained, and keeping what must stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.coordinator.decisions.machine import DIRTY, GONE, LOAD_FAILED, Machine
from weft_rl.contract.names import PolicyVersion, VersionVector
from weft_rl.coordinator.decisions.purposes.repair import Restore
from weft_rl.coordinator.decisions.purposes.rollback import RollbackPurpose, rollback_ways
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.decisions.state.values import Phase, ReplicaState
from weft_rl.coordinator.decisions.transfers import preflight
from weft_rl.coordinator.runtime.catalog.database import Catalog


def _pushed(policy: str, times: int, *replica_ids: str, **settings: int) -> Machine:
    m = Machine(**settings).pool(*(replica_ids or ("r0", "r1")))
    m.base_copies = 2
    m.acquire(policy)
    group_id = ""
    for _ in range(times):
        group_id = m.transfer(m.run_to(Phase.COMMITTED, policy, group_id=group_id)).group_id
    return m


def _answer(m: Machine, ticket: int) -> effects.RollbackAnswer:
    answer = m.answer(ticket)
    assert isinstance(answer, effects.RollbackAnswer)
    return answer


def test_an_adapter_goes_back_and_the_numbers_go_on() -> None:
    m = _pushed("math", 3)
    ticket = m.roll_back("math", 2)
    kinds = [type(e) for e in m.last]
    assert kinds.index(effects.SavePolicy) < kinds.index(effects.CallSwitch)
    assert [s.durable for s in m.found(effects.SavePolicy)] == [True]
    assert not m.answered(ticket)
    assert m.standing("r0")[0] is ReplicaState.READY, "no flapping until it has switched"
    m.answer_commits(ticket)
    answer = _answer(m, ticket)
    assert (str(answer.version), answer.replaced_version) == ("math@2", 3)
    assert answer.replica_ids == ("r0", "r1")
    assert m.state.vector.adapters["math"].versions == (1, 2, 3)
    for replica in m.state.replicas.values():
        assert replica.vector.adapters["math"].alias == 2
        assert m.standing(replica.replica_id)[0] is ReplicaState.READY
    pushed = m.run_to(Phase.COMMITTED)
    assert str(m.transfer(pushed).policy_version) == "math@4"
    assert m.state.vector.adapters["math"].alias == 4


def test_a_base_goes_back_as_far_as_all_retain_it() -> None:
    m = _pushed("base", 3)
    assert m.error(m.roll_back("base", 1)).reason == "NOT_RETAINED"
    ticket = m.roll_back("base", 2)
    m.answer_commits(ticket)
    assert _answer(m, ticket).pause_seconds == 0.5
    assert m.state.policies["base"].versions == (2,)
    assert {str(s.version) for s in m.ever(effects.SaveCommitted)} == {"base@2"}
    assert str(m.ever(effects.SaveRetired)[-1].version) == "base@3"
    assert {r.retained for r in m.state.replicas.values()} == {(2, 3)}
    again = m.roll_back("base", 3)
    m.answer_commits(again)
    assert m.state.vector.base == 3
    assert str(m.transfer(m.run_to(Phase.COMMITTED, "base")).policy_version) == "base@4"


def test_a_base_that_a_ready_replica_does_not_retain_is_refused_by_name() -> None:
    m = _pushed("base", 1, "r0")
    m.register("r1")
    m.run_to(Phase.COMMITTED, "base")  # r1 has only this one
    error = m.error(m.roll_back("base", 1))
    assert (error.reason, error.metadata["member"]) == ("NOT_RETAINED", "r1")
    assert m.state.vector.base == 2


def _changed_in_place(*replica_ids: str, undoable: tuple[int, ...] = (2, 1)) -> Machine:
    """A pool at base@3, which keeps what the last deltas have changed."""
    m = Machine()
    for replica_id in replica_ids or ("r0", "r1"):
        m.register(replica_id, loads_in_place=True)
    m.pool()
    m.acquire("base")
    for _ in range(3):
        m.run_to(Phase.COMMITTED, "base")
    m.now += 3.0
    for replica_id in m.state.replicas:
        m.beat(replica_id, retained_base_versions=(3,), undo_base_versions=undoable)
    return m


def test_a_base_goes_back_by_what_deltas_have_changed() -> None:
    m = _changed_in_place()
    assert rollback_ways(m.state) == [(2, 0, 2), (1, 0, 2)]
    ticket = m.roll_back("base", 1)
    assert m.transfer(ticket).targets == ("r0", "r1")
    for replica_id in ("r0", "r1"):
        m.answer_commit(ticket, replica_id, undoable=(2, 3))
    assert _answer(m, ticket).replica_ids == ("r0", "r1")
    assert rollback_ways(m.state) == [(3, 0, 2), (2, 0, 2)]


def test_a_base_that_one_replica_cannot_go_back_to_is_refused_before_anything_changes() -> None:
    m = _changed_in_place()
    m.beat("r1", retained_base_versions=(3,), undo_base_versions=(2,))
    assert rollback_ways(m.state) == [(2, 0, 2)]
    error = m.error(m.roll_back("base", 1))
    assert (error.reason, error.metadata["member"]) == ("NOT_RETAINED", "r1")
    assert "r1 keeps what deltas have changed as far as base@2" in error.message
    assert "--staging-memory-gib" in error.message
    assert m.state.vector.base == 3
    assert not m.ever(effects.CallSwitch)


def test_what_deltas_have_changed_is_no_copy_for_others() -> None:
    """Nobody is sent it, a pin does not keep it, and no delta starts from it."""
    m = _changed_in_place("r0", "r1", undoable=(2,))
    assert PolicyVersion("base", 2) not in m.state.copies
    for number in (2, 3):
        record = m.record(PolicyVersion("base", number))
        ticket = next(m.ids)
        m.do(events.Pin(ticket, PolicyVersion("base", number), True, record))
        assert "those that load in place keep none" in m.error(ticket).message
    ticket = m.roll_back("base", 2)
    m.answer_commit(ticket, "r0", undoable=(3,))
    m.answer_commit(ticket, "r1", GONE)
    m.now += 3.0
    m.beat("r0", retained_base_versions=(2,), undo_base_versions=(3,))
    # One did not switch: it catches up by itself, and is no source for a third.
    m.beat("r1", version_vector=VersionVector(3), retained_base_versions=(3,),
           undo_base_versions=(2,))  # fmt: skip
    m.register("r2", loads_in_place=True)
    m.do(events.Tick())
    assert {(one.replica_id, one.source_id) for one in m.look_ups()} == {
        ("r1", "r1"),
        ("r2", "r0"),
    }
    assert preflight.why_no_delta(m.state, [m.state.replicas["r1"]])


def test_a_version_that_only_deltas_lead_back_to_is_not_lost() -> None:
    m = _changed_in_place("r0")
    m.tokens.clear()
    ticket = m.roll_back("base", 1)
    m.answer_commit(ticket, "r0", GONE)
    m.now += 3.0
    m.beat("r0", version_vector=VersionVector(3), retained_base_versions=(3,),
           undo_base_versions=(2, 1))  # fmt: skip
    m.do(events.Tick())
    assert not m.state.republish
    assert m.standing("r0")[1].startswith("lacks base@1")
    assert "no replica" not in m.standing("r0")[1]


def test_one_that_is_not_ready_does_not_stand_in_the_way_and_catches_up() -> None:
    m = _pushed("base", 2, "r0")
    m.register("r1")
    ticket = m.roll_back("base", 1)
    assert m.transfer(ticket).targets == ("r0",)
    m.answer_commits(ticket)
    m.do(events.Tick())
    (clone,) = m.answer_look_ups()
    assert str(m.transfer(clone).policy_version) == "base@1"
    m.finish(clone)
    assert m.standing("r1")[0] is ReplicaState.READY


@pytest.mark.parametrize(
    ("policy", "version", "reason"),
    [
        ("nope", 1, "POLICY_UNKNOWN"),
        ("math", 9, "VERSION_UNKNOWN"),
        ("math", 0, "VERSION_UNKNOWN"),
        ("math", 1, "NOT_RETAINED"),
    ],
)
def test_what_cannot_be_gone_back_to(policy: str, version: int, reason: str) -> None:
    m = _pushed("math", 3, "r0", retain_versions=2)
    for call in m.ever(effects.CallRetire):
        vector = m.state.replicas["r0"].vector.without_adapter(call.versions[0])
        m.do(events.RetireAnswered("r0", "i1", vector))
    m.pass_time(1)
    assert m.state.policies["math"].versions == (2, 3)
    assert m.error(m.roll_back(policy, version)).reason == reason


def test_a_base_that_engines_were_started_with_is_not_retained() -> None:
    m = _pushed("base", 1)
    assert m.error(m.roll_back("base", 0)).reason == "NOT_RETAINED"


def test_a_version_that_was_aborted_was_never_served() -> None:
    m = _pushed("math", 1, "r0")
    pushing = m.run_to(Phase.STAGING)
    m.do(events.AbortTransfer(0, f"t{pushing}", "math", m.tokens["math"], ""))
    assert m.error(m.roll_back("math", 2)).reason == "VERSION_UNKNOWN"


def test_going_back_to_what_is_served_does_nothing() -> None:
    m = _pushed("math", 2)
    answer = _answer(m, m.roll_back("math", 2))
    assert (answer.replaced_version, answer.replica_ids) == (2, ())
    assert not m.ever(effects.CallSwitch)


def test_it_waits_for_its_turn_and_those_behind_it_wait_too() -> None:
    m = _pushed("math", 2)
    pushing = m.run_to(Phase.STAGING)
    ticket = m.roll_back("math", 1)
    later = m.begin()
    assert m.transfer(ticket).phase is Phase.WAITING
    m.stage_all(pushing)
    m.answer_commits(pushing)
    assert m.transfer(ticket).phase is Phase.COMMITTING
    assert m.transfer(later).phase is Phase.WAITING
    m.answer_commits(ticket)
    assert m.state.vector.adapters["math"].alias == 1
    assert m.transfer(later).phase is Phase.FORMING


def test_its_turn_may_not_come_in_time_or_nobody_may_wait_for_it() -> None:
    m = _pushed("math", 2)
    m.run_to(Phase.STAGING)
    late = m.roll_back("math", 1, seconds=1)
    gone = m.roll_back("math", 1)
    m.do(events.CallerGone(gone))
    m.pass_time(2)
    assert m.error(late).reason == "DEADLINE"
    assert not [t for t in m.state.transfers.values() if isinstance(t.purpose, RollbackPurpose)]
    assert m.state.vector.adapters["math"].alias == 2


def test_when_no_replica_can_the_pool_goes_on_with_what_it_served() -> None:
    m = _pushed("base", 2)
    ticket = m.roll_back("base", 1)
    m.answer_commits(ticket, r0=LOAD_FAILED, r1=LOAD_FAILED)
    assert m.error(ticket).reason == "LOAD_FAILED"
    assert m.state.policies["base"].served_version == 2
    assert m.ever(effects.SavePolicy)[-1].policy.served_version == 2
    assert str(m.ever(effects.SaveCommitted)[-1].version) == "base@2"
    for replica_id in ("r0", "r1"):
        assert m.standing(replica_id)[0] is ReplicaState.READY


def test_one_that_breaks_is_quarantined_and_repaired_from_its_own_copy() -> None:
    m = _pushed("base", 2)
    ticket = m.roll_back("base", 1)
    m.answer_commits(ticket, r1=DIRTY)
    assert _answer(m, ticket).replica_ids == ("r0",)
    assert m.standing("r1")[0] is ReplicaState.QUARANTINED
    m.do(events.Tick())
    (restore,) = m.answer_look_ups()
    assert isinstance(m.transfer(restore).purpose, Restore)
    m.answer_commit(restore, "r1")
    assert m.standing("r1") == (ReplicaState.READY, "")


def test_a_pool_that_is_all_dirty_goes_back_to_its_retained_copies() -> None:
    m = _pushed("base", 1)
    ticket = m.run_to(Phase.COMMITTING, "base")
    m.answer_commits(ticket, r0=DIRTY, r1=DIRTY)
    back = m.roll_back("base", 1)
    assert m.transfer(back).targets == ("r0", "r1")
    m.answer_commits(back)
    for replica_id in ("r0", "r1"):
        assert m.standing(replica_id) == (ReplicaState.READY, "")


def test_an_adapter_does_not_go_back_to_what_nobody_holds() -> None:
    m = _pushed("math", 3, "r0")
    m.do(events.Leave(0, "r0", "i1"))
    error = m.error(m.roll_back("math", 1))
    assert error.reason == "NOT_RETAINED"
    assert "no replica in contact holds math@1; 'math' can go back to nothing" in error.message
    m.register("r0", "i2", spilled=["math@2"])
    assert "can go back to 2" in m.error(m.roll_back("math", 1)).message
    assert _answer(m, m.roll_back("math", 2)).replica_ids == ()  # it is brought from there
    assert m.state.vector.adapters["math"].alias == 2


def test_nobody_is_told_to_roll_back_to_nothing() -> None:
    m = _pushed("math", 1)
    m.do(events.Retire(77, PolicyVersion("math", 1), m.record(PolicyVersion("math", 1))))
    assert "push a newer version first" in m.error(77).message
    m.run_to(Phase.COMMITTED)
    m.do(events.Retire(78, PolicyVersion("math", 2), m.record(PolicyVersion("math", 2))))
    assert "push a newer version or roll back to 1 first" in m.error(78).message


def test_replicas_that_load_in_place_are_not_said_to_retain() -> None:
    m = Machine()
    m.register("r0", loads_in_place=True)
    m.do(events.ReferenceKnown("f" * 64))
    m.base_copies = 0
    m.acquire("base")
    m.run_to(Phase.COMMITTED, "base")
    m.run_to(Phase.COMMITTED, "base")
    message = m.error(m.roll_back("base", 1)).message
    assert "push the weights again" in message
    assert "--base-copies" not in message


def test_a_replica_that_leaves_meanwhile_is_not_waited_for() -> None:
    m = _pushed("math", 2)
    ticket = m.roll_back("math", 1)
    m.answer_commit(ticket, "r0")
    m.do(events.Leave(0, "r1", "i1"))
    assert _answer(m, ticket).replica_ids == ("r0",)


def _pin(m: Machine, policy: str, version: int, pinned: bool = True) -> int:
    ticket = next(m.ids)
    record = m.record(PolicyVersion(policy, version))
    m.do(events.Pin(ticket, PolicyVersion(policy, version), pinned, record))
    return ticket


def test_what_is_pinned_is_not_retired_until_it_is_let_go() -> None:
    m = _pushed("math", 1, "r0", retain_versions=1)
    for _ in range(2):
        assert isinstance(m.answer(_pin(m, "math", 1)), effects.EmptyAnswer)
    assert len(m.ever(effects.SavePin)) == 1
    for _ in range(2):
        m.run_to(Phase.COMMITTED)
    asked = {str(v) for c in m.ever(effects.CallRetire) for v in c.versions}
    assert asked == {"math@2"}
    for _ in range(2):
        assert isinstance(m.answer(_pin(m, "math", 1, pinned=False)), effects.EmptyAnswer)
    m.pass_time(3)
    asked = {str(v) for c in m.ever(effects.CallRetire) for v in c.versions}
    assert asked == {"math@1", "math@2"}


def test_a_version_that_may_be_undone_is_not_pinned() -> None:
    m = _pushed("math", 1)
    ticket = m.run_to(Phase.COMMITTING)
    assert m.error(_pin(m, "math", 2)).reason == "TRANSFER_UNDER_WAY"
    m.answer(_pin(m, "math", 1))
    m.answer_commits(ticket, r0=LOAD_FAILED)
    m.answer(_pin(m, "math", 2))
    assert m.state.policies["math"].pinned == (1, 2)


def test_what_cannot_be_pinned() -> None:
    m = _pushed("base", 1)
    assert m.error(_pin(m, "nope", 1)).reason == "POLICY_UNKNOWN"
    m = _pushed("math", 1)
    assert m.error(_pin(m, "math", 7)).reason == "VERSION_UNKNOWN"
    m = _pushed("math", 2, retain_versions=1)  # and both hold the first until they answer
    assert m.error(_pin(m, "math", 1)).reason == "NOT_RETAINED"
    m.do(events.Leave(0, "r0", "i1"))
    m.do(events.Leave(0, "r1", "i1"))
    error = m.error(_pin(m, "math", 2))
    assert (error.reason, "no replica in contact holds math@2" in error.message) == (
        "NOT_RETAINED",
        True,
    )
    assert m.error(m.roll_back("math", 1)).reason == "NOT_RETAINED"


def test_rollback_and_pins_survive_a_restart(catalog_path: Path) -> None:
    m = _pushed("base", 2)
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    m.run_to(Phase.COMMITTED)
    for policy in ("base", "math"):
        m.answer_commits(m.roll_back(policy, 1))
    _pin(m, "math", 1)
    _pin(m, "math", 2)
    _pin(m, "math", 2, pinned=False)
    catalog = Catalog.open(catalog_path)
    catalog.apply([e for e in m.all if isinstance(e, effects.Save)])
    catalog.close()
    catalog = Catalog.open(catalog_path)
    policies = {p.name: p for p in catalog.snapshot().policies}
    catalog.close()
    assert (policies["base"].served_version, policies["base"].versions) == (1, (1,))
    assert policies["base"].last_version == 2
    assert (policies["math"].served_version, policies["math"].versions) == (1, (1, 2))
    assert policies["math"].pinned == (1,)
    assert PoolState(policies=policies).vector.adapters["math"].alias == 1
