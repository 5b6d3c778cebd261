"""What pauses generation for a load in place, and all that may end it; a fake engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_side.vllm_engine.replica import VllmReplica
from rollout_side.vllm_engine.worker.rank_results import RankResult
from tests.doubles.vllm import BASE, FakeEngine, failed, make_replica, ok
from tests.waits import eventually
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
        await eventually(lambda: call in self.engine.calls)


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


async def _carry_out(fake: Fake, action: str) -> None:
    """A word for an order; a 2 is for another transfer."""
    transfer_id = "t2" if action.endswith("2") else "t"
    match action.rstrip("2"):
        case "load":
            await fake.load(transfer_id)
        case "commit":
            await fake.replica.apply_base(transfer_id, BASE, b"")
        case "discard":
            await fake.replica.discard(transfer_id)


_CHANGED = {"weft_discard": [ok(changed=True, kept=False)]}
_STAGED = ["pause", "weft_apply_base", *SERVED[1:]]


@pytest.mark.parametrize(
    ("actions", "answers", "calls", "loading", "is_dirty"),
    [
        ("load", {}, BEGUN, "t", False),
        ("load commit", {}, [*BEGUN, *SERVED], "", False),
        ("load load", {}, [*BEGUN, "weft_load_in_place"], "t", False),
        # Nothing was loaded: requests go on.
        ("load!", {"weft_load_in_place": [failed("NOT_STAGED")]}, [*BEGUN, "resume"], "", False),
        ("load discard2", {}, [*BEGUN, "weft_discard"], "t", False),
        ("load discard", {}, [*BEGUN, "weft_discard", "resume"], "", False),
        ("load commit!", {"weft_loaded": [failed("NOT_STAGED")]},
         [*BEGUN, "weft_loaded", "resume"], "", False),
        # Something was: it stays paused until a base is loaded.
        ("load discard", _CHANGED, [*BEGUN, "weft_discard"], "", True),
        ("load discard load2", _CHANGED, [*BEGUN, "weft_discard", *BEGUN], "t2", True),
        ("load discard load2 commit2", _CHANGED,
         [*BEGUN, "weft_discard", *BEGUN, *SERVED], "", False),
        ("load load2", _CHANGED, [*BEGUN, "weft_discard", *BEGUN], "t2", True),
        ("load load2 discard", _CHANGED,
         [*BEGUN, "weft_discard", *BEGUN, "weft_discard"], "t2", True),
        ("load commit2", _CHANGED, [*BEGUN, "weft_discard", *_STAGED], "", False),
        ("load commit!", {"weft_loaded": [failed("LOAD_FAILED", dirty=True)]},
         [*BEGUN, "weft_loaded"], "", True),
    ],
)  # fmt: skip
async def test_what_an_engine_is_told_in_order(
    fake: Fake,
    actions: str,
    answers: dict[str, list[RankResult]],
    calls: list[str],
    loading: str,
    is_dirty: bool,
) -> None:
    fake.engine.answers |= {name: lambda found=found: found for name, found in answers.items()}
    for action in actions.split():
        fails = pytest.raises((NotReadyError, LoadFailedError))
        with fails if action.endswith("!") else contextlib.nullcontext():
            await _carry_out(fake, action.rstrip("!"))
    assert fake.calls() == calls
    assert fake.replica.loading == loading
    assert bool(fake.replica.dirty_reason) == is_dirty
    assert bool(fake.replica.tracker.refuse_reason) == is_dirty


async def test_a_commit_tells_how_long_it_took() -> None:
    replica = make_replica(FakeEngine(), in_place=True)
    await replica.load_in_place("t", BASE, LONG)
    times = await replica.apply_base("t", BASE, b"")
    assert times.load_seconds == 2.0
    assert times.pause_seconds > 0


async def test_an_order_that_comes_again_and_fails_ends_nothing(fake: Fake) -> None:
    await fake.load()
    fake.engine.answers["weft_load_in_place"] = lambda: [failed("NOT_STAGED")]
    with pytest.raises(NotReadyError):
        await fake.load()
    assert fake.calls() == [*BEGUN, "weft_load_in_place"]  # whoever ends it has generation resume
    assert fake.replica.loading == "t"


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
