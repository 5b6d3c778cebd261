"""A real agent with a double's engine, served and known to the coordinator."""

from __future__ import annotations

import asyncio

import grpc

from rollout_side.agent.agent import Agent
from rollout_side.agent.generate_servicer import GenerateServicer
from rollout_side.agent.servicer import ReplicaServicer
from weft.rpc.server import Security, Servicer, bind, make_server
from weft.tracing import NO_TRACER, Tracer
from weft.v1.generate_pb2_grpc import add_GenerateServiceServicer_to_server
from weft.v1.replica_pb2_grpc import add_ReplicaServiceServicer_to_server

_WAIT_SECONDS = 20.0


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
    server = (await make_server(servicers, security)).server
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
