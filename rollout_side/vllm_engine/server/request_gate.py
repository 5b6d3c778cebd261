"""Gate of an engine's requests: pauses generation and refuses new requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from rollout_side.vllm_engine.compat import bridges
from rollout_side.vllm_engine.http.middleware import RequestTracker
from rollout_side.vllm_engine.server.requests_at_switch import EngineCaches
from rollout_side.vllm_engine.server.worker_calls import WorkerCalls
from weft_rl.contract.errors import TransferTimeoutError, WeftError

_log = logging.getLogger(__name__)

_BLOCKS_SECONDS = 30.0
_LOOK_SECONDS = 0.02


class RequestGate:
    """Gate of one engine's requests, with the reasons to keep them out; used on its event loop.

    A dirty engine's weights may be mixed. Until a base has loaded, generation stays paused, and new
    requests are refused over HTTP.
    """

    def __init__(
        self, engine: Any, workers: WorkerCalls, tracker: RequestTracker, caches: EngineCaches
    ) -> None:
        self._engine, self._workers, self._tracker = engine, workers, tracker
        self._caches = caches
        self._lock = asyncio.Lock()
        self._closed = self._to_sleep = ""
        self._is_asleep = False
        #: Why the weights may be mixed; empty when they are not.
        self.dirty_reason = ""

    @contextlib.asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Allow one switch at a time; mark the engine dirty if a failure leaves mixed weights."""
        async with self._lock:
            try:
                yield
            except WeftError as error:
                self.mark_if_dirty(error)
                raise

    async def pause(self) -> None:
        """Pause generation, with running requests kept in their places; succeeds if it is paused.

        With a KV connector, wait until no block of the KV cache is on its way. A block that arrived
        after a load would be used under weights that have not computed it.
        """
        await self._pause()
        # A dirty engine has stayed paused, so no block has moved.
        if self._caches.has_connector and not self.dirty_reason:
            await self._wait_for_blocks()

    async def _pause(self) -> None:
        paused = bridges.pause_keeping(self._engine)
        await self._workers.bounded(paused, "pausing", changes_weights=False)

    async def _wait_for_blocks(self) -> None:
        deadline = time.monotonic() + _BLOCKS_SECONDS
        bounded, what = self._workers.bounded, "emptying the KV cache"
        while not await bounded(self._caches.try_to_empty(), what, changes_weights=False):
            await self.resume(changed=False)
            if time.monotonic() >= deadline:
                raise TransferTimeoutError(
                    "the engine's KV cache could not be emptied before the load: blocks moved from "
                    f"or to its connector for {_BLOCKS_SECONDS:g} s; push again"
                )
            await asyncio.sleep(_LOOK_SECONDS)
            await self._pause()

    async def resume(self, *, changed: bool = True) -> None:
        """Resume generation, unless the engine sleeps."""
        if self._is_asleep:
            return
        resumed = bridges.resume(self._engine)
        await self._workers.bounded(resumed, "resuming", changes_weights=changed)

    async def recover(self, error: BaseException, what: str) -> None:
        """Resume generation after a failure under ``pause``, if nothing has changed."""
        if isinstance(error, WeftError):
            self.mark_if_dirty(error)
        else:  # cancelled between two steps: the workers' state is unknown
            self.mark_dirty(f"{what} was interrupted: {error!r}")
        if not self.dirty_reason:
            await self.resume(changed=False)

    def mark_if_dirty(self, error: WeftError) -> bool:
        """Mark the engine dirty if an error leaves mixed weights; return whether it does."""
        if error.metadata.get("dirty") == "true":
            self.mark_dirty(error.message)
            return True
        return False

    def mark_dirty(self, reason: str) -> None:
        """Refuse requests until ``mark_clean``."""
        if reason != self.dirty_reason:
            self.dirty_reason = reason
            self._notify_tracker()
            _log.error("the engine is dirty and refuses requests: %s", reason)

    def mark_clean(self) -> None:
        """Clear the dirty mark: a base has loaded whole."""
        self.dirty_reason = ""
        self._notify_tracker()

    def expect_sleep(self, reason: str) -> None:
        """Refuse new requests until ``wake``; running ones continue, even after a pause."""
        self._to_sleep = reason
        self._notify_tracker()

    def sleep(self) -> None:
        """Keep generation paused until ``wake``: the engine sleeps."""
        self._is_asleep = True

    def wake(self) -> None:
        """Note that the engine does not sleep, and is not about to."""
        self._to_sleep, self._is_asleep = "", False
        self._notify_tracker()

    def close(self, reason: str) -> None:
        """Refuse new requests for a reason of the caller's; an empty one takes them again."""
        self._closed = reason
        self._notify_tracker()

    def _notify_tracker(self) -> None:
        dirty = self.dirty_reason
        repair = f"the replica's weights are being repaired: {dirty}" if dirty else ""
        self._tracker.refuse_reason = repair or self._to_sleep or self._closed
