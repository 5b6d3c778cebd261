"""Replicas with mixed weights, or an alias that stands elsewhere, are put right."""

from __future__ import annotations

from tests.unit.coordinator.decisions.machine import DIRTY, Machine
from tests.unit.coordinator.decisions.recovery.clones import (
    BASE_1,
    GONE_FOR_GOOD,
    next_clone,
    serving_pool,
)
from weft_rl.contract.names import AdapterVersions, VersionVector
from weft_rl.coordinator.decisions.purposes.repair import Restore
from weft_rl.coordinator.decisions.state import effects
from weft_rl.coordinator.decisions.state.values import Phase, ReplicaState


def test_a_dirty_replica_is_repaired_by_a_clone() -> None:
    m = Machine().pool("r0", "r1")
    m.acquire("base")
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    ticket = m.run_to(Phase.COMMITTING, "base")
    m.answer_commits(ticket, r1=DIRTY)
    clone = next_clone(m)
    assert m.transfer(clone).policy_version == BASE_1
    assert m.standing("r1")[0] is ReplicaState.QUARANTINED
    m.finish(clone)
    assert m.standing("r1") == (ReplicaState.READY, "")


def test_a_dirty_replica_is_repaired_from_its_own_copy() -> None:
    """The load of a second copy of what it serves broke: it has the first."""
    m = Machine().pool("r0")
    m.acquire("base")
    m.run_to(Phase.COMMITTED, "base")
    m.now += 5
    m.beat("r0", ticket=9, retained_base_versions=(1,), dirty_reason="a layer burned")
    assert m.standing("r0") == (ReplicaState.QUARANTINED, "a layer burned")
    ticket = next_clone(m)
    assert isinstance(m.transfer(ticket).purpose, Restore)
    (call,) = m.found(effects.CallSwitch)
    assert (call.replica_id, call.version) == ("r0", BASE_1)
    m.answer_commit(ticket, "r0")
    assert m.standing("r0") == (ReplicaState.READY, "")


def test_a_dirty_pool_without_a_copy_says_so() -> None:
    m = Machine().pool("r0")
    m.acquire("base")
    ticket = m.run_to(Phase.COMMITTING, "base")
    m.answer_commits(ticket, r0=DIRTY)
    assert m.standing("r0") == (
        ReplicaState.QUARANTINED,
        f"the engine broke; it needs base@1, {GONE_FOR_GOOD}",
    )


def test_an_alias_that_stands_elsewhere_is_put_right() -> None:
    m = serving_pool()
    vector = VersionVector(
        1, {"math": AdapterVersions((1, 2), 1), "code": AdapterVersions((1,), 1)}
    )
    m.register("r1", vector=vector)
    ticket = next_clone(m)
    assert isinstance(m.transfer(ticket).purpose, Restore)
    m.answer_commit(ticket, "r1")
    assert m.standing("r1")[0] is ReplicaState.READY
