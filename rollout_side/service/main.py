"""One replica process: engine, OpenAI server and agent on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import replace

from rollout_side.agent.agent import Agent
from rollout_side.agent.registration import check_contact
from rollout_side.agent.servicers import GenerateServicer, ReplicaServicer
from rollout_side.config import RolloutConfig
from rollout_side.service.metrics import ReplicaMetrics
from rollout_side.vllm_engine.compat import bridges
from rollout_side.vllm_engine.launch import open_engine
from rollout_side.vllm_engine.replica import VllmReplica
from weft_rl.progress import STARTING, said
from weft_rl.rpc.channel import MAX_PROMPT_BYTES
from weft_rl.rpc.security.credentials import Credentials
from weft_rl.rpc.security.guard import AccessFile
from weft_rl.rpc.server import Security, Servicer, WeftServer, bind, check_listen, make_server
from weft_rl.telemetry.metrics import refusal_counter
from weft_rl.telemetry.ports import Ports
from weft_rl.telemetry.traces import open_tracer
from weft_rl.tracing import NO_TRACER, Tracer
from weft_rl.v1.generate_pb2_grpc import add_GenerateServiceServicer_to_server
from weft_rl.v1.replica_pb2_grpc import add_ReplicaServiceServicer_to_server

_log = logging.getLogger(__name__)

#: Health service that is SERVING while the replica serves all that the pool does.
READY_SERVICE = "weft.ready"
_STOP_SECONDS = 5.0
# Interval of the log lines while the replica waits.
_LOG_SECONDS = 30.0
#: How long running requests may take to end once the replica has failed; once it was
#: told to stop.
_FAILURE_SECONDS, _CUT_SECONDS = 10.0, 0.5
#: Called with the gRPC address, the OpenAI server's base URL, and the ports beside these.
Ready = Callable[[str, str, Ports], None]


class _StopSignals:
    """Handler of stop signals. The first SIGTERM begins a drain. A second one ends the process at
    once, and so does SIGINT, which a terminal also sends to the engine's processes."""

    def __init__(self, drain_seconds: float) -> None:
        self.received = asyncio.Event()
        self.agent: Agent | None = None
        self._drain_seconds = drain_seconds
        self._signalled = False

    def signal(self, number: int) -> None:
        """Handle a signal."""
        at_once = self._signalled or number == signal.SIGINT or not self._drain_seconds
        if at_once or self.agent is None:
            self.received.set()
        else:
            self.agent.drain(self._drain_seconds, "its process was told to stop")
        self._signalled = True

    async def wait(self) -> str:
        """Wait until the process is to end at once; returns why."""
        await self.received.wait()
        return "told to stop at once"


def run(config: RolloutConfig, *, ready: Ready | None = None) -> str:
    """Run ``serve`` on an event loop of its own, of the kind that vLLM's own server has."""
    with asyncio.Runner(loop_factory=bridges.event_loop_factory()) as runner:
        return runner.run(serve(config, ready=ready))


async def serve(config: RolloutConfig, *, ready: Ready | None = None) -> str:
    """Run a replica until it has drained; call ``ready`` once it listens.

    SIGTERM begins a drain of ``drain_seconds``; a second one, or SIGINT, ends the process at once.
    SIGHUP has it read its files again, and ends none of the engine's processes.

    Returns:
        The reason for the end, for messages.

    Raises:
        WeftError: The arguments are refused, the engine does not start, a port or the replica's
            name is taken, or the pool refuses this replica.
    """
    stop = _StopSignals(config.drain_seconds)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.signal, signum)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as the processes that it starts do
    tracer = NO_TRACER
    if config.telemetry.traces:
        tracer = open_tracer("weft-replica", config.agent.replica_id)
    security = Security(
        credentials=Credentials.from_environment(),
        access=AccessFile(config.access) if config.access else None,
        insecure=config.insecure,
    )
    # Checked before a model is loaded for minutes.
    check_listen(config.agent.listen, security)
    check_listen(config.telemetry.metrics)
    check_listen(config.telemetry.health)
    await check_contact(config.agent)
    with said(STARTING, _log.info) as start:  # the loop is blocked for minutes
        engine = await open_engine(config, on_step=start.step)
    patience = _FAILURE_SECONDS
    try:
        why = await _serve_engine(config, engine, stop, ready, tracer, security)
        patience = _CUT_SECONDS  # the drain has finished what it could
    finally:
        await engine.shutdown(patience)
        await asyncio.to_thread(tracer.close)
    return why


async def _serve_engine(
    config: RolloutConfig,
    engine: VllmReplica,
    stop: _StopSignals,
    ready: Ready | None,
    tracer: Tracer,
    security: Security,
) -> str:
    http_url = config.agent.http_url or f"http://{config.http_host}:{engine.http_port}"
    agent = stop.agent = Agent(replace(config.agent, http_url=http_url), engine)
    metrics = ReplicaMetrics(agent, config)
    servicers = [
        Servicer(
            "weft.v1.ReplicaService",
            ReplicaServicer(agent, metrics.switched, tracer),
            add_ReplicaServiceServicer_to_server,
        ),
        Servicer(
            "weft.v1.GenerateService",
            GenerateServicer(agent),
            add_GenerateServiceServicer_to_server,
        ),
    ]
    on_refused = refusal_counter(metrics.registry)
    server = await make_server(
        servicers, security, on_refused=on_refused, max_request_bytes=MAX_PROMPT_BYTES, eighths=2
    )
    await server.set_health(READY_SERVICE, serving=False)
    port = bind(server.server, config.agent.listen, security)
    ports = await Ports.open(config.telemetry, server, metrics.registry, security)

    def look_again() -> None:
        security.look_again()
        ports.look_again()

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, look_again)
    try:
        await _advertise(agent, port)
        await server.server.start()
        _log.info(
            "replica %s: gRPC on %s, OpenAI API on %s",
            config.agent.replica_id,
            agent.address,
            http_url,
        )
        await engine.start_http()
        if ready is not None:
            ready(agent.address, http_url, ports)
        return await _run_until_stopped(agent, engine, server, stop, metrics)
    finally:
        await ports.close()


async def _run_until_stopped(
    agent: Agent,
    engine: VllmReplica,
    server: WeftServer,
    stop: _StopSignals,
    metrics: ReplicaMetrics,
) -> str:
    """Stay in the pool until a drain has ended or a signal ends it; return the reason."""
    running = {
        asyncio.create_task(engine.serve_http(), name="http"),
        asyncio.create_task(agent.run(), name="agent"),
        asyncio.create_task(_mirror_readiness(agent, server), name="readiness"),
    }
    if engine.spill_folder is not None:
        look = metrics.watch_spill(engine.spill_folder.num_bytes)
        running.add(asyncio.create_task(look, name="spill size"))
    ends = {
        asyncio.create_task(agent.wait_drained(), name="drained"),
        asyncio.create_task(stop.wait(), name="stop"),
    }
    tasks = running | ends
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done & running:
            task.result()  # raises what ended the process
        why = next((str(task.result()) for task in done & ends), "the OpenAI server has stopped")
        _log.info("stopping: %s", why)
        return why
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                await asyncio.gather(*tasks, return_exceptions=True)
        await server.server.stop(grace=1.0)


async def _advertise(agent: Agent, port: int) -> None:
    """Find the address that others reach this replica by. Waits, as registration does, while the
    coordinator's name cannot be resolved."""
    logged_at = float("-inf")
    while True:
        try:
            agent.advertise(port)
            return
        except OSError as error:
            if time.monotonic() - logged_at >= _LOG_SECONDS:
                logged_at = time.monotonic()
                _log.warning(
                    "no route to the coordinator at %s yet: %s; waiting (or give --advertise-host)",
                    agent.config.coordinator,
                    error.strerror or error,
                )
        await asyncio.sleep(1.0)


async def _mirror_readiness(agent: Agent, server: WeftServer) -> None:
    """Show in grpc.health whether the replica is ready, for probes and balancers."""
    was = False
    while True:
        if (now := agent.is_ready) != was:
            await server.set_health(READY_SERVICE, serving=now)
            _log.info("replica is %s", "ready" if now else "not ready")
            was = now
        await agent.wait_answer()
