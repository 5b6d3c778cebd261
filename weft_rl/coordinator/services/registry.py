"""RegistryService: a thin translation of messages to events and back."""

# ruff: noqa: N802 (methods are named as in the proto)
from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, Final

import grpc

from weft_rl.coordinator.decisions.membership import check_free
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.replica import NOT_TOLD, OutOfService
from weft_rl.coordinator.decisions.state.values import (
    HeldVersion,
    HeldVersionRecord,
    ReplicaState,
    VersionRecord,
)
from weft_rl.coordinator.messages.wire import held_from_proto
from weft_rl.coordinator.runtime.catalog.database import Catalog
from weft_rl.coordinator.runtime.driver import Driver
from weft_rl.coordinator.runtime.manifests import ReferenceCache, UploadQueue
from weft_rl.rpc.bounds import check_revision
from weft_rl.rpc.codec import (
    MAX_SPILLED,
    capabilities_from_proto,
    checkpoint_from_proto,
    drain_to_proto,
    duration_to_proto,
    report_from_proto,
    version_to_proto,
)
from weft_rl.rpc.manifest_codec import ReferenceDecoder
from weft_rl.v1 import registry_pb2, registry_pb2_grpc, types_pb2

Context = grpc.aio.ServicerContext[Any, Any]
#: Leftovers that one heartbeat may speak of; the others come with the next.
_MAX_STAGED: Final = 64
#: Versions whose digests are taken note of: those, and what is in memory.
_MAX_HELD: Final = 3 * MAX_SPILLED
_HELD_AT_ONCE: Final = 256
#: Versions that a replica lacks, and is told of.
_MAX_LACKING: Final = 4096


class RegistryServicer(registry_pb2_grpc.RegistryServiceServicer):
    """Service by which replicas join the pool, stay in it, and leave it."""

    def __init__(self, driver: Driver, references: ReferenceCache, uploads: UploadQueue) -> None:
        self._driver = driver
        self._uploads = uploads
        self._references = references

    async def Register(
        self, request: registry_pb2.RegisterRequest, context: Context
    ) -> registry_pb2.RegisterResponse:
        """See protos/weft/v1/registry.proto."""
        check_revision(request.protocol_revision, "the replica")
        capabilities = capabilities_from_proto(request.capabilities)
        held = await self._heard(request.held_versions)
        told = request.HasField("checkpoint") and request.checkpoint.state
        checkpoint = checkpoint_from_proto(request.checkpoint) if told else NOT_TOLD
        answer = await self._driver.call(
            lambda ticket: events.Register(
                ticket=ticket,
                replica_id=request.replica_id,
                incarnation=request.incarnation,
                address=request.address,
                http_url=request.http_url,
                model_name=request.model_name,
                capabilities=capabilities,
                report=report_from_proto(request.report),
                held=held,
                last_generation=request.last_coordinator_generation,
                last_epoch=request.last_epoch,
                last_coordinator_id=request.last_coordinator_id,
                checkpoint=checkpoint,
                out_of_service=_order_from_proto(request),
                pool_id=request.pool_id,
            )
        )
        assert isinstance(answer, effects.RegisterAnswer)
        return registry_pb2.RegisterResponse(
            heartbeat_interval=duration_to_proto(answer.heartbeat_seconds),
            reference_wanted=answer.reference_wanted,
            coordinator_generation=answer.generation,
            coordinator_id=answer.coordinator_id,
            refuse_reason=answer.refuse_reason,
            order_number=answer.order_number,
            out_of_service=_order_to_proto(answer.out_of_service),
            epoch=answer.epoch,
            pool_id=answer.pool_id,
        )

    async def CheckReplica(
        self, request: registry_pb2.CheckReplicaRequest, context: Context
    ) -> registry_pb2.CheckReplicaResponse:
        """See protos/weft/v1/registry.proto."""
        check_revision(request.protocol_revision, "the replica")
        driver = self._driver
        check_free(driver.state, request.replica_id, request.incarnation, driver.now())
        return registry_pb2.CheckReplicaResponse()

    async def PutReference(
        self, request_iterator: AsyncIterator[registry_pb2.PutReferenceRequest], context: Context
    ) -> registry_pb2.PutReferenceResponse:
        """See protos/weft/v1/registry.proto."""
        reference = await self._uploads.read(request_iterator, ReferenceDecoder())
        state = self._driver.state
        if state.fingerprint in ("", reference.fingerprint):  # no other is of use
            here = {replica.capabilities.reference_digest for replica in state.replicas.values()}
            self._references.put(reference, here)
            fingerprints = (reference.fingerprint, reference.draft_fingerprint)
            self._driver.post(events.ReferenceKnown(*fingerprints, reference.details_digest))
        return registry_pb2.PutReferenceResponse()

    async def ReportCheckpoint(
        self, request: registry_pb2.ReportCheckpointRequest, context: Context
    ) -> registry_pb2.ReportCheckpointResponse:
        """See protos/weft/v1/registry.proto."""
        checkpoint = checkpoint_from_proto(request.checkpoint)
        await self._driver.call(
            lambda ticket: events.ReportCheckpoint(
                ticket, request.replica_id, request.incarnation, checkpoint
            )
        )
        return registry_pb2.ReportCheckpointResponse()

    async def Heartbeat(
        self, request: registry_pb2.HeartbeatRequest, context: Context
    ) -> registry_pb2.HeartbeatResponse:
        """See protos/weft/v1/registry.proto."""
        staged = await self._staged(request.staged_transfer_ids[:_MAX_STAGED])
        held = await self._heard(request.held_versions)
        answer = await self._driver.call(
            lambda ticket: events.Heartbeat(
                ticket,
                request.replica_id,
                request.incarnation,
                report_from_proto(request.report),
                staged,
                held,
                request.held_versions_complete,
            )
        )
        assert isinstance(answer, effects.HeartbeatAnswer)
        return registry_pb2.HeartbeatResponse(
            ready=answer.ready,
            drain=drain_to_proto(answer.drain),
            in_transfer=answer.in_transfer,
            refuse_reason=answer.refuse_reason,
            pinned_base_versions=answer.pinned_bases,
            held_versions_wanted=answer.held_wanted,
            coordinator_generation=answer.generation,
            order_number=answer.order_number,
            lacking=map(version_to_proto, answer.lacking[:_MAX_LACKING]),
            lacking_more=len(answer.lacking) > _MAX_LACKING,
            base_doubt=answer.base_doubt,
            out_of_service=_order_to_proto(answer.out_of_service),
            epoch=answer.epoch,
            pool_id=answer.pool_id,
            absent_policies=[
                registry_pb2.AbsentPolicy(
                    policy=one.policy, last_version=one.last_version, reason=one.reason
                )
                for one in answer.absent
            ],
        )

    async def Leave(
        self, request: registry_pb2.LeaveRequest, context: Context
    ) -> registry_pb2.LeaveResponse:
        """See protos/weft/v1/registry.proto."""
        await self._driver.call(
            lambda ticket: events.Leave(ticket, request.replica_id, request.incarnation)
        )
        return registry_pb2.LeaveResponse()

    async def _heard(
        self, messages: Sequence[types_pb2.HeldVersion]
    ) -> tuple[HeldVersionRecord, ...]:
        """Return the versions that a replica holds, each with its record in the catalog. Lets
        other calls, and the catalog's writes, run after every few versions."""
        heard: list[HeldVersionRecord] = []
        messages = messages[:_MAX_HELD]
        for begin in range(0, len(messages), _HELD_AT_ONCE):
            held = [*map(held_from_proto, messages[begin : begin + _HELD_AT_ONCE])]
            heard += await self._driver.read(partial(_with_records, held))
        return tuple(heard)

    async def _staged(self, transfer_ids: Sequence[str]) -> dict[str, VersionRecord | None]:
        if not transfer_ids:  # as in most heartbeats
            return {}
        return await self._driver.read(
            lambda catalog: {name: catalog.find_transfer(name) for name in transfer_ids}
        )


def _with_records(held: Sequence[HeldVersion], catalog: Catalog) -> list[HeldVersionRecord]:
    return [HeldVersionRecord(one, catalog.find_version(one.version)) for one in held]


def _order_from_proto(request: registry_pb2.RegisterRequest) -> OutOfService | None:
    if not request.HasField("out_of_service"):
        return None
    told = request.out_of_service
    state = ReplicaState.QUARANTINED if told.quarantined else ReplicaState.CORDONED
    return OutOfService(state, told.reason)


def _order_to_proto(order: OutOfService | None) -> registry_pb2.OutOfService | None:
    if order is None:
        return None
    return registry_pb2.OutOfService(
        quarantined=order.state is ReplicaState.QUARANTINED, reason=order.reason
    )
