"""Answers of the engine double: a token a step, by a rule that names the versions behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

from rollout_side.engine import BaseSpan, FinishReason, GenerateOrder, SampleChunk
from weft_rl.contract.errors import VersionChangedError

if TYPE_CHECKING:
    from tests.doubles.engine import EngineDouble

#: Tokens of a sample where the request says nothing.
MAX_TOKENS = 8


def token(base: int, adapter: int, index: int, position: int) -> int:
    """What the double "samples"."""
    return ((base * 100 + adapter) * 100 + index) * 1000 + position


class AnswerDouble:
    """See ``rollout_side.engine.Answer``."""

    def __init__(self, engine: EngineDouble, order: GenerateOrder) -> None:
        self._engine, self._order = engine, order
        self.base = engine.base_version
        self.prompt_token_ids: Sequence[int] = ()
        self.has_ended = False
        #: Tokens that each of its samples has.
        self.num_steps = 0

    async def chunks(self) -> AsyncGenerator[Sequence[SampleChunk], None]:
        order, how = self._order, self._order.sampling
        if isinstance(order.prompt, str):
            self.prompt_token_ids = [ord(letter) for letter in order.prompt]
        if order.images:  # each is as many tokens as it has rows
            given = [*map(ord, order.prompt)] if isinstance(order.prompt, str) else order.prompt
            rows = [image.height or len(image.file) for image in order.images]
            self.prompt_token_ids = [*given, *(7 for count in rows for _ in range(count))]
        bases: list[int] = []
        held: list[tuple[int, int]] = []  # (base, position) of tokens that were not sent yet
        last = how.max_tokens or MAX_TOKENS
        while self.num_steps < last:
            await self._engine.stepping.wait()
            await asyncio.sleep(0)
            base, position = self._engine.base_version, self.num_steps
            aborts = self._engine.capabilities.running_requests == "abort" and position
            if base != (bases[0] if aborts else self.base) and (order.strict or aborts):
                yield self._last(bases, FinishReason.ABORT, held)
                raise VersionChangedError(f"the base is base@{base} by now")
            bases.append(base)
            held.append((base, position))
            self.num_steps += 1
            is_due = position == 0 or len(held) >= order.chunk_tokens
            if self.num_steps < last and is_due:
                yield [self._chunk(i, held) for i in range(self._order.num_samples)]
                held.clear()
        yield self._last(bases, FinishReason.LENGTH, held)

    def _chunk(self, index: int, held: list[tuple[int, int]], **ends: Any) -> SampleChunk:
        adapter = self._order.adapter.version if self._order.adapter else 0
        tokens = tuple(token(base, adapter, index, position) for base, position in held)
        return SampleChunk(index=index, token_ids=tokens, logprobs=(-0.5,) * len(held), **ends)

    def _last(
        self, bases: list[int], reason: FinishReason, held: list[tuple[int, int]]
    ) -> list[SampleChunk]:
        firsts = [i for i, base in enumerate(bases) if i == 0 or base != bases[i - 1]]
        ends = [*firsts[1:], len(bases)]
        keeps = self._engine.capabilities.running_requests == "keep"
        spans = tuple(
            BaseSpan(bases[i], i, end, keeps and i > 0)
            for i, end in zip(firsts, ends, strict=False)
        )
        return [
            self._chunk(i, held, finish_reason=reason, base_spans=spans)
            for i in range(self._order.num_samples)
        ]

    def end(self) -> None:
        self.has_ended = True
        self._engine.answers.discard(self)
