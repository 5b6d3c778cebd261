"""PublishService: a thin layer, from messages to events and back."""

# ruff: noqa: N802 (methods are named as in the proto)
from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import grpc

from weft_rl.contract.errors import NotReadyError, PeerUnavailableError
from weft_rl.contract.names import check_name
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.replica import Replica
from weft_rl.coordinator.decisions.state.replica_state import (
    base_targets,
    eligible_targets,
    shared_backends,
)
from weft_rl.coordinator.decisions.state.transfer import Transfer
from weft_rl.coordinator.decisions.state.values import VersionRecord, VersionState
from weft_rl.coordinator.decisions.step import already_committed, not_its_owner
from weft_rl.coordinator.messages.wire import (
    ABORT,
    ACQUIRE,
    BEGIN,
    RELEASE,
    RENEW,
    SLEEP_ROLLOUTS,
    begin_to_proto,
    lease_to_proto,
    transfer_from_record,
    transfer_to_proto,
)
from weft_rl.coordinator.runtime.driver import Driver
from weft_rl.coordinator.runtime.manifests import (
    DescribedReference,
    LayoutCache,
    ReferenceCache,
    UploadQueue,
    dtype_exceptions,
    new_transfer_ids,
)
from weft_rl.coordinator.runtime.traces import TransferTraces
from weft_rl.rpc.bounds import check_revision
from weft_rl.rpc.codec import (
    aborts_from_proto,
    dtype_to_proto,
    duration_from_proto,
)
from weft_rl.rpc.manifest_codec import (
    ManifestDecoder,
    reference_tensor_to_proto,
    reference_to_chunks,
)
from weft_rl.rpc.security.guard import CALLER
from weft_rl.tracing import parent_in
from weft_rl.v1 import publish_pb2, publish_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

#: A push that names no timeout gets this much; one that names more gets at most a day.
DEFAULT_TIMEOUT_SECONDS: Final = 600.0
MAX_TIMEOUT_SECONDS: Final = 86_400.0
#: Longest wait for a replica that has registered and not yet described its base.
_UNDESCRIBED_SECONDS: Final = 5.0
#: A wait on behalf of a caller that set no deadline.
MAX_WAIT_SECONDS: Final = 3_600.0


class PublishServicer(publish_pb2_grpc.PublishServiceServicer):
    """Service for trainers, which own policies, push versions, and learn what became of them."""

    def __init__(
        self,
        driver: Driver,
        manifests: LayoutCache,
        references: ReferenceCache,
        uploads: UploadQueue,
        traces: TransferTraces | None = None,
    ) -> None:
        self._driver = driver
        self._manifests = manifests
        self._references = references
        self._uploads = uploads
        self._traces = traces

    def _answer_by(self, context: Context) -> float:
        """Return the time at which a wait must end, so that the caller still gets an answer."""
        left = context.time_remaining()
        if left is None:
            return self._driver.now() + MAX_WAIT_SECONDS
        return self._driver.now() + left - min(1.0, left * 0.2)

    async def DescribeTarget(
        self, request: publish_pb2.DescribeTargetRequest, context: Context
    ) -> publish_pb2.DescribeTargetResponse:
        """See protos/weft/v1/publish.proto."""
        deadline = self._answer_by(context)
        patience = self._driver.now() + _UNDESCRIBED_SECONDS
        await self._driver.call(
            lambda ticket: events.DescribeTarget(ticket, deadline, patience), until=deadline
        )
        state = self._driver.state
        replicas = base_targets(state)
        if not replicas:
            raise PeerUnavailableError("the last replica has just left", reason="POOL_EMPTY")
        targets = eligible_targets(state) or replicas
        capabilities = replicas[0].capabilities
        described = self._described(replicas)
        if described is None:
            raise PeerUnavailableError("the base was just bound anew", reason="POOL_EMPTY")
        exceptions = dtype_exceptions(described, capabilities.base_dtype)
        reference = described.reference
        return publish_pb2.DescribeTargetResponse(
            base_fingerprint=state.fingerprint,
            architecture=state.architecture,
            base_dtype=dtype_to_proto(capabilities.base_dtype),
            base_dtype_exceptions={n: dtype_to_proto(d) for n, d in exceptions.by_name.items()},
            base_dtype_exceptions_digest=exceptions.digest,
            adapter_dtype=dtype_to_proto(capabilities.adapter_dtype),
            base_version=state.vector.base,
            base_checkpoint_digest=state.checkpoint.digest if state.checkpoint else b"",
            num_replicas=len(eligible_targets(state)),
            backends=shared_backends(targets),
            trial_names=[target.capabilities.trial_name for target in targets],
            gpu_uuids=[uuid for target in targets for uuid in target.capabilities.gpu_uuids],
            draft_tensors=map(reference_tensor_to_proto, reference.draft),
            draft_prefixes=reference.draft_prefixes,
            reference_name=described.name,
        )

    def _described(self, replicas: Sequence[Replica]) -> DescribedReference | None:
        """Return the description of the pool's base, with the draft of the first replica that takes
        one."""
        taken = (replica.capabilities.draft_fingerprint for replica in replicas)
        draft = next(filter(None, taken), "")
        fingerprint = self._driver.state.fingerprint
        digests = {replica.capabilities.reference_digest for replica in replicas}
        describe = self._references.describe
        return describe(fingerprint, draft, digests) or describe(fingerprint, "", digests)

    async def GetReference(
        self, request: publish_pb2.GetReferenceRequest, context: Context
    ) -> AsyncIterator[publish_pb2.GetReferenceResponse]:
        """See protos/weft/v1/publish.proto."""
        described = self._references.describe(request.fingerprint)
        if request.fingerprint == self._driver.state.fingerprint:
            described = self._described(base_targets(self._driver.state))
        if described is None:
            raise NotReadyError(
                f"no model of the fingerprint {request.fingerprint[:12]!r} is known here",
                reason="MANIFEST_UNKNOWN",
            )
        for chunk in reference_to_chunks(described.reference):
            yield publish_pb2.GetReferenceResponse(chunk=chunk, reference_name=described.name)

    async def AcquirePolicy(
        self, request: publish_pb2.AcquirePolicyRequest, context: Context
    ) -> publish_pb2.AcquirePolicyResponse:
        """See protos/weft/v1/publish.proto."""
        answer = await self._driver.call(
            lambda ticket: ACQUIRE.decode(request, ticket=ticket, identity=CALLER.get())
        )
        assert isinstance(answer, effects.LeaseAnswer)
        return publish_pb2.AcquirePolicyResponse(
            lease=lease_to_proto(answer.policy, answer.lease, answer.time_to_live),
            last_version=answer.last_version,
            publish_again_version=answer.publish_again_version,
            pool_id=answer.pool_id,
        )

    async def RenewLease(
        self, request: publish_pb2.RenewLeaseRequest, context: Context
    ) -> publish_pb2.RenewLeaseResponse:
        """See protos/weft/v1/publish.proto."""
        answer = await self._driver.call(lambda ticket: RENEW.decode(request, ticket=ticket))
        assert isinstance(answer, effects.LeaseAnswer)
        lease = lease_to_proto(answer.policy, answer.lease, answer.time_to_live)
        return publish_pb2.RenewLeaseResponse(
            lease=lease,
            publish_again_version=answer.publish_again_version,
            pool_id=answer.pool_id,
        )

    async def ReleasePolicy(
        self, request: publish_pb2.ReleasePolicyRequest, context: Context
    ) -> publish_pb2.ReleasePolicyResponse:
        """See protos/weft/v1/publish.proto."""
        await self._driver.call(lambda ticket: RELEASE.decode(request, ticket=ticket))
        return publish_pb2.ReleasePolicyResponse()

    async def PutManifest(
        self, request_iterator: AsyncIterator[publish_pb2.PutManifestRequest], context: Context
    ) -> publish_pb2.PutManifestResponse:
        """See protos/weft/v1/publish.proto."""
        manifest = await self._uploads.read(request_iterator, ManifestDecoder())
        layout = self._manifests.put(manifest)
        return publish_pb2.PutManifestResponse(layout_digest=layout.digest)

    async def BeginTransfer(
        self, request: publish_pb2.BeginTransferRequest, context: Context
    ) -> publish_pb2.BeginTransferResponse:
        """See protos/weft/v1/publish.proto."""
        check_revision(request.protocol_revision, "the trainer")
        check_name(request.policy, "policy")
        timeout = duration_from_proto(request.timeout) if request.HasField("timeout") else 0.0
        timeout = min(timeout if timeout > 0 else DEFAULT_TIMEOUT_SECONDS, MAX_TIMEOUT_SECONDS)
        deadline = self._driver.now() + timeout
        answer_by = min(deadline, self._answer_by(context))
        recorded = await self._recorded(request.policy, request.request_id)
        ids = new_transfer_ids()
        if self._traces is not None:
            self._traces.expect(ids.transfer_id, parent_in(context.invocation_metadata()))
        answer = await self._driver.call(
            lambda ticket: BEGIN.decode(
                request,
                ticket=ticket,
                layout=self._manifests.get(request.layout_digest),
                min_replicas=request.require.min_replicas if request.HasField("require") else 1,
                deadline=deadline,
                answer_by=answer_by,
                ids=ids,
                recorded=recorded,
            ),
            until=answer_by,
        )
        assert isinstance(answer, effects.BeginAnswer)
        return begin_to_proto(answer)

    async def _recorded(self, policy_name: str, request_id: str) -> VersionRecord | None:
        """Find the catalog's record of what the lease's owner made with this request id before."""
        policy = self._driver.state.policies.get(policy_name)
        if policy is None or policy.lease is None:
            return None
        # Asked of a policy without versions too: the id may be another policy's.
        trainer_id = policy.lease.trainer_id
        return await self._driver.read(lambda catalog: catalog.find_request(trainer_id, request_id))

    async def AwaitTransfer(
        self, request: publish_pb2.AwaitTransferRequest, context: Context
    ) -> publish_pb2.AwaitTransferResponse:
        """See protos/weft/v1/publish.proto."""
        record = await self._forgotten(request.transfer_id)
        if record is not None:
            if record.failure:
                raise record.failure.error()
            message = transfer_from_record(record, self._driver.state)
            return publish_pb2.AwaitTransferResponse(transfer=message)
        answer = await self._driver.call(
            lambda ticket: events.AwaitTransfer(ticket, request.transfer_id)
        )
        assert isinstance(answer, Transfer)
        driver = self._driver
        message = transfer_to_proto(answer, driver.state, driver.now(), answer.layout.num_buckets)
        return publish_pb2.AwaitTransferResponse(transfer=message)

    async def _forgotten(self, transfer_id: str) -> VersionRecord | None:
        """Find the catalog's record of a transfer that the state no longer has."""
        state = self._driver.state
        if transfer_id in state.transfers or transfer_id in state.history:
            return None
        record = await self._driver.read(lambda catalog: catalog.find_transfer(transfer_id))
        return record if record and record.state is not VersionState.STAGING else None

    async def AbortTransfer(
        self, request: publish_pb2.AbortTransferRequest, context: Context
    ) -> publish_pb2.AbortTransferResponse:
        """See protos/weft/v1/publish.proto."""
        record = await self._forgotten(request.transfer_id) if request.transfer_id else None
        if record is not None:
            if record.version.policy != request.policy:
                raise not_its_owner(request.transfer_id, request.policy, request.fencing_token)
            if record.state not in (VersionState.ABORTED, VersionState.FAILED):
                raise already_committed(str(record.version))
            return publish_pb2.AbortTransferResponse()
        await self._driver.call(lambda ticket: ABORT.decode(request, ticket=ticket))
        return publish_pb2.AbortTransferResponse()

    async def SleepRollouts(
        self, request: publish_pb2.SleepRolloutsRequest, context: Context
    ) -> publish_pb2.SleepRolloutsResponse:
        """See protos/weft/v1/publish.proto."""
        aborts, answer_by = aborts_from_proto(request.when_running), self._answer_by(context)
        answer = await self._driver.call(
            lambda ticket: SLEEP_ROLLOUTS.decode(
                request, ticket=ticket, aborts=aborts, answer_by=answer_by
            ),
            until=answer_by,
        )
        assert isinstance(answer, effects.SleepAnswer)
        return publish_pb2.SleepRolloutsResponse(replica_ids=answer.replica_ids)

    async def WakeRollouts(
        self, request: publish_pb2.WakeRolloutsRequest, context: Context
    ) -> publish_pb2.WakeRolloutsResponse:
        """See protos/weft/v1/publish.proto."""
        answer_by = self._answer_by(context)
        answer = await self._driver.call(
            lambda ticket: events.WakeRollouts(
                ticket, request.fencing_token, request.session_id, answer_by
            ),
            until=answer_by,
        )
        assert isinstance(answer, effects.SleepAnswer)
        return publish_pb2.WakeRolloutsResponse(replica_ids=answer.replica_ids)
