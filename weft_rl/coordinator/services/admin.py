"""AdminService: a thin layer, from messages to events and back."""

# ruff: noqa: N802 (methods are named as in the proto)
from __future__ import annotations

from typing import Any, Final

import grpc

from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.options import DEFAULT_REQUESTS_SECONDS
from weft_rl.coordinator.decisions.replicas import base_binding
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.values import VersionRecord
from weft_rl.coordinator.messages.wire import (
    FORGET_ANSWER,
    REBIND_ANSWER,
    ROLLBACK_ANSWER,
    TAKE_OUT,
    UNCORDON_ANSWER,
)
from weft_rl.coordinator.runtime.driver import Driver
from weft_rl.coordinator.runtime.manifests import new_transfer_ids
from weft_rl.rpc.codec import (
    POLICY_VERSION,
    aborts_from_proto,
    duration_from_proto,
    vector_to_proto,
)
from weft_rl.v1 import admin_pb2, admin_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

#: A wait on behalf of a caller that set no deadline.
MAX_WAIT_SECONDS: Final = 3_600.0
#: Time of a drain for which none is given.
DRAIN_SECONDS: Final = 300.0


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Service for operators: their questions and orders."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def Rollback(
        self, request: admin_pb2.RollbackRequest, context: Context
    ) -> admin_pb2.RollbackResponse:
        """See protos/weft/v1/admin.proto."""
        answer_by = self._answer_by(context)
        recorded = await self._recorded(PolicyVersion(request.policy, request.to_version))
        answer = await self._driver.call(
            lambda ticket: events.RollbackPolicy(
                ticket, request.policy, request.to_version, new_transfer_ids(), answer_by, recorded
            ),
            until=answer_by,
        )
        assert isinstance(answer, effects.RollbackAnswer)
        return ROLLBACK_ANSWER.encode(answer)

    async def Pin(self, request: admin_pb2.PinRequest, context: Context) -> admin_pb2.PinResponse:
        """See protos/weft/v1/admin.proto."""
        version = POLICY_VERSION.decode(request.version)
        recorded = await self._recorded(version)
        await self._driver.call(
            lambda ticket: events.Pin(
                ticket, version.policy, version.version, request.pinned, recorded
            )
        )
        return admin_pb2.PinResponse()

    async def Retire(
        self, request: admin_pb2.RetireRequest, context: Context
    ) -> admin_pb2.RetireResponse:
        """See protos/weft/v1/admin.proto."""
        version = POLICY_VERSION.decode(request.version)
        recorded = await self._recorded(version)
        await self._driver.call(
            lambda ticket: events.RetireVersion(ticket, version.policy, version.version, recorded)
        )
        return admin_pb2.RetireResponse()

    async def SetRetention(
        self, request: admin_pb2.SetRetentionRequest, context: Context
    ) -> admin_pb2.SetRetentionResponse:
        """See protos/weft/v1/admin.proto."""
        answer = await self._driver.call(
            lambda ticket: events.SetRetention(ticket, request.policy, request.num_versions)
        )
        assert isinstance(answer, effects.RetentionAnswer)
        return admin_pb2.SetRetentionResponse(num_versions=answer.num_versions)

    async def ForgetPolicy(
        self, request: admin_pb2.ForgetPolicyRequest, context: Context
    ) -> admin_pb2.ForgetPolicyResponse:
        """See protos/weft/v1/admin.proto."""
        answer = await self._driver.call(
            lambda ticket: events.ForgetPolicy(ticket, request.policy, request.force)
        )
        assert isinstance(answer, effects.ForgetAnswer)
        return FORGET_ANSWER.encode(answer)

    async def Cordon(
        self, request: admin_pb2.CordonRequest, context: Context
    ) -> admin_pb2.CordonResponse:
        """See protos/weft/v1/admin.proto."""
        await self._driver.call(lambda ticket: TAKE_OUT.decode(request, ticket=ticket))
        return admin_pb2.CordonResponse()

    async def Uncordon(
        self, request: admin_pb2.UncordonRequest, context: Context
    ) -> admin_pb2.UncordonResponse:
        """See protos/weft/v1/admin.proto."""
        answer = await self._driver.call(lambda ticket: events.Uncordon(ticket, request.replica_id))
        assert isinstance(answer, effects.UncordonAnswer)
        return UNCORDON_ANSWER.encode(answer)

    async def GetBase(
        self, request: admin_pb2.GetBaseRequest, context: Context
    ) -> admin_pb2.GetBaseResponse:
        """See protos/weft/v1/admin.proto."""
        state = self._driver.state
        return admin_pb2.GetBaseResponse(
            base_fingerprint=state.fingerprint,
            architecture=state.architecture,
            version_vector=vector_to_proto(state.vector) if state.fingerprint else None,
            replica_ids=base_binding.present(state),
            num_transfers=len(state.transfers),
            checkpoint_digest=state.checkpoint.digest if state.checkpoint else b"",
            checkpoint_replica_id=state.checkpoint.replica_id if state.checkpoint else "",
        )

    async def RebindBase(
        self, request: admin_pb2.RebindBaseRequest, context: Context
    ) -> admin_pb2.RebindBaseResponse:
        """See protos/weft/v1/admin.proto."""
        answer = await self._driver.call(
            lambda ticket: events.RebindBase(ticket, request.base_fingerprint)
        )
        assert isinstance(answer, effects.RebindAnswer)
        return REBIND_ANSWER.encode(answer)

    async def Drain(
        self, request: admin_pb2.DrainRequest, context: Context
    ) -> admin_pb2.DrainResponse:
        """See protos/weft/v1/admin.proto."""
        seconds = DRAIN_SECONDS
        if request.HasField("timeout"):
            seconds = duration_from_proto(request.timeout)
        await self._driver.call(
            lambda ticket: events.DrainReplica(ticket, request.replica_id, seconds, request.reason)
        )
        return admin_pb2.DrainResponse()

    async def SleepReplica(
        self, request: admin_pb2.SleepReplicaRequest, context: Context
    ) -> admin_pb2.SleepReplicaResponse:
        """See protos/weft/v1/admin.proto."""
        aborts, level = aborts_from_proto(request.when_running), request.level or 1
        seconds = DEFAULT_REQUESTS_SECONDS
        if request.HasField("timeout"):
            seconds = duration_from_proto(request.timeout)
        answer_by = self._answer_by(context)
        await self._driver.call(
            lambda ticket: events.SleepReplica(
                ticket, request.replica_id, aborts, seconds, answer_by, level
            ),
            until=answer_by,
        )
        return admin_pb2.SleepReplicaResponse()

    async def WakeReplica(
        self, request: admin_pb2.WakeReplicaRequest, context: Context
    ) -> admin_pb2.WakeReplicaResponse:
        """See protos/weft/v1/admin.proto."""
        answer_by = self._answer_by(context)
        await self._driver.call(
            lambda ticket: events.WakeReplica(ticket, request.replica_id, answer_by),
            until=answer_by,
        )
        return admin_pb2.WakeReplicaResponse()

    async def _recorded(self, version: PolicyVersion) -> VersionRecord | None:
        await self._driver.flush()
        return await self._driver.read(lambda catalog: catalog.find_version(version))

    def _answer_by(self, context: Context) -> float:
        """Return the time by which a caller is answered: before it stops waiting."""
        left = context.time_remaining()
        left = MAX_WAIT_SECONDS if left is None else left - min(1.0, left * 0.2)
        return self._driver.now() + left
