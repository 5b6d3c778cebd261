"""Replicas that are told to switch, or to load, and do not get on with it."""

from __future__ import annotations

import pytest

from tests.unit.coordinator.decisions.machine import Machine
from tests.unit.coordinator.decisions.stalling import pass_stuck, suspects_of
from weft_rl.contract.replica_report import ReplicaWork
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.replica_state import routes
from weft_rl.coordinator.decisions.state.values import Phase

#: ``PoolSettings.stall_seconds``.
STALL = 10.0


def _pool(*replica_ids: str, **capabilities: object) -> Machine:
    m = Machine()
    for replica_id in replica_ids:
        m.register(replica_id, http_url=f"http://{replica_id}", **capabilities)
    m.do(events.ReferenceKnown("f" * 64))
    for policy in ("base", "math", "code"):
        m.acquire(policy)
    return m


def _committing(m: Machine, policy: str = "math", **changes: object) -> tuple[int, int]:
    """A push that all have switched to but r0."""
    changes.setdefault("timeout", 600.0)
    ticket = m.run_to(Phase.COMMITTING, policy, **changes)
    waiter = m.await_end(ticket)
    for replica_id in m.transfer(ticket).targets:
        if replica_id != "r0":
            m.answer_commit(ticket, replica_id)
    return ticket, waiter


def _routed(m: Machine) -> list[str]:
    return [replica.replica_id for replica in routes(m.state)]


@pytest.mark.parametrize("policy", ["math", "base"])
@pytest.mark.parametrize("min_replicas", [0, 1])
def test_a_push_ends_with_who_serves_it(policy: str, min_replicas: int) -> None:
    m = _pool("r0", "r1", "r2")
    ticket, waiter = _committing(m, policy, min_replicas=min_replicas)
    m.pass_time(STALL - 1.0)
    assert m.transfer(ticket).phase is Phase.COMMITTING
    m.pass_time(1.25)
    assert m.answered(waiter)
    assert m.transfer(ticket).failure is None
    assert m.transfer(ticket).served_by == {"r1", "r2"}
    refusal = m.transfer(ticket).refusals["r0"]
    assert refusal.reason == "STALLED"
    assert f"it was to switch to {policy}@1 and has been silent for 10" in refusal.message
    assert suspects_of(m) == ["r0"]
    assert _routed(m) == ["r1", "r2"]


@pytest.mark.parametrize("policy", ["math", "base"])
def test_a_push_to_one_replica_ends_and_says_that_nobody_serves_it(policy: str) -> None:
    m = _pool("r0")
    _, waiter = _committing(m, policy)
    m.pass_time(STALL + 0.5)
    error = m.error(waiter)
    assert (error.reason, error.metadata["cause"]) == ("LOAD_FAILED", "STALLED")
    assert error.metadata["withdrawn"] == "false", "it may serve it yet"
    assert suspects_of(m) == ["r0"]
    assert _routed(m) == []


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_no_other_push_waits_longer_than_that(num_replicas: int) -> None:
    names = [f"r{i}" for i in range(num_replicas)]
    m = _pool(*names)
    _committing(m)
    m.pass_time(1.0)
    other = m.begin("code", timeout=20.0)
    assert m.transfer(other).phase is Phase.WAITING
    m.pass_time(STALL - 0.5)
    if num_replicas > 1:
        assert m.transfer(other).phase is Phase.FORMING
        assert m.transfer(other).targets == ("r1", "r2")
    else:
        m.pass_time(12.0)
        assert m.error(other).reason == "POOL_EMPTY"
        assert "r0 is suspect" in m.error(other).message


def test_one_that_gets_on_may_take_as_long_as_a_commit_may() -> None:
    m = _pool("r0", "r1")
    ticket, waiter = _committing(m, "base")
    m.works["r0"] = ReplicaWork("its engine, weft_apply_base", 0.4)
    m.pass_time(90.0)
    assert m.transfer(ticket).phase is Phase.COMMITTING
    del m.works["r0"]  # it is done, and its answer is on its way
    m.pass_time(STALL - 2.0)
    m.answer_commit(ticket, "r0")
    assert m.answered(waiter)
    assert m.transfer(ticket).failure is None
    assert m.transfer(ticket).served_by == {"r0", "r1"}
    assert not suspects_of(m)


def test_one_that_says_that_it_is_at_it_and_does_not_get_on_is_given_up() -> None:
    m = _pool("r0", "r1")
    ticket, _ = _committing(m)
    m.works["r0"] = ReplicaWork("its engine, weft_load_adapter", 0.1)
    m.pass_time(5.0)
    pass_stuck(m, "r0", "its engine, weft_load_adapter", STALL - 0.5)
    assert m.transfer(ticket).phase is Phase.COMMITTING
    pass_stuck(m, "r0", "its engine, weft_load_adapter", 1.0, since=STALL - 0.5)
    assert m.transfer(ticket).served_by == {"r1"}
    assert "(its engine, weft_load_adapter)" in m.transfer(ticket).refusals["r0"].message


def test_work_that_was_begun_before_the_order_does_not_count_against_it() -> None:
    m = _pool("r0", "r1")
    m.works["r0"] = ReplicaWork("its engine, weft_spill", 8.0)
    m.pass_time(0.25)
    ticket, _ = _committing(m)
    del m.works["r0"]
    m.pass_time(STALL - 1.0)
    assert m.transfer(ticket).phase is Phase.COMMITTING


def test_the_time_that_the_coordinator_was_stopped_is_not_counted() -> None:
    m = _pool("r0", "r1")
    ticket, _ = _committing(m)
    m.pass_time(5.0)
    m.now += 30.0
    m.pass_time(STALL - 1.0)
    assert m.transfer(ticket).phase is Phase.COMMITTING
    assert not suspects_of(m)


def _is_cleared(m: Machine) -> None:
    m.do(events.Tick())
    call = [c for c in m.ever(effects.CallJoin) if c.group.is_probe][-1]
    m.do(events.JoinAnswered(call.transfer_id, "r0", None))
    m.do(events.RankAttends(call.group.group_id, 1))


def test_a_late_answer_counts_and_its_replica_is_routed_once_it_has_answered_a_probe() -> None:
    m = _pool("r0", "r1")
    ticket, _ = _committing(m)
    m.pass_time(STALL + 1.0)
    m.answer_commit(ticket, "r0")
    assert str(m.state.replicas["r0"].vector) == str(m.state.vector)
    m.pass_time(5.0)
    assert _routed(m) == ["r1"], "it has not answered"
    _is_cleared(m)
    assert _routed(m) == ["r0", "r1"]


def test_the_only_replica_serves_what_it_answers_late() -> None:
    m = _pool("r0")
    ticket, _ = _committing(m)
    m.pass_time(STALL + 1.0)
    assert m.state.unserved
    m.answer_commit(ticket, "r0")
    m.answer_discard(ticket, "r0")
    assert not m.state.unserved
    assert m.state.policies["math"].served_version == 1
    _is_cleared(m)
    assert _routed(m) == ["r0"]


def test_the_only_replica_that_comes_back_without_it_has_it_withdrawn() -> None:
    m = _pool("r0")
    ticket, _ = _committing(m)
    m.pass_time(STALL + 1.0)
    m.answer_discard(ticket, "r0")
    assert m.state.policies["math"].served_version == 0
    _is_cleared(m)
    assert _routed(m) == ["r0"]
    assert m.transfer(m.run_to(Phase.COMMITTED)).served_by == {"r0"}


def test_one_that_comes_back_without_it_is_brought_it() -> None:
    m = _pool("r0", "r1")
    ticket, _ = _committing(m)
    m.pass_time(STALL + 1.0)
    m.answer_discard(ticket, "r0")
    _is_cleared(m)
    m.pass_time(1.0)
    (clone,) = m.answer_look_ups()
    m.finish(clone)
    assert _routed(m) == ["r0", "r1"]


def test_a_rollback_does_not_wait_for_it() -> None:
    m = _pool("r0", "r1")
    for _ in range(2):
        m.run_to(Phase.COMMITTED)
    ticket = m.roll_back("math", 1)
    m.answer_commit(ticket, "r1")
    m.pass_time(STALL + 0.5)
    answer = m.answer(ticket)
    assert answer.replica_ids == ("r1",)
    assert suspects_of(m) == ["r0"]


def test_a_clone_to_it_ends_and_keeps_nobody_waiting() -> None:
    m = _pool("r1")
    m.run_to(Phase.COMMITTED)
    m.register("r0", http_url="http://r0")
    m.pass_time(1.0)
    (clone,) = m.answer_look_ups()
    m.attend_all(clone)
    m.prepare_all(clone)
    m.stage_all(clone)
    assert m.transfer(clone).phase is Phase.COMMITTING
    m.pass_time(STALL + 0.5)
    assert m.transfer(clone).phase is Phase.ABORTED
    assert suspects_of(m) == ["r0"]
    _is_cleared(m)
    m.pass_time(1.0)
    assert m.answer_look_ups(), "it is tried again"


def test_one_that_does_not_pause_to_load_in_place_is_given_up() -> None:
    m = _pool("r0", "r1", loads_in_place=True)
    ticket = m.run_to(Phase.STAGING, "base", min_replicas=1, timeout=600.0)
    transfer = m.transfer(ticket)
    for rank in (1, 2):
        m.do(events.RankLoadDue(transfer.group_id, transfer.transfer_id, rank))
    m.do(events.LoadAnswered(transfer.transfer_id, "r1", None))
    m.pass_time(STALL - 1.0)
    assert m.transfer(ticket).targets == ("r0", "r1")
    m.pass_time(1.5)
    assert m.transfer(ticket).targets == ("r1",)
    assert "it was to pause generation" in m.transfer(ticket).losses["r0"].message
    assert suspects_of(m) == ["r0"]


def test_one_that_is_lost_is_not_waited_for_either() -> None:
    m = _pool("r0", "r1")
    ticket, _ = _committing(m)
    m.pass_time(5.0, beats=False)
    m.beat("r1")
    m.pass_time(1.5, beats=False)
    assert m.transfer(ticket).refusals["r0"].reason == "PEER_GONE"
    assert m.transfer(ticket).served_by == {"r1"}
