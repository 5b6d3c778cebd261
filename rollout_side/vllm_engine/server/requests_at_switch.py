"""Running requests of an engine when its base changes, and the caches that a switch empties.

Only this module decides what is emptied. A cache belongs here if its keys are content (tokens, an
image) and its values follow from weights; docs/architecture.md lists them all.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from rollout_side.vllm_engine.compat import requests
from rollout_side.vllm_engine.http import middleware
from rollout_side.vllm_engine.http.middleware import RequestNotes
from rollout_side.vllm_engine.http.served_models import Refusal
from weft_rl.contract.capabilities import RunningRequests
from weft_rl.contract.errors import LoadFailedError, VersionChangedError
from weft_rl.contract.names import BASE_POLICY, PolicyVersion


class EngineCaches:
    """Caches of one engine; every coroutine is awaited while generation is paused."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        model = engine.model_config
        #: True if it caches the outputs of an encoder of images, sounds or queries.
        self.has_encoder = bool(
            model.is_multimodal_model or model.is_encoder_decoder or model.runner_type == "pooling"
        )
        #: True if blocks of the KV cache are also kept outside the engine.
        self.has_connector = engine.vllm_config.kv_transfer_config is not None

    async def try_to_empty(self) -> bool:
        """Empty the caches of KV blocks; return False if some blocks are being moved. Running
        requests are computed anew, under the weights of that time."""
        try:
            return await self._reset_blocks()
        except Exception:
            if self._engine.errored:
                raise
            return False  # vLLM raises where a request waits for blocks from outside

    async def forget(self, *, keep_running: bool) -> None:
        """Empty the caches, so that new work uses nothing that the former base has computed.

        Args:
            keep_running: Whether running requests keep their blocks.
        """
        if keep_running:
            await requests.keep_requests(self._engine)
        elif not await self._reset_blocks():
            raise LoadFailedError(
                "the engine could not reset its KV cache, so old blocks would be used under new "
                "weights; push a base again",
                metadata={"dirty": "true"},
            )
        if self.has_encoder:
            await self._engine.reset_encoder_cache()

    async def _reset_blocks(self) -> bool:
        # Without a connector, older versions would answer that it could not be reset.
        outside = {"reset_connector": True} if self.has_connector else {}
        answer = await self._engine.reset_prefix_cache(reset_running_requests=True, **outside)
        return answer is True


_ABORTED = (
    f"{VersionChangedError.default_reason}: the base changed while this request ran, and this "
    "replica ends such requests (weft rollout --running-requests abort); ask again"
)


@dataclass(eq=False)
class _RequestCall:
    request_id: str
    notes: RequestNotes
    is_sent: bool = False
    """True if the engine has it."""
    is_aborted: bool = False
    refusal: Refusal | None = None


class RequestsAtSwitch:
    """Requests of one engine, and their handling at a switch; used on its event loop.

    vLLM's server looks a request's model up, renders its prompt, and has the engine admit it. The
    weights may change before its admission, and before its first token. So its name is resolved
    again at its admission, and at each switch until it has tokens.

    To keep requests, each gets a salt of the KV cache, made of its base and of the number of
    switches so far. A base that is served again, after a rollback or a repair, must not find what
    running requests have cached meanwhile. Requests also get a salt if blocks are kept outside the
    engine's own cache, whose reset cannot be verified. To abort requests, ``generate`` raises an
    error that vLLM's server answers as retryable.
    """

    def __init__(self, engine: Any, choice: RunningRequests) -> None:
        self.choice = choice
        self._engine = engine
        self.caches = EngineCaches(engine)
        self._base, self._num_switches = PolicyVersion(BASE_POLICY, 0), 0
        #: vLLM's own ``generate``.
        self.generate = engine.generate
        self._calls: dict[str, list[_RequestCall]] = {}
        requests.send_items_until_taken(engine)
        requests.on_request_sent(engine, self._mark_sent)
        if choice == "keep" or self.caches.has_connector:
            requests.salt_requests(engine, self._salt)
        for name in ("generate", "encode"):  # answers of tokens, and of pooling models
            if method := getattr(engine, name, None):
                setattr(engine, name, functools.partial(self._admit, method))

    async def begun(self) -> frozenset[str]:
        """Return the requests that have tokens; call it while generation is paused."""
        await requests.take_in_outputs(self._engine)
        return requests.begun_requests(self._engine)

    async def switch(self, version: PolicyVersion, begun: frozenset[str]) -> None:
        """Record that another base is loaded, and empty the caches; call it while paused.

        Requests that have tokens are aborted, if that is the choice.

        Args:
            version: The base.
            begun: Requests that have tokens; the others begin anew.
        """
        # Requests with the old salt were sent before, so they are there when the caches are reset.
        self._base, self._num_switches = version, self._num_switches + 1
        if self.choice == "abort" and begun:
            for call in self._all_calls():
                call.is_aborted |= call.request_id in begun
            await self._engine.abort(sorted(begun))
        await self.caches.forget(keep_running=self.choice == "keep")

    def _salt(self, given: str | None) -> str:
        """Return the salt of a request that is admitted now; ``given`` is its own, or None."""
        return f"{self._base} {self._num_switches} {given or ''}"

    async def note_base(self, begun: frozenset[str]) -> None:
        """End requests that the new base may not answer; call it while paused.

        Called as soon as the base has its name.

        Args:
            begun: As for ``switch``; requests admitted since then have no tokens.
        """
        unfinished = requests.unfinished_requests(self._engine)
        to_begin = []
        for call in self._all_calls():
            is_over = call.is_sent and call.request_id not in unfinished
            if call.request_id in begun or is_over:
                call.notes.has_begun = True
            else:
                to_begin.append(call)
        for call in to_begin:
            call.refusal = call.notes.switch()
        if ended := [call.request_id for call in to_begin if call.refusal is not None]:
            await self._engine.abort(ended)

    def _all_calls(self) -> Iterator[_RequestCall]:
        return itertools.chain.from_iterable(self._calls.values())

    def _mark_sent(self, request_id: str) -> None:
        for call in self._calls.get(request_id, ()):  # a client may use an id twice
            call.is_sent = True

    async def _admit(
        self, method: Callable[..., AsyncGenerator[Any, None]], *args: Any, **more: Any
    ) -> AsyncGenerator[Any, None]:
        """Admit a call of ``AsyncLLM.generate`` or ``AsyncLLM.encode``, and pass its outputs on.
        vLLM's server calls this in place of either."""
        notes = middleware.current_notes()
        if (refusal := notes.admit()) is not None:
            raise requests.failure(refusal.message, refusal.status)
        # Nothing is awaited since the admission: a switch finds the request among the calls.
        call = _RequestCall(more["request_id"] if "request_id" in more else args[2], notes)
        self._calls.setdefault(call.request_id, []).append(call)
        outputs = method(*args, **more)
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    if call.refusal is not None:
                        break
                    notes.has_begun = True
                    yield output
        finally:
            self._calls[call.request_id].remove(call)
            if not self._calls[call.request_id]:
                del self._calls[call.request_id]
        if call.refusal is not None:
            raise requests.failure(call.refusal.message, call.refusal.status)
        if call.is_aborted:
            middleware.set_reason(VersionChangedError.default_reason)
            raise requests.failure(_ABORTED, HTTPStatus.SERVICE_UNAVAILABLE)
