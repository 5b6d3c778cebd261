"""Sleep: who may order it, what ends it, and what is true of a replica meanwhile."""

from __future__ import annotations

import pytest

from tests.unit.coordinator.decisions.machine import GONE, Machine
from weft_rl.contract.errors import (
    LeaseFencedError,
    NotFoundError,
    NotReadyError,
    RequestConflictError,
    TransferTimeoutError,
)
from weft_rl.contract.names import VersionVector
from weft_rl.contract.replica_report import Sleep
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.replica_state import (
    base_targets,
    versions_to_bring,
)
from weft_rl.coordinator.decisions.state.values import Failure, ReplicaState


def _pool() -> Machine:
    """r0 and r1 on the trainer's GPU, r2 elsewhere; the trainer holds the base's lease."""
    m = Machine()
    for name, gpu in (("r0", "a"), ("r1", "b"), ("r2", "c")):
        m.register(name, gpu_uuids=(gpu,), can_sleep=name != "r2")
    m.pool()
    m.acquire("base")
    return m


def _sleep(m: Machine, *gpus: str, seconds: float = 60.0, level: int = 1) -> int:
    ticket = next(m.ids)
    m.do(
        events.SleepRollouts(
            ticket=ticket,
            fencing_token=m.tokens.get("base", 0),
            session_id="s1",
            gpu_uuids=frozenset(gpus or ("a", "b")),
            level=level,
            aborts=False,
            timeout_seconds=5.0,
            answer_by=m.now + seconds,
        )
    )
    return ticket


def _wake(m: Machine, seconds: float = 60.0) -> int:
    ticket = next(m.ids)
    m.do(events.WakeRollouts(ticket, m.tokens["base"], "s1", m.now + seconds))
    return ticket


def _asleep(m: Machine, *names: str) -> None:
    for name in names:
        m.do(events.SleepAnswered(name, "i1", Sleep("t1"), None))


def _awake(m: Machine, *names: str) -> None:
    for name in names:
        m.do(events.WakeAnswered(name, "i1", None))


def _slept() -> Machine:
    m = _pool()
    ticket = _sleep(m)
    _asleep(m, "r0", "r1")
    assert m.answer(ticket) == effects.SleepAnswer(("r0", "r1"))
    return m


def _called(m: Machine, kind: type[effects.CallSleep | effects.CallWake]) -> list[str]:
    return [call.replica_id for call in m.ever(kind)]


def test_those_that_share_a_gpu_sleep_and_are_routed_to_no_more_from_the_order_on() -> None:
    m = _pool()
    ticket = _sleep(m)
    assert _called(m, effects.CallSleep) == ["r0", "r1"]
    assert not m.state.replicas["r0"].routed
    assert m.state.replicas["r2"].routed
    assert m.standing("r0") == (ReplicaState.ASLEEP, "for trainer t1, once its requests have ended")
    _asleep(m, "r0")
    assert not m.answered(ticket)
    _asleep(m, "r1")
    assert m.answer(ticket) == effects.SleepAnswer(("r0", "r1"))
    assert m.standing("r0") == (ReplicaState.ASLEEP, "for trainer t1")
    kinds = [a.kind for a in m.ever(effects.Announce) if a.subject == "r0"]
    assert kinds[-1] is effects.EventKind.REPLICA_ASLEEP

    ticket = _wake(m)
    assert m.standing("r1") == (ReplicaState.ASLEEP, "it is being woken")
    assert not m.answered(ticket)
    _awake(m, "r0", "r1")
    assert m.answer(ticket) == effects.SleepAnswer(("r0", "r1"))
    assert m.state.replicas["r1"].routed


def test_nobody_shares_the_gpu_and_nothing_happens() -> None:
    m = _pool()
    assert m.answer(_sleep(m, "elsewhere")) == effects.SleepAnswer(())
    assert m.answer(_wake(m)) == effects.SleepAnswer(())
    assert not m.ever(effects.CallSleep)


@pytest.mark.parametrize("level", [1, 2])
def test_weights_that_could_not_be_brought_back_are_not_discarded(level: int) -> None:
    m = Machine()
    m.register("r0", gpu_uuids=("a",), can_sleep=True)
    m.register("r1", gpu_uuids=("b",), can_sleep=True, base_refusal="its reload mixes them")
    m.pool()
    m.acquire("base")
    ticket = _sleep(m, "a", "b", level=level)
    if level == 1:
        assert set(m.state.sleeps) == {"r0", "r1"}
        return
    error = m.error(ticket)
    assert (error.reason, error.metadata) == ("SLEEP_DISABLED", {"member": "r1"})
    assert "its reload mixes them" in error.message
    assert not m.state.sleeps


def test_one_that_cannot_sleep_is_refused_before_any_other_does() -> None:
    m = _pool()
    error = m.error(_sleep(m, "a", "c"))
    assert (type(error), error.reason) == (NotReadyError, "SLEEP_DISABLED")
    assert error.metadata == {"member": "r2"}
    assert not m.state.sleeps


def test_only_the_owner_of_the_base_orders_it() -> None:
    m = _pool()
    m.tokens["base"] += 1
    assert isinstance(m.error(_sleep(m)), LeaseFencedError)
    assert isinstance(m.error(_wake(m)), LeaseFencedError)


def test_the_end_of_the_lease_wakes_them() -> None:
    m = _slept()
    m.pass_time(30.0)
    assert not m.ever(effects.CallWake)
    m.pass_time(12.0, renews=False)
    assert _called(m, effects.CallWake) == ["r0", "r1"]
    _awake(m, "r0", "r1")
    assert m.standing("r0")[0] is ReplicaState.READY


def test_a_lease_given_back_wakes_them_too_and_the_next_owner_starts_anew() -> None:
    m = _slept()
    m.do(events.ReleasePolicy(0, "base", m.tokens["base"], "s1"))
    m.acquire("base", trainer="t1", session="s2")
    m.pass_time(1.0)
    assert _called(m, effects.CallWake) == ["r0", "r1"]


def test_an_order_that_is_refused_is_told_and_not_repeated() -> None:
    m = _pool()
    ticket = _sleep(m)
    _asleep(m, "r0")
    busy = Failure("DEADLINE", "3 requests have not ended", {"member": "r1"})
    m.do(events.SleepAnswered("r1", "i1", None, busy))
    error = m.error(ticket)
    assert isinstance(error, TransferTimeoutError)
    assert error.message == "3 requests have not ended; asleep until they are woken: r0"
    assert error.metadata == {"member": "r1", "asleep": "r0"}
    assert not m.state.replicas["r1"].routed  # nobody knows whether a call came too late
    m.pass_time(1.0)
    assert _called(m, effects.CallWake) == ["r1"]
    _awake(m, "r1")
    m.pass_time(10.0)
    assert _called(m, effects.CallSleep) == ["r0", "r1"]
    assert m.standing("r1")[0] is ReplicaState.READY
    assert m.standing("r0")[0] is ReplicaState.ASLEEP


def test_whoever_refuses_first_the_others_are_still_to_sleep_and_are_named() -> None:
    m = _pool()
    ticket = _sleep(m)
    m.do(events.SleepAnswered("r0", "i1", None, Failure("LOAD_FAILED", "no", {"member": "r0"})))
    assert m.error(ticket).metadata == {"member": "r0", "asleep": "r1"}  # its call is on its way
    _asleep(m, "r1")
    ticket = _wake(m)
    _awake(m, "r1", "r0")
    assert m.answer(ticket) == effects.SleepAnswer(("r1",))


def test_one_that_does_not_answer_in_time_leaves_the_others_asleep_and_named() -> None:
    m = _pool()
    ticket = _sleep(m, seconds=9.0)
    _asleep(m, "r1")
    m.pass_time(10.0)
    error = m.error(ticket)
    assert error.metadata == {"member": "r0", "asleep": "r1"}
    assert error.message.endswith("whether r0 sleep; asleep until they are woken: r1")


def test_one_that_is_woken_meanwhile_leaves_the_others_asleep_and_named() -> None:
    m = _pool()
    ticket = _sleep(m)
    m.do(events.WakeReplica(next(m.ids), "r1", m.now + 9.0))
    assert m.error(ticket).metadata == {"asleep": "r0"}


def test_one_that_refuses_alone_names_nobody() -> None:
    m = _pool()
    ticket = _sleep(m, "a")
    m.do(events.SleepAnswered("r0", "i1", None, Failure("LOAD_FAILED", "no", {"member": "r0"})))
    assert (m.error(ticket).message, m.error(ticket).metadata) == ("no", {"member": "r0"})


def test_a_call_that_is_lost_is_made_again_until_the_deadline() -> None:
    m = _pool()
    ticket = _sleep(m, "a", seconds=9.0)
    m.do(events.SleepAnswered("r0", "i1", None, GONE))
    m.pass_time(3.0)
    assert _called(m, effects.CallSleep) == ["r0", "r0"]
    m.pass_time(7.0)
    assert m.error(ticket).metadata == {"member": "r0"}
    m.pass_time(1.0)
    assert _called(m, effects.CallWake) == ["r0"]  # which ends its wait for requests
    _asleep(m, "r0")  # too late: it is to serve
    m.pass_time(1.0)
    assert _called(m, effects.CallWake) == ["r0", "r0"]


def test_the_end_of_the_lease_wakes_one_that_still_waits_for_its_requests() -> None:
    m = _pool()
    _sleep(m, "a", seconds=600.0)
    m.do(events.ReleasePolicy(0, "base", m.tokens["base"], "s1"))
    m.pass_time(1.0)
    assert _called(m, effects.CallWake) == ["r0"]
    woken = Failure("EPOCH_FENCED", "told to wake before it slept", {"member": "r0"})
    m.do(events.SleepAnswered("r0", "i1", None, woken))
    _awake(m, "r0")
    assert m.standing("r0")[0] is ReplicaState.READY
    m.pass_time(10.0)
    assert _called(m, effects.CallWake) == ["r0"]


def test_one_that_is_lost_or_leaves_is_not_waited_for() -> None:
    m = _pool()
    ticket = _sleep(m)
    _asleep(m, "r0")
    m.do(events.Leave(0, "r1", "i1"))
    assert m.answer(ticket) == effects.SleepAnswer(("r0",))
    m.pass_time(1.0)
    assert list(m.state.sleeps) == ["r0"]


def test_a_new_process_of_a_sleeping_replica_is_put_to_sleep() -> None:
    m = _slept()
    m.pass_time(5.0, beats=False)
    m.register("r0", "i2", gpu_uuids=("a",), can_sleep=True)
    assert m.standing("r0")[0] is ReplicaState.ASLEEP
    m.pass_time(1.0)
    assert _called(m, effects.CallSleep) == ["r0", "r1", "r0"]


def test_a_call_that_waits_is_told_that_the_opposite_was_ordered() -> None:
    m = _pool()
    ticket = _sleep(m)
    _wake(m)
    assert isinstance(m.error(ticket), RequestConflictError)


def test_a_new_order_puts_woken_weights_to_sleep_again() -> None:
    m = _slept()
    m.state.replicas["r0"]
    m.beat("r0", version_vector=VersionVector(), sleep=Sleep("t1", weights_awake=True))
    assert m.standing("r0")[1] == "for trainer t1, its weights awake"
    ticket = _sleep(m)
    assert _called(m, effects.CallSleep) == ["r0", "r1", "r0", "r1"]
    assert not m.answered(ticket)


def test_a_push_reaches_those_that_sleep_and_nothing_else_is_brought_to_them() -> None:
    m = _slept()
    assert [r.replica_id for r in base_targets(m.state)] == ["r0", "r1", "r2"]
    policies = {**m.state.policies}
    m.acquire("math")
    assert m.state.policies.keys() == {*policies, "math"}
    assert versions_to_bring(m.state, m.state.replicas["r0"]) == []


def test_an_operator_s_order_outlasts_leases_and_trainers() -> None:
    m = _pool()
    ticket = next(m.ids)
    m.do(events.SleepReplica(ticket, "r0", True, 1.0, m.now + 9.0))
    assert m.ever(effects.CallSleep)[0].aborts
    m.do(events.SleepAnswered("r0", "i1", Sleep(""), None))
    assert m.answer(ticket) == effects.SleepAnswer(("r0",))
    assert m.standing("r0") == (ReplicaState.ASLEEP, "by an operator")
    again = _sleep(m)
    _asleep(m, "r1")
    assert m.answer(again) == effects.SleepAnswer(("r0", "r1"))
    woken = _wake(m)
    _awake(m, "r1")
    assert m.answer(woken) == effects.SleepAnswer(("r1",))
    m.pass_time(30.0, renews=False)
    assert m.standing("r0")[0] is ReplicaState.ASLEEP
    ticket = next(m.ids)
    m.do(events.WakeReplica(ticket, "r0", m.now + 9.0))
    _awake(m, "r0")
    assert m.answer(ticket) == effects.SleepAnswer(("r0",))
    assert m.standing("r0")[0] is ReplicaState.READY


def test_orders_for_nobody_are_refused() -> None:
    m = _pool()
    m.do(events.SleepReplica(91, "r9", True, 1.0, m.now))
    m.do(events.WakeReplica(92, "r9", m.now))
    assert {type(m.error(ticket)) for ticket in (91, 92)} == {NotFoundError}


def test_a_restarted_coordinator_takes_the_sleep_for_given_while_its_trainer_comes_back() -> None:
    m = Machine()
    more = {"gpu_uuids": ("a",), "can_sleep": True, "asleep": Sleep("t1")}
    m.register("r0", **more, last_coordinator_id="the former one")
    m.pool()
    m.pass_time(5.0)
    m.acquire("base", trainer="t1")
    m.pass_time(30.0)
    assert not m.ever(effects.CallWake)
    assert m.standing("r0") == (ReplicaState.ASLEEP, "for trainer t1")
    _wake(m)
    assert _called(m, effects.CallWake) == ["r0"]


def test_it_wakes_what_nobody_comes_back_for_and_what_it_has_not_ordered() -> None:
    m = Machine()
    m.state = type(m.state)(settings=m.state.settings, coordinator_id="this one")
    asleep = {"can_sleep": True, "asleep": Sleep("t1")}
    m.register("r0", **asleep, last_coordinator_id="the former one")
    m.register("r1", **asleep, last_coordinator_id="this one")
    m.pool()
    m.pass_time(1.0)
    assert _called(m, effects.CallWake) == ["r1"]
    m.pass_time(12.0)
    assert _called(m, effects.CallWake) == ["r1", "r0"]


def test_a_call_that_was_cancelled_leaves_the_order() -> None:
    m = _pool()
    ticket = _sleep(m)
    m.do(events.CallerGone(ticket))
    assert not m.state.sleep_waits
    assert sorted(m.state.sleeps) == ["r0", "r1"]


def test_a_replica_that_drains_does_so_asleep() -> None:
    m = _slept()
    m.do(events.Drain(0, "r0", 60.0, ""))
    assert m.standing("r0")[0] is ReplicaState.DRAINING


def test_the_level_that_is_ordered_is_what_each_process_is_told() -> None:
    m = _pool()
    _sleep(m, "a", level=2)
    m.do(events.SleepReplica(next(m.ids), "r1", False, 5.0, m.now + 60, 2))
    assert [call.level for call in m.ever(effects.CallSleep)] == [2, 2]


def test_a_level_that_a_replica_tells_of_is_kept_for_its_next_process() -> None:
    m = Machine()
    more = {"gpu_uuids": ("a",), "can_sleep": True}
    m.register("r0", **more, asleep=Sleep("", level=2), last_coordinator_id="the former one")
    m.pool()
    m.pass_time(5.0, beats=False)
    m.register("r0", "i2", **more)
    m.pass_time(1.0)
    assert [(call.incarnation, call.level) for call in m.ever(effects.CallSleep)] == [("i2", 2)]


def test_one_that_wakes_without_weights_is_brought_a_base_and_routed_to_after() -> None:
    m = _slept()
    m.do(events.WakeAnswered("r1", "i1", None))  # of a wake that was on its way
    ticket = _wake(m)
    m.do(events.WakeAnswered("r0", "i1", None, "its weights were discarded as it slept"))
    _awake(m, "r1")
    assert m.answer(ticket) == effects.SleepAnswer(("r0", "r1"))
    state, why = m.standing("r0")
    assert state is ReplicaState.QUARANTINED
    assert why.startswith("its weights were discarded as it slept")
    assert not m.state.replicas["r0"].routed
    assert m.state.replicas["r1"].routed


def test_a_wake_that_fails_for_good_is_answered_at_once() -> None:
    m = _slept()
    ticket = _wake(m)
    m.do(events.WakeAnswered("r0", "i1", Failure("LOAD_FAILED", "no memory", {"member": "r0"})))
    assert m.error(ticket).message.startswith("no memory")
