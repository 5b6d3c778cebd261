"""Members that live, owe the next step and say nothing: who is given up, and who is not."""

from __future__ import annotations

import pytest

from tests.unit.coordinator.decisions.machine import Machine
from tests.unit.coordinator.decisions.stalling import (
    BUCKETS,
    DIGEST,
    LATE,
    pass_saying,
    push,
    say,
    suspects_of,
)
from weft_rl.coordinator.decisions.purposes.clone import Clone
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.transfer import (
    Activity,
    GroupProgress,
    RankReport,
    Transfer,
)
from weft_rl.coordinator.decisions.state.values import Phase, ReplicaState
from weft_rl.coordinator.decisions.transfers.stalls import owed_steps, stalled

# -- who is given up -----------------------------------------------------------------------


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_a_replica_that_never_attends_fails_a_push_to_all_and_is_named(num_replicas: int) -> None:
    m, ticket, waiter = push(Phase.FORMING, *[f"r{i}" for i in range(num_replicas)])
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
    assert suspects_of(m) == ["r0"]


def test_the_survivors_of_stalls_go_on_in_one_new_group() -> None:
    m, ticket, _ = push(Phase.FORMING, min_replicas=1)
    group = m.transfer(ticket).group_id
    for rank in (0, 2):
        m.do(events.RankAttends(group, rank))
    m.pass_time(11.0)
    transfer = m.transfer(ticket)
    assert (transfer.phase, transfer.targets) == (Phase.FORMING, ("r1",))
    assert transfer.lost == ("r2", "r0")
    assert len(m.ever(effects.SendReform)) == 1
    assert suspects_of(m) == ["r0", "r2"]


def test_silence_is_counted_over_the_groups_of_a_transfer() -> None:
    m, ticket, _ = push(Phase.FORMING, min_replicas=1)
    for rank in (0, 2, 3):
        m.do(events.RankAttends(m.transfer(ticket).group_id, rank))
    m.pass_time(8.0)
    m.do(events.RankGone(m.transfer(ticket).group_id, 3, "it died"))
    for rank in (0, 2):
        m.do(events.RankAttends(m.transfer(ticket).group_id, rank))
    m.pass_time(2.5)
    assert m.transfer(ticket).targets == ("r1",)
    assert suspects_of(m) == ["r0"]


def test_who_joins_the_next_group_has_its_whole_time_again() -> None:
    m, ticket, _ = push(Phase.FORMING, min_replicas=1)
    for rank in (0, 2, 3):
        m.do(events.RankAttends(m.transfer(ticket).group_id, rank))
    m.pass_time(8.0)
    m.do(events.RankGone(m.transfer(ticket).group_id, 3, "it died"))
    m.attend_all(ticket)
    m.pass_time(9.0)
    assert m.transfer(ticket).targets == ("r0", "r1")
    assert not suspects_of(m)


def test_a_receiver_that_does_not_get_ready_is_given_up() -> None:
    m, ticket, _ = push(Phase.FORMING, min_replicas=1)
    m.attend_all(ticket)
    transfer = m.transfer(ticket)
    for rank in (1, 3):
        m.do(events.RankPrepared(transfer.group_id, transfer.transfer_id, rank))
    pass_saying(m, ticket, 11.0, activity=Activity.ALLOCATING, ranks=(1, 3))
    assert m.transfer(ticket).targets == ("r0", "r2")
    (lost,) = [e for e in m.ever(effects.Announce) if e.kind == "replica_suspect"]
    assert "it was to get ready and has been silent for 10" in lost.message


def test_a_receiver_that_was_sent_more_than_it_reports_is_given_up() -> None:
    m, ticket, waiter = push(Phase.STAGING)
    say(m, ticket, num_verified={1: 2, 2: 1, 3: 2})
    say(m, ticket, Activity.WAITING, bucket=2, ranks=(0,))
    pass_saying(m, ticket, 11.0, ranks=(0, 1, 3), bucket=2)
    error = m.error(waiter)
    assert (error.reason, error.metadata["member"]) == ("STALLED", "r1")
    assert "it was to verify bucket 1" in error.message
    assert "waiting for bucket 0" in error.message, "what it said last"


def test_a_receiver_that_has_everything_must_stage_it() -> None:
    m, ticket, waiter = push(Phase.STAGING)
    say(m, ticket, num_verified={1: 4, 2: 4, 3: 4})
    for rank in (0, 2, 3):
        m.stage(ticket, rank, DIGEST)
    m.pass_time(11.0)
    assert m.error(waiter).metadata["member"] == "r0"


def test_an_order_to_join_that_is_not_taken_in_time_is_a_stall() -> None:
    m, ticket, waiter = push(Phase.FORMING)
    m.do(events.JoinAnswered(f"t{ticket}", "r1", LATE))
    assert m.error(waiter).metadata["member"] == "r1"
    assert m.error(waiter).reason == "STALLED"
    assert suspects_of(m) == ["r1"]


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
    m, ticket, _ = push(phase)
    if phase is Phase.FORMING:
        m.attend_all(ticket)
    say(m, ticket, Activity.SENDING, bucket=2, ranks=(0,))
    pass_saying(m, ticket, seconds, activity=activity, bucket=2)
    assert m.transfer(ticket).phase is phase
    assert not suspects_of(m)


def test_one_that_waits_for_bytes_owes_nothing() -> None:
    m, ticket, _ = push(Phase.STAGING)
    say(m, ticket, num_verified={1: 1, 2: 1, 3: 1})
    pass_saying(m, ticket, 50, activity=Activity.PACKING, bucket=1, ranks=(0,))
    assert m.transfer(ticket).phase is Phase.STAGING


def test_a_rank_behind_a_stuck_relay_is_not_accused() -> None:
    """r0 forwards to r2 (gloo's tree), and hangs: both have too few buckets."""
    m, ticket, waiter = push(Phase.STAGING)
    say(m, ticket, num_verified={1: 1, 2: 3, 3: 1})
    say(m, ticket, Activity.WAITING, bucket=3, ranks=(0,))
    pass_saying(m, ticket, 11.0, ranks=(0, 2, 3), bucket=3)
    assert m.error(waiter).metadata["member"] == "r0"
    assert suspects_of(m) == ["r0"]


def test_the_time_that_the_coordinator_itself_was_stopped_does_not_count() -> None:
    m, ticket, _ = push(Phase.FORMING)
    m.pass_time(5.0)
    m.now += 20.0
    m.do(events.Tick())
    m.pass_time(4.0)
    assert m.transfer(ticket).phase is Phase.FORMING


def test_what_was_said_of_another_transfer_or_group_does_not_count() -> None:
    m, ticket, waiter = push(Phase.FORMING)
    group = m.transfer(ticket).group_id
    m.do(events.RankAttends(group, 0))
    for _ in range(12):
        m.do(events.RanksHeard(group, {1: RankReport("another", Activity.WAITING)}))
        m.do(events.RanksHeard("another", {1: RankReport("", Activity.WAITING)}, "", {1: 3}))
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
    say(m, ticket, Activity.SENDING, bucket=3, ranks=(0,), num_verified={1: 1, 2: 1})
    pass_saying(m, ticket, 12, activity=Activity.LOADING, ranks=(2,), bucket=1)
    assert m.transfer(ticket).targets == ("r1",)
    assert m.standing("r0")[0] is ReplicaState.QUARANTINED


def test_the_last_that_load_in_place_have_until_the_deadline() -> None:
    m, ticket, waiter = _loading("r0", "r1")
    say(m, ticket, Activity.SENDING, bucket=3, ranks=(0,), num_verified={1: 1, 2: 1})
    m.pass_time(60.0)
    assert m.transfer(ticket).phase is Phase.STAGING
    assert not suspects_of(m)
    m.pass_time(60.0)
    assert m.error(waiter).reason == "DEADLINE"


def test_holding_requests_still_is_not_the_workers_step() -> None:
    m, ticket, waiter = _loading("r0")
    transfer = m.transfer(ticket)
    m.do(events.RankLoadDue(transfer.group_id, transfer.transfer_id, 1))  # told again
    say(m, ticket, Activity.SENDING, bucket=3, ranks=(0,), num_verified={1: 1})
    steps = owed_steps(m.transfer(ticket), m.state.groups[transfer.group_id])
    assert 1 not in steps
    m.do(events.LoadAnswered(transfer.transfer_id, "r0", None))
    steps = owed_steps(m.transfer(ticket), m.state.groups[transfer.group_id])
    assert steps[1] == "verify bucket 1"
    assert not m.answered(waiter)


# -- trainers ------------------------------------------------------------------------------


def _silent_sender() -> tuple[Machine, int, int]:
    """It came, and has said nothing since."""
    return push(Phase.STAGING)


@pytest.mark.parametrize("attending", [(), (1, 2, 3)])
def test_a_push_that_its_trainer_never_comes_to_is_over_within_seconds(
    attending: tuple[int, ...],
) -> None:
    """It was interrupted as it began, say, and lives: nobody has to wait for that to count."""
    m, ticket, waiter = push(Phase.FORMING)
    for rank in attending:
        m.do(events.RankAttends(m.transfer(ticket).group_id, rank))
    m.pass_time(9.0)
    assert not m.answered(waiter)
    pass_saying(m, ticket, 3.0, ranks=(1, 2, 3))
    error = m.error(waiter)
    assert error.reason == "TRANSFER_ABORTED"
    assert "t1 has not come to its push" in error.message
    assert not suspects_of(m)


def test_nor_one_in_the_group_of_the_push_before() -> None:
    m, first, _ = push(Phase.STAGING)
    say(m, first, num_verified={1: 4, 2: 4, 3: 4})
    for rank in range(4):
        m.stage(first, rank, DIGEST)
    m.answer_commits(first)
    ticket = m.begin("math", layout=BUCKETS, group_id=m.transfer(first).group_id, timeout=600.0)
    waiter = m.await_end(ticket)
    assert m.transfer(ticket).group_id == m.transfer(first).group_id
    m.prepare_all(ticket)
    pass_saying(m, ticket, 12.0, ranks=(1, 2, 3))
    assert m.error(waiter).reason == "TRANSFER_ABORTED"


def test_one_word_of_it_there_is_enough_to_have_come() -> None:
    m, first, _ = push(Phase.STAGING)
    say(m, first, num_verified={1: 4, 2: 4, 3: 4})
    for rank in range(4):
        m.stage(first, rank, DIGEST)
    m.answer_commits(first)
    ticket = m.begin("math", layout=BUCKETS, group_id=m.transfer(first).group_id, timeout=600.0)
    say(m, ticket, Activity.PACKING, ranks=(0,))
    m.prepare_all(ticket)
    pass_saying(m, ticket, 50.0, ranks=(1, 2, 3))
    assert m.transfer(ticket).phase is Phase.STAGING


def test_a_trainer_that_stalls_is_given_up_once_somebody_waits() -> None:
    m, ticket, waiter = _silent_sender()
    pass_saying(m, ticket, 100, ranks=(1, 2, 3))
    assert m.transfer(ticket).phase is Phase.STAGING, "nobody waits for it"
    m.acquire("code", "t2", "s2")
    other = m.begin("code", timeout=600.0)
    m.pass_time(0.5)
    error = m.error(waiter)
    assert (error.reason, error.metadata["member"]) == ("STALLED", "t1")
    assert m.transfer(other).phase is Phase.FORMING
    assert not suspects_of(m)


def test_a_trainer_has_a_minute_though_others_wait() -> None:
    m, ticket, waiter = _silent_sender()
    m.acquire("code", "t2", "s2")
    m.begin("code", timeout=600.0)
    pass_saying(m, ticket, 55, ranks=(1, 2, 3))
    assert m.transfer(ticket).phase is Phase.STAGING
    pass_saying(m, ticket, 6, ranks=(1, 2, 3))
    assert m.error(waiter).reason == "STALLED"


def test_a_trainer_that_gathers_may_be_slow_though_others_wait() -> None:
    m, ticket, _ = push(Phase.STAGING)
    m.acquire("code", "t2", "s2")
    m.begin("code", timeout=600.0)
    say(m, ticket, num_verified={1: 1, 2: 1, 3: 1})
    pass_saying(m, ticket, 120, activity=Activity.PACKING, bucket=1, ranks=(0,))
    assert m.transfer(ticket).phase is Phase.STAGING


def test_a_trainer_that_stops_in_the_middle_is_given_up() -> None:
    m, ticket, waiter = push(Phase.STAGING)
    m.acquire("code", "t2", "s2")
    m.begin("code", timeout=600.0)
    say(m, ticket, num_verified={1: 1, 2: 1, 3: 1})
    pass_saying(m, ticket, 62, ranks=(1, 2, 3), bucket=1)
    assert "it was to send bucket 1" in m.error(waiter).message


def test_a_push_has_an_hour_from_its_turn_whatever_it_asked_for() -> None:
    m = Machine(max_transfer_seconds=100.0).pool("r0")
    m.acquire("math")
    first = m.begin("math", timeout=5000.0)
    m.attend_all(first)
    waiter = m.await_end(first)
    m.acquire("code", "t2", "s2")
    second = m.begin("code", timeout=5000.0)
    pass_saying(m, first, 99, activity=Activity.ALLOCATING)
    assert m.transfer(first).phase is Phase.FORMING
    pass_saying(m, first, 2, activity=Activity.ALLOCATING)
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
    assert isinstance(m.transfer(ticket).purpose, Clone)
    return m, ticket


@pytest.mark.parametrize(("rank", "member"), [(0, "r0"), (1, "r1")])
def test_a_clone_ends_when_its_source_or_its_target_stalls(rank: int, member: str) -> None:
    m, ticket = _clone()
    m.do(events.RankAttends(m.transfer(ticket).group_id, 1 - rank))
    m.pass_time(11.0)
    transfer = m.transfer(ticket)
    assert transfer.failure is not None
    assert (transfer.failure.reason, transfer.failure.metadata["member"]) == ("STALLED", member)
    assert suspects_of(m) == [member]
    m.pass_time(60.0)
    assert not m.look_ups(), "no other clone from or to it"


# -- the rule by itself --------------------------------------------------------------------


def test_a_debt_begins_when_it_is_owed_and_any_word_puts_its_end_off() -> None:
    progress = GroupProgress().with_owed_steps({1: "get ready"}, 5.0)
    assert progress.silence(1, 12.0) == 7.0
    assert progress.with_owed_steps({1: "get ready"}, 9.0) is progress
    assert progress.with_owed_steps({1: "verify bucket 0"}, 9.0).silence(1, 12.0) == 3.0
    assert progress.heard({1: RankReport("t", Activity.WAITING)}, {}, 11.0).silence(1, 12.0) == 1.0
    assert progress.heard({}, {1: 3}, 11.0).silence(1, 12.0) == 1.0
    assert progress.forgiven(4.0).silence(1, 12.0) == 3.0
    assert progress.silence(2, 99.0) == 0.0


def test_ranks_that_are_staged_owe_nothing() -> None:
    m, ticket, _ = push(Phase.STAGING)
    say(m, ticket, num_verified={1: 4, 2: 4, 3: 4})
    for rank in (0, 1):
        m.stage(ticket, rank, DIGEST)
    transfer: Transfer = m.transfer(ticket)
    group = m.state.groups[transfer.group_id]
    assert owed_steps(transfer, group) == {2: "stage what it has", 3: "stage what it has"}
    assert stalled(transfer, group, m.now, 10.0) == []


def test_a_sender_that_is_staged_has_sent_all() -> None:
    m, ticket, _ = push(Phase.STAGING)
    say(m, ticket, num_verified={1: 2, 2: 4, 3: 4})
    m.stage(ticket, 0, DIGEST)
    transfer: Transfer = m.transfer(ticket)
    owed = owed_steps(transfer, m.state.groups[transfer.group_id])
    assert owed == {1: "verify bucket 2", 2: "stage what it has", 3: "stage what it has"}


# -- who cannot keep up --------------------------------------------------------------------


def _slow(m: Machine, ticket: int, seconds: int, slow: int = 2) -> None:
    """r1 (rank 2) works at its first bucket and says so; the others have all that was sent."""
    num_verified = {rank: 0 if rank == slow else 2 for rank in (1, 2, 3)}
    for _ in range(seconds):
        if m.transfer(ticket).phase is Phase.STAGING:
            say(m, ticket, Activity.WAITING, bucket=2, num_verified=num_verified)
        m.pass_time(1.0)


def test_one_that_would_outlast_the_push_leaves_it() -> None:
    m, ticket, _ = push(Phase.STAGING, min_replicas=1, timeout=100.0)
    _slow(m, ticket, 20)
    assert m.transfer(ticket).phase is Phase.STAGING, "it may be slow for a while"
    _slow(m, ticket, 10)
    after = m.transfer(ticket)
    assert (after.targets, after.lost) == (("r0", "r2"), ("r1",))
    assert after.losses["r1"].reason == "TOO_SLOW"
    assert not suspects_of(m), "it works: nothing is wrong with it but its pace"
    assert m.standing("r1")[0] is not ReplicaState.LOST


@pytest.mark.parametrize("min_replicas", [0, 3])
def test_one_that_is_required_has_until_the_deadline(min_replicas: int) -> None:
    m, ticket, waiter = push(Phase.STAGING, min_replicas=min_replicas, timeout=100.0)
    _slow(m, ticket, 98)
    assert m.transfer(ticket).phase is Phase.STAGING
    _slow(m, ticket, 5)
    assert m.error(waiter).reason == "DEADLINE"


def test_one_that_is_slow_and_will_be_done_in_time_stays() -> None:
    m, ticket, _ = push(Phase.STAGING, min_replicas=1, timeout=100.0)
    for second in range(60):
        done = second // 15  # four buckets in 60 s
        verified = {1: min(4, done + 2), 2: done, 3: min(4, done + 2)}
        say(m, ticket, Activity.WAITING, bucket=min(4, done + 2), num_verified=verified)
        m.pass_time(1.0)
    assert not m.transfer(ticket).lost


def test_a_slow_sender_costs_no_receiver_its_place() -> None:
    m, ticket, waiter = push(Phase.STAGING, min_replicas=1, timeout=100.0)
    for _ in range(105):
        if not m.answered(waiter):
            say(m, ticket, Activity.PACKING, bucket=1, num_verified={1: 1, 2: 1, 3: 1})
        m.pass_time(1.0)
    assert m.error(waiter).reason == "DEADLINE"
    assert not m.transfer(ticket).lost


def test_one_that_takes_too_long_to_get_ready_leaves_the_push() -> None:
    m, ticket, _ = push(Phase.FORMING, min_replicas=1, timeout=100.0)
    m.attend_all(ticket)
    transfer = m.transfer(ticket)
    for rank in (1, 3):
        m.do(events.RankPrepared(transfer.group_id, transfer.transfer_id, rank))
    pass_saying(m, ticket, 23, activity=Activity.ALLOCATING)
    assert not m.transfer(ticket).lost
    pass_saying(m, ticket, 4, activity=Activity.ALLOCATING)
    assert m.transfer(ticket).losses["r1"].reason == "TOO_SLOW"
