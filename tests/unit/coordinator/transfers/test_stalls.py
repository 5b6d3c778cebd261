"""Members that live, owe the next step and say nothing: who is given up, and who is not."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

import pytest

from tests.unit.coordinator.machine import LAYOUT, Machine
from weft.coordinator.decisions import effects, events
from weft.coordinator.decisions.replicas.replica_state import in_contact, standing
from weft.coordinator.decisions.replicas.routes import routes
from weft.coordinator.decisions.state.progress import Activity, Watch, Word
from weft.coordinator.decisions.state.transfer import Transfer
from weft.coordinator.decisions.state.values import ContentDigest, Errand, Failure, Phase, Standing
from weft.coordinator.decisions.transfers.stalls import owed_steps, stalled

LATE = Failure("DEADLINE", "the deadline of JoinGroup passed", {})
BUCKETS = dataclasses.replace(LAYOUT, num_buckets=4)
DIGEST = ContentDigest(1, b"\1" * 8, BUCKETS.total_bytes)


def _push(phase: Phase, *replica_ids: str, **changes: object) -> tuple[Machine, int, int]:
    m = Machine().pool(*(replica_ids or ("r0", "r1", "r2")))
    policy = str(changes.pop("policy", "math"))
    m.acquire(policy)
    changes.setdefault("timeout", 600.0)
    ticket = m.begin(policy, layout=BUCKETS, **changes)
    waiter = m.await_end(ticket)
    if phase is Phase.STAGING:
        m.attend_all(ticket)
        m.prepare_all(ticket)
    return m, ticket, waiter


def _say(
    m: Machine,
    ticket: int,
    activity: Activity = Activity.WAITING,
    *,
    bucket: int = 0,
    ranks: tuple[int, ...] = (0, 1, 2, 3),
    num_verified: Mapping[int, int] | None = None,
) -> None:
    transfer = m.transfer(ticket)
    word = Word(transfer.transfer_id, activity, bucket)
    words = dict.fromkeys(ranks, word)
    heard = events.RanksHeard(transfer.group_id, words, transfer.transfer_id, num_verified or {})
    m.do(heard)


def _pass(m: Machine, ticket: int, seconds: float, **said: object) -> None:
    """Time goes by in which ranks say what they do, once a second."""
    for _ in range(int(seconds)):
        if m.transfer(ticket).uncommitted:
            _say(m, ticket, **said)  # type: ignore[arg-type]
        m.pass_time(1.0)


def _suspects(m: Machine) -> list[str]:
    return [r.replica_id for r in m.state.replicas.values() if r.suspect]


# -- who is given up -----------------------------------------------------------------------


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_a_replica_that_never_attends_fails_a_push_to_all_and_is_named(num_replicas: int) -> None:
    m, ticket, waiter = _push(Phase.FORMING, *[f"r{i}" for i in range(num_replicas)])
    group = m.transfer(ticket).group_id
    for rank in [0, *range(2, num_replicas + 1)]:
        m.do(events.RankAttends(group, rank))
    m.pass_time(9.0)
    assert m.transfer(ticket).phase is Phase.FORMING
    m.pass_time(2.0)
    error = m.error(waiter)
    assert (error.reason, error.status) == ("STALLED", "UNAVAILABLE")
    assert error.metadata["member"] == "r0"
    assert "r0 makes no progress: it was to join the group" in error.message
    assert _suspects(m) == ["r0"]


def test_the_survivors_of_stalls_go_on_in_one_new_group() -> None:
    m, ticket, _ = _push(Phase.FORMING, min_replicas=1)
    group = m.transfer(ticket).group_id
    for rank in (0, 2):
        m.do(events.RankAttends(group, rank))
    m.pass_time(11.0)
    transfer = m.transfer(ticket)
    assert (transfer.phase, transfer.targets) == (Phase.FORMING, ("r1",))
    assert transfer.lost == ("r2", "r0")
    assert len(m.ever(effects.SendReform)) == 1
    assert _suspects(m) == ["r0", "r2"]


def test_a_receiver_that_does_not_get_ready_is_given_up() -> None:
    m, ticket, _ = _push(Phase.FORMING, min_replicas=1)
    m.attend_all(ticket)
    transfer = m.transfer(ticket)
    for rank in (1, 3):
        m.do(events.RankPrepared(transfer.group_id, transfer.transfer_id, rank))
    _pass(m, ticket, 11.0, activity=Activity.ALLOCATING, ranks=(1, 3))
    assert m.transfer(ticket).targets == ("r0", "r2")
    (lost,) = [e for e in m.ever(effects.Announce) if e.kind == "replica_suspect"]
    assert "it was to get ready and has been silent for 10" in lost.message


def test_a_receiver_that_was_sent_more_than_it_reports_is_given_up() -> None:
    m, ticket, waiter = _push(Phase.STAGING)
    _say(m, ticket, num_verified={1: 2, 2: 1, 3: 2})
    _say(m, ticket, Activity.WAITING, bucket=2, ranks=(0,))
    _pass(m, ticket, 11.0, ranks=(0, 1, 3), bucket=2)
    error = m.error(waiter)
    assert (error.reason, error.metadata["member"]) == ("STALLED", "r1")
    assert "it was to verify bucket 1" in error.message
    assert "waiting for bucket 0" in error.message, "what it said last"


def test_a_receiver_that_has_everything_must_stage_it() -> None:
    m, ticket, waiter = _push(Phase.STAGING)
    _say(m, ticket, num_verified={1: 4, 2: 4, 3: 4})
    for rank in (0, 2, 3):
        m.stage(ticket, rank, DIGEST)
    m.pass_time(11.0)
    assert m.error(waiter).metadata["member"] == "r0"


def test_an_order_to_join_that_is_not_taken_in_time_is_a_stall() -> None:
    m, ticket, waiter = _push(Phase.FORMING)
    m.do(events.JoinAnswered(f"t{ticket}", "r1", LATE))
    assert m.error(waiter).metadata["member"] == "r1"
    assert m.error(waiter).reason == "STALLED"
    assert _suspects(m) == ["r1"]


# -- who is not ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "activity", "seconds"),
    [
        (Phase.STAGING, Activity.WAITING, 90),  # 1 GiB over 100 Mbit/s
        (Phase.FORMING, Activity.ALLOCATING, 60),
        (Phase.STAGING, Activity.LOADING, 30),
        (Phase.FORMING, Activity.FORMING, 20),
    ],
)
def test_one_that_says_that_it_works_may_be_slow(
    phase: Phase, activity: Activity, seconds: int
) -> None:
    m, ticket, _ = _push(phase)
    if phase is Phase.FORMING:
        m.attend_all(ticket)
    _say(m, ticket, Activity.SENDING, bucket=2, ranks=(0,))
    _pass(m, ticket, seconds, activity=activity, bucket=2)
    assert m.transfer(ticket).phase is phase
    assert not _suspects(m)


def test_one_that_waits_for_bytes_owes_nothing() -> None:
    m, ticket, _ = _push(Phase.STAGING)
    _say(m, ticket, num_verified={1: 1, 2: 1, 3: 1})
    _pass(m, ticket, 50, activity=Activity.PACKING, bucket=1, ranks=(0,))
    assert m.transfer(ticket).phase is Phase.STAGING


def test_a_rank_behind_a_stuck_relay_is_not_accused() -> None:
    """r0 forwards to r2 (gloo's tree), and hangs: both have too few buckets."""
    m, ticket, waiter = _push(Phase.STAGING)
    _say(m, ticket, num_verified={1: 1, 2: 3, 3: 1})
    _say(m, ticket, Activity.WAITING, bucket=3, ranks=(0,))
    _pass(m, ticket, 11.0, ranks=(0, 2, 3), bucket=3)
    assert m.error(waiter).metadata["member"] == "r0"
    assert _suspects(m) == ["r0"]


def test_the_time_that_the_coordinator_itself_was_stopped_does_not_count() -> None:
    m, ticket, _ = _push(Phase.FORMING)
    m.pass_time(5.0)
    m.now += 20.0
    m.do(events.Tick())
    m.pass_time(4.0)
    assert m.transfer(ticket).phase is Phase.FORMING


def test_what_was_said_of_another_transfer_or_group_does_not_count() -> None:
    m, ticket, waiter = _push(Phase.FORMING)
    group = m.transfer(ticket).group_id
    for _ in range(12):
        m.do(events.RanksHeard(group, {1: Word("another", Activity.WAITING)}))
        m.do(events.RanksHeard("another", {1: Word("", Activity.WAITING)}, "", {1: 3}))
        m.pass_time(1.0)
    assert m.error(waiter).reason == "STALLED"


# -- loading in place ----------------------------------------------------------------------


def _loading(*replica_ids: str) -> tuple[Machine, int, int]:
    m = Machine()
    for replica_id in replica_ids:
        m.register(replica_id, loads_in_place=True)
    m.do(events.ReferenceKnown("f" * 64))
    m.acquire("base")
    ticket = m.begin("base", layout=BUCKETS, timeout=100.0)
    waiter = m.await_end(ticket)
    m.attend_all(ticket)
    m.prepare_all(ticket)
    transfer = m.transfer(ticket)
    for rank, replica_id in enumerate(replica_ids, 1):
        m.do(events.RankLoadDue(transfer.group_id, transfer.transfer_id, rank))
        m.do(events.LoadAnswered(transfer.transfer_id, replica_id, None))
    return m, ticket, waiter


def test_a_push_that_loads_in_place_goes_on_with_those_that_work() -> None:
    m, ticket, _ = _loading("r0", "r1")
    _say(m, ticket, Activity.SENDING, bucket=3, ranks=(0,), num_verified={1: 1, 2: 1})
    _pass(m, ticket, 12, activity=Activity.LOADING, ranks=(2,), bucket=1)
    assert m.transfer(ticket).targets == ("r1",)
    assert standing(m.state, m.state.replicas["r0"])[0] is Standing.QUARANTINED


def test_the_last_that_load_in_place_have_until_the_deadline() -> None:
    m, ticket, waiter = _loading("r0", "r1")
    _say(m, ticket, Activity.SENDING, bucket=3, ranks=(0,), num_verified={1: 1, 2: 1})
    m.pass_time(60.0)
    assert m.transfer(ticket).phase is Phase.STAGING
    assert not _suspects(m)
    m.pass_time(60.0)
    assert m.error(waiter).reason == "DEADLINE"


def test_holding_requests_still_is_not_the_workers_step() -> None:
    m, ticket, waiter = _loading("r0")
    transfer = m.transfer(ticket)
    m.do(events.RankLoadDue(transfer.group_id, transfer.transfer_id, 1))  # told again
    _say(m, ticket, Activity.SENDING, bucket=3, ranks=(0,), num_verified={1: 1})
    steps = owed_steps(m.transfer(ticket), m.state.groups[transfer.group_id])
    assert 1 not in steps
    m.do(events.LoadAnswered(transfer.transfer_id, "r0", None))
    steps = owed_steps(m.transfer(ticket), m.state.groups[transfer.group_id])
    assert steps[1] == "verify bucket 1"
    assert not m.answered(waiter)


# -- trainers ------------------------------------------------------------------------------


def _silent_sender() -> tuple[Machine, int, int]:
    m, ticket, waiter = _push(Phase.FORMING)
    group = m.transfer(ticket).group_id
    for rank in (1, 2, 3):
        m.do(events.RankAttends(group, rank))
    return m, ticket, waiter


def test_a_trainer_that_never_attends_is_given_up_once_somebody_waits() -> None:
    m, ticket, waiter = _silent_sender()
    m.pass_time(100.0)
    assert m.transfer(ticket).phase is Phase.FORMING, "nobody waits for it"
    m.acquire("code", "t2", "s2")
    other = m.begin("code", timeout=600.0)
    m.pass_time(0.5)
    error = m.error(waiter)
    assert (error.reason, error.metadata["member"]) == ("STALLED", "t1")
    assert m.transfer(other).phase is Phase.FORMING
    assert not _suspects(m)


def test_a_trainer_has_a_minute_though_others_wait() -> None:
    m, ticket, waiter = _silent_sender()
    m.acquire("code", "t2", "s2")
    m.begin("code", timeout=600.0)
    m.pass_time(55.0)
    assert m.transfer(ticket).phase is Phase.FORMING
    m.pass_time(6.0)
    assert m.error(waiter).reason == "STALLED"


def test_a_trainer_that_gathers_may_be_slow_though_others_wait() -> None:
    m, ticket, _ = _push(Phase.STAGING)
    m.acquire("code", "t2", "s2")
    m.begin("code", timeout=600.0)
    _say(m, ticket, num_verified={1: 1, 2: 1, 3: 1})
    _pass(m, ticket, 120, activity=Activity.PACKING, bucket=1, ranks=(0,))
    assert m.transfer(ticket).phase is Phase.STAGING


def test_a_trainer_that_stops_in_the_middle_is_given_up() -> None:
    m, ticket, waiter = _push(Phase.STAGING)
    m.acquire("code", "t2", "s2")
    m.begin("code", timeout=600.0)
    _say(m, ticket, num_verified={1: 1, 2: 1, 3: 1})
    _pass(m, ticket, 62, ranks=(1, 2, 3), bucket=1)
    assert "it was to send bucket 1" in m.error(waiter).message


def test_a_push_has_an_hour_from_its_turn_whatever_it_asked_for() -> None:
    m = Machine(max_transfer_seconds=100.0).pool("r0")
    m.acquire("math")
    first = m.begin("math", timeout=5000.0)
    m.attend_all(first)
    waiter = m.await_end(first)
    m.acquire("code", "t2", "s2")
    second = m.begin("code", timeout=5000.0)
    _pass(m, first, 99, activity=Activity.ALLOCATING)
    assert m.transfer(first).phase is Phase.FORMING
    _pass(m, first, 2, activity=Activity.ALLOCATING)
    assert m.error(waiter).reason == "DEADLINE"
    assert "--max-transfer-seconds" in m.error(waiter).message
    assert m.transfer(second).phase is Phase.FORMING, "what it waited for does not count"
    assert m.transfer(second).deadline == pytest.approx(m.now + 100.0, abs=2.0)


# -- clones --------------------------------------------------------------------------------


def _clone() -> tuple[Machine, int]:
    m = Machine().pool("r0")
    m.acquire("math")
    m.run_to(Phase.COMMITTED)
    m.register("r1")
    m.pass_time(0.25)
    (ticket,) = m.answer_look_ups()
    assert m.transfer(ticket).errand is Errand.CLONE
    return m, ticket


@pytest.mark.parametrize(("rank", "member"), [(0, "r0"), (1, "r1")])
def test_a_clone_ends_when_its_source_or_its_target_stalls(rank: int, member: str) -> None:
    m, ticket = _clone()
    m.do(events.RankAttends(m.transfer(ticket).group_id, 1 - rank))
    m.pass_time(11.0)
    transfer = m.transfer(ticket)
    assert transfer.failure is not None
    assert (transfer.failure.reason, transfer.failure.metadata["member"]) == ("STALLED", member)
    assert _suspects(m) == [member]
    m.pass_time(60.0)
    assert not m.look_ups(), "no other clone from or to it"


# -- what becomes of a suspect -------------------------------------------------------------


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
    place, why = standing(m.state, m.state.replicas["r0"])
    assert place is Standing.SUSPECT
    assert why.startswith("r0 makes no progress: its workers did not take the order to join")
    assert "lacks math@1" in why
    assert [r.replica_id for r in in_contact(m.state)] == ["r1"]
    assert [(e.kind, e.subject) for e in m.ever(effects.Announce) if "suspect" in e.kind] == [
        ("replica_suspect", "r0")
    ]


def test_a_suspect_that_serves_what_the_pool_serves_stays_routed() -> None:
    m = _suspect("r0")  # the push has failed: nothing is lacking
    assert standing(m.state, m.state.replicas["r0"])[0] is Standing.SUSPECT
    assert [r.replica_id for r in routes(m.state)] == ["r0"]
    replica = m.state.replicas["r0"]
    m.do(events.Heartbeat(77, "r0", replica.incarnation, replica.vector, 0))
    answer = m.answer(77)
    assert isinstance(answer, effects.HeartbeatAnswer)
    assert answer.ready
    m = _suspect("r0", "r1")  # that push is served: it lacks the version
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
    m.pass_time(1.5)
    (call,) = _probes(m)
    assert (call.first_rank, call.group.size) == (1, 3)
    m.do(events.JoinAnswered(call.transfer_id, "r0", None))
    m.do(events.RankAttends(call.group.group_id, 1))
    m.pass_time(300.0)
    assert _suspects(m) == ["r0"]
    assert len(_probes(m)) == 1, "it was taken, and is not repeated"
    m.do(events.RankAttends(call.group.group_id, 2))
    assert not _suspects(m)
    assert call.group.group_id not in m.state.groups
    assert [r.replica_id for r in in_contact(m.state)] == ["r0", "r1"]


def test_a_probe_whose_stream_breaks_is_made_anew() -> None:
    m = _suspect("r0", "r1", num_receivers=2)
    m.pass_time(1.5)
    (call,) = _probes(m)
    m.do(events.JoinAnswered(call.transfer_id, "r0", None))
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
    assert _suspects(m) == ["r0"], "the same process has registered again"
    m.pass_time(1.5)
    m.pass_time(10.0, beats=False)
    m.register("r0", "i2")
    assert not _suspects(m)
    m.pass_time(0.25)
    assert not any(group.is_probe for group in m.state.groups.values())


def test_a_push_that_finds_suspects_alone_waits_and_says_so() -> None:
    m = _suspect("r0")
    ticket = m.begin("math", timeout=20.0)
    m.pass_time(21.0)
    error = m.error(ticket)
    assert error.reason == "POOL_EMPTY"
    assert "r0 is suspect" in error.message


# -- the rule by itself --------------------------------------------------------------------


def test_a_debt_begins_when_it_is_owed_and_any_word_puts_its_end_off() -> None:
    watch = Watch().with_debts({1: "get ready"}, 5.0)
    assert watch.silence(1, 12.0) == 7.0
    assert watch.with_debts({1: "get ready"}, 9.0) is watch
    assert watch.with_debts({1: "verify bucket 0"}, 9.0).silence(1, 12.0) == 3.0
    assert watch.heard({1: Word("t", Activity.WAITING)}, {}, 11.0).silence(1, 12.0) == 1.0
    assert watch.heard({}, {1: 3}, 11.0).silence(1, 12.0) == 1.0
    assert watch.forgiven(4.0).silence(1, 12.0) == 3.0
    assert watch.silence(2, 99.0) == 0.0


def test_ranks_that_are_staged_owe_nothing() -> None:
    m, ticket, _ = _push(Phase.STAGING)
    _say(m, ticket, num_verified={1: 4, 2: 4, 3: 4})
    for rank in (0, 1):
        m.stage(ticket, rank, DIGEST)
    transfer: Transfer = m.transfer(ticket)
    group = m.state.groups[transfer.group_id]
    assert owed_steps(transfer, group) == {2: "stage what it has", 3: "stage what it has"}
    assert stalled(transfer, group, m.now, 10.0) == []
