"""What becomes of an engine's running requests when its base changes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from rollout_side.vllm_engine.compat import requests
from rollout_side.vllm_engine.http import version_headers
from rollout_side.vllm_engine.server.switching.caches import EngineCaches
from weft.contract.capabilities import RunningRequests
from weft.contract.errors import VersionChangedError
from weft.contract.names import BASE_POLICY, PolicyVersion

_ABORTED = (
    f"{VersionChangedError.default_reason}: the base changed while this request ran, and this "
    "replica ends such requests (weft rollout --running-requests abort); ask again"
)


@dataclass(eq=False)
class _Call:
    """A call of the engine's ``generate``."""

    request_id: str
    is_aborted: bool = False


class RequestsAtSwitch:
    """The requests of one engine; on its event loop.

    To keep them, every request gets a salt of the KV cache: of the base that it is admitted
    under, and of the number of switches until then, because a base that comes back (by a
    rollback, by a repair) must not find what running requests have cached meanwhile. So it does
    where blocks are kept outside the engine's own cache, whose reset the engine only reports. To
    abort them, ``generate`` raises what vLLM's server answers as something to be asked again.

    Args:
        engine: vLLM's ``AsyncLLM``; methods of it are replaced, but to recompute.
        choice: What becomes of them.
    """

    def __init__(self, engine: Any, choice: RunningRequests) -> None:
        self.choice = choice
        self._engine = engine
        self.caches = EngineCaches(engine)
        self._base, self._num_switches = PolicyVersion(BASE_POLICY, 0), 0
        #: vLLM's own ``generate``.
        self.generate = engine.generate
        self._calls: set[_Call] = set()
        if choice == "keep" or self.caches.has_connector:
            requests.salt_requests(engine, self._salt)
        if choice == "abort":
            engine.generate = self._generate_or_raise

    async def begun(self) -> frozenset[str]:
        """The requests that have tokens, while generation is paused."""
        if self.choice == "abort":  # what a client has been sent must be known
            await requests.take_in_outputs(self._engine)
        return requests.begun_requests(self._engine)

    async def switch(self, version: PolicyVersion, begun: frozenset[str]) -> None:
        """Take in, while generation is paused, that the weights are of another base.

        Args:
            version: The base.
            begun: The requests that have tokens; the others begin anew.

        Raises:
            LoadFailedError: What the former base has computed could be used: dirty.
        """
        # Who was given the old salt has been sent, and so is there before the caches are reset.
        self._base, self._num_switches = version, self._num_switches + 1
        if self.choice == "abort" and begun:
            for call in self._calls:
                call.is_aborted |= call.request_id in begun
            await self._engine.abort(sorted(begun))
        await self.caches.forget(keep_running=self.choice == "keep")

    def _salt(self, given: str | None) -> str:
        """Of a request that is admitted now, and came with a salt or none."""
        return f"{self._base} {self._num_switches} {given or ''}"

    async def _generate_or_raise(
        self, prompt: Any, params: Any, request_id: str, **more: Any
    ) -> AsyncGenerator[Any, None]:
        """``AsyncLLM.generate``, as vLLM's server calls it."""
        call = _Call(request_id)
        self._calls.add(call)
        outputs = self.generate(prompt, params, request_id, **more)
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    yield output
        finally:
            self._calls.discard(call)
        if call.is_aborted:
            version_headers.note_reason(VersionChangedError.default_reason)
            raise requests.retryable(_ABORTED)
