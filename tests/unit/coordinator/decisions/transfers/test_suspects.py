"""What becomes of a replica of which a working thread has stalled: probes, and what clears it."""

from __future__ import annotations

import itertools

from tests.unit.coordinator.decisions.machine import Machine
from tests.unit.coordinator.decisions.stalling import LATE, pass_stuck, suspects_of
from weft_rl.contract.replica_report import ReplicaWork
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.replica_state import (
    eligible_targets,
    routes,
)
from weft_rl.coordinator.decisions.state.values import Phase, ReplicaState


def _suspect(*replica_ids: str, **capabilities: object) -> Machine:
    m = Machine()
    for replica_id in replica_ids:
        m.register(replica_id, http_url=f"http://{replica_id}", **capabilities)
    m.do(events.ReferenceKnown("f" * 64))
    m.acquire("math")
    ticket = m.begin("math", min_replicas=1, timeout=600.0)
    m.do(events.JoinAnswered(f"t{ticket}", "r0", LATE))
    if len(replica_ids) > 1:
        m.attend_all(ticket)
        m.prepare_all(ticket)
        m.stage_all(ticket)
        m.answer_commits(ticket)
    return m


def _probes(m: Machine) -> list[effects.CallJoin]:
    return [call for call in m.ever(effects.CallJoin) if call.group.is_probe]


def test_a_suspect_is_shown_and_heartbeats_do_not_clear_it() -> None:
    m = _suspect("r0", "r1")
    m.pass_time(30.0)
    place, why = m.standing("r0")
    assert place is ReplicaState.SUSPECT
    assert why.startswith("r0 makes no progress: its workers did not take the order to join")
    assert "lacks math@1" in why
    assert [r.replica_id for r in eligible_targets(m.state)] == ["r1"]
    assert [(e.kind, e.subject) for e in m.ever(effects.Announce) if "suspect" in e.kind] == [
        ("replica_suspect", "r0")
    ]


def _told(m: Machine) -> effects.CallJoin:
    """Its engine takes the order to attend a probe."""
    m.do(events.Tick())
    (call,) = _probes(m)
    m.do(events.JoinAnswered(call.transfer_id, "r0", None))
    return call


def test_a_suspect_is_routed_only_once_its_engine_takes_orders_and_serves_all() -> None:
    m = _suspect("r0")  # the push has failed: nothing is lacking
    assert m.standing("r0")[0] is ReplicaState.SUSPECT
    assert routes(m.state) == []
    _told(m)
    assert [r.replica_id for r in routes(m.state)] == ["r0"]
    assert eligible_targets(m.state) == [], "what receives may hang on"
    answer = m.beat("r0")
    assert answer.ready
    m = _suspect("r0", "r1")  # that push is served: it lacks the version
    _told(m)
    assert [r.replica_id for r in routes(m.state)] == ["r1"]
    assert m.found(effects.RoutesChanged) or m.ever(effects.RoutesChanged)


def test_probes_that_are_not_taken_come_less_and_less_often() -> None:
    m = _suspect("r0", "r1")
    at = []
    for _ in range(4 * 260):
        before = len(_probes(m))
        m.pass_time(0.25)
        if len(_probes(m)) > before:
            at.append(m.now)
            m.do(events.JoinAnswered(_probes(m)[-1].transfer_id, "r0", LATE))
    waits = [round(b - a) for a, b in itertools.pairwise(at)]
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert len({call.group.group_id for call in _probes(m)}) == 1, "the same one, repeated"


def test_every_receiver_must_answer_the_probe() -> None:
    m = _suspect("r0", "r1", num_receivers=2)
    call = _told(m)
    assert (call.first_rank, call.group.size) == (1, 3)
    m.do(events.RankAttends(call.group.group_id, 1))
    m.pass_time(300.0)
    assert suspects_of(m) == ["r0"]
    assert len(_probes(m)) == 1, "it was taken, and is not repeated"
    m.do(events.RankAttends(call.group.group_id, 2))
    assert not suspects_of(m)
    assert call.group.group_id not in m.state.groups
    assert [r.replica_id for r in eligible_targets(m.state)] == ["r0", "r1"]


def test_a_probe_whose_stream_breaks_is_made_anew() -> None:
    m = _suspect("r0", "r1", num_receivers=2)
    call = _told(m)
    m.do(events.RankAttends(call.group.group_id, 1))
    m.do(events.RankGone(call.group.group_id, 1, "it broke"))
    m.pass_time(3.0)
    again = _probes(m)[-1].group
    assert again.group_id != call.group.group_id
    assert again.secret != call.group.secret
    assert again.epoch > call.group.epoch


def test_another_process_of_a_suspect_is_none() -> None:
    m = _suspect("r0", "r1")
    m.register("r0")
    assert suspects_of(m) == ["r0"], "the same process has registered again"
    m.pass_time(1.5)
    m.pass_time(10.0, beats=False)
    m.register("r0", "i2")
    assert not suspects_of(m)
    m.pass_time(0.25)
    assert not any(group.is_probe for group in m.state.groups.values())


def test_a_push_that_finds_suspects_alone_waits_and_says_so() -> None:
    m = _suspect("r0")
    ticket = m.begin("math", timeout=20.0)
    m.pass_time(21.0)
    error = m.error(ticket)
    assert error.reason == "POOL_EMPTY"
    assert "r0 is suspect" in error.message


def _hung() -> Machine:
    m = Machine()
    for replica_id in ("r0", "r1"):
        m.register(replica_id, http_url=f"http://{replica_id}")
    m.do(events.ReferenceKnown("f" * 64))
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    m.pass_time(1.0)
    return m


def _attends(m: Machine) -> None:
    call = _told(m)
    m.do(events.RankAttends(call.group.group_id, 1))


def test_a_replica_that_does_not_get_on_with_its_work_is_suspect_without_any_transfer() -> None:
    m = _hung()
    what = "its engine, weft_drop_adapter"  # an order to retire
    pass_stuck(m, "r0", what, 9.5)
    assert not suspects_of(m)
    assert [r.replica_id for r in routes(m.state)] == ["r0", "r1"]
    pass_stuck(m, "r0", what, 0.75, since=9.5)
    assert suspects_of(m) == ["r0"]
    assert [r.replica_id for r in routes(m.state)] == ["r1"]
    why = m.standing("r0")[1]
    assert "its engine, weft_drop_adapter" in why
    ticket = m.run_to(Phase.COMMITTED)
    assert m.transfer(ticket).served_by == {"r1"}


def test_a_replica_that_answers_its_probe_and_hangs_in_an_order_stays_suspect() -> None:
    m = _hung()
    m.works["r0"] = ReplicaWork("switching to math@1", 11.0)
    m.pass_time(0.25)
    _attends(m)
    m.works["r0"] = ReplicaWork("switching to math@1", 16.0)
    m.pass_time(5.0)
    assert suspects_of(m) == ["r0"]
    assert [r.replica_id for r in routes(m.state)] == ["r1"]
    del m.works["r0"]
    m.pass_time(0.25)
    assert not suspects_of(m)
    assert [r.replica_id for r in routes(m.state)] == ["r0", "r1"]


def test_a_coordinator_that_stops_again_and_again_does_not_forgive_who_hangs_for_ever() -> None:
    m = _hung()
    hung_for = 0.0
    while hung_for < 12.0:  # of which the coordinator sees as much
        pass_stuck(m, "r0", "its engine, weft_spill", 2.0, since=hung_for)
        hung_for += 2.0
        m.now += 3.0
    assert suspects_of(m) == ["r0"]


def test_work_that_gets_on_may_take_its_time() -> None:
    m = _hung()
    m.works["r0"] = ReplicaWork("its engine, weft_apply_base", 0.5)
    m.pass_time(60.0)
    assert not suspects_of(m)


def test_time_in_which_a_replica_was_not_heard_at_all_is_not_held_against_it() -> None:
    m = _hung()
    m.pass_time(5.0, beats=False)
    pass_stuck(m, "r0", "switching to math@1", 9.5, since=5.0)
    assert not suspects_of(m)
    pass_stuck(m, "r0", "switching to math@1", 1.0, since=14.5)
    assert suspects_of(m) == ["r0"]
