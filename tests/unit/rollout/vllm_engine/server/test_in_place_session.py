"""What pauses generation for a load in place, and all that may end it; a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_side.vllm_engine.replica import VllmReplica
from tests.doubles.vllm import BASE, FakeEngine, failed, make_replica, ok
from weft_rl.contract.errors import LoadFailedError, NotReadyError
from weft_rl.contract.names import PolicyVersion

LONG = 60.0
BEGUN = ["pause", "weft_load_in_place"]
SERVED = ["weft_loaded", "base@3", "reset", "weft_keep_base", "resume"]


@dataclass
class Fake:
    """A replica and its engine, whose calls are those since the last look."""

    engine: FakeEngine
    replica: VllmReplica

    def alone(self) -> AbstractAsyncContextManager[None]:
        """Once no other switch is under way."""
        return self.replica._gate.exclusive()

    def calls(self) -> list[str]:
        calls, self.engine.calls = self.engine.calls, []
        return calls

    def leaves(self, *, changed: bool, kept: bool = False) -> None:
        """What the worker tells when a load ends."""
        self.engine.answers["weft_discard"] = lambda: [ok(changed=changed, kept=kept)]

    async def load(self, transfer_id: str = "t", seconds: float = LONG) -> None:
        await self.replica.load_in_place(transfer_id, BASE, seconds)

    async def until(self, call: str) -> None:
        async with asyncio.timeout(10):
            while call not in self.engine.calls:
                await asyncio.sleep(0.001)


@pytest.fixture
async def fake(request: pytest.FixtureRequest) -> AsyncIterator[Fake]:
    """With one rank, or as many as a test names."""
    engine = FakeEngine(num_ranks=getattr(request, "param", 1))
    replica = make_replica(engine, in_place=True)
    yield Fake(engine, replica)
    replica._in_place.close()
    await asyncio.sleep(0)
    left = [t for t in asyncio.all_tasks() if t.get_name() == "load-in-place"]
    assert not left or all(t.cancelling() for t in left)


async def test_a_commit_serves_what_was_loaded(fake: Fake) -> None:
    await fake.load()
    assert fake.calls() == BEGUN
    assert fake.replica.loading == "t"
    times = await fake.replica.apply_base("t", BASE, b"")
    assert fake.calls() == SERVED
    assert fake.replica.loading == fake.replica.dirty_reason == ""
    assert times.load_seconds == 2.0
    assert times.pause_seconds > 0


async def test_the_order_may_come_again(fake: Fake) -> None:
    await fake.load()
    await fake.load()
    assert fake.calls() == [*BEGUN, "weft_load_in_place"]
    fake.engine.answers["weft_load_in_place"] = lambda: [failed("NOT_STAGED")]
    with pytest.raises(NotReadyError):
        await fake.load()
    assert fake.calls() == ["weft_load_in_place"]  # whoever ends it lets generation resume
    assert fake.replica.loading == "t"


async def test_what_was_not_prepared_changes_nothing(fake: Fake) -> None:
    fake.engine.answers["weft_load_in_place"] = lambda: [failed("NOT_STAGED")]
    with pytest.raises(NotReadyError):
        await fake.load()
    assert fake.calls() == [*BEGUN, "resume"]
    assert fake.replica.loading == fake.replica.dirty_reason == ""


async def test_discarded_before_anything_was_loaded(fake: Fake) -> None:
    await fake.load()
    fake.calls()
    await fake.replica.discard("another")
    assert fake.calls() == ["weft_discard"]
    assert fake.replica.loading == "t"
    await fake.replica.discard("t")
    assert fake.calls() == ["weft_discard", "resume"]
    assert fake.replica.loading == fake.replica.dirty_reason == ""


async def test_discarded_midway_it_is_dirty_until_a_base_is_loaded(fake: Fake) -> None:
    await fake.load()
    fake.calls()
    fake.leaves(changed=True)
    await fake.replica.discard("t")
    assert fake.calls() == ["weft_discard"]
    assert "base@3 was being loaded in place" in fake.replica.dirty_reason
    assert fake.replica.tracker.refuse_reason
    assert not fake.replica.loading
    await fake.load("t2")
    assert fake.calls() == BEGUN
    assert fake.replica.dirty_reason
    await fake.replica.apply_base("t2", BASE, b"")
    assert fake.calls() == SERVED
    assert fake.replica.dirty_reason == fake.replica.tracker.refuse_reason == ""


@pytest.mark.parametrize("changed", [False, True])
async def test_it_ends_by_itself_in_time(fake: Fake, changed: bool) -> None:
    fake.leaves(changed=changed)
    await fake.load(seconds=0.0)
    await fake.until("weft_discard")
    async with fake.alone():
        assert fake.replica.loading == ""
        assert bool(fake.replica.dirty_reason) == changed
        assert fake.calls() == [*BEGUN, "weft_discard", *([] if changed else ["resume"])]
    fake.engine.answers["weft_apply_base"] = lambda: [failed("NOT_STAGED")]
    with pytest.raises(NotReadyError):  # a commit that comes late
        await fake.replica.apply_base("t", BASE, b"")
    assert bool(fake.replica.dirty_reason) == changed


@pytest.mark.parametrize("ends", ["commit", "discard", "another load"])
async def test_what_was_loaded_whole_waits_for_a_late_word(fake: Fake, ends: str) -> None:
    fake.leaves(changed=True, kept=True)
    await fake.load(seconds=0.0)
    await fake.until("weft_discard")
    async with fake.alone():
        assert "not committed" in fake.replica.dirty_reason
        assert not fake.replica.loading  # so that its agent looks again
        fake.calls()
    if ends == "commit":
        times = await fake.replica.apply_base("t", BASE, b"")
        assert fake.calls() == SERVED
        assert times.pause_seconds > 0
        assert not fake.replica.dirty_reason
        return
    fake.leaves(changed=True)
    if ends == "discard":
        await fake.replica.discard("t")
        assert fake.calls() == ["weft_discard"]
    else:
        await fake.load("t2")
        assert fake.calls() == ["weft_discard", *BEGUN]
    assert fake.replica.dirty_reason


async def test_another_load_takes_its_place(fake: Fake) -> None:
    await fake.load()
    fake.calls()
    fake.leaves(changed=True)
    await fake.load("t2")
    assert fake.calls() == ["weft_discard", *BEGUN]
    assert fake.replica.loading == "t2"
    assert fake.replica.dirty_reason
    await fake.replica.discard("t")  # late: it is the other one's
    assert fake.replica.loading == "t2"


async def test_a_staged_base_takes_its_place(fake: Fake) -> None:
    await fake.load()
    fake.calls()
    fake.leaves(changed=True)
    await fake.replica.apply_base("t2", BASE, b"")
    assert fake.calls() == [
        "weft_discard", "pause", "weft_apply_base", "base@3", "reset", "weft_keep_base", "resume",
    ]  # fmt: skip
    assert fake.replica.loading == fake.replica.dirty_reason == ""


async def test_other_bytes_are_not_served(fake: Fake) -> None:
    await fake.load()
    fake.calls()
    fake.engine.answers["weft_loaded"] = lambda: [failed("LOAD_FAILED", dirty=True)]
    with pytest.raises(LoadFailedError):
        await fake.replica.apply_base("t", BASE, b"")
    assert fake.calls() == ["weft_loaded"]
    assert fake.replica.dirty_reason
    assert not fake.replica.loading


async def test_a_commit_of_what_never_began_lets_requests_go_on(fake: Fake) -> None:
    await fake.load()
    fake.calls()
    fake.engine.answers["weft_loaded"] = lambda: [failed("NOT_STAGED")]
    with pytest.raises(NotReadyError):
        await fake.replica.apply_base("t", BASE, b"")
    assert fake.calls() == ["weft_loaded", "resume"]
    assert fake.replica.loading == fake.replica.dirty_reason == ""


async def test_no_adapter_comes_or_goes_meanwhile(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: Any = fake.replica.models
    monkeypatch.setattr(models, "check_new", lambda version: None)
    monkeypatch.setattr(models, "is_served", lambda version, digest: False)
    await fake.load()
    fake.calls()
    with pytest.raises(NotReadyError) as refused:
        await fake.replica.load_adapter("a", PolicyVersion("math", 1), "{}", b"")
    assert refused.value.reason == "TRANSFER_UNDER_WAY"
    served = SimpleNamespace(removed_at=0, unused_since=-LONG, request=None)
    monkeypatch.setattr(models, "remove", lambda version, mark: served)
    assert not await fake.replica.retire(PolicyVersion("math", 1))
    assert fake.calls() == []


async def test_an_interrupted_beginning_is_dirty(fake: Fake) -> None:
    fake.engine.hang["weft_load_in_place"] = asyncio.Event()
    task = asyncio.create_task(fake.load())
    await fake.until("weft_load_in_place")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "interrupted" in fake.replica.dirty_reason
    fake.engine.hang["weft_load_in_place"].set()
    await asyncio.sleep(0)


# -- two ranks -------------------------------------------------------------------------


@pytest.mark.parametrize("fake", [2], indirect=True)
async def test_nothing_has_changed_unless_the_receiving_rank_has_begun(fake: Fake) -> None:
    fake.engine.answers["weft_load_in_place"] = lambda: [failed("NOT_STAGED"), ok(1)]
    with pytest.raises(NotReadyError):
        await fake.load()
    assert fake.calls() == [*BEGUN, "resume"]
    assert fake.replica.dirty_reason == ""
    fake.engine.answers["weft_load_in_place"] = lambda: [ok(0), failed("NOT_STAGED", rank=1)]
    with pytest.raises(LoadFailedError, match="rank 1 of 2"):
        await fake.load()
    assert fake.calls() == BEGUN  # it stays paused
    assert fake.replica.dirty_reason


@pytest.mark.parametrize("fake", [2], indirect=True)
@pytest.mark.parametrize("kept", [[True, True], [True, False], [False, True]])
async def test_what_one_rank_alone_has_whole_is_not_kept(fake: Fake, kept: list[bool]) -> None:
    orders = iter([kept, [False, False]])
    fake.engine.answers["weft_discard"] = lambda: [
        ok(rank, changed=True, kept=k) for rank, k in enumerate(next(orders))
    ]
    await fake.load(seconds=0.0)
    await fake.until("weft_discard")
    async with fake.alone():
        assert fake.replica.dirty_reason
        discards = [call for call in fake.calls() if call == "weft_discard"]
        assert len(discards) == (1 if all(kept) else 2)
        assert fake.replica._in_place.is_pending("t") == all(kept)


@pytest.mark.parametrize("fake", [2], indirect=True)
async def test_ranks_that_do_not_agree_are_dirty(fake: Fake) -> None:
    await fake.load()
    fake.engine.answers["weft_loaded"] = lambda: [
        ok(0, load_seconds=1.0),
        failed("NOT_STAGED", rank=1),
    ]
    with pytest.raises(NotReadyError) as refused:
        await fake.replica.apply_base("t", BASE, b"")
    assert refused.value.metadata["dirty"] == "true"
    assert fake.replica.dirty_reason
