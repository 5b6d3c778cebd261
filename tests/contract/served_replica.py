"""A replica with an engine double, served, and a stub to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rollout_side.agent.agent import Agent
from rollout_side.memory.versions import StagedVersion
from tests.doubles.agent import hear, serve
from tests.doubles.engine import EngineDouble
from weft_rl.contract.manifest import plan_buckets
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import DataType, TensorMeta
from weft_rl.rpc.channel import open_aio_channel
from weft_rl.v1 import generate_pb2_grpc, replica_pb2, replica_pb2_grpc, types_pb2

MANIFEST = plan_buckets([TensorMeta("w", DataType.FLOAT32, (8, 8))])
BASE_1 = types_pb2.PolicyVersion(policy="base", version=1)


@dataclass
class Served:
    """A replica with an engine double, and stubs to it."""

    agent: Agent
    engine: EngineDouble
    stub: Any
    generate: Any = None
    """The stub of its GenerateService."""

    def stage(self, version: str) -> str:
        parsed = PolicyVersion.parse(version)
        segment = self.engine.store.reserve(
            f"t-{version}", MANIFEST.wire_bytes, adapter=parsed.policy != "base"
        )
        segment.data.fill_(parsed.version)
        self.engine.store.put_staged(
            StagedVersion(f"t-{version}", parsed, MANIFEST, segment, version.encode())
        )
        return f"t-{version}"

    async def commit(self, version: str, **fields: Any) -> replica_pb2.CommitTransferResponse:
        parsed = PolicyVersion.parse(version)
        return await self.stub.CommitTransfer(
            replica_pb2.CommitTransferRequest(
                transfer_id=self.stage(version),
                version=types_pb2.PolicyVersion(policy=parsed.policy, version=parsed.version),
                content_digest=types_pb2.ContentDigest(value=version.encode()),
                **fields,
            )
        )


@asynccontextmanager
async def serving(agent: Agent, engine: EngineDouble) -> AsyncIterator[Served]:
    """Serve the agent as long as the context lasts, without a coordinator."""
    server = await serve(agent)
    hear(agent)
    async with open_aio_channel(agent.address) as channel:
        yield Served(
            agent,
            engine,
            replica_pb2_grpc.ReplicaServiceStub(channel),
            generate_pb2_grpc.GenerateServiceStub(channel),
        )
    engine.close()
    await server.stop(None)
