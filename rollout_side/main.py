"""One replica process: engine, OpenAI server and agent on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rollout_side.agent import Agent
from rollout_side.config import AgentConfig
from rollout_side.servicer import ReplicaServicer
from rollout_side.spill_folder import SpillSettings
from rollout_side.vllm_engine.launch import open_engine
from rollout_side.vllm_engine.replica import VllmReplica
from weft.contract.errors import InvalidRequestError
from weft.rpc.server import Servicer, WeftServer, bind, make_server
from weft.v1.replica_pb2_grpc import add_ReplicaServiceServicer_to_server

_log = logging.getLogger(__name__)

_SERVICE = "weft.v1.ReplicaService"
#: Health service name that says whether the replica serves all that the pool does.
READY_SERVICE = "weft.ready"
_STOP_SECONDS = 5.0
#: Called with the gRPC address and the OpenAI server's base URL.
Ready = Callable[[str, str], None]


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """What ``weft rollout`` was told."""

    agent: AgentConfig
    vllm_args: Sequence[str]
    """vLLM's own server arguments, the model first."""
    http_host: str = "127.0.0.1"
    http_port: int = 8000
    adapter_memory_bytes: int = 4 * 2**30
    """Bound of the adapter store, in host memory."""
    staging_memory_bytes: int = 64 * 2**30
    """Bound of staged and retained base weights, in host memory."""
    retain_base: int = 1
    """Versions of the base that a copy is kept of in host memory, the served one
    included; others are cloned from it, and rollback goes back to it. 0 keeps none."""
    spill_dir: str = ""
    """Directory that what is served is written to, so that a restart finds it; empty
    for none. The base is written from the copy that ``retain_base`` keeps."""
    spill_bytes: int = 256 * 2**30
    """Bound of the versions of this base model there, of whichever replica."""

    def __post_init__(self) -> None:
        if not 0 <= self.retain_base <= 100:
            raise InvalidRequestError("retain_base must be between 0 and 100")
        if self.spill_dir and not self.retain_base:
            raise InvalidRequestError(
                "--spill-dir writes the base from the copy that --retain-base keeps: it needs "
                "--retain-base 1 or more"
            )

    @property
    def spill(self) -> SpillSettings | None:
        """Where versions are spilled to, if they are."""
        if not self.spill_dir:
            return None
        return SpillSettings(
            directory=self.spill_dir,
            capacity_bytes=self.spill_bytes,
            owner=self.agent.replica_id,
        )


async def serve(config: RolloutConfig, *, ready: Ready | None = None) -> None:
    """Run a replica until SIGTERM or SIGINT; calls ``ready`` once it listens.

    Raises:
        WeftError: The arguments are refused, the engine does not start, the port
            is taken, or the pool refuses this replica.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    engine = await open_engine(
        list(config.vllm_args),
        http_host=config.http_host,
        http_port=config.http_port,
        adapter_memory_bytes=config.adapter_memory_bytes,
        staging_memory_bytes=config.staging_memory_bytes,
        retain_base=config.retain_base,
        spill=config.spill,
    )
    try:
        await _serve_engine(config, engine, stop, ready)
    finally:
        await engine.shutdown()


async def _serve_engine(
    config: RolloutConfig, engine: VllmReplica, stop: asyncio.Event, ready: Ready | None
) -> None:
    http_url = config.agent.http_url or f"http://{config.http_host}:{engine.http_port}"
    agent = Agent(replace(config.agent, http_url=http_url), engine)
    servicer = Servicer(_SERVICE, ReplicaServicer(agent), add_ReplicaServiceServicer_to_server)
    server = await make_server([servicer])
    await server.set_health(READY_SERVICE, serving=False)
    agent.advertise(bind(server.server, config.agent.listen))
    await server.server.start()
    _log.info(
        "replica %s: gRPC on %s, OpenAI API on %s", config.agent.replica_id, agent.address, http_url
    )
    await engine.start_http()
    if ready is not None:
        ready(agent.address, http_url)
    tasks = {
        asyncio.create_task(engine.serve_http(), name="http"),
        asyncio.create_task(agent.run(), name="agent"),
        asyncio.create_task(_mirror_readiness(agent, server), name="readiness"),
        asyncio.create_task(stop.wait(), name="stop"),
    }
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # raises what ended the process
        _log.info("stopping")
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                await asyncio.gather(*tasks, return_exceptions=True)
        await server.server.stop(grace=1.0)


async def _mirror_readiness(agent: Agent, server: WeftServer) -> None:
    """Follow the coordinator's word in grpc.health, for probes and balancers."""
    was = False
    while True:
        if (now := agent.is_ready) != was:
            await server.set_health(READY_SERVICE, serving=now)
            _log.info("replica is %s", "ready" if now else "not ready")
            was = now
        await asyncio.sleep(0.2)
