"""What a replica still holds after the coordinator restarted."""

from __future__ import annotations

import itertools
from dataclasses import replace

from tests.unit.coordinator.decisions.machine import LOAD_FAILED, Machine, saved_versions
from weft_rl.contract.replica_report import ReplicaReport
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.transfer import TransferIds
from weft_rl.coordinator.decisions.state.values import Phase, VersionRecord, VersionState


def _restarted(m: Machine) -> Machine:
    """The same catalog, and nothing else."""
    after = Machine()
    policies = {k: replace(p, lease=None) for k, p in m.state.policies.items()}
    after.state = replace(after.state, policies=policies, fingerprint=m.state.fingerprint)
    return after.pool("r0", "r1")


def test_a_committed_version_is_rolled_forward_by_its_record() -> None:
    before = Machine().pool("r0", "r1")
    before.acquire("math")
    ticket = before.run_to(Phase.COMMITTING)
    record = saved_versions(before)[-1]
    assert record.state is VersionState.COMMITTED
    m = _restarted(before)
    m.beat("r0", staged={f"t{ticket}": record})
    (call,) = m.found(effects.CallCommit)
    assert (call.replica_id, call.version, call.content_digest) == (
        "r0",
        record.version,
        record.content_digest,
    )
    vector = m.state.replicas["r0"].vector.with_adapter(record.version)
    m.do(events.CommitAnswered(f"t{ticket}", "r0", "i1", vector, 0.0, None))
    m.beat("r0", staged={f"t{ticket}": record})  # served by now: only its bytes are left
    assert not m.found(effects.CallCommit)
    assert m.found(effects.CallDiscard)


def test_anything_else_is_discarded() -> None:
    before = Machine().pool("r0", "r1")
    before.acquire("math")
    ticket = before.run_to(Phase.STAGING)
    aborted = replace(saved_versions(before)[-1], state=VersionState.ABORTED)
    m = _restarted(before)
    m.beat("r1", staged={f"t{ticket}": aborted, "t-unheard-of": None})
    assert [c.transfer_id for c in m.found(effects.CallDiscard)] == ["t-unheard-of", f"t{ticket}"]


def test_a_transfer_under_way_is_left_alone() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    ticket = m.run_to(Phase.STAGING)
    m.beat("r0", staged={f"t{ticket}": saved_versions(m)[-1]})
    assert not m.found(effects.CallDiscard)
    assert not m.found(effects.CallCommit)


def test_a_base_that_was_superseded_is_not_rolled_forward() -> None:
    before = Machine().pool("r0", "r1")
    before.acquire("base")
    first = before.run_to(Phase.COMMITTED, "base")
    record = next(r for r in saved_versions(before) if r.state is VersionState.COMMITTED)
    before.run_to(Phase.COMMITTED, "base")
    m = _restarted(before)
    m.beat("r0", staged={f"t{first}": record})
    assert not m.found(effects.CallCommit)
    assert m.found(effects.CallDiscard)


def _left_behind(policy: str) -> tuple[Machine, int, VersionRecord]:
    """A pool whose second version of a policy was committed as the coordinator died."""
    before = Machine().pool("r0", "r1")
    before.acquire(policy)
    before.run_to(Phase.COMMITTED, policy)
    ticket = before.run_to(Phase.COMMITTING, policy)
    m = _restarted(before)
    m.ids = itertools.count(1000)
    return m, ticket, saved_versions(before)[-1]


def test_what_is_rolled_forward_waits_for_its_turn() -> None:
    m, ticket, record = _left_behind("math")
    m.acquire("code")
    push = m.run_to(Phase.STAGING, "code")
    for _ in range(2):
        m.beat("r0", staged={f"t{ticket}": record})
        assert not m.found(effects.CallCommit)
    m.stage_all(push)
    m.answer_commits(push)
    (call,) = [c for c in m.found(effects.CallCommit) if c.version == record.version]
    assert (call.transfer_id, call.replica_id) == (f"t{ticket}", "r0")
    m.begin("code", request_id="later")
    assert "r0" in {t for x in m.state.transfers.values() for t in x.occupied}
    m.do(events.CommitAnswered(f"t{ticket}", "r0", "i1", None, 0.0, LOAD_FAILED))
    m.beat("r0", staged={f"t{ticket}": record})  # refused: it is not offered again
    assert not m.found(effects.CallCommit)
    assert m.found(effects.CallDiscard)


def test_what_is_rolled_forward_does_not_overtake_a_rollback() -> None:
    m, ticket, record = _left_behind("math")
    first = replace(record, version=replace(record.version, version=1))
    m.register("r0", vector=m.state.replicas["r0"].vector.with_adapter(first.version))
    m.acquire("code")
    push = m.run_to(Phase.STAGING, "code")
    ids = TransferIds("t-back", 0, "g", "token", "secret")
    m.do(events.Rollback(next(m.ids), "math", 1, ids, m.now + 60, first))
    m.beat("r0", staged={f"t{ticket}": record})
    m.stage_all(push)
    m.answer_commits(push)
    assert [c.version for c in m.found(effects.CallSwitch)] == [first.version]
    assert not m.found(effects.CallCommit)
    vector = m.state.replicas["r0"].vector
    m.do(events.CommitAnswered("t-back", "r0", "i1", vector, 0.0, None))
    (call,) = m.found(effects.CallCommit)
    assert (call.version, call.alias) == (record.version, 1)


def test_a_base_that_was_left_behind_waits_for_the_pins_to_be_heard() -> None:
    m, ticket, record = _left_behind("base")
    base = replace(m.state.policies["base"], pinned=(1,))
    m.state = replace(m.state, policies={**m.state.policies, "base": base})
    m.beat("r0", staged={f"t{ticket}": record})
    assert not m.found(effects.CallCommit)
    replica = m.state.replicas["r0"]
    beat = events.Heartbeat(
        0,
        "r0",
        "i1",
        ReplicaReport(version_vector=replica.vector, pinned_base_versions=frozenset({1})),
    )
    m.do(replace(beat, staged={f"t{ticket}": record}))
    assert [c.replica_id for c in m.found(effects.CallCommit)] == ["r0"]
