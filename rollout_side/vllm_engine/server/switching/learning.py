"""Learning of copy plans while base@0 is served, so that the first push is as fast as others."""

from __future__ import annotations

import logging
from collections.abc import Callable

from rollout_side.vllm_engine.server.initial_weights import StartedWith
from rollout_side.vllm_engine.server.switching.request_gate import RequestGate
from rollout_side.vllm_engine.server.worker_calls import WorkerCalls
from weft_rl.contract.errors import WeftError

_log = logging.getLogger(__name__)


async def learn_copies(
    started_with: StartedWith,
    workers: WorkerCalls,
    gate: RequestGate,
    is_served: Callable[[], bool],
) -> None:
    """Have the workers learn a copy plan from the engine's files, once these are read.

    The engine's step then waits for one reading of its weights. Never raises: what is not learnt so
    is learnt from the first push.

    Args:
        is_served: Returns whether the engine has what these files hold, awake and whole.
    """
    stored = await started_with.read_tensors()
    if not stored:
        return
    tensors = [(t.name, t.dtype, list(t.shape), t.digest) for t in stored]
    try:
        async with gate.exclusive():
            if is_served():
                await workers.call("weft_learn_copies", tensors, is_quiet=True)
    except WeftError as error:
        _log.info("how bases are loaded is learnt from the first push: %s", error)
