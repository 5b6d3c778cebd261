"""Versions that lie in a replica's spill directory: restored, retired, or of no use."""

from __future__ import annotations

from tests.unit.coordinator.decisions.machine import DIGEST, LAYOUT, SPEC, Machine
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.replica_report import ReplicaReport
from weft_rl.coordinator.decisions.purposes.clone import Clone
from weft_rl.coordinator.decisions.purposes.repair import Restore
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.values import Failure, Phase, ReplicaState

MISMATCH = Failure("DIGEST_MISMATCH", "these are not its files", {})
ALL = ("base@1", "math@1", "math@2")


def _restarted(*spilled: str, **settings: float) -> Machine:
    """A pool of one that served base@1, math@1 and math@2, and came back empty."""
    m = Machine(**settings).pool("r0")
    for policy in ("base", "math", "math"):
        m.acquire(policy)
        m.run_to(Phase.COMMITTED, policy)
    m.do(events.Leave(0, "r0", "i1"))
    m.register("r0", "i2", spilled=spilled)
    return m


def _next(m: Machine) -> int:
    m.do(events.Tick())
    (ticket,) = m.answer_look_ups()
    return ticket


def test_a_whole_pool_restarted_comes_back_from_its_spill_directory() -> None:
    m = _restarted(*ALL)
    brought = []
    while m.standing("r0")[0] is not ReplicaState.READY:
        ticket = _next(m)
        (call,) = m.found(effects.CallRestore)
        brought.append((str(call.version), call.alias))
        assert (call.content_digest, call.layout_digest) == (DIGEST, LAYOUT.digest)
        assert call.adapter == (None if call.version.policy == "base" else SPEC)
        assert call.timeout_seconds == m.state.settings.clone_seconds
        _, why = m.standing("r0")
        if call.version.version == 2 or call.version.policy == "base":
            assert f"lacks {call.version}, which comes from its spill directory" in why
        m.answer_commit(ticket, "r0")
        assert isinstance(m.transfer(ticket).purpose, Restore)
        assert m.transfer(ticket).phase is Phase.COMMITTED
    assert brought == [("base@1", 0), ("math@1", 2), ("math@2", 2)]
    assert m.state.replicas["r0"].vector == m.state.vector
    m.pass_time(30)
    assert not m.look_ups()
    assert not [e for e in m.ever(effects.Announce) if e.kind == "publish_again_wanted"]


def test_a_free_peer_is_preferred_to_the_disk_and_the_disk_to_a_busy_one() -> None:
    m = Machine().pool("r0")
    m.acquire("base")
    m.run_to(Phase.COMMITTED, "base")
    m.register("r1", spilled=("base@1",))
    m.register("r2", spilled=("base@1",))
    m.do(events.Tick())
    assert [(e.replica_id, e.source_id) for e in m.look_ups()] == [("r1", "r0"), ("r2", "r2")]


def test_the_disk_is_tried_after_a_clone_failed_and_the_other_way_round() -> None:
    m = Machine().pool("r0")
    m.acquire("base")
    m.run_to(Phase.COMMITTED, "base")
    m.register("r1", spilled=("base@1",))
    clone = _next(m)
    assert isinstance(m.transfer(clone).purpose, Clone)
    m.do(events.RankGone(m.transfer(clone).group_id, 0, "a bad day"))
    m.pass_time(2)
    (restore,) = m.answer_look_ups()
    assert isinstance(m.transfer(restore).purpose, Restore)
    m.answer_commit(restore, "r1", MISMATCH)
    m.pass_time(4)
    (again,) = m.answer_look_ups()
    assert isinstance(m.transfer(again).purpose, Clone)


def test_a_corrupt_copy_is_noted_and_once_it_is_not_listed_the_owner_is_asked() -> None:
    m = _restarted("base@1", publish_again_after_seconds=3)
    m.answer_commit(_next(m), "r0", MISMATCH)
    _, why = m.standing("r0")
    assert "could not be brought yet, it is tried again: these are not its files" in why
    m.beat("r0", "i2")
    m.pass_time(4)
    asked = {e.subject for e in m.ever(effects.Announce) if e.kind == "publish_again_wanted"}
    assert asked == {"base@1", "math@2"}


def test_one_who_restored_is_cloned_from() -> None:
    m = _restarted("base@1")
    m.answer_commit(_next(m), "r0")
    m.register("r1")
    ticket = _next(m)
    assert isinstance(m.transfer(ticket).purpose, Clone)
    assert m.transfer(ticket).source == "r0"


def test_a_copy_in_memory_is_not_read_from_disk() -> None:
    m = _restarted("base@1")
    m.answer_commit(_next(m), "r0")
    report = ReplicaReport(
        version_vector=m.state.replicas["r0"].vector,
        retained_base_versions=(1,),
        dirty_reason="mixed",
        spilled_versions=frozenset({PolicyVersion("base", 1)}),
    )
    m.do(events.Heartbeat(0, "r0", "i2", report))
    m.pass_time(1.5)
    m.do(events.Heartbeat(0, "r0", "i2", report))
    _next(m)
    assert m.found(effects.CallSwitch)
    assert not m.found(effects.CallRestore)


def test_nobody_clones_from_anothers_disk() -> None:
    m = _restarted("base@1")
    m.register("r1")
    m.do(events.Tick())
    assert [(e.replica_id, e.source_id) for e in m.look_ups()] == [("r0", "r0")]


def test_retired_versions_leave_the_directory_and_those_of_another_catalog_stay() -> None:
    m = Machine(retain_versions=1).pool()
    m.register("r0", spilled=("math@1", "math@9", "code@1"))
    m.do(events.ReferenceKnown("f" * 64))
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    m.pass_time(3)
    assert not m.ever(effects.CallRetire), "math@1 is served"
    m.run_to(Phase.COMMITTED)
    m.pass_time(5)
    ordered = {str(v) for call in m.ever(effects.CallRetire) for v in call.versions}
    assert ordered == {"math@1"}
    vector = m.state.vector
    m.do(events.RetireAnswered("r0", "i1", vector))
    count = len(m.ever(effects.CallRetire))
    m.pass_time(5)
    assert len(m.ever(effects.CallRetire)) > count, "until it is not listed any more"
