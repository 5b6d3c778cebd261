"""The order of a switch's steps and what each failure leaves, with a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_side.engine import JoinOrder, MemoryUsage, SpillOrder
from rollout_side.vllm_engine.loading import lora_hook
from rollout_side.vllm_engine.replica import GRACE_SECONDS
from rollout_side.vllm_engine.worker.holdings import HoldingsPage, HoldingsWriter, WorkerUsage
from rollout_side.vllm_engine.worker.rank_results import RankResult
from tests.doubles.vllm import BASE, TICKET, FakeEngine, failed, make_replica, ok, started
from tests.waits import eventually
from weft_rl.contract.errors import (
    DigestMismatchError,
    LoadFailedError,
    NotReadyError,
    TransferTimeoutError,
)
from weft_rl.contract.names import PolicyVersion


async def test_a_restore_is_waited_for() -> None:
    engine, holdings = FakeEngine(num_ranks=2), HoldingsPage()
    replica = make_replica(engine, spills=True, holdings=holdings)
    restoring = asyncio.create_task(replica.restore("t", BASE, b"d", b"l"))
    await eventually(lambda: "weft_restore" in engine.calls)
    assert not restoring.done()
    memory = MemoryUsage(adapter_bytes=0, staging_bytes=0, staged_transfer_ids=("t",))
    HoldingsWriter(holdings.path).write(WorkerUsage(memory, "t"))
    await restoring
    assert engine.calls == ["weft_restore", "weft_restored"]  # asked once
    engine.answers["weft_restored"] = lambda: [failed("DIGEST_MISMATCH"), ok(1)]
    with pytest.raises(DigestMismatchError):
        await replica.restore("t", BASE, b"d", b"l")
    assert not replica.dirty_reason


async def test_a_restore_that_takes_too_long_is_dropped() -> None:
    engine, replica = started(restore_seconds=0.0, spills=True)
    with pytest.raises(TransferTimeoutError):
        await replica.restore("t", BASE, b"d", b"l")
    assert engine.calls[-1] == "weft_discard"
    assert not replica.dirty_reason


async def test_nothing_is_restored_without_a_spill_directory() -> None:
    engine = FakeEngine()
    with pytest.raises(NotReadyError, match="no --spill-dir"):
        await make_replica(engine).restore("t", BASE, b"d", b"l")
    assert engine.calls == []


async def test_a_switch_of_the_base() -> None:
    engine = FakeEngine()
    times = await make_replica(engine).apply_base("t", BASE, b"")
    assert engine.calls == [
        "pause",
        "weft_apply_base",
        "base@3",
        "reset",
        "weft_keep_base",
        "resume",
    ]
    assert times.pause_seconds >= times.load_seconds >= 0


async def test_the_pause_ends_while_the_workers_keep_the_base() -> None:
    engine = FakeEngine()
    kept = engine.hang["weft_keep_base"] = asyncio.Event()
    switched = asyncio.create_task(make_replica(engine).apply_base("t", BASE, b""))
    await eventually(lambda: engine.calls[-2:] == ["weft_keep_base", "resume"])
    assert not switched.done()
    kept.set()
    await switched


async def test_a_base_that_cannot_be_kept_is_an_error_of_an_engine_that_goes_on() -> None:
    engine, replica = started(1)
    engine.failures["weft_keep_base"] = RuntimeError("no memory")
    with pytest.raises(LoadFailedError, match="no memory"):
        await replica.apply_base("t", BASE, b"")
    assert engine.calls[-2:] == ["weft_keep_base", "resume"]
    assert replica.dirty_reason


async def test_a_draft_is_of_the_base_that_brought_it() -> None:
    engine, replica = started(2, draft_fingerprint="d")
    assert replica.report.draft_version == 0
    engine.answers["weft_apply_base"] = lambda: [ok(0, has_draft=True), ok(1, has_draft=True)]
    await replica.apply_base("t", BASE, b"")
    assert replica.report.draft_version == BASE.version
    engine.answers["weft_apply_base"] = lambda: [ok(0, has_draft=False), ok(1, has_draft=False)]
    await replica.apply_base("u", PolicyVersion("base", 4), b"")
    assert (replica.base_version, replica.report.draft_version) == (4, BASE.version)
    engine.answers["weft_apply_base"] = lambda: [failed("LOAD_FAILED", dirty=True)] * 2
    with pytest.raises(LoadFailedError):
        await replica.apply_base("v", PolicyVersion("base", 5), b"")
    engine.answers["weft_apply_base"] = lambda: [ok(0, has_draft=False), ok(1, has_draft=False)]
    await replica.apply_base("u", PolicyVersion("base", 4), b"")
    assert replica.report.draft_version == -1, "a part of what failed may be in it"


async def test_ranks_share_the_copy_before_the_pause_and_drop_it_after() -> None:
    engine = FakeEngine(num_ranks=2)
    await make_replica(engine).apply_base("t", BASE, b"")
    assert engine.calls[:3] == ["weft_handle", "weft_adopt", "pause"]
    assert engine.calls[-2:] == ["weft_keep_base", "resume"]


async def test_ranks_that_have_each_their_own_part_share_nothing_and_keep_as_much() -> None:
    engine = FakeEngine(num_ranks=2)
    engine.answers["weft_handle"] = lambda: [ok(0, handle=b""), ok(1, handle=b"")]
    engine.answers["weft_keep_base"] = lambda: [ok(0, num_undo=3), ok(1, num_undo=2)]
    await make_replica(engine).apply_base("t", BASE, b"")
    assert engine.calls[:3] == ["weft_handle", "pause", "weft_apply_base"]
    assert engine.calls[-3:] == ["weft_keep_base", "resume", "weft_bound_undo"]
    assert engine.last_args["weft_bound_undo"] == (2,)


@pytest.mark.parametrize("is_back", [True, False])
async def test_a_rank_that_cannot_follow_takes_the_others_back(is_back: bool) -> None:
    engine, replica = started(2)
    engine.answers["weft_apply_base"] = lambda: [
        ok(0, has_draft=False),
        failed("LOAD_FAILED", rank=1),
    ]
    others = {"transfer_id": "s" if is_back else "t", "content_digest": b"d"}
    engine.answers["weft_take_back"] = lambda: [
        ok(0, transfer_id="s", content_digest=b"d"), ok(1, **others),
    ]  # fmt: skip
    with pytest.raises(LoadFailedError, match="rank 1 of 2") as raised:
        await replica.apply_base("t", BASE, b"")
    assert (raised.value.metadata.get("dirty") == "true") is not is_back
    assert ("resume" in engine.calls) is is_back
    assert bool(replica.dirty_reason) is not is_back


async def test_nothing_changed_means_that_requests_go_on() -> None:
    engine, replica = started()
    engine.answers["weft_apply_base"] = lambda: [failed("NOT_STAGED")]
    with pytest.raises(NotReadyError):
        await replica.apply_base("t", BASE, b"")
    assert engine.calls == ["pause", "weft_apply_base", "resume"]
    assert replica.dirty_reason == replica.tracker.refuse_reason == ""


@pytest.mark.parametrize(
    "answers",
    [
        [failed("LOAD_FAILED", dirty=True), failed("LOAD_FAILED", rank=1, dirty=True)],
        [failed("NOT_STAGED"), ok(1)],
    ],
    ids=["a rank says so", "one rank loaded, one did not"],
)
async def test_mixed_weights_stay_paused_until_a_base_loads(answers: list[RankResult]) -> None:
    engine, replica = started(2)
    engine.answers["weft_apply_base"] = lambda: answers
    with pytest.raises(Exception, match="rank 0 of 2") as raised:
        await replica.apply_base("t", BASE, b"")
    assert raised.value.metadata["dirty"] == "true"  # type: ignore[attr-defined]
    assert "resume" not in engine.calls
    assert replica.tracker.refuse_reason
    engine.answers["weft_apply_base"] = lambda: [failed("NOT_STAGED"), failed("NOT_STAGED", rank=1)]
    with pytest.raises(NotReadyError):
        await replica.apply_base("t", BASE, b"")
    assert "resume" not in engine.calls, "an earlier failure left the weights mixed"
    del engine.answers["weft_apply_base"]
    await replica.apply_base("t", BASE, b"")
    assert "resume" in engine.calls
    assert replica.dirty_reason == replica.tracker.refuse_reason == ""


async def test_a_cache_that_cannot_be_reset_is_not_served_from() -> None:
    engine, replica = started()
    engine.reset_works = False
    with pytest.raises(LoadFailedError, match="KV cache"):
        await replica.apply_base("t", BASE, b"")
    assert "resume" not in engine.calls
    assert "KV cache" in replica.dirty_reason


@pytest.mark.parametrize("method", ["weft_apply_base", "weft_load_adapter"])
async def test_an_overrun_is_dirty_and_is_not_cancelled(method: str) -> None:
    engine, replica = started(load_seconds=0.01)
    engine.hang[method] = asyncio.Event()
    switch = (
        replica.apply_base("t", BASE, b"")
        if method == "weft_apply_base"
        else replica.load_adapter("t", PolicyVersion("math", 1), "{}", b"")
    )
    with pytest.raises(LoadFailedError, match=r"within 0.01 s") as raised:
        await switch
    assert raised.value.metadata["dirty"] == "true"
    assert method in replica.dirty_reason
    engine.hang[method].set()
    await asyncio.sleep(0)


@pytest.mark.parametrize("method", ["weft_pin_bases", "weft_join", "weft_spill", "weft_held"])
async def test_workers_that_were_away_for_a_while_need_no_repair(method: str) -> None:
    """Stopped for longer than any call may take, and back."""
    engine, replica = started(call_seconds=0.01, spills=True)
    away = engine.hang[method] = asyncio.Event()
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "weft_pin_bases": lambda: replica.pin_bases([3]),
        "weft_join": lambda: replica.join_group(JoinOrder(ticket=TICKET, trainer_id="t")),
        "weft_spill": lambda: replica.spill(SpillOrder()),
        "weft_held": lambda: replica.manifest(BASE),
    }
    with pytest.raises(TransferTimeoutError, match=method):
        await calls[method]()
    assert replica.dirty_reason == ""
    away.set()
    del engine.hang[method]
    if method != "weft_held":
        await calls[method]()
    await replica.apply_base("t", BASE, b"")


async def test_a_pause_that_comes_late_is_taken_back() -> None:
    engine, replica = started(call_seconds=0.01)
    away = engine.hang["pause"] = asyncio.Event()
    with pytest.raises(TransferTimeoutError, match="pausing"):
        await replica.apply_base("t", BASE, b"")
    away.set()
    assert engine.calls == ["pause", "resume"]  # the engine does them in this order
    assert replica.dirty_reason == ""


async def test_a_resume_that_is_late_after_a_load_is_dirty() -> None:
    """Whoever asked is told of a failure, so nobody may take it for what it served."""
    engine, replica = started(call_seconds=0.01)
    away = engine.hang["resume"] = asyncio.Event()
    with pytest.raises(LoadFailedError, match="resuming"):
        await replica.apply_base("t", BASE, b"")
    assert "resuming" in replica.dirty_reason
    away.set()
    await asyncio.sleep(0)


async def test_an_adapter_is_dropped_once_the_workers_are_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    def request(version: PolicyVersion, number: int) -> Any:
        path = f"{lora_hook.SCHEME}{version}"
        return SimpleNamespace(lora_name=str(version), lora_path=path, lora_int_id=number)

    monkeypatch.setattr(lora_hook, "lora_request", request)
    engine, replica = started(call_seconds=0.01)
    old, new = PolicyVersion("math", 1), PolicyVersion("math", 2)
    for version in (old, new):
        await replica.load_adapter("t", version, "{}", b"")
    assert not await replica.retire(old)
    await asyncio.sleep(GRACE_SECONDS)
    away = engine.hang["weft_drop_adapter"] = asyncio.Event()
    with pytest.raises(TransferTimeoutError, match="weft_drop_adapter"):
        await replica.retire(old)
    assert replica.dirty_reason == ""
    away.set()
    assert await replica.retire(old)


async def test_an_interrupted_switch_is_dirty() -> None:
    engine, replica = started()
    engine.hang["weft_apply_base"] = asyncio.Event()
    task = asyncio.create_task(replica.apply_base("t", BASE, b""))
    await eventually(lambda: "weft_apply_base" in engine.calls)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "interrupted" in replica.dirty_reason
    engine.hang["weft_apply_base"].set()
    await asyncio.sleep(0)


async def test_a_dead_engine_is_a_dirty_one() -> None:
    engine = FakeEngine()

    def die() -> list[RankResult]:
        raise RuntimeError("EngineCore encountered an issue")

    engine.answers["weft_pin_bases"] = die
    with pytest.raises(LoadFailedError, match="encountered an issue") as raised:
        await make_replica(engine).pin_bases([3])
    assert raised.value.metadata["dirty"] == "true"
