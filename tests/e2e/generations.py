"""Answers of a ``VllmReplica`` to GenerateService's orders, in its process and from a test."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_side.engine import BaseSpan, FinishReason, GenerateOrder, Generation, SampleChunk
from rollout_side.vllm_engine.server.requests_at_switch import RequestsAtSwitch
from weft_rl.contract.capabilities import RunningRequests
from weft_rl.contract.errors import WeftError


@dataclass
class Generated:
    """One sample, whole."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    base_spans: Sequence[BaseSpan] = ()


class Generations:
    """In the replica's process: begins answers, and reads or ends them when it is told."""

    def __init__(self, replica: Any) -> None:
        self._replica = replica
        self._answers: list[tuple[Generation, AsyncGenerator[Sequence[SampleChunk], None]]] = []

    async def begin(self, order: GenerateOrder) -> tuple[int, Sequence[SampleChunk]]:
        """Returns its number and its first chunks."""
        images = await self._replica.read_images(order.images) if order.images else ()
        answer = self._replica.generate(dataclasses.replace(order, images=images))
        self._answers.append((answer, answer.chunks()))
        try:
            number, first = len(self._answers) - 1, await anext(self._answers[-1][1])
            self.prompt_token_ids = answer.prompt_token_ids
            return number, first
        except BaseException:
            answer.end()
            raise

    async def told_prompt(self) -> list[int]:
        """Token ids that the last answer told its prompt as."""
        return [*self.prompt_token_ids]

    async def read(self, number: int) -> tuple[list[SampleChunk], WeftError | None]:
        """The rest of one, and how it failed, if it did."""
        answer, chunks = self._answers[number]
        found: list[SampleChunk] = []
        try:
            async for several in chunks:
                found += several
        except WeftError as error:
            return found, error
        finally:
            answer.end()
        return found, None

    async def choose(self, running_requests: RunningRequests) -> None:
        """What becomes of running requests from now on. To keep them the engine must have been
        started so; it can do all else then, too."""
        engine, switch = self._replica.engine, self._replica.base_switch
        engine.generate = switch.requests.generate
        switch.requests = RequestsAtSwitch(engine, running_requests)

    async def end(self, number: int) -> None:
        """End one."""
        self._answers[number][0].end()
        await asyncio.sleep(0)


def joined(chunks: Sequence[SampleChunk], num_samples: int) -> list[Generated]:
    """The samples of an answer."""
    samples = [Generated() for _ in range(num_samples)]
    for chunk in chunks:
        sample = samples[chunk.index]
        assert sample.finish_reason is None
        sample.tokens += chunk.token_ids
        sample.logprobs += chunk.logprobs
        sample.finish_reason, sample.base_spans = chunk.finish_reason, chunk.base_spans
    assert all(len(sample.tokens) == len(sample.logprobs) for sample in samples)
    return samples
