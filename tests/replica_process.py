"""A replica process with the engine double: what a push costs without an engine.

``python -m tests.replica_process COORDINATOR REPLICA_ID NUM_TENSORS ELEMENTS``: its
base has NUM_TENSORS float32 tensors of ELEMENTS each. It answers each line of its
standard input with a line of JSON about what it serves, and ends when that closes.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import torch

from rollout_side.agent import Agent
from rollout_side.config import AgentConfig
from rollout_side.servicer import ReplicaServicer
from tests.pool import EngineDouble, wait_registered
from weft.rpc.server import Servicer, bind, make_server
from weft.transport.group import num_parked_groups
from weft.v1.replica_pb2_grpc import add_ReplicaServiceServicer_to_server


def base_weights(num_tensors: int, elements: int) -> dict[str, torch.Tensor]:
    """The double's base; expanded, so that it costs no memory."""
    return {
        f"layers.{i // 8}.t{i % 8}.weight": torch.zeros(1).expand(elements)
        for i in range(num_tensors)
    } | {"layers.0.q_proj.weight": torch.zeros(1).expand(64, 64)}


def describe(agent: Agent, engine: EngineDouble) -> dict[str, Any]:
    """What is served: the first element of each base tensor, and the versions."""
    usage = engine.store.usage()
    return {
        "base": agent.vector.base,
        "adapters": {name: list(e.versions) for name, e in agent.vector.adapters.items()},
        "firsts": sorted({float(t.flatten()[0]) for t in engine.base.values()}),
        "is_whole": all(bool((t == t.flatten()[0]).all()) for t in engine.base.values()),
        "staging_bytes": usage.staging_bytes - engine.store._retained_bytes(),
        "parked_groups": num_parked_groups(),
    }


async def main(coordinator: str, replica_id: str, num_tensors: int, elements: int) -> None:
    """Serve until standard input closes."""
    engine = EngineDouble(
        base_weights(num_tensors, elements), keep_base="--keep" in sys.argv, retain_base=1
    )
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
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(describe(agent, engine)), flush=True)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await server.stop(None)


if __name__ == "__main__":
    target, name, tensors, size = sys.argv[1:5]
    asyncio.run(main(target, name, int(tensors), int(size)))
