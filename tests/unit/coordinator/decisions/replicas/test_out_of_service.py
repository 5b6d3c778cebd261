"""Cordon and drain: who is out of service, and what still goes to whom."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.unit.coordinator.decisions.machine import Machine
from weft_rl.contract.replica_report import DrainNote, OutOfService, ReplicaReport
from weft_rl.coordinator.decisions.purposes.clone import Clone
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.replica_state import routes
from weft_rl.coordinator.decisions.state.values import Phase, ReplicaState
from weft_rl.coordinator.runtime.catalog.database import Catalog


def _take_out(m: Machine, replica_id: str, reason: str = "", *, no_pushes: bool = False) -> int:
    ticket = next(m.ids)
    m.do(events.Cordon(ticket, replica_id, reason, no_pushes))
    return ticket


def _uncordon(m: Machine, replica_id: str) -> int:
    ticket = next(m.ids)
    m.do(events.Uncordon(ticket, replica_id))
    return ticket


def _drain(m: Machine, replica_id: str, seconds: float = 60.0, reason: str = "") -> int:
    ticket = next(m.ids)
    m.do(events.Drain(ticket, replica_id, seconds, reason))
    return ticket


def _beat(m: Machine, replica_id: str, note: DrainNote | None = None) -> effects.HeartbeatAnswer:
    answer = m.beat(
        replica_id,
        retained_base_versions=m.state.replicas[replica_id].retained,
        drain=note,
        refusing=m.ordered_refusal(replica_id),
        order_number=m.state.order_number,
    )
    assert isinstance(answer, effects.HeartbeatAnswer)
    return answer


def _targets(m: Machine, policy: str = "math") -> tuple[str, ...]:
    return m.transfer(m.run_to(Phase.COMMITTED, policy)).targets


def _kinds(m: Machine) -> list[tuple[str, str]]:
    return [(e.kind, e.subject) for e in m.ever(effects.Announce)]


def test_a_cordoned_replica_receives_and_is_not_ready() -> None:
    m = Machine().pool("r0", "r1")
    m.acquire("math")
    m.answer(_take_out(m, "r1", "new disk"))
    assert m.standing("r1") == (ReplicaState.OUT_OF_SERVICE, "by an operator: new disk")
    assert not _beat(m, "r1").ready
    assert not _beat(m, "r1").out_of_service.refusal
    assert _targets(m) == ("r0", "r1")
    m.answer(_uncordon(m, "r1"))
    assert _beat(m, "r1").ready
    assert ("replica_out_of_service", "r1") in _kinds(m)
    assert _kinds(m)[-1] == ("replica_ready", "r1")


def test_a_cordoned_replica_says_what_it_lacks() -> None:
    m = Machine().pool("r0")
    m.acquire("base")
    m.run_to(Phase.COMMITTED, "base")
    m.register("r1")
    _take_out(m, "r1")
    assert m.standing("r1") == (
        ReplicaState.OUT_OF_SERVICE,
        "by an operator; lacks base@1, which it is sent when it is put back into service",
    )


def test_a_cordon_is_of_the_name_and_outlives_both_sides(catalog_path: Path) -> None:
    m = Machine().pool("r0", "r1")
    _take_out(m, "r0", "a")
    _take_out(m, "r0", "b")
    _take_out(m, "r1")
    _uncordon(m, "r1")
    m.do(events.Leave(0, "r0", "i1"))
    m.register("r0", "i2")
    assert m.standing("r0") == (ReplicaState.OUT_OF_SERVICE, "by an operator: b")
    catalog = Catalog.open(catalog_path)
    catalog.apply([e for e in m.all if isinstance(e, effects.Save)])
    catalog.close()
    catalog = Catalog.open(catalog_path)
    assert catalog.snapshot().out_of_service == {"r0": OutOfService("b")}
    catalog.close()


def test_orders_for_unknown_replicas() -> None:
    m = Machine().pool("r0")
    for ticket in (
        _take_out(m, "r9"),
        _uncordon(m, "r9"),
        _drain(m, "r9"),
    ):
        assert m.error(ticket).reason == "REPLICA_UNKNOWN"
    _take_out(m, "r0")
    m.do(events.Leave(0, "r0", "i1"))
    m.answer(_uncordon(m, "r0"))  # a name that is gone can be forgotten
    assert m.error(_uncordon(m, "r0")).reason == "REPLICA_UNKNOWN"


def test_nothing_goes_to_a_replica_that_an_operator_keeps_out() -> None:
    m = Machine().pool("r0", "r1")
    m.acquire("base")
    m.acquire("math")
    m.answer(_take_out(m, "r1", "answers nonsense", no_pushes=True))
    m.answer(_take_out(m, "r1", "does not loosen it"))
    assert m.standing("r1") == (
        ReplicaState.OUT_OF_SERVICE,
        "by an operator: answers nonsense; it has not said yet that it refuses requests",
    )
    assert _beat(m, "r1").out_of_service.refusal.endswith("answers nonsense")
    assert m.standing("r1") == (ReplicaState.OUT_OF_SERVICE, "by an operator: answers nonsense")
    assert _targets(m, "base") == _targets(m) == ("r0",)
    m.pass_time(1.0)
    assert m.look_ups() == []
    _uncordon(m, "r1")
    m.pass_time(1.0)
    assert [(e.replica_id, e.source_id) for e in m.look_ups()] == [("r1", "r0")]


def test_nothing_is_cloned_from_a_replica_that_an_operator_keeps_out() -> None:
    m = Machine().pool("r0")
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    _take_out(m, "r0", "why", no_pushes=True)
    m.register("r1")
    m.pass_time(1.0)
    assert m.look_ups() == []
    assert "no replica in contact holds" in m.standing("r1")[1]
    _uncordon(m, "r0")
    m.pass_time(1.0)
    (ticket,) = m.answer_look_ups()
    assert isinstance(m.transfer(ticket).purpose, Clone)


def _seconds_left(m: Machine, replica_id: str, note: DrainNote | None = None) -> float:
    drain = _beat(m, replica_id, note).drain
    assert drain is not None
    return drain.time_left_seconds


def test_a_draining_replica_gets_nothing_new() -> None:
    m = Machine().pool("r0", "r1")
    m.acquire("math")
    m.acquire("base")
    m.answer(_drain(m, "r1", 60.0, "old card"))
    assert m.standing("r1") == (ReplicaState.DRAINING, "by an operator: old card")
    assert _targets(m) == _targets(m, "base") == ("r0",)
    m.pass_time(1.0)
    assert m.look_ups() == []
    answer = _beat(m, "r1")
    assert (answer.ready, answer.in_transfer) == (False, False)
    assert answer.drain == DrainNote(pytest.approx(59.0), "by an operator: old card")
    assert ("replica_draining", "r1") in _kinds(m)


def test_a_transfer_under_way_goes_on_at_a_draining_replica() -> None:
    m = Machine().pool("r0", "r1")
    m.acquire("math")
    push = m.run_to(Phase.STAGING)
    _drain(m, "r1")
    assert _beat(m, "r1").in_transfer
    m.stage_all(push)
    assert _beat(m, "r1").in_transfer
    m.answer_commits(push)
    assert m.transfer(push).served_by == {"r0", "r1"}
    assert not _beat(m, "r1").in_transfer


def test_a_drain_only_becomes_shorter() -> None:
    m = Machine().pool("r0")
    for seconds, left in ((60.0, 60.0), (600.0, 60.0), (10.0, 10.0)):
        _drain(m, "r0", seconds)
        assert _seconds_left(m, "r0") == pytest.approx(left)
    for seconds in (-1.0, float("nan"), 100_000.0):
        assert m.error(_drain(m, "r0", seconds)).reason == "INVALID_REQUEST"


def test_a_replica_that_drains_of_its_own_accord() -> None:
    m = Machine().pool("r0", "r1")
    note = DrainNote(30.0, "told to stop")
    assert _seconds_left(m, "r1", note) == pytest.approx(30.0)
    assert m.standing("r1") == (ReplicaState.DRAINING, "told to stop")
    m.register("r1")  # the same process: the drain goes on
    assert m.standing("r1")[0] is ReplicaState.DRAINING
    m.do(events.Leave(0, "r1", "i1"))
    assert "r1" not in m.state.replicas
    m.register("r1", "i2")
    assert m.standing("r1")[0] is ReplicaState.READY


def test_a_restarted_coordinator_hears_of_a_drain_when_the_replica_registers() -> None:
    m = Machine()
    ticket = next(m.ids)
    m.register("r0")
    known = m.state.replicas["r0"]
    m.do(
        events.Register(
            ticket=ticket,
            replica_id="r0",
            incarnation="i1",
            address="r0:1",
            http_url="",
            model_name="tiny",
            capabilities=known.capabilities,
            report=ReplicaReport(drain=DrainNote(5.0, "told to stop")),
        )
    )
    assert m.standing("r0")[0] is ReplicaState.DRAINING


def test_a_draining_replica_is_the_last_choice_for_a_clone() -> None:
    m = Machine().pool("r0", "r1")
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    _drain(m, "r0")
    m.register("r2")
    m.pass_time(0.5)
    assert [e.source_id for e in m.look_ups()] == ["r1"]
    m.do(events.Leave(0, "r1", "i1"))
    m.answer_look_ups()
    m.pass_time(0.5)
    (ticket,) = m.answer_look_ups()
    assert m.transfer(ticket).source == "r0"
    assert _beat(m, "r0").in_transfer


# -- READY means that it answers -------------------------------------------------


def _refuse_calls(m: Machine) -> list[tuple[str, str, int]]:
    return [
        (c.replica_id, c.out_of_service.refusal if c.out_of_service else "", c.order_number)
        for c in m.ever(effects.CallRefuse)
    ]


def _says(m: Machine, replica_id: str, refusing: str, number: int) -> None:
    m.do(events.RefuseAnswered(replica_id, "i1", refusing, number))


def _routed(m: Machine) -> list[str]:
    return [replica.replica_id for replica in routes(m.state)]


def _open_pool() -> Machine:
    m = Machine()
    for name in ("r0", "r1"):
        m.register(name, http_url=f"http://{name}")
    m.do(events.ReferenceKnown("f" * 64))
    return m


def test_a_usual_start_needs_no_heartbeat_more() -> None:
    m = _open_pool()
    assert _routed(m) == ["r0", "r1"]  # with Register already


def test_one_that_is_put_back_is_ready_once_it_has_said_that_it_is_open() -> None:
    m = _open_pool()
    why = "an operator took this replica out of service: nonsense"
    m.answer(_take_out(m, "r1", "nonsense", no_pushes=True))
    assert _refuse_calls(m) == [("r1", why, 1)]
    assert m.standing("r1")[1].endswith("it has not said yet that it refuses requests")
    _says(m, "r1", why, 1)
    assert m.standing("r1") == (ReplicaState.OUT_OF_SERVICE, "by an operator: nonsense")
    answer = m.answer(_uncordon(m, "r1"))
    assert _refuse_calls(m)[1:] == [("r1", "", 2)]
    assert isinstance(answer, effects.UncordonAnswer)
    assert answer.state is ReplicaState.PENDING_WEIGHTS
    assert why in answer.state_reason
    assert _routed(m) == ["r0"]
    _says(m, "r1", "", 2)
    assert m.standing("r1") == (ReplicaState.READY, "")
    assert _routed(m) == ["r0", "r1"]


def test_an_order_that_was_not_heard_is_repeated_with_the_next_heartbeat() -> None:
    m = _open_pool()
    _take_out(m, "r1", "nonsense", no_pushes=True)
    _uncordon(m, "r1")  # before the replica has heard of anything: two calls race
    assert m.standing("r1")[0] is ReplicaState.PENDING_WEIGHTS
    _says(m, "r1", "", 0)
    assert m.standing("r1")[0] is ReplicaState.PENDING_WEIGHTS
    answer = _beat(m, "r1")
    assert (answer.out_of_service, answer.order_number, answer.ready) == (None, 2, True)
    assert m.standing("r1")[0] is ReplicaState.READY


@pytest.mark.parametrize("number", [0, 1, 3, 2**53])
def test_what_is_late_or_was_never_ordered_does_not_count(number: int) -> None:
    m = _open_pool()
    _take_out(m, "r1", "nonsense", no_pushes=True)
    _uncordon(m, "r1")
    _says(m, "r1", "", 2)
    vector = m.state.replicas["r1"].vector
    m.beat("r1", version_vector=vector, refusing="late", order_number=number)
    assert m.standing("r1")[0] is ReplicaState.READY
    m.do(events.RefuseAnswered("r1", "i0", "another process", 2))
    assert m.standing("r1")[0] is ReplicaState.READY


def test_one_that_refuses_by_itself_is_not_ready() -> None:
    m = _open_pool()
    vector = m.state.replicas["r1"].vector
    m.beat("r1", version_vector=vector, refusing="bare names are refused")
    assert m.standing("r1") == (
        ReplicaState.PENDING_WEIGHTS,
        "it has not said yet that it takes requests, it said last: bare names are refused",
    )
    assert _routed(m) == ["r0"]
    assert _beat(m, "r1").ready
    assert _routed(m) == ["r0", "r1"]


def test_a_process_that_registers_while_it_refuses_is_told_with_the_answer() -> None:
    m = _open_pool()
    _take_out(m, "r0", "nonsense", no_pushes=True)
    answer = m.answer(m.register("r0"))
    assert (answer.out_of_service.refusal[-8:], answer.order_number) == ("nonsense", 1)
    again = _registered(m, "r1")
    report = dataclasses.replace(again.report, refusing="an operator ordered it")
    m.do(dataclasses.replace(again, report=report))
    assert m.standing("r1")[0] is ReplicaState.PENDING_WEIGHTS
    answer = m.answer(900)
    assert answer.out_of_service is None


def _registered(m: Machine, replica_id: str) -> events.Register:
    replica = m.state.replicas[replica_id]
    return events.Register(
        ticket=900,
        replica_id=replica_id,
        incarnation=replica.incarnation,
        address=replica.address,
        http_url=replica.http_url,
        model_name=replica.model_name,
        capabilities=replica.capabilities,
        report=ReplicaReport(version_vector=replica.vector),
    )


def test_a_cordon_is_told_at_once_and_refuses_nothing() -> None:
    m = _open_pool()
    _take_out(m, "r1")
    assert _refuse_calls(m) == [("r1", "", 0)]
    answer = m.answer(_uncordon(m, "r1"))
    assert answer == effects.UncordonAnswer(ReplicaState.READY, "")
    assert _refuse_calls(m)[1:] == [("r1", "", 0)]


def test_what_no_operator_keeps_out_of_service_no_operator_puts_back() -> None:
    m = _open_pool()
    vector = m.state.replicas["r0"].vector
    m.beat("r0", version_vector=vector, dirty_reason="the engine broke")
    error = m.error(_uncordon(m, "r0"))
    assert (error.reason, "the engine broke" in error.message) == ("NOT_TAKEN_OUT_OF_SERVICE", True)
    _drain(m, "r1", reason="old card")
    assert m.error(_uncordon(m, "r1")).reason == "NOT_TAKEN_OUT_OF_SERVICE"
    _take_out(m, "r1")  # the name may come back: the order goes
    answer = m.answer(_uncordon(m, "r1"))
    assert answer.state is ReplicaState.DRAINING
    assert not m.state.out_of_service
