"""Who may attend a group, what its ranks are told, and the watermark of what all have."""

from __future__ import annotations

import dataclasses

import pytest

from weft.contract.errors import (
    CapacityError,
    InvalidRequestError,
    NotAllowedError,
    RequestConflictError,
    StaleEpochError,
)
from weft.coordinator.decisions import events
from weft.coordinator.decisions.state.transfer import Group, Member
from weft.coordinator.messages.wire import group_to_proto
from weft.coordinator.runtime.live_group import Watermark
from weft.coordinator.runtime.live_groups import LiveGroups


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


@pytest.mark.parametrize(("rank", "bucket"), [(1, 1), (1, 7), (0, 0)])
def test_buckets_are_reported_in_order_by_receivers(rank: int, bucket: int) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        Watermark("t", 2, 3).report(rank, bucket)
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
