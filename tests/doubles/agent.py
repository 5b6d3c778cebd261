"""A real agent with a double's engine, served and known to the coordinator."""

from __future__ import annotations

import asyncio
import threading

import grpc

from rollout_side.agent.agent import Agent
from rollout_side.agent.registration import HeartbeatOrders, OrderKey
from rollout_side.agent.servicers import GenerateServicer, ReplicaServicer
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.replica_report import OutOfService
from weft_rl.rpc.channel import MAX_PROMPT_BYTES
from weft_rl.rpc.server import Security, Servicer, bind, make_server
from weft_rl.tracing import NO_TRACER, Tracer
from weft_rl.v1.generate_pb2_grpc import add_GenerateServiceServicer_to_server
from weft_rl.v1.replica_pb2_grpc import add_ReplicaServiceServicer_to_server

_WAIT_SECONDS = 20.0


class Registered:
    """A registration with a coordinator that is not there; counts hurried heartbeats."""

    is_known = True
    coordinator_generation = 0
    trouble = ""

    def __init__(self) -> None:
        self.in_contact = True
        self.ready = threading.Event()
        self.ready.set()
        self.hurried = 0

    def hurry(self) -> None:
        self.hurried += 1


def hear(agent: Agent, *lacking: str) -> Registered:
    """Have the agent hear from such a coordinator that the pool serves what it does, and more."""
    if not isinstance(agent.registration, Registered):
        agent.registration = Registered()  # type: ignore[assignment]
    versions = tuple(map(PolicyVersion.parse, lacking))
    vector = agent.serving.vector
    agent.take_answer(
        HeartbeatOrders(None, False, False, OutOfService(), OrderKey(0, 0), (), vector, versions)
    )
    assert isinstance(agent.registration, Registered)
    return agent.registration


async def serve(
    agent: Agent, security: Security | None = None, tracer: Tracer = NO_TRACER
) -> grpc.aio.Server:
    """Serve the replica's services for the agent, on a port that it then advertises."""
    servicers = [
        Servicer(
            "weft.v1.ReplicaService",
            ReplicaServicer(agent, tracer=tracer),
            add_ReplicaServiceServicer_to_server,
        ),
        Servicer(
            "weft.v1.GenerateService",
            GenerateServicer(agent),
            add_GenerateServiceServicer_to_server,
        ),
    ]
    made = await make_server(servicers, security, max_request_bytes=MAX_PROMPT_BYTES)
    server = made.server
    agent.advertise(bind(server, agent.config.listen, security))
    await server.start()
    return server


async def wait_registered(agent: Agent, running: asyncio.Task[None]) -> None:
    """Return once the coordinator knows the agent; raise what ended it otherwise."""
    async with asyncio.timeout(_WAIT_SECONDS):
        while agent.registration is None or not agent.registration.registered.is_set():
            if running.done():
                running.result()
            await asyncio.sleep(0.005)
