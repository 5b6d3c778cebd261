"""Replicas that come and go: real ``weft rollout`` processes, one of them ended at times."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.e2e.replicas import LORA_ARGS, serving_url, start_replica
from tests.processes import await_ended, members
from tests.soak.traffic import Router
from tests.waits import until
from weft_rl.cli.demo.processes import Process
from weft_rl.v1 import inspect_pb2 as pb

# vLLM's token endpoint is a scale-out one; its answers name the base versions.
_ARGS = (*LORA_ARGS, "--enable-scale-out")
_READY_SECONDS = 180.0
_END_SECONDS = 60.0
#: What a killed replica's engine may take to notice that it is alone.
_ORPHAN_SECONDS = 20.0
_LIFE_SECONDS = (4.0, 12.0)


class Replicas:
    """Replica processes by name; ``churn`` ends and restarts one after the other.

    Args:
        victims: Environment of those that run with a strike of ``tests.fault``.
    """

    def __init__(
        self,
        work: Path,
        target: str,
        model: Path,
        names: Sequence[str],
        say: Callable[[str], None],
        victims: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self._victims = victims or {}
        self._work, self._target, self._model, self._say = work, target, model, say
        self._router = Router(target)
        self._starts: Counter[str] = Counter()
        self._going: set[str] = set()
        self.processes: dict[str, Process] = {}
        self.urls: dict[str, str] = {}
        #: How often each way to end a replica was taken.
        self.ended: Counter[str] = Counter()
        for name in names:
            self.start(name)
        for name in names:
            self.await_ready(name)

    def is_going(self, url: str) -> bool:
        """Whether the process at this URL is being ended or has been."""
        return url in self._going

    def churn(self, rng: random.Random, stopping: threading.Event) -> None:
        """End a replica, start it again, wait until it is ready; over and over.

        The others stay: the pool is never empty.
        """
        while not stopping.wait(rng.uniform(*_LIFE_SECONDS)):
            name = rng.choice(sorted(self.processes))
            signum = rng.choice((signal.SIGTERM, signal.SIGKILL))
            self._end(name, signum)
            self.start(name)
            self.await_ready(name)
            self._say(f"{name} is back")

    def close(self) -> None:
        """Stop all."""
        for process in self.processes.values():
            process.stop()
        self._router.close()

    def start(self, name: str) -> None:
        """Start it, anew if it has ended; ``await_ready`` waits for it."""
        self._starts[name] += 1
        env = self._victims.get(name)
        self.processes[name] = start_replica(
            self._work,
            self._target,
            name,
            self._model,
            *_ARGS,
            log_name=f"{name}-{self._starts[name]}",
            entry=("-m", "weft_rl") if env is None else ("-m", "tests.fault.victims", "weft_rl"),
            env=env,
        )

    def _end(self, name: str, signum: signal.Signals) -> None:
        process = self.processes[name]
        pids = members(process.pid)
        self._going.add(self.urls[name])
        self.ended[signum.name] += 1
        began = time.monotonic()
        process.signal(signum, _END_SECONDS)
        self._say(f"{name} ended {time.monotonic() - began:.0f} s after {signum.name}")
        await_ended(pids, _ORPHAN_SECONDS, name)
        process.stop()

    def await_ready(self, name: str) -> None:
        """Wait until it answers and the coordinator calls it ready."""
        url = self.urls[name] = serving_url(self.processes[name])

        def replica() -> pb.Replica:
            return {r.replica_id: r for r in self._router.replicas()}.get(name, pb.Replica())

        def is_ready() -> bool:
            found = replica()
            return bool(found.state == pb.REPLICA_STATE_READY and found.http_url == url)

        until(
            is_ready,
            _READY_SECONDS,
            every_seconds=0.1,
            why=lambda: f"{name} is not ready: {replica().state_reason}",
        )
