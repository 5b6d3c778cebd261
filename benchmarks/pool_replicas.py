"""Many replicas in one process that only speak: heartbeats, and orders answered.

``python -m benchmarks.pool_replicas COORDINATOR FIRST COUNT``: replicas FIRST and up,
each with a connection and a port of its own, as in a pool of as many machines; no
engine, no torch. Prints ``ready`` once all are registered, and for each line of its
input a line of JSON: for each group, how many were told to join, and when the last
was (``time.monotonic``, one clock for all processes of a machine). Ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import grpc

from tests.doubles.registration import register
from tests.doubles.tiny_model import capabilities_of
from weft_rl.contract.names import VersionVector
from weft_rl.contract.tensors import DataType, Reference, TensorMeta
from weft_rl.rpc.channel import CHANNEL_OPTIONS
from weft_rl.rpc.codec import vector_to_proto
from weft_rl.v1 import registry_pb2, replica_pb2, replica_pb2_grpc
from weft_rl.v1.registry_pb2_grpc import RegistryServiceStub

PROJECTION = "model.layers.0.q_proj.weight"
REFERENCE = Reference("Tiny", (TensorMeta(PROJECTION, DataType.BFLOAT16, (64, 64)),))
CAPABILITIES = capabilities_of(REFERENCE)
_CALL_SECONDS = 30.0


class Orders(replica_pb2_grpc.ReplicaServiceServicer):
    """Answers every order at once and remembers the joins."""

    def __init__(self) -> None:
        self.joins: dict[str, tuple[int, float]] = {}

    async def JoinGroup(self, request: Any, context: Any) -> Any:  # noqa: N802
        count, _ = self.joins.get(request.group.group_id, (0, 0.0))
        self.joins[request.group.group_id] = (count + 1, time.monotonic())
        return replica_pb2.JoinGroupResponse()

    async def DiscardTransfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        return replica_pb2.DiscardTransferResponse()


async def _live(target: str, name: str, address: str, registered: asyncio.Event) -> None:
    """One replica: register, then a heartbeat every so often."""
    options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        stub = RegistryServiceStub(channel)
        me = {"replica_id": name, "incarnation": "1"}
        vector = VersionVector()
        answer = await register(stub, CAPABILITIES, REFERENCE, vector=vector, address=address, **me)
        registered.set()
        interval = answer.heartbeat_interval.ToTimedelta().total_seconds()
        report = registry_pb2.ReplicaReport(version_vector=vector_to_proto(vector))
        beat = registry_pb2.HeartbeatRequest(report=report, **me)
        due = time.monotonic()
        while True:
            due += interval
            await asyncio.sleep(due - time.monotonic())
            await stub.Heartbeat(beat, timeout=_CALL_SECONDS)


async def main(target: str, first: int, count: int) -> None:
    """Serve until standard input closes."""
    orders, server = Orders(), grpc.aio.server()
    replica_pb2_grpc.add_ReplicaServiceServicer_to_server(orders, server)
    ports = [server.add_insecure_port("127.0.0.1:0") for _ in range(count)]
    await server.start()
    tasks, events = [], []
    for i, port in enumerate(ports):
        events.append(asyncio.Event())
        name = f"replica-{first + i:04d}"
        tasks.append(asyncio.create_task(_live(target, name, f"127.0.0.1:{port}", events[-1])))
        await asyncio.sleep(2.0 / count)  # heartbeats spread over their interval
    everyone = asyncio.gather(*(event.wait() for event in events))
    await asyncio.wait([everyone, *tasks], return_when=asyncio.FIRST_COMPLETED)
    await everyone
    print("ready", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        failed = [task for task in tasks if task.done()]
        print(json.dumps({"joins": orders.joins, "failed": len(failed)}), flush=True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
