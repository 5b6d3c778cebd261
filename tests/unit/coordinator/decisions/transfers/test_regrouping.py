"""Going on without a lost replica, as far as the trainer allows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.coordinator.decisions.machine import DIGEST, GONE, Machine
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.replica_state import eligible_targets, explain_state
from weft_rl.coordinator.decisions.state.values import Phase, ReplicaState
from weft_rl.coordinator.messages.wire import group_to_proto, transfer_to_proto


def _staging(**changes: int) -> tuple[Machine, int]:
    m = Machine().pool("r0", "r1", "r2")
    m.acquire("math")
    return m, m.run_to(Phase.STAGING, **changes)


def _lose(m: Machine, ticket: int, rank: int) -> None:
    m.do(events.RankGone(m.transfer(ticket).group_id, rank, "its stream broke"))


def test_survivors_get_a_new_group_and_go_on_from_the_oldest_missing_bucket() -> None:
    m, ticket = _staging(min_replicas=2)
    before = m.transfer(ticket)
    _lose(m, ticket, 2)
    after = m.transfer(ticket)
    assert (after.phase, after.targets, after.lost) == (Phase.FORMING, ("r0", "r2"), ("r1",))
    assert after.epoch == before.epoch + 1
    assert m.found(effects.SaveEpoch)[0].epoch == after.epoch
    (reform,) = m.found(effects.SendReform)
    assert (reform.group_id, reform.renewed.group_id) == (before.group_id, after.group_id)
    kinds = [type(e) for e in m.last]
    assert kinds.index(effects.SendReform) < kinds.index(effects.DropGroup)
    assert [(c.replica_id, c.first_rank) for c in m.found(effects.CallJoin)] == [
        ("r0", 1),
        ("r2", 2),
    ]
    m.attend_all(ticket)
    assert m.found(effects.SendPrepare)
    m.do(events.RankPrepared(after.group_id, after.transfer_id, 1, 1))
    m.do(events.RankPrepared(after.group_id, after.transfer_id, 2, 0))
    (start,) = m.found(effects.SendStart)
    assert (start.first_bucket, start.num_receivers) == (0, 2)
    m.stage_all(ticket)
    m.answer_commits(ticket)
    assert m.transfer(ticket).phase is Phase.COMMITTED
    assert m.transfer(ticket).served_by == {"r0", "r2"}


def test_those_that_have_everything_start_at_the_end() -> None:
    m, ticket = _staging(min_replicas=1)
    _lose(m, ticket, 1)
    m.attend_all(ticket)
    transfer = m.transfer(ticket)
    for rank in (1, 2):
        m.do(events.RankPrepared(transfer.group_id, transfer.transfer_id, rank, 99))
    assert m.found(effects.SendStart)[0].first_bucket == transfer.layout.num_buckets


def test_secrets_of_further_groups_are_new_and_unguessable() -> None:
    m, ticket = _staging(min_replicas=1)
    before = m.transfer(ticket)
    groups = [m.state.groups[before.group_id]]
    for _ in range(2):
        _lose(m, ticket, 1)
        groups.append(m.state.groups[m.transfer(ticket).group_id])
    secrets = {group.secret for group in groups}
    assert len(secrets) == 3
    assert sum(len(secret) == 64 for secret in secrets) == 2
    assert (groups[1].group_id, groups[1].secret) == before.ids.group(1)
    stranger = replace(before.ids, secret="a guess")
    assert groups[1].secret != stranger.group(1)[1], "names alone do not give it"


def test_no_secret_is_shown_or_sent() -> None:
    m, ticket = _staging(min_replicas=1)
    groups = [m.state.groups[m.transfer(ticket).group_id]]
    _lose(m, ticket, 1)
    groups.append(m.state.groups[m.transfer(ticket).group_id])
    transfer = m.transfer(ticket)
    told = [repr(effect) for effect in (*m.ever(effects.CallJoin), *m.ever(effects.SendReform))]
    shown = [*map(repr, groups), repr(transfer), *told]
    sent = [group_to_proto(g, [rank]) for g in groups for rank in range(g.size)]
    assert len(told) > 3
    for secret in (transfer.ids.secret, *(group.secret for group in groups)):
        assert not any(secret in text for text in (*shown, *map(str, sent)))


@pytest.mark.parametrize(("min_replicas", "rank"), [(0, 1), (3, 1), (1, 0)])
def test_require_all_too_few_left_or_the_sender_gone_fails_the_push(
    min_replicas: int, rank: int
) -> None:
    m, ticket = _staging(min_replicas=min_replicas)
    waiter = m.await_end(ticket)
    _lose(m, ticket, rank)
    assert m.transfer(ticket).phase is Phase.ABORTED
    assert m.error(waiter).reason == "PEER_GONE"


def test_a_late_answer_of_one_that_was_lost_changes_nothing() -> None:
    m, ticket = _staging(min_replicas=2)
    _lose(m, ticket, 2)
    m.do(events.JoinAnswered(f"t{ticket}", "r1", GONE))
    assert m.transfer(ticket).targets == ("r0", "r2")
    m.do(events.RankGone("g-old", 1, "late"))
    assert m.transfer(ticket).phase is Phase.FORMING


def test_a_replica_that_cannot_be_told_to_join_is_lost() -> None:
    m = Machine().pool("r0", "r1")
    m.acquire("math")
    ticket = m.begin(min_replicas=1)
    m.do(events.JoinAnswered(f"t{ticket}", "r0", GONE))
    assert m.transfer(ticket).targets == ("r1",)


def test_silence_loses_a_replica_of_a_transfer_under_way() -> None:
    m, ticket = _staging(min_replicas=1)
    m.pass_time(30, beats=False)
    assert m.transfer(ticket).phase is Phase.ABORTED  # all three fell silent
    assert len(m.transfer(ticket).lost) == 2


def test_a_lost_replica_is_no_target_until_it_is_heard_again() -> None:
    m, ticket = _staging(min_replicas=2)
    _lose(m, ticket, 2)
    replica = m.state.replicas["r1"]
    assert explain_state(m.state, replica)[0] is ReplicaState.LOST
    assert [r.replica_id for r in eligible_targets(m.state)] == ["r0", "r2"]
    m.beat("r1")
    assert [r.replica_id for r in eligible_targets(m.state)] == ["r0", "r1", "r2"]


def test_no_lost_replica_is_told_to_commit() -> None:
    m, ticket = _staging(min_replicas=1)
    _lose(m, ticket, 1)
    m.attend_all(ticket)
    m.prepare_all(ticket)
    m.stage_all(ticket)
    assert {c.replica_id for c in m.ever(effects.CallCommit)} == {"r1", "r2"}
    m.answer_commits(ticket)
    assert m.standing("r0")[0] is ReplicaState.LOST


# -- whoever remains -------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["STAGING_FULL", "INTERNAL", "DIGEST_MISMATCH", "UNSUPPORTED"])
@pytest.mark.parametrize("phase", [Phase.FORMING, Phase.STAGING])
def test_a_receiver_that_fails_by_itself_leaves_the_push(reason: str, phase: Phase) -> None:
    m = Machine().pool("r0", "r1", "r2")
    m.acquire("math")
    ticket = m.begin(min_replicas=1)
    m.attend_all(ticket)
    if phase is Phase.STAGING:
        m.prepare_all(ticket)
    before = m.transfer(ticket)
    m.do(events.RankFailed(before.group_id, before.transfer_id, 2, reason, "the reason"))
    after = m.transfer(ticket)
    assert (after.phase, after.targets, after.lost) == (Phase.FORMING, ("r0", "r2"), ("r1",))
    assert after.losses["r1"].reason == reason
    # It spoke for itself: it is in contact, and no reason to route nothing to it.
    assert m.standing("r1")[0] is not ReplicaState.LOST


def test_where_every_receiver_fails_the_push_ends_with_the_last_reason() -> None:
    m, ticket = _staging(min_replicas=1)
    waiter = m.await_end(ticket)
    for _ in range(3):
        transfer = m.transfer(ticket)
        failed = events.RankFailed(
            transfer.group_id, transfer.transfer_id, 1, "DIGEST_MISMATCH", "other bytes"
        )
        m.do(failed)
    assert m.error(waiter).reason == "DIGEST_MISMATCH"


def test_a_receiver_that_fails_by_itself_ends_a_push_to_all() -> None:
    m, ticket = _staging()
    waiter, transfer = m.await_end(ticket), m.transfer(ticket)
    m.do(events.RankFailed(transfer.group_id, transfer.transfer_id, 2, "STAGING_FULL", "no room"))
    assert m.error(waiter).reason == "STAGING_FULL"


_OTHER = replace(DIGEST, value=b"\2" * 8)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 1, 3, 0), (1, 0, 2, 3), (2, 0, 1, 3)])
def test_a_receiver_with_another_digest_than_the_senders_leaves_the_push(
    order: tuple[int, ...],
) -> None:
    m, ticket = _staging(min_replicas=1)
    for rank in order:
        if m.transfer(ticket).lost:
            break
        m.stage(ticket, rank, _OTHER if rank == 2 else DIGEST)
    after = m.transfer(ticket)
    assert (after.targets, after.lost) == (("r0", "r2"), ("r1",))
    assert after.losses["r1"].reason == "DIGEST_MISMATCH"
    m.attend_all(ticket)
    m.prepare_all(ticket)
    m.stage_all(ticket)
    assert m.transfer(ticket).phase is Phase.COMMITTING


def test_a_replica_without_room_is_left_out_and_named() -> None:
    m = Machine().pool("r0")
    m.register("r1", adapter_capacity_bytes=1)
    m.acquire("math")
    ticket = m.begin(min_replicas=1)
    transfer = m.transfer(ticket)
    assert (transfer.phase, transfer.targets, transfer.lost) == (Phase.FORMING, ("r0",), ("r1",))
    assert transfer.losses["r1"].reason == "STAGING_FULL"
    m.attend_all(ticket)
    m.prepare_all(ticket)
    m.stage_all(ticket)
    m.answer_commits(ticket)
    assert m.transfer(ticket).served_by == {"r0"}
    assert [
        r.replica_id for r in transfer_to_proto(m.transfer(ticket), m.state, m.now, 1).refusals
    ] == ["r1"]


@pytest.mark.parametrize("min_replicas", [0, 2])
def test_where_too_few_have_room_the_push_is_refused(min_replicas: int) -> None:
    m = Machine().pool("r0")
    m.register("r1", adapter_capacity_bytes=1)
    m.acquire("math")
    assert m.error(m.begin(min_replicas=min_replicas)).metadata["replica"] == "r1"


@pytest.mark.parametrize("accusers", [(1,), (1, 3)])
def test_who_cannot_reach_the_others_leaves_the_push(accusers: tuple[int, ...]) -> None:
    """They say that a peer is gone, and nobody's stream has broken."""
    m, ticket = _staging(min_replicas=1)
    before = m.transfer(ticket)
    for rank in accusers:
        failed = events.RankFailed(
            before.group_id, before.transfer_id, rank, "PEER_GONE", "connection reset"
        )
        m.do(failed)
    m.pass_time(1.0)
    after = m.transfer(ticket)
    assert set(after.lost) == {f"r{rank - 1}" for rank in accusers}
    assert after.phase is Phase.FORMING


@pytest.mark.parametrize("accusers", [(0,), (0, 1), (1, 2, 3)])
def test_where_the_sender_or_all_cannot_reach_the_others_the_push_ends(
    accusers: tuple[int, ...],
) -> None:
    m, ticket = _staging(min_replicas=1)
    waiter, before = m.await_end(ticket), m.transfer(ticket)
    for rank in accusers:
        failed = events.RankFailed(
            before.group_id, before.transfer_id, rank, "PEER_GONE", "connection reset"
        )
        m.do(failed)
    m.pass_time(1.0)
    assert m.error(waiter).reason == "PEER_GONE"
