"""A whole pool in one process: real coordinator, real agents, real gloo, and an
engine double in vLLM's place. For tests whose subject is not the engine; tests with
real vLLM stand beside them in tests/e2e.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc

from rollout_side.agent.agent import Agent
from rollout_side.config import AgentConfig
from tests.doubles.agent import serve, wait_registered
from tests.doubles.engine import EngineDouble
from weft_rl.coordinator.config import CoordinatorConfig
from weft_rl.coordinator.server import Coordinator
from weft_rl.rpc.channel import open_channel
from weft_rl.rpc.server import Security

_T = TypeVar("_T")
_WAIT_SECONDS = 20.0
CONTACT_SECONDS = 3.0


class Pool:
    """Coordinator and replicas on an event loop of their own; used from any thread."""

    def __init__(self, catalog: Path | None, target: str = "", **config: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pool", daemon=True)
        self._thread.start()
        self.config = {
            "listen": "127.0.0.1:0", "catalog": catalog, "lost_after_seconds": 6.0, **config
        }  # fmt: skip
        self.security: Security | None = None
        """Of the replicas' servers; what they show to the coordinator is the environment's."""
        self.coordinator: Coordinator | None = None
        self._replicas: dict[str, tuple[Any, asyncio.Task[None]]] = {}
        self.agents: dict[str, Agent] = {}
        self.target = target
        if catalog is not None:
            self.start_coordinator()

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run on the pool's loop and wait."""
        return self.start(coroutine).result(_WAIT_SECONDS)

    def start(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run on the pool's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def start_coordinator(self) -> None:
        """Start (again, on the same port and catalog); once it answers, if it was away.

        gRPC shares a connection between all clients of this process, and lets those who could
        not connect wait for up to 2 s: whoever asks meanwhile is told that nobody answers, which
        was so. A user's command is a process of its own.
        """
        was_away = bool(self.target)

        async def start() -> int:
            self.coordinator = Coordinator(CoordinatorConfig(**self.config))
            return await self.coordinator.start()

        port = self.run(start())
        self.target = self.config["listen"] = f"127.0.0.1:{port}"
        if was_away:
            with open_channel(self.target) as channel:
                grpc.channel_ready_future(channel).result(_WAIT_SECONDS)

    def stop_coordinator(self) -> None:
        """Stop it; replicas and trainers stay."""
        assert self.coordinator is not None
        self.run(self.coordinator.stop())
        self.coordinator = None

    def add_replica(self, replica_id: str, engine: EngineDouble) -> Agent:
        """Start a replica and wait until it has registered."""
        return self.run(self.join(replica_id, engine))

    async def join(self, replica_id: str, engine: EngineDouble) -> Agent:
        """Start a replica, on the pool's loop."""
        config = AgentConfig(
            coordinator=self.target,
            replica_id=replica_id,
            http_url=f"http://{replica_id}.test",
            unready_after_seconds=CONTACT_SECONDS,
        )
        agent = Agent(config, engine)
        server = await serve(agent, self.security, engine.tracer)
        task = asyncio.create_task(agent.run())
        self._replicas[replica_id] = (server, task)
        self.agents[replica_id] = agent
        await wait_registered(agent, task)
        return agent

    def remove_replica(self, replica_id: str) -> None:
        """Stop a replica: it leaves the pool."""
        self.run(self.leave(replica_id))

    async def leave(self, replica_id: str) -> None:
        """Stop a replica, on the pool's loop."""
        server, task = self._replicas.pop(replica_id)
        agent = self.agents.pop(replica_id)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.stop(None)
        engine = agent.engine
        assert isinstance(engine, EngineDouble)
        engine.close()

    def leave_when_drained(self, replica_id: str) -> Future[str]:
        """What a replica's process does: end with its drain; says how it ended."""

        async def end() -> str:
            why = await self.agents[replica_id].wait_drained()
            await self.leave(replica_id)
            return why

        return self.start(end())

    def call(self, function: Callable[[], None]) -> None:
        """Call on the pool's loop and wait."""

        async def run() -> None:
            function()

        self.run(run())

    def close(self) -> None:
        """Stop everything and the loop's thread."""
        for replica_id in list(self._replicas):
            self.remove_replica(replica_id)
        if self.coordinator is not None:
            self.stop_coordinator()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_WAIT_SECONDS)
        self._loop.close()


@contextmanager
def replicas_of(target: str) -> Iterator[Pool]:
    """A pool whose coordinator is a process of its own."""
    pool = Pool(None, target)
    try:
        yield pool
    finally:
        pool.close()


@contextmanager
def running_pool(catalog: Path, **config: Any) -> Iterator[Pool]:
    """A pool without replicas, stopped at the end."""
    pool = Pool(catalog, heartbeat_seconds=0.2, **config)
    try:
        yield pool
    finally:
        pool.close()
