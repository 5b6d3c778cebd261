"""Pushes of several senders: all of them attend, are heard, and end together."""

from __future__ import annotations

import pytest

from tests.unit.coordinator.decisions.machine import BF16, Machine
from weft_rl.contract.group import MAX_GROUP_SIZE
from weft_rl.contract.manifest import (
    WSUM64,
    Bucket,
    SendPlan,
    TensorSlot,
    WireBucket,
    make_manifest,
    make_send_plan,
    plan_buckets,
)
from weft_rl.contract.tensors import TensorMeta
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.transfer import Activity, Group, RankReport
from weft_rl.coordinator.decisions.state.values import ContentDigest, Failure, Phase, VersionLayout
from weft_rl.coordinator.decisions.transfers import stalls

LAYOUT = VersionLayout.of(
    plan_buckets([TensorMeta(f"w{i}.w", BF16, (16, 16)) for i in range(2)], 512)
)
#: Wire buckets 0 and 2 are sender 0's, 1 and 3 sender 1's.
PLAN = make_send_plan(2, [WireBucket(s, b, 256, 1) for b in range(2) for s in range(2)])
WITH_GAP = TensorSlot(TensorMeta("w", BF16, (4, 4)), 0, 256)
DIGEST = ContentDigest(WSUM64, b"\1" * 8, LAYOUT.total_bytes)


def _begun(**changes: object) -> tuple[Machine, int, int]:
    m = Machine().pool("r0", "r1", "r2")
    m.acquire("math")
    ticket = m.begin(layout=LAYOUT, **{"send_plan": PLAN} | changes)
    return m, ticket, m.await_end(ticket)


def _staging(**changes: object) -> tuple[Machine, int, int]:
    m, ticket, waiter = _begun(**changes)
    m.attend_all(ticket)
    m.prepare_all(ticket)
    assert m.transfer(ticket).phase is Phase.STAGING
    return m, ticket, waiter


def _group(m: Machine, ticket: int) -> Group:
    return m.state.groups[m.transfer(ticket).group_id]


def _say(m: Machine, ticket: int, buckets: dict[int, int], **verified: int) -> None:
    reports = {rank: RankReport(f"t{ticket}", Activity.SENDING, n) for rank, n in buckets.items()}
    by_rank = {int(rank[1:]): n for rank, n in verified.items()}
    m.do(events.RanksHeard(m.transfer(ticket).group_id, reports, f"t{ticket}", by_rank))


def test_both_attend_before_receivers_prepare_and_both_stage_before_the_commit() -> None:
    m, ticket, _ = _begun()
    group = _group(m, ticket)
    assert (group.size, group.num_receivers) == (5, 3)
    assert [member.first_rank for member in group.members] == [2, 3, 4]
    assert [group.rank_name(rank) for rank in range(3)] == [
        "t1 (sender 0)",
        "t1 (sender 1)",
        "r0",
    ]
    for rank in (0, 2, 3, 4):
        m.do(events.RankAttends(group.group_id, rank))
    assert not m.ever(effects.SendPrepare)
    m.do(events.RankAttends(group.group_id, 1))
    (prepare,) = m.found(effects.SendPrepare)
    assert prepare.transfer.send_plan == PLAN
    m.do(events.RankPrepared(group.group_id, f"t{ticket}", 1, 4))  # no receiver's
    for rank in (2, 3):
        m.do(events.RankPrepared(group.group_id, f"t{ticket}", rank))
    assert not m.ever(effects.SendStart)
    m.do(events.RankPrepared(group.group_id, f"t{ticket}", 4, 3))
    (start,) = m.found(effects.SendStart)
    assert (start.num_receivers, start.num_buckets, start.first_bucket) == (3, 4, 0)
    for rank in (0, 2, 3, 4):
        m.stage(ticket, rank, DIGEST)
    assert not m.ever(effects.CallCommit)
    m.stage(ticket, 1, DIGEST)
    assert len(m.ever(effects.CallCommit)) == 3
    m.answer_commits(ticket)
    ended = m.transfer(ticket)
    assert ended.phase is Phase.COMMITTED
    assert (ended.send_plan, ended.layout.num_buckets) == (None, 4)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", [Phase.FORMING, Phase.STAGING])
def test_a_sender_that_is_gone_or_fails_ends_the_push(rank: int, phase: Phase) -> None:
    for is_gone in (True, False):
        m, ticket, waiter = _staging() if phase is Phase.STAGING else _begun()
        group_id = m.transfer(ticket).group_id
        if is_gone:
            m.do(events.RankGone(group_id, rank, "its stream broke"))
        else:
            m.do(events.RankFailed(group_id, f"t{ticket}", rank, "NOT_FINITE", "a NaN"))
        assert m.transfer(ticket).phase is Phase.ABORTED
        error = m.error(waiter)
        assert error.reason == ("PEER_GONE" if is_gone else "NOT_FINITE")
        assert f"t1 (sender {rank})" in error.message
        assert error.metadata["member"] == "t1"
        assert m.ever(effects.SendAbort)[-1].group_id == group_id
        assert not m.state.groups


def test_a_sender_with_another_digest_ends_the_push() -> None:
    m, ticket, waiter = _staging()
    m.stage(ticket, 0, DIGEST)
    m.stage(ticket, 1, ContentDigest(WSUM64, b"\2" * 8, LAYOUT.total_bytes))
    error = m.error(waiter)
    assert (error.reason, error.metadata["member"]) == ("DIGEST_MISMATCH", "t1")
    assert "t1 (sender 1) has the digest" in error.message


def test_survivors_reform_with_both_senders_at_their_ranks() -> None:
    m, ticket, _ = _staging(min_replicas=1)
    before = _group(m, ticket)
    m.do(events.RankGone(before.group_id, 3, "its stream broke"))
    renewed = _group(m, ticket)
    assert (renewed.num_senders, renewed.size, renewed.epoch) == (2, 4, before.epoch + 1)
    assert [(x.replica_id, x.first_rank) for x in renewed.members] == [("r0", 2), ("r2", 3)]
    (reform,) = m.ever(effects.SendReform)
    assert reform.renewed == renewed
    m.attend_all(ticket)
    for rank, verified in ((2, 3), (3, 2)):
        m.do(events.RankPrepared(renewed.group_id, f"t{ticket}", rank, verified))
    assert m.ever(effects.SendStart)[-1].first_bucket == 2, "counted in wire buckets"


def test_a_group_is_kept_for_a_push_of_as_many_senders_only() -> None:
    m, first, _ = _staging()
    for rank in range(5):
        m.stage(first, rank, DIGEST)
    m.answer_commits(first)
    group_id = m.transfer(first).group_id
    kept = m.begin(layout=LAYOUT, send_plan=PLAN, group_id=group_id)
    assert m.transfer(kept).group_id == group_id
    for rank in range(2, 5):
        m.do(events.RankPrepared(group_id, f"t{kept}", rank))
    for rank in range(5):
        m.stage(kept, rank, DIGEST)
    m.answer_commits(kept)
    alone = m.begin(layout=LAYOUT, group_id=group_id)
    assert m.transfer(alone).group_id != group_id
    assert _group(m, alone).num_senders == 1


def test_who_owes_what_while_bytes_flow() -> None:
    m, ticket, _ = _staging()

    def owed() -> dict[int, str]:
        return stalls.owed_steps(m.transfer(ticket), _group(m, ticket))

    assert owed() == {0: "send bucket 0", 1: "send bucket 1"}
    _say(m, ticket, {1: 2})  # sender 1 has sent its first
    assert owed() == {0: "send bucket 0"}
    _say(m, ticket, {0: 1})
    assert owed() == dict.fromkeys((2, 3, 4), "verify bucket 0")
    _say(m, ticket, {}, r2=2, r3=1, r4=1)
    assert owed() == {0: "send bucket 2", 3: "verify bucket 1", 4: "verify bucket 1"}
    _say(m, ticket, {0: 3}, r3=2, r4=2)
    assert owed() == {1: "send bucket 3"} | dict.fromkeys((2, 3, 4), "verify bucket 2")
    _say(m, ticket, {1: 4}, r2=4, r3=4, r4=4)
    assert owed() == {0: "end", 1: "end"} | dict.fromkeys((2, 3, 4), "stage what it has")


def test_one_sender_that_stalls_ends_the_push_like_one_alone() -> None:
    m, ticket, waiter = _staging(timeout=600.0)
    _say(m, ticket, {0: 1}, r2=1, r3=1, r4=1)
    for _ in range(100):
        m.pass_time(1.0)
        _say(m, ticket, {0: 3})
    assert m.transfer(ticket).uncommitted, "nobody waits for its replicas"
    m.acquire("code")
    m.begin("code")
    m.pass_time(1.0)
    error = m.error(waiter)
    assert error.reason == "STALLED"
    assert "t1 (sender 1) makes no progress: it was to send bucket 1" in error.message


@pytest.mark.parametrize(
    ("changes", "reason", "message"),
    [
        ({"carries_runs": True, "policy": "base"}, "INVALID_REQUEST", "not both"),
        ({"send_plan": SendPlan(1, PLAN.buckets[:1])}, "INVALID_REQUEST", "the send plan has 256"),
        (
            {"layout": VersionLayout.of(make_manifest([WITH_GAP], [Bucket(512, 1)]))},
            "INVALID_MANIFEST",
            "without gaps",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(
    changes: dict[str, object], reason: str, message: str
) -> None:
    m = Machine().pool("r0")
    policy = str(changes.pop("policy", "math"))
    m.acquire(policy)
    ticket = m.begin(policy, **{"layout": LAYOUT, "send_plan": PLAN} | changes)
    error = m.error(ticket)
    assert error.reason == reason
    assert message in error.message
    assert not m.state.transfers


def test_a_request_id_is_of_one_plan() -> None:
    m, ticket, _ = _begun()
    again = m.begin(layout=LAYOUT, send_plan=PLAN, request_id=f"q{ticket}")
    answer = m.answer(again)
    assert answer.transfer_id == f"t{ticket}"
    other = m.begin(layout=LAYOUT, request_id=f"q{ticket}")
    assert m.error(other).reason == "REQUEST_CONFLICT"


def test_groups_that_are_too_large_are_refused() -> None:
    m = Machine()
    for i in range(16):
        m.register(f"r{i}", num_receivers=(MAX_GROUP_SIZE - 1) // 16 + (i < 15))
    m.pool()
    m.acquire("math")
    error = m.error(m.begin(layout=LAYOUT, send_plan=PLAN))
    assert error.reason == "GROUP_TOO_LARGE"
    assert "16382 receivers" in error.message
    assert _group(m, m.begin(layout=LAYOUT)).size == MAX_GROUP_SIZE


@pytest.mark.parametrize(("min_replicas", "phase"), [(0, Phase.ABORTED), (1, Phase.FORMING)])
def test_a_failure_of_a_receiver_is_not_a_senders(min_replicas: int, phase: Phase) -> None:
    m, ticket, _ = _staging(min_replicas=min_replicas)
    failure = Failure("DIGEST_MISMATCH", "other bytes", {})
    group_id = m.transfer(ticket).group_id
    m.do(events.RankFailed(group_id, f"t{ticket}", 2, failure.reason, failure.message))
    assert m.transfer(ticket).phase is phase
