"""A ``VllmReplica`` in a process of its own, driven from a test.

The child runs the event loop; orders and answers go over a pipe, several at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

from rollout_side.config import AgentConfig, RolloutConfig, Staging
from rollout_side.engine import SwitchTimes
from tests.e2e.generations import Generations
from tests.e2e.staging_receiver import FACTORY, StageOrder, content_digest
from tests.models import adapter_config
from weft_rl.contract.capabilities import RunningRequests
from weft_rl.contract.names import PolicyVersion

_ARGS = [
    *("--enforce-eager", "--max-model-len", "512", "--dtype", "float32", "--max-num-seqs", "16"),
    *("--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"),
    *("--served-model-name", "tiny"),
]
LORA_ARGS = [
    *("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "2", "--max-lora-rank", "16"),
]


@dataclass(frozen=True)
class Completion:
    """What the OpenAI server answered."""

    model: str
    tokens: list[int]
    logprobs: list[float]


@dataclass
class EngineProcess:
    """Start with ``start``; end with ``stop``. Methods block, from any thread."""

    model: Path
    args: tuple[str, ...] = ()
    staging: Staging = RolloutConfig.staging
    running_requests: RunningRequests = RolloutConfig.running_requests
    child: Callable[..., None] | None = None
    """What its process runs, in the place of ``run_child``."""
    process: Any = None
    port: int = 0
    facts: dict[str, Any] = field(default_factory=dict)

    def start(self) -> EngineProcess:
        """Return once the OpenAI server listens."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.e2e.preloaded"])
        self._pipe, theirs = context.Pipe()
        self._ids, self._waiting = itertools.count(), dict[int, Future[Any]]()
        self._lock = threading.Lock()
        argv = [str(self.model), *_ARGS, *self.args]
        self.process = context.Process(
            target=self.child or run_child,
            args=(theirs, argv, self.staging, self.running_requests),
            name="engine",
        )
        self.process.start()
        theirs.close()
        ready: Future[Any] = Future()
        self._waiting[-1] = ready
        self._reader = threading.Thread(target=self._read, name="engine-pipe", daemon=True)
        self._reader.start()
        try:
            self.facts = ready.result(timeout=180)
        except BaseException:
            self.stop()
            raise
        self.port = self.facts["port"]
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)
        return self

    def stop(self) -> None:
        """Ask it to end; kill the processes that are left, by their pids."""
        with contextlib.suppress(Exception):
            self.call("shutdown", timeout=20)
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self.process.join(15)
        pids = [self.process.pid, *self.facts.get("worker_pids", ())]
        for pid in pids if self.process.is_alive() else pids[1:]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self.process.join(5)
        with contextlib.suppress(AttributeError):
            self.http.close()
        self._pipe.close()

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Begin ``await replica.<method>(...)``; dots reach into attributes, and
        ``generations`` is a ``Generations`` of the replica."""
        number, future = next(self._ids), Future[Any]()
        with self._lock:
            self._waiting[number] = future
            self._pipe.send((number, method, args, kwargs))
        return future

    def call(self, method: str, *args: Any, timeout: float = 60, **kwargs: Any) -> Any:
        """``submit`` and wait; raises what the replica raised."""
        return self.submit(method, *args, **kwargs).result(timeout)

    def rpc(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """The raw answers of a worker method."""
        answers: list[dict[str, Any]] = self.call("engine.collective_rpc", method, args=args)
        return answers

    # -- pushes -----------------------------------------------------------------

    def stage(
        self, transfer_id: str, version: str, file: Path, drop: tuple[str, ...] = ()
    ) -> bytes:
        """Stage a file in the receiving worker; returns its content digest."""
        order = StageOrder(transfer_id=transfer_id, version=version, file=str(file), drop=drop)
        self.call("join_group", order.join_order())
        return content_digest(file)

    def scribble(self) -> None:
        """Overwrite all memory that a later push may reuse, and what is retained."""
        self.call("join_group", StageOrder(scribble=True).join_order())

    def break_next_load(self, after: int) -> None:
        """Make rank 0's next base load fail after some tensors."""
        self.call("join_group", StageOrder(break_load_after=after).join_order())

    def push_adapter(self, version: str, adapter: Path) -> SwitchTimes:
        """Stage and load a saved adapter."""
        digest = self.stage(f"t-{version}", version, adapter / "adapter_model.safetensors")
        parsed = PolicyVersion.parse(version)
        times: SwitchTimes = self.call(
            "load_adapter", f"t-{version}", parsed, adapter_config(adapter), digest
        )
        return times

    def push_base(self, version: str, model: Path) -> SwitchTimes:
        """Stage and load a saved model."""
        digest = self.stage(f"t-{version}", version, model / "model.safetensors")
        times: SwitchTimes = self.call(
            "apply_base", f"t-{version}", PolicyVersion.parse(version), digest
        )
        return times

    def arrive(
        self, version: str, model: Path, *, seconds: float = 60.0, num_buckets: int = 10**6
    ) -> None:
        """Have a saved model loaded in place, as transfer ``t-VERSION``, so far as it comes."""
        order = StageOrder(
            transfer_id=f"t-{version}",
            version=version,
            file=str(model / "model.safetensors"),
            in_place=True,
            num_buckets=num_buckets,
        )
        self.call("join_group", order.join_order())
        self.call("load_in_place", f"t-{version}", PolicyVersion.parse(version), seconds)

    def retire(self, version: str) -> bool:
        """``Engine.retire``."""
        return bool(self.call("retire", PolicyVersion.parse(version)))

    # -- requests -----------------------------------------------------------------

    def complete(self, model: str, prompt: list[int], num_tokens: int = 8) -> Completion:
        """Greedy tokens with their log-probabilities, over HTTP."""
        response = self.http.post(
            "/v1/completions",
            json={
                "model": model,
                "prompt": prompt,
                "max_tokens": num_tokens,
                "temperature": 0,
                "logprobs": 1,
                "ignore_eos": True,
                "return_tokens_as_token_ids": True,
            },
        )
        response.raise_for_status()
        answer = response.json()
        logprobs = answer["choices"][0]["logprobs"]
        tokens = [int(token.removeprefix("token_id:")) for token in logprobs["tokens"]]
        return Completion(answer["model"], tokens, logprobs["token_logprobs"])

    def _read(self) -> None:
        while True:
            try:
                number, ok, value = self._pipe.recv()
            except (EOFError, OSError):
                break
            future = self._waiting.pop(number)
            if ok:
                future.set_result(value)
            else:
                future.set_exception(value)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionError("the engine's process has ended"))


def run_child(
    pipe: Connection, argv: list[str], staging: Staging, running_requests: RunningRequests
) -> None:
    """Serve until the pipe ends; runs in a fork of a process that has imported vLLM."""
    from tests.e2e import preloaded

    preloaded.fork_processes(pipe)
    asyncio.run(_serve(pipe, argv, staging, running_requests))


async def _serve(
    pipe: Connection, argv: list[str], staging: Staging, running_requests: RunningRequests
) -> None:
    from rollout_side.vllm_engine import launch

    launch.WORKER_EXTENSION = "tests.e2e.worker_methods.WorkerUnderTest"
    try:
        replica = await launch.open_engine(
            RolloutConfig(
                agent=AgentConfig(coordinator="127.0.0.1:1"),
                vllm_args=argv,
                http_port=0,
                adapter_memory_bytes=2**26,
                staging_memory_bytes=2**26,
                staging=staging,
                base_copies=2,
                running_requests=running_requests,
            ),
            receiver_factory=FACTORY,
        )
        await replica.start_http()
    except BaseException as error:
        traceback.print_exc()
        pipe.send((-1, False, RuntimeError(f"the engine did not start: {error!r}")))
        raise
    facts = {
        "port": replica.http_port,
        "capabilities": replica.capabilities,
        "reference": replica.reference,
        "model_name": replica.model_name,
        "worker_pids": replica.worker_pids,
        "counted": _counted(),
        "loras": await replica.engine.list_loras() if "--enable-lora" in argv else set(),
    }
    pipe.send((-1, True, facts))
    loop, orders = asyncio.get_running_loop(), asyncio.Queue[Any]()

    def read() -> None:
        while True:
            try:
                order = pipe.recv()
            except (EOFError, OSError):
                order = None
            loop.call_soon_threadsafe(orders.put_nowait, order)
            if order is None:
                return

    threading.Thread(target=read, name="orders", daemon=True).start()
    tasks = set[asyncio.Task[None]]()
    replica.generations = Generations(replica)  # type: ignore[attr-defined]
    while (order := await orders.get()) is not None:
        task = asyncio.create_task(_obey(pipe, replica, *order))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await replica.shutdown(1.0)


def _counted() -> list[str]:
    """Return what vLLM has counted so far of requests and tokens, for Prometheus."""
    from prometheus_client import REGISTRY

    families = (family for family in REGISTRY.collect() if family.name.startswith("vllm:"))
    samples = (sample for family in families for sample in family.samples)
    ends = ("_total", "_count")
    return [s.name for s in samples if s.name.endswith(ends) and s.value]


async def _obey(
    pipe: Connection, replica: Any, number: int, method: str, args: Any, kw: Any
) -> None:
    try:
        target = replica
        for name in method.split("."):
            target = getattr(target, name)
        value = target(*args, **kw) if callable(target) else target
        if asyncio.iscoroutine(value):
            value = await value
        pipe.send((number, True, value))
    except BaseException as error:
        pipe.send((number, False, error))
