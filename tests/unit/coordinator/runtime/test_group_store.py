"""The key-value store of a group, and the watermark."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from weft.contract.errors import (
    CapacityError,
    InvalidRequestError,
    NotAllowedError,
    RequestConflictError,
    StaleEpochError,
    TransferTimeoutError,
)
from weft.coordinator.decisions import events
from weft.coordinator.decisions.state.transfer import Group, Member
from weft.coordinator.messages.wire import group_to_proto
from weft.coordinator.runtime import group_store
from weft.coordinator.runtime.group_store import GroupStore
from weft.coordinator.runtime.live_groups import Hub, Watermark


async def test_values() -> None:
    s = GroupStore()
    s.set(["a", "b"], [b"1", b"2"])
    assert await s.get(["b", "a"], 0) == [b"2", b"1"]
    assert s.check(["a", "b"])
    assert not s.check(["a", "c"])
    assert s.add("n", 5) == 5
    assert s.add("n", -7) == -2
    assert await s.get(["n"], 0) == [b"-2"]
    s.append("a", b"x")
    assert await s.get(["a"], 0) == [b"1x"]
    assert s.compare_set("new", b"", b"v") == b"v"
    assert s.compare_set("new", b"w", b"z") == b"v"
    assert s.compare_set("new", b"v", b"z") == b"z"
    assert s.compare_set("absent", b"w", b"z") == b""
    assert len(s) == 4
    assert s.delete(["a", "nope"]) == 1
    with pytest.raises(InvalidRequestError):
        s.add("new", 1)
    with pytest.raises(InvalidRequestError):
        s.set(["a"], [])


async def test_waiters_wake_when_the_last_key_comes() -> None:
    s = GroupStore()
    waiting = asyncio.create_task(s.get(["a", "b"], 5))
    await asyncio.sleep(0)
    s.set(["b"], [b"2"])
    await asyncio.sleep(0)
    assert not waiting.done()
    s.set(["a"], [b"1"])
    assert await waiting == [b"1", b"2"]


async def test_a_wait_has_a_deadline_and_leaves_nothing_behind() -> None:
    s = GroupStore()
    with pytest.raises(TransferTimeoutError, match="'a' was not set"):
        await s.wait(["a"], 0.01)
    assert not s._waiters


async def test_dropping_the_group_wakes_everyone() -> None:
    s = GroupStore()
    waiting = [asyncio.create_task(s.wait([key], 5)) for key in "aab"]
    await asyncio.sleep(0)
    s.close("r1 is gone")
    for task in waiting:
        with pytest.raises(StaleEpochError, match="r1 is gone"):
            await task
    with pytest.raises(StaleEpochError):
        s.set(["a"], [b""])


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_store, "MAX_STORE_KEYS", 2)
    monkeypatch.setattr(group_store, "MAX_STORE_BYTES", 100)
    s = GroupStore()
    s.set(["a", "b"], [b"", b""])
    with pytest.raises(CapacityError) as keys:
        s.set(["c"], [b""])
    with pytest.raises(CapacityError) as size:
        s.append("a", b"x" * 99)
    assert keys.value.reason == size.value.reason == "STORE_FULL"
    s.append("a", b"x" * 98)
    s.delete(["a"])
    s.append("b", b"x" * 99)


@pytest.mark.parametrize("held", ["9223372036854775807", "9" * 4000, "9" * 5000, "1.5"])
async def test_a_counter_stays_one_of_64_bits(held: str) -> None:
    s = GroupStore()
    s.set(["n"], [held.encode()])
    with pytest.raises(InvalidRequestError) as refused:
        s.add("n", 1)
    assert refused.value.reason == "PROTOCOL"
    assert await s.get(["n"], 0) == [held.encode()]
    s.set(["n"], [b"-9223372036854775807"])
    assert s.add("n", -1) == -(2**63)
    with pytest.raises(InvalidRequestError):
        s.add("n", -1)


async def test_nothing_is_set_where_not_all_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_store, "MAX_STORE_BYTES", 10)
    monkeypatch.setattr(group_store, "MAX_VALUE_BYTES", 8)
    monkeypatch.setattr(group_store, "MAX_ANSWER_BYTES", 8)
    s = GroupStore()
    s.set(["a"], [b"1"])
    for values in ([b"2", b"x" * 9], [b"2", b"x" * 8]):
        with pytest.raises(CapacityError):
            s.set(["a", "b"], values)
        assert await s.get(["a"], 0) == [b"1"]
        assert not s.check(["b"])
    s.append("a", b"234")
    with pytest.raises(CapacityError, match="ask for fewer"):
        await s.get(["a"] * 3, 0)


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
    sent = [group_to_proto(group, rank) for rank in range(group.size)]
    assert {plan.token for plan in sent} == {group.token_of(0), group.token_of(1)}
    assert not any(group.secret in text for text in (*tokens, *map(str, sent), repr(group)))


async def test_who_may_attend() -> None:
    posted: list[events.Event] = []
    hub = Hub(posted.append)
    with pytest.raises(StaleEpochError):
        hub.attend("g", _token(0), 0)
    hub.open_group(_group())
    with pytest.raises(NotAllowedError):
        hub.attend("g", "guess", 0)
    with pytest.raises(NotAllowedError):
        hub.attend("g", _group().secret, 0)
    with pytest.raises(NotAllowedError):
        hub.attend("g", _token(0), 1)
    with pytest.raises(InvalidRequestError):
        hub.attend("g", _token(1), 2)
    link = hub.attend("g", _token(1), 1)
    with pytest.raises(RequestConflictError):
        hub.attend("g", _token(1), 1)
    hub.leave(link, "broke")
    hub.leave(link, "broke")
    assert posted == [events.RankAttends("g", 1), events.RankGone("g", 1, "broke")]
    hub.attend("g", _token(1), 1)
    hub.drop_group("g", "enough")
    with pytest.raises(StaleEpochError, match="enough"):
        hub.attend("g", _token(1), 1)


async def test_releases_coalesce_and_a_deaf_rank_is_cut_off() -> None:
    hub = Hub(lambda event: None)
    hub.open_group(_group())
    link = hub.attend("g", _token(0), 0)
    assert (await link.next()).WhichOneof("message") == "welcome"
    for n in range(1, 10_001):
        link.release("t", n)
    assert (await link.next()).released.num_buckets == 10_000
    for _ in range(300):
        hub.send_start("g", "t", 1, 1, 0)

    async def read_all() -> None:
        while await link.next():
            pass

    with pytest.raises(CapacityError) as refused:
        await read_all()
    assert refused.value.reason == "TOO_SLOW"
