"""Who may attend a group, what its ranks are told, and the watermark of what all have."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import pytest

from weft_rl.contract.errors import (
    CapacityError,
    InvalidRequestError,
    NotAllowedError,
    RequestConflictError,
    StaleEpochError,
)
from weft_rl.contract.group import LinkUsage
from weft_rl.contract.manifest import WireBucket, make_send_plan
from weft_rl.coordinator.decisions.purposes.clone import Clone
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.transfer import Group, Member, Transfer, TransferIds
from weft_rl.coordinator.decisions.state.values import Failure, PolicyKind
from weft_rl.coordinator.messages.wire import group_to_proto
from weft_rl.coordinator.runtime.live_groups import LiveGroups, RankStream, Watermark
from weft_rl.rpc.codec import LINK_USAGE, send_plan_from_proto
from weft_rl.v1 import rendezvous_pb2


def test_the_watermark_is_the_slowest_receiver() -> None:
    mark = Watermark("t", num_receivers=2, num_buckets=3)
    assert not mark.report(1, 0)
    assert not mark.report(1, 1)
    assert mark.report(2, 0)
    assert mark.num_verified == 1
    assert mark.report(2, 1)
    assert mark.num_verified == 2
    assert not mark.is_through(1)
    mark.report(1, 2)
    assert mark.is_through(1)


def test_a_report_counts_all_buckets_up_to_its_own() -> None:
    mark = Watermark("t", num_receivers=2, num_buckets=5, first_bucket=1)
    assert not mark.report(1, 3)
    assert mark.report(2, 2)
    assert mark.num_verified == 3
    assert mark.report(2, 4)
    assert (mark.num_verified, mark.is_through(2), mark.is_through(1)) == (4, True, False)


def test_senders_hear_of_their_own_buckets_and_all_of_the_last() -> None:
    wires = [WireBucket(sender, bucket, 256, 1) for bucket in range(2) for sender in range(3)]
    mark = Watermark("t", 1, 6, num_senders=3, plan=make_send_plan(3, wires))
    assert [mark.report(3, bucket) for bucket in (0, 2, 4)] == [{0}, {1, 2}, {0, 1}]
    assert [*mark.report(3, 5)] == [0, 1, 2]


@pytest.mark.parametrize(("rank", "bucket"), [(1, 1), (1, 0), (1, 7), (0, 2)])
def test_a_report_is_a_receivers_and_of_more_than_the_last(rank: int, bucket: int) -> None:
    mark = Watermark("t", 2, 3)
    mark.report(1, 1)
    with pytest.raises(InvalidRequestError) as refused:
        mark.report(rank, bucket)
    assert refused.value.reason == "PROTOCOL"


def _group() -> Group:
    return Group("g", "secret", 1, "t1", "s1", "gloo", (Member("r0", "i1", 1, 1),))


def _token(rank: int) -> str:
    return _group().token_of(rank)


def test_tokens_are_a_ranks_own_in_one_epoch() -> None:
    group = _group()
    renewed = dataclasses.replace(group, epoch=2)
    other = dataclasses.replace(group, group_id="g1")
    tokens = {g.token_of(rank) for g in (group, renewed, other) for rank in range(3)}
    assert len(tokens) == 9
    guessed = dataclasses.replace(group, secret="guess")
    assert not tokens & {guessed.token_of(rank) for rank in range(3)}, "they need the secret"
    sent = [group_to_proto(group, [rank]) for rank in range(group.size)]
    assert {plan.token for plan in sent} == {group.token_of(0), group.token_of(1)}
    assert not any(group.secret in text for text in (*tokens, *map(str, sent), repr(group)))


async def test_who_may_attend() -> None:
    posted: list[events.Event] = []
    groups = LiveGroups(posted.append)
    with pytest.raises(StaleEpochError):
        groups.attend("g", _token(0), 0)
    groups.open_group(_group())
    with pytest.raises(NotAllowedError):
        groups.attend("g", "guess", 0)
    with pytest.raises(NotAllowedError):
        groups.attend("g", _group().secret, 0)
    with pytest.raises(NotAllowedError):
        groups.attend("g", _token(0), 1)
    with pytest.raises(InvalidRequestError):
        groups.attend("g", _token(1), 2)
    with pytest.raises(InvalidRequestError, match="in flight"):
        groups.attend("g", _token(0), 0)
    link = groups.attend("g", _token(1), 1)
    with pytest.raises(RequestConflictError):
        groups.attend("g", _token(1), 1)
    groups.leave(link, "broke")
    groups.leave(link, "broke")
    assert posted == [events.RankAttends("g", 1), events.RankGone("g", 1, "broke")]
    groups.attend("g", _token(1), 1)
    groups.drop_group("g", "enough")
    with pytest.raises(StaleEpochError, match="enough"):
        groups.attend("g", _token(1), 1)


async def test_releases_coalesce_and_a_deaf_rank_is_cut_off() -> None:
    groups = LiveGroups(lambda event: None)
    groups.open_group(_group())
    link = groups.attend("g", _token(0), 0, 2)
    assert (await link.next()).WhichOneof("message") == "welcome"
    for n in range(1, 10_001):
        link.release("t", n)
    assert (await link.next()).released.num_buckets == 10_000
    for _ in range(300):
        groups.send_start("g", "t", 1, 1, 0)

    async def read_all() -> None:
        while await link.next():
            pass

    with pytest.raises(CapacityError) as refused:
        await read_all()
    assert refused.value.reason == "TOO_SLOW"


def _two_senders(num_replicas: int = 1) -> Group:
    members = tuple(Member(f"r{i}", "i1", 2 + i, 1) for i in range(num_replicas))
    return Group("g", "secret", 1, "t1", "s1", "gloo", members, num_senders=2)


async def _heard(link: RankStream) -> list[str]:
    """What a rank was told, by kind; ends when there is nothing more."""
    kinds = []
    with contextlib.suppress(TimeoutError):
        while message := await asyncio.wait_for(link.next(), 0.05):
            kinds.append(str(message.WhichOneof("message")))
    return kinds


async def test_each_receiver_is_told_which_part_of_a_mixed_plan_is_its_own() -> None:
    groups, group = LiveGroups(lambda event: None), _two_senders(num_replicas=2)
    groups.open_group(group)
    links = [groups.attend("g", group.token_of(r), r, 2 if r < 2 else 0) for r in range(4)]
    wires = [WireBucket(sender, 0, 256, 1) for sender in (0, 1)]
    plan = make_send_plan(2, [*wires, *wires], b"12345678", 2)
    transfer = Transfer(
        ids=TransferIds("t", 1, "g", "k", "s"),
        purpose=Clone(replica_id="r0", source="r1"),
        policy="base",
        kind=PolicyKind.BASE,
        trainer_id="t1",
        send_plan=plan,
        whole_for=frozenset({"r1"}),
        begin_at=0.0,
    )
    groups.send_prepare("g", transfer, 10.0)
    told = {}
    for rank in (2, 3):
        assert (await links[rank].next()).WhichOneof("message") == "welcome"
        prepare = (await links[rank].next()).prepare
        assert send_plan_from_proto(prepare.send_plan) == plan
        told[group.member_name(rank)] = prepare.takes_whole
    assert told == {"r0": False, "r1": True}
    assert await _heard(links[0]) == ["welcome"], "senders prepare nothing"


async def test_each_of_several_senders_is_told_what_one_alone_is() -> None:
    posted: list[events.Event] = []
    groups, group = LiveGroups(posted.append), _two_senders()
    groups.open_group(group)
    with pytest.raises(InvalidRequestError, match="rank 1 sends"):
        groups.attend("g", group.token_of(1), 1)
    links = [groups.attend("g", group.token_of(r), r, 3 - r if r < 2 else 0) for r in range(3)]
    plan = make_send_plan(2, [WireBucket(0, 0, 256, 1), WireBucket(1, 0, 256, 1)])
    transfer = Transfer(
        ids=TransferIds("t", 1, "g", "k", "s"),
        purpose=Clone(replica_id="r0", source="r1"),
        policy="math",
        kind=PolicyKind.ADAPTER,
        trainer_id="t1",
        send_plan=plan,
        begin_at=0.0,
    )
    groups.send_prepare("g", transfer, 10.0)
    assert (await links[2].next()).WhichOneof("message") == "welcome"
    prepare = (await links[2].next()).prepare
    assert prepare.num_buckets_in_flight == 2, "the least that a sender has said"
    assert send_plan_from_proto(prepare.send_plan) == plan
    groups.send_start("g", "t", 1, 2, 1)
    said = rendezvous_pb2.BucketVerified(transfer_id="t", bucket=1)
    for link in links[:2]:
        with pytest.raises(InvalidRequestError):
            groups.receive(link, rendezvous_pb2.AttendRequest(bucket_verified=said))
    groups.receive(links[2], rendezvous_pb2.AttendRequest(bucket_verified=said))
    renewed = dataclasses.replace(group, group_id="g.1", epoch=2)
    groups.send_reform("g", "t", renewed, "r1 died")
    for rank, link in enumerate(links[:2]):
        messages = [await link.next() for _ in range(4)]
        kinds = [m.WhichOneof("message") for m in messages if m is not None]
        assert sorted(map(str, kinds)) == ["reform", "released", "start", "welcome"]
        (told,) = [m.reform.group for m in messages if m is not None and m.HasField("reform")]
        assert (told.rank, told.num_senders) == (rank, 2)
        assert (told.token, list(told.further_tokens)) == (renewed.token_of(rank), [])
        (freed,) = [m.released for m in messages if m is not None and m.HasField("released")]
        assert freed.num_buckets == 2
    failure = Failure("PEER_GONE", "r0 died", {})
    groups.send_abort("g", "t", failure)
    assert [await _heard(link) for link in links] == [["abort"], ["abort"], ["start", "abort"]]


async def test_bytes_that_ranks_have_sent_are_told_with_the_next_look() -> None:
    groups = LiveGroups(lambda event: None)
    groups.open_group(_group())
    link = groups.attend("g", _token(0), 0, 2)

    def say(rank: int, num_bytes: int, num_waiting: int) -> None:
        usage = LINK_USAGE.encode(LinkUsage(num_bytes, 0.5, num_waiting, encrypted=True))
        each = rendezvous_pb2.SentBytes(rank=rank, usage=usage)
        report = rendezvous_pb2.SentReport(hops=[each])
        groups.receive(link, rendezvous_pb2.AttendRequest(sent=report))

    say(1, 100, 7)
    say(1, 200, 5)
    say(2, 1, 1)  # a rank that the group has not
    [heard] = groups.take_progress()
    assert heard.hops == {(0, 1): LinkUsage(300, 1.0, 5, encrypted=True)}
    assert not heard.reports, "it says nothing of the thread that works"
    assert not groups.take_progress()
