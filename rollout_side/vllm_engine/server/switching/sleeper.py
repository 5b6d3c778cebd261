"""Putting an engine to sleep, and waking it: vLLM's sleep mode.

Asleep, the accelerator's memory is free; the engine's weights lie in host memory (level 1), or
are gone (level 2). A switch wakes the weights, to be loaded; the KV cache, and with it
generation, only ``wake_up``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from typing import Any

from rollout_side.engine import Asleep, SleepOrder
from rollout_side.vllm_engine.compat import bridges, sleep_mode
from rollout_side.vllm_engine.http.request_tracker import RequestTracker
from rollout_side.vllm_engine.server.switching.request_gate import RequestGate
from rollout_side.vllm_engine.server.worker_calls import WorkerCalls
from weft.contract.errors import (
    LoadFailedError,
    NotReadyError,
    TransferTimeoutError,
)
from weft.contract.sleep import DISCARDS

_log = logging.getLogger(__name__)

# Between two looks at whether requests, or readers of the weights, have ended.
_LOOK_SECONDS = 0.02


class Sleeper:
    """The sleep of one engine; on its event loop, every coroutine inside ``gate.exclusive``.

    Args:
        engine: vLLM's ``AsyncLLM``.
        workers: Its calls.
        gate: Refuses new requests meanwhile, and stays paused.
        tracker: Knows which run.
        enabled: Whether the engine has the allocator for it.
    """

    def __init__(
        self,
        engine: Any,
        workers: WorkerCalls,
        gate: RequestGate,
        tracker: RequestTracker,
        *,
        enabled: bool,
    ) -> None:
        self._engine, self._workers, self._gate = engine, workers, gate
        self._tracker, self._enabled = tracker, enabled
        #: Set while the engine sleeps.
        self.asleep: Asleep | None = None
        self._lost = ""

    @property
    def weights_asleep(self) -> bool:
        """Whether the engine's weights must not be touched."""
        return self.asleep is not None and not self.asleep.weights_awake

    async def fall_asleep(self, order: SleepOrder) -> None:
        """See ``Engine``."""
        if not self._enabled:
            raise NotReadyError(
                "this replica's engine cannot sleep: start it with --enable-sleep",
                reason="SLEEP_DISABLED",
            )
        former = self.asleep
        if former is not None and not former.weights_awake:
            self.asleep = dataclasses.replace(former, trainer_id=order.trainer_id)
            return
        is_discarded = order.level == DISCARDS or (former is not None and former.base_discarded)
        asleep = Asleep(order.trainer_id, level=order.level, base_discarded=is_discarded)
        deadline = time.monotonic() + order.timeout_seconds
        whose = f"of trainer {order.trainer_id!r}" if order.trainer_id else "of an operator"
        self._gate.sleep(
            f"the replica sleeps by order {whose}: ask another one, or again once it is awake"
        )
        try:
            await self._end_requests(order.aborts, deadline)
            await self._free_memory(order.level, deadline)
            if former is not None and not sleep_mode.can_sleep_in_part():
                await self._wake("kv_cache")
        except BaseException:
            await self._stay_awake()
            raise
        # From here on memory may be gone, whatever fails: only waking brings it back.
        self.asleep = asleep
        await self._workers.bounded(self._let_sleep(order.level), "falling asleep")
        _log.info("asleep at level %d, by order %s", order.level, whose)

    async def _let_sleep(self, level: int) -> None:
        try:
            await sleep_mode.fall_asleep(self._engine, level)
        except Exception as error:
            # A worker that fails after it has given memory back leaves vLLM in the belief that
            # it is awake, and waking it would do nothing.
            self._lost = (
                f"the engine failed as it fell asleep ({type(error).__name__}: {error}), and its "
                "memory may be gone: restart the replica"
            )
            raise self._loss() from error

    async def _end_requests(self, aborts: bool, deadline: float) -> None:
        while self._tracker.num_running:
            if time.monotonic() >= deadline:
                raise TransferTimeoutError(
                    f"{self._tracker.num_running} requests have not ended in time: the replica "
                    "does not sleep, and takes requests again"
                )
            if aborts:  # again and again: some are between the server and the engine
                aborted = bridges.abort_requests(self._engine)
                await self._workers.bounded(aborted, "aborting requests", changes_weights=False)
            await asyncio.sleep(_LOOK_SECONDS)

    async def _free_memory(self, level: int, deadline: float) -> None:
        while True:
            values = await self._workers.call("weft_sleep", level)
            if all(value["is_free"] for value in values):
                return
            if time.monotonic() >= deadline:
                raise TransferTimeoutError(
                    "the base is being read (cloned, digested or spilled) and did not end in time"
                )
            await asyncio.sleep(_LOOK_SECONDS)

    async def _stay_awake(self) -> None:
        await self._workers.call("weft_wake", False)
        if self.asleep is not None:  # it was put to sleep before, and its KV cache still is
            return
        await self._workers.call("weft_awake")
        self._gate.wake()
        if not self._gate.dirty_reason:
            await self._gate.resume(changed=False)

    def _loss(self) -> LoadFailedError:
        return LoadFailedError(self._lost, metadata={"dirty": "true"})

    async def wake_weights(self) -> None:
        """Have the weights back, before they are loaded; succeeds if they are awake.

        Raises:
            LoadFailedError: With metadata ``dirty``: they are lost.
        """
        if self._lost:
            raise self._loss()
        if self.asleep is None or self.asleep.weights_awake:
            return
        await self._wake("weights")
        await self._workers.call("weft_wake", self.asleep.level == DISCARDS)
        self.asleep = dataclasses.replace(self.asleep, weights_awake=True)

    def base_loaded(self) -> None:
        """A base has loaded whole."""
        if self.asleep is not None:
            self.asleep = dataclasses.replace(self.asleep, base_discarded=False)

    async def wake_up(self) -> bool:
        """See ``Engine``; but where the base was discarded, and none has loaded since, the
        engine is dirty: returns whether there is one."""
        if self.asleep is None:
            return True
        await self.wake_weights()
        await self._wake("kv_cache")
        await self._workers.call("weft_awake")
        has_base = not self.asleep.base_discarded
        if not has_base:
            self._gate.mark_dirty("its weights were discarded as it slept")
        self.asleep = None
        self._gate.wake()
        if self._gate.dirty_reason:  # which vLLM does not know of
            await self._gate.pause()
        else:
            await self._gate.resume(changed=False)
        _log.info("awake")
        return has_base

    async def _wake(self, tag: str) -> None:
        await self._workers.bounded(sleep_mode.wake_up(self._engine, [tag]), f"waking its {tag}")
