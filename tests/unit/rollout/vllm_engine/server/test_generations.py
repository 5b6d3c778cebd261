"""Answers to GenerateService over vLLM's double: spans, ends, what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from rollout_side.engine import (
    BaseSpan,
    FinishReason,
    GenerateOrder,
    Generation,
    SampleChunk,
)
from rollout_side.vllm_engine.compat import bridges
from rollout_side.vllm_engine.loading import lora_hook
from rollout_side.vllm_engine.replica import GRACE_SECONDS, VllmReplica
from tests.doubles.vllm import BASE, GeneratingEngine, make_replica, sampling_params
from tests.waits import eventually
from weft_rl.contract.errors import (
    CapacityError,
    InvalidRequestError,
    NotFoundError,
    PeerUnavailableError,
    VersionChangedError,
)
from weft_rl.contract.names import PolicyVersion

MATH_1 = PolicyVersion("math", 1)
_ID = "weft-1"


@pytest_asyncio.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GeneratingEngine]:
    monkeypatch.setattr(bridges, "sampling_params", sampling_params)
    made = GeneratingEngine()
    yield made
    made.close()


def _order(num_samples: int = 1, *, strict: bool = False, **more: Any) -> GenerateOrder:
    return GenerateOrder(
        **{"prompt": [1], "adapter": None, "num_samples": num_samples, "strict": strict, **more}
    )


class _Read:
    """Reads an answer on and on, until it ends."""

    def __init__(self, answer: Generation) -> None:
        self.chunks: list[SampleChunk] = []
        self.task = asyncio.create_task(self._read(answer))

    async def _read(self, answer: Generation) -> None:
        async for chunks in answer.chunks():
            self.chunks += chunks

    def tokens(self, index: int = 0) -> list[int]:
        return [t for c in self.chunks if c.index == index for t in c.token_ids]

    def spans(self, index: int = 0) -> Sequence[BaseSpan]:
        (last,) = [c for c in self.chunks if c.index == index and c.finish_reason]
        return last.base_spans


async def _started(engine: GeneratingEngine, answer: Generation) -> _Read:
    read, before = _Read(answer), len(engine.prompts)
    await eventually(lambda: len(engine.prompts) != before)
    return read


async def _switch(replica: VllmReplica, version: PolicyVersion = BASE) -> None:
    await replica.apply_base("t", version, b"d")


async def test_the_boundary_is_taken_at_the_pause_behind_what_waits(
    engine: GeneratingEngine,
) -> None:
    replica = make_replica(engine)
    read = await _started(engine, replica.generate(_order(2)))
    engine.emit(_ID, [10, 11])
    engine.emit(_ID, [20], index=1)
    engine.emit(_ID, [12], finish="length")  # all of it waits as generation is paused
    await _switch(replica)
    engine.emit(_ID, [21, 22], index=1)
    await _switch(replica, PolicyVersion("base", 4))
    await _switch(replica, PolicyVersion("base", 5))
    engine.emit(_ID, [23], finish="stop", index=1)
    await read.task
    assert (read.tokens(0), read.tokens(1)) == ([10, 11, 12], [20, 21, 22, 23])
    assert read.spans(0) == (BaseSpan(0, 0, 3),)
    assert read.spans(1) == (BaseSpan(0, 0, 1), BaseSpan(3, 1, 3), BaseSpan(5, 3, 4))
    logprobs = [value for chunk in read.chunks for value in chunk.logprobs if chunk.index]
    assert logprobs == [-0.20, -0.21, -0.22, -0.23]


async def test_a_reader_that_is_slow_changes_no_boundary(engine: GeneratingEngine) -> None:
    replica = make_replica(engine)
    chunks = replica.generate(_order()).chunks()
    first = asyncio.ensure_future(anext(chunks))
    await eventually(lambda: engine.prompts)
    engine.emit(_ID, [10])
    await first
    engine.emit(_ID, [11, 12])
    await _switch(replica)
    engine.emit(_ID, [13], finish="stop")
    rest = [chunk async for several in chunks for chunk in several]
    assert rest[-1].base_spans == (BaseSpan(0, 0, 3), BaseSpan(3, 3, 4))


async def test_one_that_has_not_begun_is_of_the_new_base(engine: GeneratingEngine) -> None:
    replica = make_replica(engine)
    answer = replica.generate(_order())
    await _switch(replica)
    read = await _started(engine, answer)
    engine.emit(_ID, [10], finish="stop")
    await read.task
    assert (answer.base, replica.base_version) == (0, 3)
    assert read.spans() == (BaseSpan(3, 0, 1),)


async def test_the_same_base_again_is_no_boundary(engine: GeneratingEngine) -> None:
    replica = make_replica(engine)
    await _switch(replica)
    read = await _started(engine, replica.generate(_order(strict=True)))
    engine.emit(_ID, [10])
    await _switch(replica)
    engine.emit(_ID, [11], finish="stop")
    await read.task
    assert read.spans() == (BaseSpan(3, 0, 2),)


async def test_what_vllm_says_of_weights_counts(engine: GeneratingEngine) -> None:
    engine.names_weights = True
    replica = make_replica(engine)
    read = await _started(engine, replica.generate(_order()))
    engine.emit(_ID, [10, 11], finish="stop")
    await read.task
    assert read.spans() == (BaseSpan(7, 0, 2),)


async def test_a_strict_answer_ends_at_the_pause_with_the_tokens_so_far(
    engine: GeneratingEngine,
) -> None:
    replica = make_replica(engine)
    read = await _started(engine, replica.generate(_order(2, strict=True)))
    engine.emit(_ID, [10, 11], finish="stop")
    engine.emit(_ID, [20, 21], index=1)
    await _switch(replica)
    engine.emit(_ID, [22], index=1)
    with pytest.raises(VersionChangedError, match="from base@0 to base@3"):
        await read.task
    assert (read.tokens(0), read.tokens(1)) == ([10, 11], [20, 21])
    reasons = [chunk.finish_reason for chunk in read.chunks if chunk.finish_reason]
    assert reasons == [FinishReason.STOP, FinishReason.ABORT]
    assert read.spans(1) == (BaseSpan(0, 0, 2),)
    assert engine.calls.index(f"abort {_ID}") < engine.calls.index("resume")


async def test_a_strict_answer_that_was_over_is_whole(engine: GeneratingEngine) -> None:
    replica = make_replica(engine)
    read = await _started(engine, replica.generate(_order(strict=True)))
    engine.emit(_ID, [10], finish="stop")
    await _switch(replica)
    await read.task
    assert read.spans() == (BaseSpan(0, 0, 1),)


async def test_an_answer_of_an_exact_base_ends_where_it_has_no_token(
    engine: GeneratingEngine,
) -> None:
    """And goes on where it has some, as its spans tell."""
    replica = make_replica(engine)
    begun = await _started(engine, replica.generate(_order(exact_base=True)))
    engine.emit(_ID, [10])
    waiting = await _started(engine, replica.generate(_order(exact_base=True)))
    await _switch(replica)
    with pytest.raises(VersionChangedError, match="to base@3"):
        await waiting.task
    assert not waiting.tokens()
    engine.emit(_ID, [11], finish="stop")
    await begun.task
    assert begun.spans() == (BaseSpan(0, 0, 1), BaseSpan(3, 1, 2))


async def test_a_strict_answer_that_has_not_begun_gets_no_tokens(
    engine: GeneratingEngine,
) -> None:
    replica = make_replica(engine)
    answer = replica.generate(_order(strict=True))
    await _switch(replica)  # vLLM does not know the request yet
    read = await _started(engine, answer)
    engine.emit(_ID, [10])
    with pytest.raises(VersionChangedError):
        await read.task
    answer.end()
    await asyncio.sleep(0)
    assert [(c.token_ids, c.finish_reason) for c in read.chunks] == [((), FinishReason.ABORT)]
    assert engine.calls[-1] == f"abort {_ID}"
    assert not engine.output_processor.request_states


async def test_who_ends_it_ends_it_in_the_engine(engine: GeneratingEngine) -> None:
    replica = make_replica(engine)
    chunks = (answer := replica.generate(_order(2))).chunks()
    first = asyncio.ensure_future(anext(chunks))
    await eventually(lambda: engine.prompts)
    engine.emit(_ID, [10])
    await first  # nobody reads on
    assert replica.num_requests() == 1
    for _ in range(2):
        answer.end()
    assert replica.num_requests() == 0
    await asyncio.sleep(0)
    assert engine.calls == [f"abort {_ID}"]
    assert not engine.output_processor.request_states
    await _switch(replica)  # which it is no part of any more


async def test_one_that_is_over_is_not_aborted(engine: GeneratingEngine) -> None:
    replica = make_replica(engine)
    read = await _started(engine, answer := replica.generate(_order(prompt="text")))
    engine.emit(_ID, [10], finish="length")
    await read.task
    answer.end()
    await asyncio.sleep(0)
    assert engine.calls == []
    assert (engine.prompts, answer.prompt_token_ids) == (["text"], [1, 2])


async def test_a_version_is_not_dropped_under_an_answer(engine: GeneratingEngine) -> None:
    replica = make_replica(engine)
    request = SimpleNamespace(
        lora_name="math@1", lora_path=f"{lora_hook.SCHEME}math@1", lora_int_id=2**20
    )
    replica.models.add(MATH_1, request, b"")
    replica.models.drop_alias("math")
    answer = replica.generate(_order(adapter=MATH_1))
    assert not await replica.retire(MATH_1)
    read = await _started(engine, answer)
    with pytest.raises(NotFoundError):
        replica.generate(_order(adapter=MATH_1))
    engine.emit(_ID, [10], finish="stop")
    await read.task
    assert not await replica.retire(MATH_1)
    answer.end()
    assert not await replica.retire(MATH_1)
    await asyncio.sleep(GRACE_SECONDS * 1.5)
    assert await replica.retire(MATH_1)


class VLLMClientError(Exception):
    """As vLLM names it."""


class EngineDeadError(Exception):
    """As vLLM names it."""


class GracefulHTTPError(Exception):
    """As vLLM names it."""


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (ValueError("too long"), InvalidRequestError),
        (type("VLLMValidationError", (VLLMClientError,), {})("too long"), InvalidRequestError),
        (type("QueueOverflowError", (GracefulHTTPError,), {})("too long"), CapacityError),
        (EngineDeadError("too long"), PeerUnavailableError),
        (RuntimeError("too long"), RuntimeError),
    ],
)
async def test_what_vllm_raises(
    engine: GeneratingEngine, raised: Exception, kind: type[Exception]
) -> None:
    engine.refusal = raised
    answer = make_replica(engine).generate(_order())
    with pytest.raises(kind, match=r"too long|has died"):
        await anext(answer.chunks())
    answer.end()
