"""Requests of an engine: tokens, salts and failures in the API process, blocks in its core."""

from __future__ import annotations

import asyncio
import copy
import importlib
import time
import weakref
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

#: ``--scheduler-cls``.
SCHEDULER = f"{__name__}.make_scheduler"
#: What ``EngineCore`` can be asked for then; see ``keep_held_blocks``.
KEEP_REQUESTS = "weft_keep_requests"


def make_scheduler(*args: Any, vllm_config: Any, **settings: Any) -> Any:
    """Make vLLM's own scheduler, and add ``keep_held_blocks`` to ``EngineCore``. It is the
    scheduler that vLLM would have chosen."""
    core: Any = importlib.import_module("vllm.v1.engine.core").EngineCore
    setattr(core, KEEP_REQUESTS, keep_held_blocks)
    own = copy.copy(vllm_config.scheduler_config)
    own.scheduler_cls = None
    return own.get_scheduler_cls()(*args, vllm_config=vllm_config, **settings)


def keep_held_blocks(core: Any) -> None:
    """Let requests continue on the blocks that they hold, and stop reuse of old cached blocks.

    To be called while generation is paused, after a load. New requests have another salt. Present
    requests take no block from the cache any more, so one that is preempted is computed anew under
    the weights of that time. A request without tokens belongs to no version yet: it gives its
    blocks back, and all of it is computed under the new weights. So does a request that has outputs
    of an encoder still to read, which the new weights make anew.
    """
    scheduler = core.scheduler
    for request in scheduler.requests.values():
        request.skip_reading_prefix_cache = True
    begun: list[Any] = []
    others: list[Any] = []
    for request in scheduler.running:
        is_kept = request.num_output_tokens and not _reads_encoder(scheduler, request)
        (begun if is_kept else others).append(request)
    scheduler.running[:] = begun
    for request in reversed(others):  # each goes to the front of those that wait
        scheduler._preempt_request(request, time.monotonic())
    # The workers are to take them out of their batch, as those of the step before.
    scheduler.prev_step_scheduled_req_ids.difference_update(
        request.request_id for request in others
    )


def _reads_encoder(scheduler: Any, request: Any) -> bool:
    """Return whether a request that has tokens still refers to outputs of an encoder."""
    if scheduler.is_encoder_decoder:  # its cache manager lists every request until its end
        return False
    return bool(scheduler.encoder_cache_manager.get_cached_input_ids(request))


_POLL_SECONDS = 0.001
#: Where vLLM has what its server answers as a failure to generate, the newest place first.
_FAILURES = (
    ("vllm.exceptions", "RetryableRequestError"),
    ("vllm.exceptions", "GenerationError"),
    ("vllm.entrypoints.openai.engine.protocol", "GenerationError"),
)


async def take_in_outputs(engine: Any) -> None:
    """Wait, at a pause, until the outputs that came before it have been taken in. The engine's
    answer to the pause comes behind these outputs, in the same queue."""
    if not engine.output_processor.request_states:
        return
    queue = engine.engine_core.outputs_queue
    while queue.qsize() or not queue._getters:  # until its one reader waits for more
        await asyncio.sleep(_POLL_SECONDS)
    for _ in range(3):  # who waits for one of these outputs has it then
        await asyncio.sleep(0)


async def tokens_before(engine: Any) -> dict[tuple[str, int], int]:
    """Count the tokens of each unfinished sample, at a pause.

    Returns:
        Counts by request and sample index; empty where outputs name the weights behind their tokens
        (0.32 and later).
    """
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
    """Return the callers' ids of requests that have a token in an unfinished sample."""
    return frozenset(
        state.external_req_id
        for state in engine.output_processor.request_states.values()
        if state.detokenizer is not None and state.detokenizer.num_output_tokens()
    )


def unfinished_requests(engine: Any) -> frozenset[str]:
    """Return the callers' ids of requests that the engine has not finished."""
    states = engine.output_processor.request_states.values()
    return frozenset(state.external_req_id for state in states)


def on_request_sent(engine: Any, note: Callable[[str], None]) -> None:
    """Call ``note`` with the caller's id of each request when it is sent to the engine. From then
    on it is among the unfinished requests, until it has finished."""
    core = engine.engine_core
    send = core.add_request_async

    async def send_noted(request: Any) -> None:
        note(request.external_req_id)
        await send(request)

    core.add_request_async = send_noted


def salt_requests(engine: Any, salt: Callable[[str | None], str]) -> None:
    """Set the KV-cache salt of every request as it is sent to the engine.

    Nothing comes between the two.

    Args:
        salt: Maps the salt that a request came with, None for none, to the one that it gets.
    """
    core = engine.engine_core
    send = core.add_request_async

    async def send_salted(request: Any) -> None:
        request.cache_salt = salt(request.cache_salt)
        await send(request)

    core.add_request_async = send_salted


#: Caches of prepared images and sounds that send an item's data to the engine once, 0.26 and 0.32.
_SENDER_CACHES = {"MultiModalProcessorSenderCache", "LruKeyReplicatedSenderCache"}


def send_items_until_taken(engine: Any) -> None:
    """Have an image or a sound sent with each request, until the engine has taken one of them.

    vLLM's cache here counts an item as sent once it is prepared, and sends its hash alone from
    then on. A request that ends in between (refused, cut off, or found wrong later) never brings
    it: the engine would know nothing of the hash, and vLLM answers the next request with it by 500.
    """
    cache = engine.renderer.mm_processor_cache
    if type(cache).__name__ not in _SENDER_CACHES:
        return  # no items, or always sent, or in memory that both can read
    unsent = _UnsentCache(cache)
    core = engine.engine_core
    send = core.add_request_async

    async def send_taken(request: Any) -> None:
        await send(request)
        for feature in request.mm_features or ():
            if feature.data is not None:
                unsent.forget(feature.mm_hash or feature.identifier)

    core.add_request_async = send_taken


class _UnsentCache:
    """Items of vLLM's cache that no request has brought to the engine; replaces two of its methods.
    The cache is used on vLLM's thread for items, and ``forget`` on the event loop."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        #: What the cache keeps of each, by hash: an item that it evicts is gone from here, too.
        self._unsent: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._is_cached, self._get = cache.is_cached_item, cache.get_and_update_item
        cache.is_cached_item, cache.get_and_update_item = self.is_cached_item, self.get_and_update

    def is_cached_item(self, mm_hash: str) -> bool:
        """Return whether an item's hash alone may be sent."""
        return mm_hash not in self._unsent and bool(self._is_cached(mm_hash))

    def get_and_update(self, mm_item: Any, mm_hash: str) -> Any:
        """Return what is sent of an item: its data, or None for it, and vLLM's changes of the
        prompt."""
        found = self._get(mm_item, mm_hash)
        if found[0] is None and mm_item is not None and mm_hash in self._unsent:
            return mm_item
        if found[0] is not None and self._is_cached(mm_hash):  # else it was too large
            self._unsent[mm_hash] = self._cache._cache[mm_hash]
        return found

    def forget(self, mm_hash: str) -> None:
        """Note that the engine has an item."""
        self._unsent.pop(mm_hash, None)


async def keep_requests(engine: Any) -> None:
    """Call ``keep_requests``, which ``make_scheduler`` added, in the engine's process."""
    await engine.engine_core.call_utility_async(KEEP_REQUESTS)


def failure(message: str, status: int) -> Exception:
    """Make an error that vLLM's server answers with ``status`` where ``generate`` raises it."""
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
