"""The requests of an engine, in the API process: what they have, their salts, their ends."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from rollout_side.vllm_engine.compat import engine_core

_POLL_SECONDS = 0.001
#: Where vLLM has what its server answers as a failure to generate, the newest place first.
_FAILURES = (
    ("vllm.exceptions", "RetryableRequestError"),
    ("vllm.exceptions", "GenerationError"),
    ("vllm.entrypoints.openai.engine.protocol", "GenerationError"),
)


async def take_in_outputs(engine: Any) -> None:
    """Return, at a pause, once what the engine had put out before it has been taken in: its
    answer to the pause comes behind that, in the same queue."""
    if not engine.output_processor.request_states:
        return
    queue = engine.engine_core.outputs_queue
    while queue.qsize() or not queue._getters:  # until its one reader waits for more
        await asyncio.sleep(_POLL_SECONDS)
    for _ in range(3):  # who waits for one of these outputs has it then
        await asyncio.sleep(0)


async def tokens_before(engine: Any) -> dict[tuple[str, int], int]:
    """How many tokens each unfinished sample has, by its request and its index, at a pause;
    nothing where outputs name the weights behind their tokens (0.32 and later)."""
    states = engine.output_processor.request_states
    if not states or hasattr(next(iter(states.values())), "weight_version_starts"):
        return {}
    await take_in_outputs(engine)
    return {
        (state.external_req_id, state.request_index): state.detokenizer.num_output_tokens()
        for state in states.values()
        if state.detokenizer is not None
    }


def begun_requests(engine: Any) -> frozenset[str]:
    """The requests of which an unfinished sample has a token, as they are called by who made
    them."""
    return frozenset(
        state.external_req_id
        for state in engine.output_processor.request_states.values()
        if state.detokenizer is not None and state.detokenizer.num_output_tokens()
    )


def unfinished_requests(engine: Any) -> frozenset[str]:
    """The requests that the engine has not finished, as they are called by who made them."""
    states = engine.output_processor.request_states.values()
    return frozenset(state.external_req_id for state in states)


def note_sent(engine: Any, note: Callable[[str], None]) -> None:
    """Have each request noted, as it is called by who made it, when it is sent to the engine:
    it is among the unfinished ones then, until it has finished."""
    core = engine.engine_core
    send = core.add_request_async

    async def send_noted(request: Any) -> None:
        note(request.external_req_id)
        await send(request)

    core.add_request_async = send_noted


def salt_requests(engine: Any, salt: Callable[[str | None], str]) -> None:
    """Give every request the salt of the KV cache that it is admitted with, as it is sent to
    the engine: nothing comes between the two.

    Args:
        salt: From the salt that a request came with.
    """
    core = engine.engine_core
    send = core.add_request_async

    async def send_salted(request: Any) -> None:
        request.cache_salt = salt(request.cache_salt)
        await send(request)

    core.add_request_async = send_salted


async def keep_requests(engine: Any) -> None:
    """See ``engine_core.keep_requests``, which it needs there."""
    await engine.engine_core.call_utility_async(engine_core.KEEP_REQUESTS)


def failure(message: str, status: int) -> Exception:
    """What vLLM's server answers with that status where ``generate`` raises it."""
    for module, name in _FAILURES:
        try:
            kind = getattr(importlib.import_module(module), name, None)
        except ModuleNotFoundError:
            continue
        if kind is not None:
            error: Exception = kind(message)
            error.status_code = HTTPStatus(status)  # type: ignore[attr-defined]
            return error
    return RuntimeError(message)
