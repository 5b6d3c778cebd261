"""What becomes of requests that run when the base changes, over vLLM's double."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from rollout_side.engine import BaseSpan, FinishReason, GenerateOrder, SampleChunk
from rollout_side.vllm_engine.compat import bridges, requests
from rollout_side.vllm_engine.compat.requests import KEEP_REQUESTS
from rollout_side.vllm_engine.replica import VllmReplica
from rollout_side.vllm_engine.server import request_gate
from rollout_side.vllm_engine.server.requests_at_switch import EngineCaches
from tests.doubles.vllm import (
    BASE,
    FakeEngine,
    GeneratingEngine,
    make_replica,
    sampling_params,
)
from tests.waits import eventually
from weft_rl.contract.capabilities import RunningRequests
from weft_rl.contract.errors import LoadFailedError, TransferTimeoutError, VersionChangedError
from weft_rl.contract.names import STARTED_WITH, PolicyVersion


class Again(Exception):
    """In the place of vLLM's."""


@pytest_asyncio.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GeneratingEngine]:
    monkeypatch.setattr(bridges, "sampling_params", sampling_params)
    monkeypatch.setattr(requests, "failure", lambda message, status: Again(message))
    made = GeneratingEngine()
    yield made
    made.close()


class _Http:
    """A request of vLLM's server: what it gets from the engine."""

    def __init__(self, engine: GeneratingEngine, request_id: str, num_samples: int = 1) -> None:
        self._outputs = engine.generate([1], sampling_params(None, num_samples), request_id)
        self.tokens: list[int] = []
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for output in self._outputs:
            self.tokens += output.outputs[0].token_ids


async def _generate(replica: VllmReplica) -> list[SampleChunk]:
    answer = replica.generate(GenerateOrder(prompt=[1], adapter=None))
    found: list[SampleChunk] = []
    try:
        async for chunks in answer.chunks():
            found += chunks
    except VersionChangedError as error:
        found.append(error)  # type: ignore[arg-type]
    finally:
        answer.end()
    return found


async def _begun(engine: GeneratingEngine, number: int) -> None:
    await eventually(lambda: len(engine.prompts) >= number)


async def test_kept_requests_go_on_and_nothing_is_reset(engine: GeneratingEngine) -> None:
    replica = make_replica(engine, running_requests="keep")
    answer = asyncio.create_task(_generate(replica))
    await _begun(engine, 1)
    engine.emit("weft-1", [10, 11])
    times = await replica.apply_base("t", BASE, b"")
    assert engine.calls == [
        "pause", "weft_apply_base", "base@3", KEEP_REQUESTS, "weft_keep_base", "resume",
    ]  # fmt: skip
    engine.emit("weft-1", [12], finish="stop")
    assert (await answer)[-1].base_spans == (BaseSpan(0, 0, 2), BaseSpan(3, 2, 3, True))
    assert times.num_begun == 1


async def test_what_has_no_token_is_of_the_new_base_alone(engine: GeneratingEngine) -> None:
    replica = make_replica(engine, running_requests="keep")
    answer = asyncio.create_task(_generate(replica))
    await _begun(engine, 1)
    times = await replica.apply_base("t", BASE, b"")
    engine.emit("weft-1", [10], finish="stop")
    assert (await answer)[-1].base_spans == (BaseSpan(3, 0, 1),)
    assert times.num_begun == 0


async def test_no_two_switches_have_one_salt(engine: GeneratingEngine) -> None:
    """Nor where a base comes back, by a rollback or a repair."""
    replica = make_replica(engine, running_requests="keep")
    http: list[_Http] = []
    for at, (given, version) in enumerate(
        ((None, 3), ("mine", 4), ("mine", 3), ("mine", 3), (None, 3), (None, 3))
    ):
        engine.given_salt = given
        http.append(_Http(engine, f"r{at}"))
        await _begun(engine, at + 1)
        await asyncio.sleep(0)
        if at < 4:
            await replica.apply_base("t", PolicyVersion("base", version), b"")
    assert engine.salts[0].split() == ["base@0", "0"]
    assert len(set(engine.salts)) == 5
    assert engine.salts[4] == engine.salts[5]  # of one base, and without one of their own
    assert [salt.endswith("mine") for salt in engine.salts] == [False, True, True, True] + 2 * [
        False
    ]
    for request in http:
        request.task.cancel()


async def test_a_salt_changes_before_the_engine_keeps_its_requests(
    engine: GeneratingEngine,
) -> None:
    """Who has the old one is there by then; with the new one nobody finds what is older."""
    replica = make_replica(engine, running_requests="keep")
    engine.hang[KEEP_REQUESTS] = asyncio.Event()
    switch = asyncio.create_task(replica.apply_base("t", BASE, b""))
    await eventually(lambda: KEEP_REQUESTS in engine.calls)
    request = _Http(engine, "r0")
    await _begun(engine, 1)
    await asyncio.sleep(0)
    assert engine.salts[0].startswith("base@3 1 ")
    engine.hang[KEEP_REQUESTS].set()
    await switch
    request.task.cancel()


async def test_an_engine_that_cannot_keep_them_is_dirty(engine: GeneratingEngine) -> None:
    replica = make_replica(engine, running_requests="keep", call_seconds=0.02)
    engine.hang[KEEP_REQUESTS] = asyncio.Event()
    with pytest.raises(LoadFailedError, match="emptying the caches"):
        await replica.apply_base("t", BASE, b"")
    assert replica.dirty_reason
    assert "resume" not in engine.calls
    engine.hang[KEEP_REQUESTS].set()


async def test_what_has_tokens_is_aborted_with_a_reason(engine: GeneratingEngine) -> None:
    replica = make_replica(engine, running_requests="abort")
    answer = asyncio.create_task(_generate(replica))
    begun, group = _Http(engine, "h1"), _Http(engine, "h2", num_samples=2)
    waiting = _Http(engine, "h3")
    await _begun(engine, 4)
    for name in ("weft-1", "h1", "h2"):  # all of it waits as generation is paused
        engine.emit(name, [10])
    times = await replica.apply_base("t", BASE, b"")
    assert engine.calls == [
        "pause", "weft_apply_base", "base@3", "abort h1 h2 weft-1", "reset", "weft_keep_base",
        "resume",
    ]  # fmt: skip
    assert times.num_begun == 3
    for ended in (begun, group):
        with pytest.raises(Again, match=r"VERSION_CHANGED: .* ask again"):
            await ended.task
        assert ended.tokens == [10]
    *_, last, error = await answer
    assert (last.finish_reason, last.base_spans) == (FinishReason.ABORT, (BaseSpan(0, 0, 1),))
    assert isinstance(error, VersionChangedError)
    engine.emit("h3", [20], finish="stop")
    await waiting.task  # it is of the new base
    assert waiting.tokens == [20]


async def test_what_ends_in_time_is_whole(engine: GeneratingEngine) -> None:
    replica = make_replica(engine, running_requests="abort")
    request = _Http(engine, "h1")
    await _begun(engine, 1)
    engine.emit("h1", [10], finish="stop")
    await replica.apply_base("t", BASE, b"")
    await request.task
    assert request.tokens == [10]
    assert not [call for call in engine.calls if call.startswith("abort")]


async def test_aborting_closes_what_a_client_leaves(engine: GeneratingEngine) -> None:
    replica = make_replica(engine, running_requests="abort")
    outputs: Any = engine.generate([1], sampling_params(None), "h1")
    first = asyncio.ensure_future(anext(outputs))
    await _begun(engine, 1)
    engine.emit("h1", [10])
    await first
    await outputs.aclose()
    assert not replica.base_switch.requests._calls


REMOTE = RuntimeError("Failed to reset KV cache even when all the running requests are preempted")


async def _in_place(replica: VllmReplica) -> None:
    await replica.load_in_place("t", BASE, 60.0)
    await replica.apply_base("t", BASE, b"")


WAYS = {
    "staged": lambda replica: replica.apply_base("t", BASE, b""),
    "in place": _in_place,
    "from the files": lambda replica: replica.apply_retained(STARTED_WITH),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("choice", ["recompute", "keep", "abort"])
async def test_every_switch_forgets_what_an_encoder_has_seen(
    choice: RunningRequests, way: str
) -> None:
    engine = FakeEngine(sees=True)
    replica = make_replica(engine, in_place=True, running_requests=choice)
    await WAYS[way](replica)
    forgotten = [KEEP_REQUESTS if choice == "keep" else "reset", "reset encoder"]
    begin = engine.calls.index(forgotten[0])
    assert engine.calls[begin : begin + 2] == forgotten
    assert engine.calls.index("pause") < begin < engine.calls.index("resume")


@pytest.mark.parametrize(
    "field",
    [{"is_multimodal_model": True}, {"is_encoder_decoder": True}, {"runner_type": "pooling"}],
)
def test_what_has_an_encoder(field: dict[str, object]) -> None:
    engine = FakeEngine()
    assert not EngineCaches(engine).has_encoder
    engine.model_config = SimpleNamespace(**{**vars(engine.model_config), **field})
    assert EngineCaches(engine).has_encoder


async def test_an_encoder_that_cannot_be_reset_is_not_asked_again() -> None:
    engine = FakeEngine(sees=True)
    engine.failures["reset encoder"] = RuntimeError("no")
    replica = make_replica(engine)
    with pytest.raises(LoadFailedError, match="emptying the caches"):
        await replica.apply_base("t", BASE, b"")
    assert replica.dirty_reason
    assert replica.tracker.refuse_reason
    assert "resume" not in engine.calls


@pytest.mark.parametrize("choice", ["recompute", "abort"])
async def test_blocks_outside_are_forgotten_and_none_arrives_behind_the_load(
    choice: RunningRequests,
) -> None:
    engine = FakeEngine(connector=True)
    # A request waits for blocks; a connector lets go of some only later.
    engine.resets = [REMOTE, False, None]
    replica = make_replica(engine, running_requests=choice)
    await replica.apply_base("t", BASE, b"")
    tried = ["pause", "reset all", "resume"]
    assert engine.calls == [
        *tried, *tried, *tried, "pause", "reset all",
        "weft_apply_base", "base@3", "reset all", "weft_keep_base", "resume",
    ]  # fmt: skip


async def test_blocks_are_awaited_before_a_load_in_place_too() -> None:
    engine = FakeEngine(connector=True)
    engine.resets = [False]
    replica = make_replica(engine, in_place=True)
    await replica.load_in_place("t", BASE, 60.0)
    assert engine.calls[-3:] == ["pause", "reset all", "weft_load_in_place"]


async def test_blocks_that_never_arrive_end_the_push_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_gate, "_BLOCKS_SECONDS", 0.0)
    engine = FakeEngine(connector=True)
    engine.reset_works = False
    replica = make_replica(engine)
    with pytest.raises(TransferTimeoutError, match="connector"):
        await replica.apply_base("t", BASE, b"")
    assert not replica.dirty_reason
    assert engine.calls[-1] == "resume"
    assert "weft_apply_base" not in engine.calls


async def test_blocks_outside_that_stay_behind_a_load_are_never_used() -> None:
    engine = FakeEngine(connector=True)
    engine.resets = [True, False]
    replica = make_replica(engine)
    with pytest.raises(LoadFailedError, match="old blocks"):
        await replica.apply_base("t", BASE, b"")
    assert replica.dirty_reason
    await replica.apply_base("t", BASE, b"")  # which pauses, and awaits nothing
    assert not replica.dirty_reason


async def test_an_engine_that_dies_as_it_is_emptied_is_not_asked_again() -> None:
    engine = FakeEngine(connector=True)
    engine.resets = [RuntimeError("dead")]
    engine.errored = True
    with pytest.raises(LoadFailedError, match="dead"):
        await make_replica(engine).apply_base("t", BASE, b"")
    assert engine.calls == ["pause", "reset all"]


@pytest.mark.parametrize("connector", [False, True])
async def test_blocks_outside_are_found_by_their_base(connector: bool) -> None:
    engine = FakeEngine(connector=connector)
    replica = make_replica(engine)
    request = SimpleNamespace(cache_salt=None, external_req_id="r")
    for _ in range(2):
        await engine.add_request_async(request)
        request.cache_salt = None
        await replica.apply_base("t", BASE, b"")
    assert engine.salts == (["base@0 0 ", "base@3 1 "] if connector else [None, None])
