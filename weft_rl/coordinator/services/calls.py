"""Services whose unary calls are rows of ``CALLS``: decoded, decided by ``step``, answered."""

# ruff: noqa: N802 (methods are named as in the proto)
from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import grpc

from weft_rl.contract.errors import NotReadyError, PeerUnavailableError
from weft_rl.contract.names import PolicyVersion, check_name
from weft_rl.contract.replica_report import MAX_SPILLED, HeldVersion
from weft_rl.coordinator.decisions.membership import check_free
from weft_rl.coordinator.decisions.replicas import base_binding
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.effects import EmptyAnswer, LeaseAnswer
from weft_rl.coordinator.decisions.state.replica import Replica
from weft_rl.coordinator.decisions.state.replica_state import (
    base_targets,
    eligible_targets,
    shared_backends,
)
from weft_rl.coordinator.decisions.state.values import (
    HeldVersionRecord,
    VersionRecord,
    VersionState,
)
from weft_rl.coordinator.decisions.step import CALLS, CallRow, already_committed, not_its_owner
from weft_rl.coordinator.decisions.transfers import preflight
from weft_rl.coordinator.messages.wire import (
    begin_to_proto,
    transfer_from_record,
    transfer_to_proto,
)
from weft_rl.coordinator.runtime.catalog.database import Catalog
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
    HELD,
    POLICY_VERSION,
    aborts_from_proto,
    dtype_to_proto,
    duration_from_proto,
    vector_to_proto,
)
from weft_rl.rpc.manifest_codec import (
    ManifestDecoder,
    ReferenceDecoder,
    reference_tensor_to_proto,
    reference_to_chunks,
)
from weft_rl.rpc.security.guard import CALLER
from weft_rl.schema import MessageCodec, SchemaError, codec, listing
from weft_rl.tracing import parent_in
from weft_rl.v1 import admin_pb2, publish_pb2, registry_pb2, types_pb2

Context = grpc.aio.ServicerContext[Any, Any]

#: A push that names no timeout gets this much; one that names more gets at most a day.
DEFAULT_TIMEOUT_SECONDS: Final = 600.0
MAX_TIMEOUT_SECONDS: Final = 86_400.0
#: Longest wait for a replica that has registered and not yet described its base.
_UNDESCRIBED_SECONDS: Final = 5.0
#: Leftovers that one heartbeat may speak of; the others come with the next.
_MAX_STAGED: Final = 64
#: Versions whose digests are taken note of: those, and what is in memory.
_MAX_HELD: Final = 3 * MAX_SPILLED
_HELD_AT_ONCE: Final = 256
#: A wait on behalf of a caller that set no deadline.
MAX_WAIT_SECONDS: Final = 3_600.0
#: Answers that are encoded with what their values do not hold.
_BY_HAND: Final = frozenset({"BeginTransfer", "AwaitTransfer"})
#: Fields of calls that are read elsewhere than in a message.
_READ_ELSEWHERE: Final = (
    "ticket", "answer_by", "ids", "identity", "recorded", "aborts", "held", "staged", "layout",
    "min_replicas", "deadline", "patience",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class CallCodec:
    """Codecs of one call and of its answer."""

    request: MessageCodec[Any, Any]
    encode: Callable[[Any], Any]


def _codecs(row: CallRow, method: Any) -> CallCodec:
    fields = {field.name for field in dataclasses.fields(row.call)}
    given = [name for name in (*_READ_ELSEWHERE, *row.unread) if name in fields]
    request = codec(row.call, method.input_type._concrete_class, given=given, told=row.unread)
    answer = method.output_type._concrete_class
    if row.answer is EmptyAnswer or method.name in _BY_HAND:
        return CallCodec(request, lambda _: answer())
    if row.answer is LeaseAnswer:  # of which a renewal tells less
        return CallCodec(request, listing(row.answer, answer))
    return CallCodec(request, codec(row.answer, answer).encode)


_ROWS: Final = {row.call.__name__: row for row in CALLS}
#: Codecs of the calls of ``step``, by the name of the RPC.
CODECS: Final[Mapping[str, CallCodec]] = {
    method.name: _codecs(_ROWS[method.name], method)
    for file, service in (
        (admin_pb2, "AdminService"),
        (publish_pb2, "PublishService"),
        (registry_pb2, "RegistryService"),
    )
    for method in file.DESCRIPTOR.services_by_name[service].methods
    if method.name in _ROWS
}
if unserved := _ROWS.keys() - CODECS.keys():
    raise SchemaError(f"no service has the calls {sorted(unserved)}")


class CallServicer:
    """Service that answers those of its unary calls that are rows of ``CALLS``.

    Subclasses have methods of their own for what more is to be done.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def __init_subclass__(cls, service: Any) -> None:
        for method in service.methods:
            if method.name in CODECS and not hasattr(cls, method.name):
                setattr(cls, method.name, _answering(method.name))

    async def decide(self, name: str, request: Any, context: Context, **given: Any) -> Any:
        """Have ``step`` decide a call, and return its answer.

        Args:
            name: Name of the RPC.
            given: Fields of its value that no message has; others are looked up here.

        Raises:
            WeftError: The call was refused.
        """
        call = CODECS[name].request
        for field, read in _GIVEN.items():
            if field in call.beside and field not in given:
                found = read(self, request, context)
                given[field] = await found if isinstance(found, Awaitable) else found
        return await self._driver.call(
            lambda ticket: call.decode(request, ticket=ticket, **given),
            until=given.get("answer_by"),
        )

    async def answer(self, name: str, request: Any, context: Context, **given: Any) -> Any:
        """Return the message that answers a call; arguments and errors are those of ``decide``."""
        return CODECS[name].encode(await self.decide(name, request, context, **given))

    def answer_by(self, _: Any, context: Context) -> float:
        """Return the time by which a caller is answered: before it stops waiting."""
        left = context.time_remaining()
        left = MAX_WAIT_SECONDS if left is None else left - min(1.0, left * 0.2)
        return self._driver.now() + left

    async def recorded(self, request: Any, _: Context) -> VersionRecord | None:
        """Return what the catalog has of the version that an order names."""
        if isinstance(request, admin_pb2.RollbackRequest):
            version = PolicyVersion(request.policy, request.to_version)
        else:
            version = POLICY_VERSION.decode(request.version)
        await self._driver.flush()
        return await self._driver.read(lambda catalog: catalog.find_version(version))


#: Fields of calls that no message has, and how each is looked up.
_GIVEN: Final[Mapping[str, Callable[[CallServicer, Any, Context], Any]]] = {
    "aborts": lambda _, request, __: aborts_from_proto(request.when_running),
    "answer_by": CallServicer.answer_by,
    "recorded": CallServicer.recorded,
    "ids": lambda *_: new_transfer_ids(),
    "identity": lambda *_: CALLER.get(),
}


def _answering(name: str) -> Callable[..., Awaitable[Any]]:
    async def method(self: CallServicer, request: Any, context: Context) -> Any:
        return await self.answer(name, request, context)

    return method


class AdminServicer(CallServicer, service=admin_pb2.DESCRIPTOR.services_by_name["AdminService"]):
    """Service for operators: their questions and orders."""

    async def GetBase(
        self, request: admin_pb2.GetBaseRequest, context: Context
    ) -> admin_pb2.GetBaseResponse:
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


class RegistryServicer(
    CallServicer, service=registry_pb2.DESCRIPTOR.services_by_name["RegistryService"]
):
    """Service by which replicas join the pool, stay in it, and leave it."""

    def __init__(self, driver: Driver, references: ReferenceCache, uploads: UploadQueue) -> None:
        super().__init__(driver)
        self._uploads = uploads
        self._references = references

    async def Register(self, request: registry_pb2.RegisterRequest, context: Context) -> Any:
        check_revision(request.protocol_revision, "the replica")
        held = await self._heard(request.held_versions)
        return await self.answer("Register", request, context, held=held)

    async def CheckReplica(
        self, request: registry_pb2.CheckReplicaRequest, context: Context
    ) -> registry_pb2.CheckReplicaResponse:
        check_revision(request.protocol_revision, "the replica")
        driver = self._driver
        check_free(driver.state, request.replica_id, request.incarnation, driver.now())
        return registry_pb2.CheckReplicaResponse()

    async def PutReference(
        self, request_iterator: AsyncIterator[registry_pb2.PutReferenceRequest], context: Context
    ) -> registry_pb2.PutReferenceResponse:
        reference = await self._uploads.read(request_iterator, ReferenceDecoder())
        state = self._driver.state
        if state.fingerprint in ("", reference.fingerprint):  # no other is of use
            here = {replica.capabilities.reference_digest for replica in state.replicas.values()}
            self._references.put(reference, here)
            fingerprints = (reference.fingerprint, reference.draft_fingerprint)
            self._driver.post(events.ReferenceKnown(*fingerprints, reference.details_digest))
        return registry_pb2.PutReferenceResponse()

    async def Heartbeat(self, request: registry_pb2.HeartbeatRequest, context: Context) -> Any:
        staged = await self._staged(request.staged_transfer_ids[:_MAX_STAGED])
        held = await self._heard(request.held_versions)
        return await self.answer("Heartbeat", request, context, staged=staged, held=held)

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


class PublishServicer(
    CallServicer, service=publish_pb2.DESCRIPTOR.services_by_name["PublishService"]
):
    """Service for trainers, which own policies, push versions, and learn what became of them."""

    def __init__(
        self,
        driver: Driver,
        manifests: LayoutCache,
        references: ReferenceCache,
        uploads: UploadQueue,
        traces: TransferTraces | None = None,
    ) -> None:
        super().__init__(driver)
        self._manifests = manifests
        self._references = references
        self._uploads = uploads
        self._traces = traces

    async def DescribeTarget(
        self, request: publish_pb2.DescribeTargetRequest, context: Context
    ) -> publish_pb2.DescribeTargetResponse:
        patience = self._driver.now() + _UNDESCRIBED_SECONDS
        await self.decide("DescribeTarget", request, context, patience=patience)
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
        layout_digest, content_digest = state.served_base_digests
        delta_refusal = preflight.why_no_delta(state, replicas)
        takers = preflight.takers_of_delta(state, replicas) if delta_refusal else ()
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
            nccl_networks=sorted({target.capabilities.nccl_network for target in targets}),
            draft_tensors=map(reference_tensor_to_proto, reference.draft),
            draft_prefixes=reference.draft_prefixes,
            reference_name=described.name,
            base_layout_digest=layout_digest,
            base_content_digest=content_digest,
            delta_refusal=delta_refusal,
            num_delta_replicas=len(takers),
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

    async def PutManifest(
        self, request_iterator: AsyncIterator[publish_pb2.PutManifestRequest], context: Context
    ) -> publish_pb2.PutManifestResponse:
        manifest = await self._uploads.read(request_iterator, ManifestDecoder())
        layout = self._manifests.put(manifest)
        return publish_pb2.PutManifestResponse(layout_digest=layout.digest)

    async def BeginTransfer(
        self, request: publish_pb2.BeginTransferRequest, context: Context
    ) -> publish_pb2.BeginTransferResponse:
        check_revision(request.protocol_revision, "the trainer")
        check_name(request.policy, "policy")
        timeout = duration_from_proto(request.timeout) if request.HasField("timeout") else 0.0
        timeout = min(timeout if timeout > 0 else DEFAULT_TIMEOUT_SECONDS, MAX_TIMEOUT_SECONDS)
        deadline = self._driver.now() + timeout
        answer_by = min(deadline, self.answer_by(request, context))
        recorded = await self._recorded_push(request.policy, request.request_id)
        ids = new_transfer_ids()
        if self._traces is not None:
            self._traces.expect(ids.transfer_id, parent_in(context.invocation_metadata()))
        answer = await self.decide(
            "BeginTransfer",
            request,
            context,
            layout=self._manifests.get(request.layout_digest),
            min_replicas=request.require.min_replicas if request.HasField("require") else 1,
            deadline=deadline,
            answer_by=answer_by,
            ids=ids,
            recorded=recorded,
        )
        return begin_to_proto(answer)

    async def _recorded_push(self, policy_name: str, request_id: str) -> VersionRecord | None:
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
        record = await self._forgotten(request.transfer_id)
        if record is not None:
            if record.failure:
                raise record.failure.error()
            message = transfer_from_record(record, self._driver.state)
            return publish_pb2.AwaitTransferResponse(transfer=message)
        answer, driver = await self.decide("AwaitTransfer", request, context), self._driver
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
    ) -> Any:
        record = await self._forgotten(request.transfer_id) if request.transfer_id else None
        if record is not None:
            if record.version.policy != request.policy:
                raise not_its_owner(request.transfer_id, request.policy, request.fencing_token)
            if record.state not in (VersionState.ABORTED, VersionState.FAILED):
                raise already_committed(str(record.version))
            return publish_pb2.AbortTransferResponse()
        return await self.answer("AbortTransfer", request, context)
