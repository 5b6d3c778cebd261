"""Sleep of an engine, by vLLM's sleep mode.

While the engine sleeps the accelerator's memory is free. Its weights lie in host memory (level 1)
or are discarded (level 2). A switch wakes the weights, to load them. Only ``wake_up`` wakes the KV
cache, and with it generation.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

from rollout_side.engine import SleepOrder
from rollout_side.vllm_engine.compat import bridges
from rollout_side.vllm_engine.http.middleware import RequestTracker
from rollout_side.vllm_engine.server.in_place_session import InPlaceSession
from rollout_side.vllm_engine.server.request_gate import RequestGate
from rollout_side.vllm_engine.server.worker_calls import WorkerCalls
from weft_rl.contract.errors import (
    LoadFailedError,
    NotReadyError,
    TransferTimeoutError,
)
from weft_rl.contract.options import DISCARDS
from weft_rl.contract.replica_report import Sleep

_log = logging.getLogger(__name__)

# Interval at which requests and readers of the weights are checked.
_LOOK_SECONDS = 0.02


class Sleeper:
    """Sleep of one engine; used on its event loop. Every coroutine but ``end_requests`` is awaited
    inside ``gate.exclusive``."""

    def __init__(
        self,
        engine: Any,
        workers: WorkerCalls,
        gate: RequestGate,
        tracker: RequestTracker,
        in_place: InPlaceSession,
        *,
        enabled: bool,
    ) -> None:
        self._engine, self._workers, self._gate = engine, workers, gate
        self._tracker, self._in_place, self._enabled = tracker, in_place, enabled
        #: Set while the engine sleeps.
        self.asleep: Sleep | None = None
        #: True while it sleeps without a base: discarded, and none was loaded since.
        self.lacks_base = False
        self._lost = ""
        self._falls_asleep = False

    @property
    def weights_asleep(self) -> bool:
        """True if the engine's weights must not be touched."""
        return self.asleep is not None and not self.asleep.weights_awake

    async def end_requests(self, order: SleepOrder, is_wanted: Callable[[], bool]) -> None:
        """Refuse new requests and let running ones end, as ``Engine.end_requests``."""
        self._check_can_sleep()
        deadline = time.monotonic() + order.timeout_seconds
        self._gate.expect_sleep(
            f"the replica sleeps by order {_ordered_by(order)}; ask another replica, or again "
            "once it is awake"
        )
        try:
            while self._tracker.num_running and is_wanted():
                if time.monotonic() >= deadline:
                    raise self._late()
                if order.aborts:  # repeatedly: some are still between the server and the engine
                    await self._abort_requests(is_wanted)
                await asyncio.sleep(_LOOK_SECONDS)
        except BaseException:
            if is_wanted():
                self.take_requests()
            raise

    def take_requests(self) -> None:
        """Take new requests again, as ``Engine.take_requests``."""
        if self.asleep is None and not self._falls_asleep:
            self._gate.wake()

    async def _abort_requests(self, is_wanted: Callable[[], bool]) -> None:
        async with self._gate.exclusive():
            if not is_wanted():
                return
            self._check_can_sleep()
            aborted = bridges.abort_requests(self._engine)
            await self._workers.bounded(aborted, "aborting requests", changes_weights=False)
            if not self._gate.dirty_reason:  # a dirty engine stays paused
                await self._gate.resume(changed=False)

    def _check_can_sleep(self) -> None:
        if not self._enabled:
            raise NotReadyError(
                "this replica's engine cannot sleep; start it with --enable-sleep",
                reason="SLEEP_DISABLED",
            )
        if self._in_place.loading:
            raise NotReadyError(
                "the replica cannot sleep while a base is being loaded in place; try again after "
                "it",
                reason="TRANSFER_UNDER_WAY",
            )

    def _late(self) -> TransferTimeoutError:
        return TransferTimeoutError(
            f"{self._tracker.num_running} requests have not ended in time: the replica stays awake "
            "and takes requests again"
        )

    async def fall_asleep(self, order: SleepOrder) -> bool:
        """Put the engine to sleep, as ``Engine.fall_asleep``; return whether it sleeps."""
        try:
            self._check_can_sleep()
            await self._in_place.end()
            if self._tracker.num_running and order.timeout_seconds <= 0:
                raise self._late()
        except BaseException:
            self.take_requests()
            raise
        if self.weights_asleep:
            assert self.asleep is not None
            self.asleep = dataclasses.replace(self.asleep, trainer_id=order.trainer_id)
            return True
        if self._tracker.num_running:
            return False
        self._falls_asleep = True
        try:
            return await self._put_to_sleep(order)
        finally:
            self._falls_asleep = False

    async def _put_to_sleep(self, order: SleepOrder) -> bool:
        former = self.asleep
        try:
            if not await self._free_memory(order):
                return False
            if former is not None and not bridges.can_sleep_in_part():
                await self._wake("kv_cache")
        except BaseException:
            await self._stay_awake()
            raise
        # From here on memory may be gone, whatever fails: only waking brings it back.
        self.lacks_base = self.lacks_base or order.level == DISCARDS
        self.asleep = Sleep(order.trainer_id, level=order.level)
        self._gate.sleep()
        await self._workers.bounded(
            self._sleep_in_engine(order.level), "falling asleep", is_quiet=True
        )
        _log.info("the engine sleeps at level %d, by order %s", order.level, _ordered_by(order))
        return True

    async def _sleep_in_engine(self, level: int) -> None:
        try:
            await bridges.fall_asleep(self._engine, level)
        except Exception as error:
            # If a worker fails after it has given memory back, vLLM takes it to be awake, and
            # waking it would do nothing.
            self._lost = (
                f"the engine failed as it fell asleep ({type(error).__name__}: {error}), and its "
                "memory may be gone: restart the replica"
            )
            raise self._loss() from error

    async def _free_memory(self, order: SleepOrder) -> bool:
        """Have the workers free Weft's memory; return False while weights are being read."""
        values = await self._workers.call("weft_sleep", order.level, is_quiet=True)
        if all(value["is_free"] for value in values):
            return True
        if order.timeout_seconds <= 0:
            raise TransferTimeoutError(
                "the base is being cloned, digested or spilled, which did not end in time: the "
                "replica stays awake"
            )
        await self._undo()
        return False

    async def _undo(self) -> None:
        """Have the workers take back what they have freed, as far as it still exists."""
        await self._workers.call("weft_wake", False)
        if self.asleep is None:
            await self._workers.call("weft_awake")

    async def _stay_awake(self) -> None:
        await self._undo()
        if self.asleep is None:  # else its KV cache has slept since before
            self._gate.wake()

    def _loss(self) -> LoadFailedError:
        return LoadFailedError(self._lost, metadata={"dirty": "true"})

    async def wake_weights(self) -> None:
        """Wake the weights, before they are loaded; succeeds if they are awake."""
        if self._lost:
            raise self._loss()
        if self.asleep is None or self.asleep.weights_awake:
            return
        await self._wake("weights")
        await self._workers.call("weft_wake", self.asleep.level == DISCARDS, is_quiet=True)
        self.asleep = dataclasses.replace(self.asleep, weights_awake=True)

    def base_loaded(self) -> None:
        """Note that a base has loaded whole."""
        self.lacks_base = False

    async def wake_up(self) -> bool:
        """Wake the engine, as ``Engine.wake_up``, but load no base; return whether it has one. An
        engine without a base is dirty."""
        if self.asleep is None:
            self._gate.wake()  # it may have been about to sleep
            return True
        await self.wake_weights()
        await self._wake("kv_cache")
        await self._workers.call("weft_awake")
        has_base, self.lacks_base = not self.lacks_base, False
        if not has_base:
            self._gate.mark_dirty("its weights were discarded as it slept")
        self.asleep = None
        self._gate.wake()
        if self._gate.dirty_reason:  # vLLM does not know that it is to stay paused
            await self._gate.pause()
        else:
            await self._gate.resume(changed=False)
        _log.info("the engine is awake")
        return has_base

    async def _wake(self, tag: str) -> None:
        woken = bridges.wake_up(self._engine, [tag])
        await self._workers.bounded(woken, f"waking its {tag}", is_quiet=True)


def _ordered_by(order: SleepOrder) -> str:
    return f"of trainer {order.trainer_id!r}" if order.trainer_id else "of an operator"
