"""The engine double in a worker process of its own, as vLLM's workers are.

The worker holds the store, receives, clones and "serves". The agent's process calls
it through a pipe, one call after the other; when the worker ends, it must end too,
since an engine without its worker is dead.
"""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch

from rollout_side.engine import AliasRefusals, EngineWork
from rollout_side.waits import UnansweredCalls
from tests.doubles.engine import EngineDouble
from tests.fault import strikes
from weft_rl.contract.errors import LoadFailedError
from weft_rl.contract.replica_report import EngineReport

# Of rollout_side.engine.Engine, and EngineDouble's own.
_METHODS = frozenset(
    {
        "join_group", "load_adapter", "apply_base", "apply_retained", "set_alias", "manifest",
        "send", "discard", "retire", "memory", "holds", "pin_bases", "spill",
        "restore", "load_in_place", "drop_alias", "spilled_facts",
    }
)  # fmt: skip

_START_SECONDS = 60.0


class WorkerDouble:
    """``EngineDouble``'s face to the agent; the rest is in the worker."""

    model_name = EngineDouble.model_name
    checkpoint = EngineDouble.checkpoint
    asleep = None
    report = EngineReport()

    def __init__(self, weights: dict[str, torch.Tensor], **settings: Any) -> None:
        like = EngineDouble(weights, **settings)
        self.capabilities, self.reference = like.capabilities, like.reference
        self.spills = like.spills
        #: As the worker told last.
        self.dirty_reason = self.loading = ""
        self.base_version = 0
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        self._worker = context.Process(target=_work, args=(theirs, shapes, settings), daemon=True)
        self._worker.start()
        theirs.close()
        # Its imports take seconds of a busy machine: the deadlines of pushes are not for these.
        assert self._pipe.poll(_START_SECONDS), "its worker did not start"
        self._pipe.recv()
        self._caller = ThreadPoolExecutor(1, "worker-calls")
        self._owed = UnansweredCalls()

    def __getattr__(self, name: str) -> Any:
        if name not in _METHODS:
            raise AttributeError(name)
        return functools.partial(self._ask, name)

    @property
    def work(self) -> EngineWork:
        """See ``Engine``."""
        return self._owed.work

    def num_requests(self) -> int:
        """It serves none."""
        return 0

    def refuse_requests(self, reason: str) -> None:
        """There are none to refuse."""

    def refuse_aliases(self, refused: AliasRefusals) -> None:
        """Nor any for aliases."""

    async def wait_ended(self) -> None:
        """Return when the worker has ended, for whatever reason."""
        await asyncio.to_thread(self._worker.join)

    def close(self) -> None:
        """Let the worker end; blocks at most some seconds."""
        self._pipe.close()
        self._worker.join(5)

    async def _ask(self, method: str, *args: Any) -> Any:
        loop, call = asyncio.get_running_loop(), object()
        self._owed.begin(call, method)
        try:
            answer = loop.run_in_executor(self._caller, self._call, method, args)
            answer.add_done_callback(lambda _: self._owed.end(call))
            ok, value = await answer
        except (EOFError, OSError) as error:
            self.dirty_reason = "the worker has ended"
            raise LoadFailedError(self.dirty_reason, metadata={"dirty": "true"}) from error
        value, self.dirty_reason, self.loading, self.base_version = value
        if not ok:
            raise value
        return value

    def _call(self, method: str, args: tuple[Any, ...]) -> tuple[bool, Any]:
        self._pipe.send((method, args))
        answer: tuple[bool, Any] = self._pipe.recv()
        return answer


def _work(pipe: Connection, shapes: dict[str, tuple[int, ...]], settings: dict[str, Any]) -> None:
    """The worker: answers until the agent's process closes the pipe or ends."""
    strikes.install("replica worker")
    engine = EngineDouble(
        {name: torch.zeros(1).expand(shape) for name, shape in shapes.items()}, **settings
    )
    pipe.send(None)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        try:
            ok, value = True, asyncio.run(getattr(engine, method)(*args))
        except Exception as error:
            ok, value = False, error
        pipe.send((ok, (value, engine.dirty_reason, engine.loading, engine.base_version)))
