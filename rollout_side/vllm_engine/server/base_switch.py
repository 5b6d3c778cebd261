"""Switch of an engine to another base, without a request that gets mixed weights."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from rollout_side.engine import SwitchTimes
from rollout_side.memory.digest_reading import TensorDigests
from rollout_side.vllm_engine.compat import bridges
from rollout_side.vllm_engine.server.generations import Generations
from rollout_side.vllm_engine.server.in_place_session import InPlaceSession
from rollout_side.vllm_engine.server.initial_checkpoint import InitialCheckpoint
from rollout_side.vllm_engine.server.request_gate import RequestGate
from rollout_side.vllm_engine.server.requests_at_switch import RequestsAtSwitch
from rollout_side.vllm_engine.server.sleeper import Sleeper
from rollout_side.vllm_engine.server.worker_calls import WorkerCalls
from weft_rl.contract.errors import WeftError
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.replica_report import EngineReport
from weft_rl.ipc.bytes_codec import bytes_codec

_log = logging.getLogger(__name__)


class BaseSwitch:
    """Switch of one engine; used on its event loop, inside ``gate.exclusive``."""

    def __init__(
        self,
        engine: Any,
        workers: WorkerCalls,
        gate: RequestGate,
        in_place: InPlaceSession,
        sleeper: Sleeper,
        requests: RequestsAtSwitch,
        answers: Generations,
        *,
        updates_draft: bool = False,
    ) -> None:
        self._engine, self._workers, self._gate = engine, workers, gate
        self._in_place, self._sleeper = in_place, sleeper
        self.requests, self._answers = requests, answers
        self._updates_draft = updates_draft
        self.report = EngineReport()

    async def apply(
        self, transfer_id: str, version: PolicyVersion, content_digest: bytes
    ) -> SwitchTimes:
        """Load a staged base, or confirm a base that was loaded in place. Errors are those of
        ``VllmReplica.apply_base``."""
        await self._sleeper.wake_weights()
        is_loaded = self._in_place.is_pending(transfer_id)
        if not is_loaded:
            await self._in_place.end()
            await self._workers.share(transfer_id, content_digest)
        begin = time.perf_counter()
        try:
            if is_loaded:
                begin, load_seconds, has_draft = await self._in_place.take(content_digest)
            else:
                await self._gate.pause()
                load_begin = time.perf_counter()
                has_draft = await self._workers.apply_base(transfer_id, content_digest)
                load_seconds = time.perf_counter() - load_begin
            loaded = time.perf_counter()
            if has_draft:
                self.report = EngineReport(draft_version=version.version)
            elif self._updates_draft and self._gate.dirty_reason:
                # What failed may have left a part of its own draft.
                self.report = EngineReport(draft_version=-1)
            num_begun = await self._forget_old_base(version)
            forgotten = time.perf_counter()
        except BaseException as error:
            await self._gate.recover(error, f"switching to {version}")
            raise
        self._gate.mark_clean()
        self._sleeper.base_loaded()
        # Asked before the engine is to resume: later the workers would be in its next step, which
        # is long since it recomputes what the cache has lost. The pause ends meanwhile.
        keeping, resuming = self._workers.keep_base(transfer_id), self._gate.resume()
        for ended in await asyncio.gather(keeping, resuming, return_exceptions=True):
            if ended is not None:
                raise ended
        pause_seconds = time.perf_counter() - begin
        _log.debug(
            "loaded policy_version=%s seconds=%.4f pause_seconds=%.4f (before loading %.4f, to "
            "forget the old cache %.4f)",
            version,
            load_seconds,
            pause_seconds,
            max(0.0, loaded - begin - load_seconds),
            forgotten - loaded,
        )
        return SwitchTimes(
            pause_seconds=pause_seconds, load_seconds=load_seconds, num_begun=num_begun
        )

    async def _forget_old_base(self, version: PolicyVersion) -> int:
        """Name the loaded version, and forget what the old weights have computed."""
        bounded, requests = self._workers.bounded, self.requests
        await bounded(bridges.set_weight_version(self._engine, str(version)), "naming the base")
        begun = await bounded(requests.begun(), "listing running requests")
        if requests.choice == "abort":
            self._answers.expect_aborts(version, begun)
        await bounded(requests.switch(version, begun), "emptying the caches of the old base")
        switched = self._answers.switch_base(version, kept=requests.choice == "keep")
        await bounded(switched, "recording the switch")
        await bounded(requests.note_base(begun), "ending requests for the former base")
        return len(begun)


async def learn_copies(
    initial_checkpoint: InitialCheckpoint,
    workers: WorkerCalls,
    gate: RequestGate,
    is_served: Callable[[], bool],
) -> None:
    """Have the workers learn a copy plan from the engine's files, once these are read.

    The engine's step then waits until its weights are read once. Never raises: without this plan,
    one is learnt from the first push.

    Args:
        is_served: Returns whether the engine holds the weights of these files, awake and whole.
    """
    stored = await initial_checkpoint.read_tensors()
    if not stored:
        return
    tensors = bytes_codec(TensorDigests).pack(TensorDigests(tuple(stored)))
    try:
        async with gate.exclusive():
            if is_served():
                await workers.call("weft_learn_copies", tensors, is_quiet=True)
    except WeftError as error:
        _log.info("the copy plan is learnt from the first push: %s", error)
