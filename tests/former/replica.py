"""A replica of the release before: ``python replica.py COORDINATOR`` (see README.md).

It reports to the coordinator as one does that registered with the coordinator before, then asks to
register until it is refused. Prints a line of JSON: both refusals, and what it goes on to serve.
"""

import asyncio
import json
import sys

import grpc
import torch
from weft.contract.errors import WeftError
from weft.rpc.channel import open_aio_channel
from weft.rpc.status import error_from_rpc
from weft.v1 import registry_pb2, types_pb2
from weft.v1.registry_pb2_grpc import RegistryServiceStub

from rollout_side.agent.agent import Agent
from rollout_side.config import AgentConfig
from tests.doubles.agent import serve
from tests.doubles.engine import EngineDouble


async def heartbeat(target: str) -> str:
    """Send one with every kind of field set; return the reason that it is refused for."""
    version = types_pb2.PolicyVersion(policy="math", version=1)
    request = registry_pb2.HeartbeatRequest(
        replica_id="former",
        incarnation="former",
        version_vector=types_pb2.VersionVector(base=1),
        adapter_used_bytes=1,
        staged_transfer_ids=["t1"],
        retained_base_versions=[1],
        dirty_reason="mixed",
        spilled_versions=[version],
        drain=registry_pb2.Drain(reason="leaves"),
        pinned_base_versions=[1],
        pinned_base_bytes=1,
        held_versions_complete=True,
        refusing="closed",
        order_number=1,
        work=registry_pb2.Work(what="loads"),
        base_as_started=True,
    )
    async with open_aio_channel(target) as channel:
        try:
            await RegistryServiceStub(channel).Heartbeat(request)
        except grpc.aio.AioRpcError as error:
            refused: WeftError = error_from_rpc(error)
            return refused.reason
    return ""


async def main(target: str) -> None:
    """Report, ask to register, say what came of both."""
    reported = await heartbeat(target)
    agent = Agent(
        AgentConfig(coordinator=target, replica_id="former"), EngineDouble({"w": torch.zeros(4)})
    )
    server = await serve(agent)
    running = asyncio.create_task(agent.run())
    async with asyncio.timeout(30):
        while not running.done() and not (agent.registration and agent.registration.trouble):
            await asyncio.sleep(0.02)
    if running.done():
        running.result()
    print(json.dumps({
        "heartbeat": reported,
        "registration": agent.registration.trouble,
        "serves": agent.serving.vector.base,
    }))  # fmt: skip
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await server.stop(None)


asyncio.run(main(sys.argv[1]))
