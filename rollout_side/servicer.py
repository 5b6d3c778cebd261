"""ReplicaService: the coordinator's orders, translated for the agent."""

from __future__ import annotations

from typing import Any

import grpc

from rollout_side.agent import Agent
from rollout_side.engine import GroupSpec
from weft.rpc.codec import (
    capabilities_to_proto,
    duration_to_proto,
    vector_to_proto,
    version_from_proto,
    version_to_proto,
    versions_from_proto,
)
from weft.v1 import replica_pb2 as pb
from weft.v1.replica_pb2_grpc import ReplicaServiceServicer

_Context = grpc.aio.ServicerContext[Any, Any]


class ReplicaServicer(ReplicaServiceServicer):
    """One replica's service; see protos/weft/v1/replica.proto for each call."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def JoinGroup(  # noqa: N802
        self, request: pb.JoinGroupRequest, context: _Context
    ) -> pb.JoinGroupResponse:
        agent, group = self._agent, request.group
        agent.check_generation(request.coordinator_generation)
        spec = GroupSpec(
            coordinator=agent.config.coordinator,
            trainer_id=request.trainer_id,
            group_id=group.group_id,
            token=group.token,
            epoch=group.epoch,
            rank=group.rank,
            size=group.size,
            backend=group.backend,
            host=agent.host,
        )
        await agent.join_group(request.trainer_id, spec)
        return pb.JoinGroupResponse()

    async def CommitTransfer(  # noqa: N802
        self, request: pb.CommitTransferRequest, context: _Context
    ) -> pb.CommitTransferResponse:
        agent = self._agent
        agent.check_generation(request.coordinator_generation)
        times = await agent.commit(
            request.transfer_id,
            version_from_proto(request.version),
            request.adapter.config_json,
            request.content_digest.value,
        )
        return pb.CommitTransferResponse(
            version_vector=vector_to_proto(agent.vector),
            pause=duration_to_proto(times.pause_seconds),
            load=duration_to_proto(times.load_seconds),
        )

    async def DiscardTransfer(  # noqa: N802
        self, request: pb.DiscardTransferRequest, context: _Context
    ) -> pb.DiscardTransferResponse:
        self._agent.check_generation(request.coordinator_generation)
        await self._agent.engine.discard(request.transfer_id)
        return pb.DiscardTransferResponse()

    async def RetireVersions(  # noqa: N802
        self, request: pb.RetireVersionsRequest, context: _Context
    ) -> pb.RetireVersionsResponse:
        agent = self._agent
        agent.check_generation(request.coordinator_generation)
        await agent.retire(versions_from_proto(request.versions))
        return pb.RetireVersionsResponse(
            version_vector=vector_to_proto(agent.vector),
            draining=[version_to_proto(version) for version in sorted(agent.draining)],
        )

    async def GetStatus(  # noqa: N802
        self, request: pb.GetStatusRequest, context: _Context
    ) -> pb.GetStatusResponse:
        agent = self._agent
        return pb.GetStatusResponse(
            replica_id=agent.config.replica_id,
            incarnation=agent.config.incarnation,
            capabilities=capabilities_to_proto(agent.engine.capabilities),
            version_vector=vector_to_proto(agent.vector),
            dirty_reason=agent.dirty_reason,
            adapter_used_bytes=agent.memory.adapter_bytes,
            staging_used_bytes=agent.memory.staging_bytes,
        )
