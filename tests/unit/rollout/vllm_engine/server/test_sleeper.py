"""What an engine is told to sleep and to wake, in order, and what each failure leaves."""

from __future__ import annotations

import asyncio

import pytest

from rollout_side.agent.serving import OrderQueue, SleepOrders
from rollout_side.engine import SleepOrder
from rollout_side.vllm_engine.compat import bridges
from rollout_side.vllm_engine.replica import VllmReplica
from tests.doubles.vllm import BASE, FakeEngine, failed, make_replica, ok, started
from tests.waits import eventually
from weft_rl.contract.errors import (
    LoadFailedError,
    NotReadyError,
    StaleEpochError,
    TransferTimeoutError,
)
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.replica_report import Sleep

SLEPT = ["weft_sleep", "sleep 1"]
DISCARDED = ["weft_sleep", "sleep 2"]
WAKE, WOKEN = ["wake weights", "weft_wake"], ["wake weights", "weft_wake discarded"]
AWAKE = ["wake kv_cache", "weft_awake", "resume"]
ADDED = ["weft_load_adapter"]
LOADED = ["pause", "weft_apply_base", "base@3", "reset", "weft_keep_base"]


def _order(*, level: int = 1, aborts: bool = False, seconds: float = 5.0) -> SleepOrder:
    return SleepOrder(trainer_id="t1", level=level, aborts=aborts, timeout_seconds=seconds)


@pytest.fixture(autouse=True)
def _sleeps_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's newer executors do; theirs is not imported."""
    monkeypatch.setattr(bridges, "can_sleep_in_part", lambda: True)


async def fall_asleep(replica: VllmReplica, order: SleepOrder) -> None:
    """By an agent."""
    await SleepOrders(replica, OrderQueue()).fall_asleep(order)


async def _asleep(*, level: int = 1) -> tuple[FakeEngine, VllmReplica]:
    engine, replica = started(can_sleep=True)
    await fall_asleep(replica, _order(level=level))
    return engine, replica


def _refused(replica: VllmReplica) -> str:
    return replica.tracker.refuse_reason


async def _carry_out(replica: VllmReplica, action: str) -> None:
    """One word for an order: a 2 discards the weights."""
    match action:
        case "sleep" | "sleep2":
            await fall_asleep(replica, _order(level=2 if action.endswith("2") else 1))
        case "wake":
            await replica.wake_up()
        case "base":
            await replica.apply_base("t", BASE, b"")
        case "adapter":
            await replica.load_adapter("t", PolicyVersion("math", 1), "{}", b"")


_FILES = ["pause", "weft_apply_base", "base@0", "reset", "weft_keep_base"]


@pytest.mark.parametrize(
    ("actions", "calls", "asleep", "lacks_base"),
    [
        ("sleep", SLEPT, Sleep("t1"), False),
        ("sleep wake", [*SLEPT, *WAKE, *AWAKE], None, False),
        ("sleep wake wake", [*SLEPT, *WAKE, *AWAKE], None, False),
        # It stays paused, and wakes what it needs.
        ("sleep base", [*SLEPT, *WAKE, *LOADED], Sleep("t1", weights_awake=True), False),
        ("sleep base sleep", [*SLEPT, *WAKE, *LOADED, *SLEPT], Sleep("t1"), False),
        ("sleep adapter wake", [*SLEPT, *WAKE, *ADDED, *AWAKE], None, False),
        # Its weights are discarded: those come that were pushed, or those of its files.
        ("sleep2", DISCARDED, Sleep("t1", level=2), True),
        ("sleep2 base", [*DISCARDED, *WOKEN, *LOADED], Sleep("t1", True, 2), False),
        ("sleep2 base wake", [*DISCARDED, *WOKEN, *LOADED, *AWAKE], None, False),
        ("sleep2 wake", [*DISCARDED, *WOKEN, *AWAKE[:-1], "pause", *_FILES, "resume"], None, False),
        ("sleep2 sleep", DISCARDED, Sleep("t1", level=2), True),
        ("sleep2 adapter sleep", [*DISCARDED, *WOKEN, *ADDED, *SLEPT], Sleep("t1"), True),
    ],
)
async def test_what_an_engine_is_told_in_order(
    actions: str, calls: list[str], asleep: Sleep | None, lacks_base: bool
) -> None:
    engine, replica = started(can_sleep=True)
    for action in actions.split():
        await _carry_out(replica, action)
    assert engine.calls == calls
    assert (replica.asleep, replica.lacks_base) == (asleep, lacks_base)
    assert bool(_refused(replica)) == (asleep is not None)


async def test_what_asks_a_sleeping_replica_is_told_where_to_go() -> None:
    _, replica = await _asleep()
    assert _refused(replica) == (
        "the replica sleeps by order of trainer 't1'; ask another replica, or again once it is "
        "awake"
    )


async def test_an_engine_that_sleeps_only_whole_wakes_its_cache_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bridges, "can_sleep_in_part", lambda: False)
    engine, replica = started(can_sleep=True)
    for action in ("sleep", "base", "sleep"):
        await _carry_out(replica, action)
    assert engine.calls[-3:] == ["weft_sleep", "wake kv_cache", "sleep 1"]


async def test_one_that_was_not_started_for_it_is_refused() -> None:
    engine = FakeEngine()
    with pytest.raises(NotReadyError, match="--enable-sleep") as caught:
        await fall_asleep(make_replica(engine), _order())
    assert caught.value.reason == "SLEEP_DISABLED"
    assert engine.calls == []


async def test_asleep_no_adapter_is_dropped() -> None:
    engine, replica = started(can_sleep=True)
    version = PolicyVersion("math", 1)
    await replica.load_adapter("t", version, "{}", b"")
    await replica.load_adapter("u", PolicyVersion("math", 2), "{}", b"")
    await fall_asleep(replica, _order())
    assert not await replica.retire(version)
    await asyncio.sleep(0.15)
    assert not await replica.retire(version)
    assert "weft_drop_adapter" not in engine.calls
    await replica.wake_up()
    assert await replica.retire(version)


async def test_requests_finish_first() -> None:
    engine, replica = started(can_sleep=True)
    with replica.tracker.running():
        sleeping = asyncio.create_task(fall_asleep(replica, _order()))
        await asyncio.sleep(0.05)
        assert engine.calls == []
        assert _refused(replica)
    await sleeping
    assert engine.calls == SLEPT


async def test_requests_that_do_not_finish_leave_it_awake() -> None:
    engine, replica = started(can_sleep=True)
    with replica.tracker.running(), pytest.raises(TransferTimeoutError, match="1 requests"):
        await fall_asleep(replica, _order(seconds=0.05))
    assert engine.calls == []
    assert (replica.asleep, _refused(replica)) == (None, "")


async def test_requests_are_aborted_until_none_is_left() -> None:
    engine, replica = started(can_sleep=True)
    with replica.tracker.running():
        sleeping = asyncio.create_task(fall_asleep(replica, _order(aborts=True)))
        await eventually(lambda: engine.calls.count("abort all") >= 2)
    await sleeping
    assert engine.calls == [*["abort all", "resume"] * 2, *SLEPT]


async def test_a_dirty_engine_aborts_requests_and_stays_paused() -> None:
    engine, replica = started(can_sleep=True)
    engine.answers["weft_apply_base"] = lambda: [failed("LOAD_FAILED", dirty=True)]
    with pytest.raises(LoadFailedError):
        await replica.apply_base("t", BASE, b"")
    with replica.tracker.running():
        sleeping = asyncio.create_task(fall_asleep(replica, _order(aborts=True)))
        await eventually(lambda: "abort all" in engine.calls)
    await sleeping
    assert "resume" not in engine.calls


async def test_a_commit_does_not_wait_for_requests_that_a_sleep_waits_for() -> None:
    """And requests continue after it."""
    engine, replica = started(can_sleep=True)
    with replica.tracker.running():
        sleeping = asyncio.create_task(fall_asleep(replica, _order()))
        await asyncio.sleep(0.05)
        await asyncio.wait_for(replica.apply_base("t", BASE, b""), 2.0)
        assert engine.calls == [*LOADED, "resume"]
        assert _refused(replica)
        assert not sleeping.done()
    await sleeping
    assert engine.calls == [*LOADED, "resume", *SLEPT]
    assert _refused(replica)


async def test_one_that_is_woken_while_it_waits_takes_requests_at_once() -> None:
    engine, replica = started(can_sleep=True)
    orders = SleepOrders(replica, queue := OrderQueue())
    loading = asyncio.Event()
    with replica.tracker.running():
        sleeping = asyncio.create_task(orders.fall_asleep(_order()))
        await asyncio.sleep(0.05)
        assert _refused(replica)
        assert orders.to_sleep == Sleep("t1")
        switch = asyncio.create_task(queue.run(loading.wait(), "loading"))
        waking = asyncio.create_task(orders.wake_up())
        with pytest.raises(StaleEpochError, match="ordered to wake"):
            await sleeping
        assert not _refused(replica)
        assert not waking.done()  # it is not its turn
        loading.set()
        await asyncio.gather(switch, waking)
        assert not _refused(replica)
    assert engine.calls == []
    assert orders.to_sleep is None


async def test_a_newer_order_takes_the_place_of_one_that_waits() -> None:
    _, replica = started(can_sleep=True)
    orders = SleepOrders(replica, OrderQueue())
    with replica.tracker.running():
        first = asyncio.create_task(orders.fall_asleep(_order(seconds=0.1)))
        await asyncio.sleep(0.05)
        newer = SleepOrder(trainer_id="", level=2, aborts=False, timeout_seconds=5.0)
        second = asyncio.create_task(orders.fall_asleep(newer))
        await asyncio.sleep(0.15)
        assert "by order of an operator" in _refused(replica)
    await asyncio.gather(first, second)
    assert replica.asleep == Sleep("", level=2)
    assert replica.lacks_base


async def test_one_that_falls_asleep_as_it_is_woken_wakes_after_it() -> None:
    engine, replica = started(can_sleep=True)
    engine.hang["sleep"] = asyncio.Event()
    orders = SleepOrders(replica, OrderQueue())
    sleeping = asyncio.create_task(orders.fall_asleep(_order()))
    await eventually(lambda: "sleep 1" in engine.calls)
    waking = asyncio.create_task(orders.wake_up())
    await asyncio.sleep(0.05)
    assert _refused(replica)
    engine.hang["sleep"].set()
    with pytest.raises(StaleEpochError):
        await sleeping
    await waking
    assert (replica.asleep, _refused(replica)) == (None, "")


async def test_an_order_to_sleep_goes_before_one_to_wake_that_waits_for_its_turn() -> None:
    _, replica = started(can_sleep=True)
    orders = SleepOrders(replica, queue := OrderQueue())
    loading = asyncio.Event()
    switch = asyncio.create_task(queue.run(loading.wait(), "loading"))
    await asyncio.sleep(0)
    waking = asyncio.create_task(orders.wake_up())
    await asyncio.sleep(0)
    sleeping = asyncio.create_task(orders.fall_asleep(_order()))
    await asyncio.sleep(0)
    loading.set()
    with pytest.raises(StaleEpochError, match="ordered to sleep"):
        await waking
    await asyncio.gather(switch, sleeping)
    assert replica.asleep == Sleep("t1")


async def test_one_whose_caller_goes_away_is_carried_out() -> None:
    _, replica = started(can_sleep=True)
    orders = SleepOrders(replica, OrderQueue())
    with replica.tracker.running():
        call = asyncio.create_task(orders.fall_asleep(_order()))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    await eventually(lambda: replica.asleep is not None)


@pytest.mark.parametrize("level", [1, 2])
async def test_who_reads_the_weights_is_waited_for(level: int) -> None:
    """And what stays awake has discarded nothing."""
    engine, replica = started(2, can_sleep=True)
    engine.answers["weft_sleep"] = lambda: [ok(is_free=False), ok(1, is_free=True)]
    with pytest.raises(TransferTimeoutError, match="is being cloned"):
        await fall_asleep(replica, _order(level=level, seconds=0.05))
    assert engine.calls[-2:] == ["weft_wake", "weft_awake"]
    assert (replica.asleep, _refused(replica)) == (None, "")


async def test_who_reads_the_weights_keeps_no_commit_waiting() -> None:
    engine = FakeEngine()
    free = [False]
    engine.answers["weft_sleep"] = lambda: [ok(is_free=free[0])]
    replica = make_replica(engine, can_sleep=True)
    orders = SleepOrders(replica, queue := OrderQueue())
    sleeping = asyncio.create_task(orders.fall_asleep(_order()))
    await eventually(lambda: engine.calls.count("weft_sleep") >= 2)
    await asyncio.wait_for(queue.run(replica.apply_base("t", BASE, b""), "it"), 2.0)
    assert _refused(replica)
    free[0] = True
    await sleeping
    assert replica.asleep == Sleep("t1")


async def test_a_worker_that_fails_before_leaves_it_awake() -> None:
    engine, replica = started(can_sleep=True)
    engine.answers["weft_sleep"] = lambda: [failed("INTERNAL")]
    with pytest.raises(Exception, match="no"):
        await fall_asleep(replica, _order())
    assert (replica.asleep, _refused(replica)) == (None, "")


async def test_an_engine_that_does_not_answer_is_taken_to_sleep_and_dirty() -> None:
    engine, replica = started(can_sleep=True, call_seconds=0.05)
    engine.hang["sleep"] = asyncio.Event()
    with pytest.raises(LoadFailedError, match="falling asleep"):
        await fall_asleep(replica, _order())
    assert replica.asleep == Sleep("t1")
    assert replica.dirty_reason
    engine.hang["sleep"].set()
    await replica.wake_up()
    assert engine.calls[-1] == "pause"  # its weights may be mixed: a base repairs it


async def test_an_engine_that_fails_as_it_falls_asleep_is_never_woken() -> None:
    """It takes itself to be awake, and waking it would leave garbage in its memory."""
    engine, replica = started(can_sleep=True)
    engine.failures["sleep"] = RuntimeError("half of it is gone")
    with pytest.raises(LoadFailedError, match=r"half of it is gone.*restart") as caught:
        await fall_asleep(replica, _order())
    assert caught.value.metadata == {"dirty": "true"}
    assert replica.asleep == Sleep("t1")
    for touch in (replica.wake_up(), replica.apply_base("t", BASE, b"")):
        with pytest.raises(LoadFailedError, match="restart the replica") as caught:
            await touch
        assert caught.value.metadata == {"dirty": "true"}
    assert engine.calls == SLEPT
    assert "half of it is gone" in _refused(replica)


async def test_an_adapter_brings_no_base_and_what_is_held_is_loaded() -> None:
    engine = FakeEngine()
    held = {"transfer_id": "t0", "content_digest": b"", "manifest": b"m"}
    engine.answers["weft_held"] = lambda: [ok(**held)]
    replica = make_replica(engine, can_sleep=True)
    await replica.apply_base("t0", BASE, b"")
    await fall_asleep(replica, _order(level=2))
    await replica.load_adapter("t", PolicyVersion("math", 1), "{}", b"")
    assert replica.asleep == Sleep("t1", weights_awake=True, level=2)
    assert replica.lacks_base
    engine.calls.clear()
    await replica.wake_up()
    assert engine.calls == ["wake kv_cache", "weft_awake", "pause", "weft_held", *LOADED, "resume"]
    assert (replica.dirty_reason, _refused(replica)) == ("", "")


async def test_with_nothing_to_load_it_is_awake_and_dirty_until_a_base_comes() -> None:
    engine, replica = started(can_sleep=True)
    engine.answers["weft_held"] = lambda: [failed("VERSION_UNKNOWN")]
    await replica.apply_base("t0", BASE, b"")
    await fall_asleep(replica, _order(level=2))
    await replica.wake_up()
    assert replica.asleep is None
    assert replica.dirty_reason == "its weights were discarded as it slept"
    assert "being repaired" in _refused(replica)
    assert engine.calls[-1] == "weft_held"  # paused
    await replica.apply_base("t", BASE, b"")
    assert engine.calls[-1] == "resume"
    assert (replica.dirty_reason, _refused(replica)) == ("", "")


async def test_nothing_sleeps_while_a_base_is_loaded_in_place() -> None:
    _, replica = started(can_sleep=True, in_place=True)
    await replica.load_in_place("t", BASE, 5.0)
    with pytest.raises(NotReadyError) as caught:
        await fall_asleep(replica, _order())
    assert caught.value.reason == "TRANSFER_UNDER_WAY"
    assert _refused(replica) == ""


async def test_nothing_sleeps_that_has_begun_to_load_in_place_as_requests_ended() -> None:
    engine, replica = started(can_sleep=True, in_place=True)
    with replica.tracker.running():
        sleeping = asyncio.create_task(fall_asleep(replica, _order()))
        await asyncio.sleep(0.05)
        await replica.load_in_place("t", BASE, 5.0)
        assert _refused(replica)
    with pytest.raises(NotReadyError) as caught:
        await sleeping
    assert caught.value.reason == "TRANSFER_UNDER_WAY"
    assert _refused(replica) == ""
    assert "resume" not in engine.calls
    await replica.apply_base("t", BASE, b"")
    assert engine.calls[-1] == "resume"
