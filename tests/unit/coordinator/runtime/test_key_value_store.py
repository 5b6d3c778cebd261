"""The key-value store of a group."""

from __future__ import annotations

import asyncio

import pytest

from weft_rl.contract.errors import (
    CapacityError,
    InvalidRequestError,
    StaleEpochError,
    TransferTimeoutError,
)
from weft_rl.coordinator.runtime import key_value_store
from weft_rl.coordinator.runtime.key_value_store import KeyValueStore


async def test_values() -> None:
    s = KeyValueStore()
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
    s = KeyValueStore()
    waiting = asyncio.create_task(s.get(["a", "b"], 5))
    await asyncio.sleep(0)
    s.set(["b"], [b"2"])
    await asyncio.sleep(0)
    assert not waiting.done()
    s.set(["a"], [b"1"])
    assert await waiting == [b"1", b"2"]


async def test_a_wait_has_a_deadline_and_leaves_nothing_behind() -> None:
    s = KeyValueStore()
    with pytest.raises(TransferTimeoutError, match="'a' was not set"):
        await s.wait(["a"], 0.01)
    assert not s._waiters


async def test_dropping_the_group_wakes_everyone() -> None:
    s = KeyValueStore()
    waiting = [asyncio.create_task(s.wait([key], 5)) for key in "aab"]
    await asyncio.sleep(0)
    s.close("r1 is gone")
    for task in waiting:
        with pytest.raises(StaleEpochError, match="r1 is gone"):
            await task
    with pytest.raises(StaleEpochError):
        s.set(["a"], [b""])


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_value_store, "MAX_STORE_KEYS", 2)
    monkeypatch.setattr(key_value_store, "MAX_STORE_BYTES", 100)
    s = KeyValueStore()
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
    s = KeyValueStore()
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
    monkeypatch.setattr(key_value_store, "MAX_STORE_BYTES", 10)
    monkeypatch.setattr(key_value_store, "MAX_VALUE_BYTES", 8)
    monkeypatch.setattr(key_value_store, "MAX_ANSWER_BYTES", 8)
    s = KeyValueStore()
    s.set(["a"], [b"1"])
    for values in ([b"2", b"x" * 9], [b"2", b"x" * 8]):
        with pytest.raises(CapacityError):
            s.set(["a", "b"], values)
        assert await s.get(["a"], 0) == [b"1"]
        assert not s.check(["b"])
    s.append("a", b"234")
    with pytest.raises(CapacityError, match="ask for fewer"):
        await s.get(["a"] * 3, 0)
