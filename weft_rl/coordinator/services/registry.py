"""RegistryService: a thin translation of messages to events and back."""

# ruff: noqa: N802 (methods are named as in the proto)
from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, Final

import grpc

from weft_rl.contract.replica_report import MAX_SPILLED, HeldVersion
from weft_rl.coordinator.decisions.membership import check_free
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.replica import NOT_TOLD
from weft_rl.coordinator.decisions.state.values import (
    HeldVersionRecord,
    VersionRecord,
)
from weft_rl.coordinator.messages.wire import (
    HEARTBEAT,
    HEARTBEAT_ANSWER,
    REGISTER,
    REGISTER_ANSWER,
)
from weft_rl.coordinator.runtime.catalog.database import Catalog
from weft_rl.coordinator.runtime.driver import Driver
from weft_rl.coordinator.runtime.manifests import ReferenceCache, UploadQueue
from weft_rl.rpc.bounds import check_revision
from weft_rl.rpc.codec import HELD, checkpoint_from_proto
from weft_rl.rpc.manifest_codec import ReferenceDecoder
from weft_rl.v1 import registry_pb2, registry_pb2_grpc, types_pb2

Context = grpc.aio.ServicerContext[Any, Any]
#: Leftovers that one heartbeat may speak of; the others come with the next.
_MAX_STAGED: Final = 64
#: Versions whose digests are taken note of: those, and what is in memory.
_MAX_HELD: Final = 3 * MAX_SPILLED
_HELD_AT_ONCE: Final = 256


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
        held = await self._heard(request.held_versions)
        told = request.HasField("checkpoint") and request.checkpoint.state
        checkpoint = checkpoint_from_proto(request.checkpoint) if told else NOT_TOLD
        answer = await self._driver.call(
            lambda ticket: REGISTER.decode(request, ticket=ticket, held=held, checkpoint=checkpoint)
        )
        assert isinstance(answer, effects.RegisterAnswer)
        return REGISTER_ANSWER.encode(answer)

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
            lambda ticket: HEARTBEAT.decode(request, ticket=ticket, staged=staged, held=held)
        )
        assert isinstance(answer, effects.HeartbeatAnswer)
        return HEARTBEAT_ANSWER.encode(answer)

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
            held = [*map(HELD.decode, messages[begin : begin + _HELD_AT_ONCE])]
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
