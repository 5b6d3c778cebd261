"""A replica process with the engine double: what a push costs without an engine.

``python -m benchmarks.replica_double COORDINATOR REPLICA_ID NUM_TENSORS ELEMENTS``:
its base has NUM_TENSORS float32 tensors of ELEMENTS each. Ends when its standard
input closes.
"""

from __future__ import annotations

import asyncio
import sys

import torch

from rollout_side.agent import Agent
from rollout_side.config import AgentConfig
from rollout_side.servicer import ReplicaServicer
from tests.pool import EngineDouble, wait_registered
from weft.rpc.server import Servicer, bind, make_server
from weft.v1.replica_pb2_grpc import add_ReplicaServiceServicer_to_server


def base_weights(num_tensors: int, elements: int) -> dict[str, torch.Tensor]:
    """The double's base; expanded, so that it costs no memory."""
    return {
        f"layers.{i // 8}.t{i % 8}.weight": torch.zeros(1).expand(elements)
        for i in range(num_tensors)
    } | {"layers.0.q_proj.weight": torch.zeros(1).expand(64, 64)}


async def main(coordinator: str, replica_id: str, num_tensors: int, elements: int) -> None:
    """Serve until standard input closes."""
    engine = EngineDouble(base_weights(num_tensors, elements), keep_base=False)
    agent = Agent(AgentConfig(coordinator=coordinator, replica_id=replica_id), engine)
    servicer = Servicer(
        "weft.v1.ReplicaService", ReplicaServicer(agent), add_ReplicaServiceServicer_to_server
    )
    server = (await make_server([servicer])).server
    agent.advertise(bind(server, agent.config.listen))
    await server.start()
    running = asyncio.create_task(agent.run())
    await wait_registered(agent, running)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await server.stop(None)


if __name__ == "__main__":
    target, name, tensors, size = sys.argv[1:]
    asyncio.run(main(target, name, int(tensors), int(size)))
