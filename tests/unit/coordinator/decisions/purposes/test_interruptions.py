"""Clones that pushes end, those that go before pushes, and those of replicas out of service."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.coordinator.decisions.machine import (
    LAYOUT,
    LOAD_FAILED,
    Machine,
)
from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.purposes.clone import Clone
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.values import Phase, ReplicaState
from weft_rl.coordinator.decisions.transfers.purpose import SLOW_COMMIT_SECONDS

LARGE = replace(LAYOUT, num_buckets=8)


def _served(**settings: float) -> Machine:
    """A pool of one that serves base@1 and math@1."""
    m = Machine(**settings).pool("r0")
    for policy in ("base", "math"):
        m.acquire(policy)
        m.run_to(Phase.COMMITTED, policy)
    return m


def _joining(m: Machine, name: str = "r1") -> int:
    """The clone of the base to a replica that has just come."""
    m.register(name)
    m.do(events.Tick())
    (clone,) = m.answer_look_ups(layout=LARGE)
    assert m.transfer(clone).phase is Phase.FORMING
    return clone


def _stage_some(m: Machine, clone: int) -> None:
    m.attend_all(clone)
    m.prepare_all(clone)
    assert m.transfer(clone).phase is Phase.STAGING


def _end(m: Machine, push: int) -> None:
    if not m.state.groups[m.transfer(push).group_id].complete:
        m.attend_all(push)
    m.prepare_all(push)
    m.stage_all(push)
    m.answer_commits(push)


@pytest.mark.parametrize("far", ["forming", "staging"])
def test_a_push_ends_a_clone_that_is_not_committed_and_takes_its_target_along(far: str) -> None:
    m = _served()
    clone = _joining(m)
    group = m.transfer(clone).group_id
    if far == "staging":
        _stage_some(m, clone)
    push = m.begin("math")
    assert m.transfer(push).targets == ("r0", "r1")
    assert group not in m.state.groups
    assert group in [e.group_id for e in m.ever(effects.DropGroup)]
    assert not m.ever(effects.CallDiscard), "what was verified is kept"
    assert not [e for e in m.ever(effects.SendAbort) if e.transfer_id == f"t{clone}"]
    assert (m.transfer(clone).phase, m.transfer(clone).occupied) == (Phase.WAITING, ())


def test_a_clone_goes_on_after_the_push_from_what_was_verified() -> None:
    m = _served()
    clone = _joining(m)
    _stage_some(m, clone)
    first = m.state.groups[m.transfer(clone).group_id]
    _end(m, m.begin("math"))
    transfer = m.transfer(clone)
    assert transfer.phase is Phase.FORMING
    second = m.state.groups[transfer.group_id]
    assert second.group_id != first.group_id
    assert second.secret != first.secret
    assert second.epoch > first.epoch
    (send,), (join,) = m.found(effects.CallSend), m.found(effects.CallJoin)
    assert (send.transfer_id, join.transfer_id) == (f"t{clone}", f"t{clone}")
    assert send.nonce == transfer.ids.nonce, "the buckets' trailers are the same"
    m.do(events.RankGone(first.group_id, 1, "of the group that was ended"))
    m.attend_all(clone)
    m.do(events.RankPrepared(second.group_id, f"t{clone}", 1, 5))
    (start,) = m.found(effects.SendStart)
    assert start.first_bucket == 5
    m.stage_all(clone)
    m.answer_commits(clone)
    assert m.standing("r1")[0] is ReplicaState.READY


def test_a_clone_that_was_ended_three_times_goes_next() -> None:
    m = _served()
    m.acquire("code")
    clone = _joining(m)
    for _ in range(3):
        _stage_some(m, clone)
        _end(m, m.begin("math"))
    _stage_some(m, clone)
    push = m.begin("math")
    assert m.transfer(clone).phase is Phase.STAGING
    assert m.transfer(push).phase is Phase.WAITING
    m.stage_all(clone)
    assert m.transfer(clone).phase is Phase.COMMITTING
    assert m.transfer(push).targets == ("r0",), "its source is free, its target gets it later"


def test_a_clone_that_never_had_its_turn_goes_next_after_a_minute() -> None:
    m = _served(stall_seconds=1e9)
    m.acquire("code")
    m.register("r1")
    m.do(events.Tick())
    push = m.run_to(Phase.STAGING, "math")
    (clone,) = m.answer_look_ups(layout=LARGE)
    m.pass_time(30)
    following = m.begin("code", timeout=600)
    m.stage_all(push)
    m.answer_commits(push)
    assert m.transfer(following).phase is Phase.FORMING, "pushes go first"
    m.pass_time(31)
    last = m.begin("math", timeout=600)
    _end(m, following)
    assert m.transfer(clone).phase is Phase.FORMING
    assert m.transfer(last).phase is Phase.WAITING
    assert m.transfer(last).waits_for == "its turn"


def test_nobody_waits_for_a_slow_answer_to_the_commit_of_a_clone() -> None:
    m = _served()
    clone = _joining(m)
    _stage_some(m, clone)
    group = m.transfer(clone).group_id
    m.stage_all(clone)
    assert m.transfer(clone).phase is Phase.COMMITTING
    assert m.transfer(clone).occupied == ("r1",), "its source is free"
    assert group not in m.state.groups
    push = m.begin("math")
    assert m.transfer(push).targets == ("r0",)
    assert m.transfer(push).purpose.required == {"r0"}
    _end(m, push)
    assert m.transfer(push).phase is Phase.COMMITTED
    m.register("r2")
    m.do(events.Tick())
    assert [e.source_id for e in m.look_ups()] == ["r0"], "others are brought what they lack"
    m.answer_commits(clone)
    assert m.transfer(clone).phase is Phase.COMMITTED


@pytest.mark.parametrize("slow", [False, True])
def test_a_push_waits_a_moment_for_a_ready_replica_that_commits_a_further_version(
    slow: bool,
) -> None:
    """It lacks an older version that is kept, which takes nothing from being ready."""
    m = _served()
    _end(m, m.begin("math"))
    m.register("r1", vector=replace(m.state.replicas["r0"].vector))
    vector = m.state.replicas["r1"].vector.without_adapter(PolicyVersion("math", 1))
    m.register("r1", vector=vector)
    m.do(events.Tick())
    (clone,) = m.answer_look_ups()
    assert m.standing("r1")[0] is ReplicaState.READY
    m.attend_all(clone)
    m.prepare_all(clone)
    m.stage_all(clone)
    push = m.begin("math")
    assert m.transfer(push).phase is Phase.WAITING
    if slow:
        m.pass_time(SLOW_COMMIT_SECONDS + 1)
        assert m.transfer(push).targets == ("r0",)
    else:
        m.answer_commits(clone)
        assert m.transfer(push).targets == ("r0", "r1")


def test_the_loss_of_a_replica_that_was_joining_does_not_fail_a_push_to_all() -> None:
    m = _served()
    _joining(m)
    push = m.begin("math")
    m.attend_all(push)
    m.prepare_all(push)
    m.do(events.Leave(0, "r1", "i1"))
    assert m.transfer(push).targets == ("r0",)
    assert m.transfer(push).lost == ("r1",)


def test_what_a_joining_replica_has_no_room_for_does_not_fail_a_push_to_all() -> None:
    m = _served()
    _joining(m)
    push = m.begin("math")
    m.attend_all(push)
    transfer = m.transfer(push)
    m.do(events.RankFailed(transfer.group_id, transfer.transfer_id, 2, "STAGING_FULL", "no room"))
    assert m.transfer(push).targets == ("r0",)
    assert m.transfer(push).phase is Phase.FORMING


def test_the_loss_of_a_ready_replica_fails_a_push_to_all() -> None:
    m = _served()
    _joining(m)
    push = m.begin("math")
    m.attend_all(push)
    m.prepare_all(push)
    m.do(events.Leave(0, "r0", "i1"))
    assert m.transfer(push).phase is Phase.ABORTED


def test_where_nobody_is_ready_all_that_take_part_are_required() -> None:
    m = _served()
    m.do(events.Leave(0, "r0", "i1"))
    m.register("r1")
    m.register("r2")
    push = m.begin("math")
    assert m.transfer(push).purpose.required == {"r1", "r2"}


def test_a_quorum_waits_for_replicas_that_are_catching_up() -> None:
    m = _served()
    clone = _joining(m)
    _stage_some(m, clone)
    m.stage_all(clone)
    push = m.begin("math", min_replicas=2)
    assert m.transfer(push).waits_for == "replicas that are catching up"
    m.answer_commits(clone)
    assert m.transfer(push).targets == ("r0", "r1")


def test_a_rollback_ends_clones_too() -> None:
    m = _served()
    _end(m, m.begin("math"))
    clone = _joining(m)
    m.roll_back("math", 1)
    assert [e.replica_id for e in m.found(effects.CallSwitch)] == ["r0"]
    assert m.transfer(clone).phase is Phase.WAITING


def test_a_replica_is_not_ready_while_an_order_that_a_rollback_overtook_is_under_way() -> None:
    m = _served()
    _end(m, m.begin("math"))
    vector = m.state.replicas["r0"].vector.without_adapter(PolicyVersion("math", 2))
    m.register("r1", vector=vector.with_adapter(PolicyVersion("math", 1)))
    m.do(events.Tick())
    (clone,) = m.answer_look_ups()
    m.attend_all(clone)
    m.prepare_all(clone)
    m.stage_all(clone)
    assert m.transfer(clone).phase is Phase.COMMITTING
    m.roll_back("math", 1)
    assert [e.replica_id for e in m.found(effects.CallSwitch)] == ["r0"]
    assert m.standing("r1")[0] is ReplicaState.PENDING_WEIGHTS, (
        "it may still be on its way to math@2"
    )
    vector = m.state.replicas["r1"].vector.with_adapter(PolicyVersion("math", 2))
    m.do(events.CommitAnswered(f"t{clone}", "r1", "i1", vector, 0.0, None))
    m.pass_time(0.5)
    assert ("r1", PolicyVersion("math", 1)) in [(e.replica_id, e.version) for e in m.look_ups()]


def test_a_replica_that_loads_a_clone_in_place_is_not_ready_whatever_it_said() -> None:
    """A heartbeat that was on its way made it seem to lack what it serves."""
    m = Machine().pool("r0")
    m.acquire("base")
    m.run_to(Phase.COMMITTED, "base")
    m.register("r1", loads_in_place=True)
    m.do(events.Tick())
    (clone,) = m.answer_look_ups(layout=LARGE)
    _stage_some(m, clone)
    m.do(events.RankLoadDue(m.transfer(clone).group_id, f"t{clone}", 1))
    m.beat(
        "r1", ticket=77, version_vector=m.state.vector, retained_base_versions=(1,), dirty_reason=""
    )
    answer = m.answer(77)
    assert not answer.ready
    assert m.transfer(clone).phase is Phase.STAGING


def test_what_goes_on_is_not_what_the_pool_served_before() -> None:
    m = _served()
    clone = _joining(m)
    _stage_some(m, clone)
    push = m.begin("base")
    m.attend_all(push)
    m.prepare_all(push)
    m.stage_all(push)
    m.answer_commit(push, "r0")
    m.answer_commit(push, "r1", LOAD_FAILED)
    assert f"t{clone}" not in m.state.transfers
    discards = [(e.replica_id, e.transfer_id) for e in m.ever(effects.CallDiscard)]
    assert ("r1", f"t{clone}") in discards


@pytest.mark.parametrize("name", ["r0", "r1"])
def test_an_order_without_pushes_ends_clones_from_and_to_a_replica_at_once(name: str) -> None:
    m = _served()
    clone = _joining(m)
    _stage_some(m, clone)
    m.do(events.Cordon(0, name, "it answers nonsense", no_pushes=True))
    assert m.transfer(clone).phase is Phase.ABORTED
    assert not [t for t in m.state.transfers.values() if t.occupied]
    assert [e.replica_id for e in m.found(effects.CallDiscard)] == ["r1"]


@pytest.mark.parametrize("order", ["cordon", "drain"])
@pytest.mark.parametrize("name", ["r0", "r1"])
def test_cordon_and_drain_end_clones_to_a_replica_alone(order: str, name: str) -> None:
    m = _served()
    clone = _joining(m)
    _stage_some(m, clone)
    if order == "cordon":
        m.do(events.Cordon(0, name))
    else:
        m.do(events.Drain(0, name, 60.0, ""))
    ended = name == "r1"
    assert m.transfer(clone).phase is (Phase.ABORTED if ended else Phase.STAGING)
    m.pass_time(5)
    busy = [t for t in m.state.transfers.values() if isinstance(t.purpose, Clone)]
    assert bool(busy) is not ended
    if ended:
        assert not m.look_ups(), "nothing else is brought to it"


def test_a_cordoned_replica_is_sent_pushes_and_what_it_lacks_once_it_is_put_back() -> None:
    m = _served()
    m.register("r1")
    m.do(events.Cordon(0, "r1"))
    _end(m, m.begin("math"))
    assert m.state.replicas["r1"].vector.adapters["math"].alias == 2
    m.do(events.Uncordon(0, "r1"))
    m.do(events.Tick())
    assert [str(e.version) for e in m.look_ups()] == ["base@1"]


def test_joiners_are_planned_for_between_pushes_that_fail() -> None:
    m = _served()
    push = m.run_to(Phase.STAGING)
    m.register("r1")
    m.do(events.RankFailed(m.transfer(push).group_id, f"t{push}", 0, "INTERNAL", "out of memory"))
    assert [e.replica_id for e in m.look_ups()] == ["r1"]
