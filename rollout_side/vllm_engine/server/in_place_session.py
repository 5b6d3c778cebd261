"""In-place load of a base, which is loaded as it arrives while generation is paused."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from rollout_side.vllm_engine.server.request_gate import RequestGate
from rollout_side.vllm_engine.server.worker_calls import WorkerCalls
from weft_rl.contract.errors import WeftError
from weft_rl.contract.names import PolicyVersion

_log = logging.getLogger(__name__)


@dataclass
class _PendingLoad:
    transfer_id: str
    version: PolicyVersion
    paused_at: float
    """Value of ``time.perf_counter()`` from which on requests wait."""
    expired: bool = False
    """True if its time is over; it is kept only because it was loaded whole."""
    timer: asyncio.Task[None] | None = None


class InPlaceSession:
    """In-place load of one engine, at most one at a time; used on its event loop. Every coroutine
    is awaited inside ``gate.exclusive``."""

    def __init__(self, workers: WorkerCalls, gate: RequestGate) -> None:
        self._workers, self._gate = workers, gate
        self._pending: _PendingLoad | None = None

    @property
    def loading(self) -> str:
        """Transfer that is being loaded in place, unless its time is up; else empty."""
        pending = self._pending
        return pending.transfer_id if pending is not None and not pending.expired else ""

    def is_pending(self, transfer_id: str) -> bool:
        """Return whether a transfer's load can be committed, if it is complete."""
        return self._pending is not None and self._pending.transfer_id == transfer_id

    async def begin(self, transfer_id: str, version: PolicyVersion, timeout_seconds: float) -> None:
        """Pause generation and let the workers load a base, as ``Engine.load_in_place``. A load
        that was begun before resumes in another group. A load for another transfer is ended."""
        if not self.is_pending(transfer_id):
            await self.end()
        if self._pending is None:
            paused_at = time.perf_counter()
            try:
                await self._gate.pause()
                await self._workers.load_in_place(transfer_id, version)
            except BaseException as error:
                await self._gate.recover(error, f"beginning to load {version}")
                raise
            self._pending = _PendingLoad(transfer_id, version, paused_at)
        else:
            await self._workers.load_in_place(transfer_id, version)
        self._expect_end(self._pending, timeout_seconds)

    async def take(self, content_digest: bytes) -> tuple[float, float, bool]:
        """Confirm the pending load, for its commit; generation stays paused.

        Returns:
            ``time.perf_counter()`` from which on requests wait; seconds that loading took; whether
            it brought the model that drafts tokens, too.

        Raises:
            NotReadyError: It was not loaded whole, and nothing has changed.
            LoadFailedError: Not whole, or other bytes: dirty.
        """
        pending, self._pending = self._pending, None
        assert pending is not None
        _stop(pending)
        loaded = await self._workers.loaded(pending.transfer_id, content_digest)
        return pending.paused_at, *loaded

    async def end(self, *, keep_loaded: bool = False) -> None:
        """End the pending load, if there is one; generation resumes if nothing has changed.

        Args:
            keep_loaded: Whether a base that was loaded whole stays pending, though the engine is
                dirty.
        """
        if (pending := self._pending) is None:
            return
        left = await self._workers.end_load(pending.transfer_id, keep_loaded=keep_loaded)
        _stop(pending)
        if not left.kept:
            self._pending = None
        if left.changed:
            what = "loaded in place, but not committed" if left.kept else "being loaded in place"
            self._gate.mark_dirty(f"{pending.version} was {what} when its transfer ended")
        elif not self._gate.dirty_reason:
            await self._gate.resume()

    def close(self) -> None:
        """Stop the timer of the pending load."""
        if self._pending is not None:
            _stop(self._pending)

    def _expect_end(self, pending: _PendingLoad, timeout_seconds: float) -> None:
        _stop(pending)
        pending.expired = False
        pending.timer = asyncio.create_task(
            self._expire(pending, timeout_seconds), name="load-in-place"
        )

    async def _expire(self, pending: _PendingLoad, timeout_seconds: float) -> None:
        """End a load that was neither committed nor discarded in time. A base that was loaded whole
        is kept: a restarted coordinator may still commit it."""
        await asyncio.sleep(timeout_seconds)
        try:
            async with self._gate.exclusive():
                if self._pending is pending:
                    pending.expired = True
                    await self.end(keep_loaded=True)
        except WeftError as error:
            _log.error("a load in place could not be ended: %s", error)
        except Exception:  # noqa: BLE001 (the edge of a task that nobody waits for)
            _log.exception("a load in place could not be ended")


def _stop(pending: _PendingLoad) -> None:
    """Stop the timer of a load, unless the timer itself is the caller."""
    timer, pending.timer = pending.timer, None
    if timer is not None and timer is not asyncio.current_task():
        timer.cancel()
