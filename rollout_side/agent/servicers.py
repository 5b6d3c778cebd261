"""gRPC services of a replica: the coordinator's orders, and requests for tokens."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import grpc

from rollout_side.agent.agent import Agent
from rollout_side.agent.registration import OrderKey, OrderSource
from rollout_side.agent.serving import VersionCopy
from rollout_side.engine import (
    GenerateOrder,
    JoinOrder,
    PromptImage,
    SampleChunk,
    SendOrder,
    SleepOrder,
    SwitchTimes,
    VersionFacts,
)
from weft_rl.contract.backends import GLOO
from weft_rl.contract.capabilities import Capabilities
from weft_rl.contract.checkpoint import StoredTensor, checkpoint_digest
from weft_rl.contract.errors import InvalidRequestError, StaleEpochError, WeftError
from weft_rl.contract.group import GroupTicket
from weft_rl.contract.names import BASE_POLICY, PolicyVersion, check_counted, check_name
from weft_rl.contract.sampling import Sampling, check_num_samples
from weft_rl.rpc.channel import check_own_address
from weft_rl.rpc.codec import (
    CAPABILITIES,
    OUT_OF_SERVICE,
    POLICY_VERSION,
    REPORT,
    SAMPLING,
    SLEEP,
    TENSOR,
    TICKET,
    aborts_from_proto,
    chunk_ranges,
    duration_from_proto,
    duration_to_proto,
    vector_to_proto,
)
from weft_rl.rpc.inbound import on_call_end
from weft_rl.rpc.manifest_codec import manifest_to_chunks
from weft_rl.schema import codec
from weft_rl.tracing import NO_TRACER, Span, Tracer, parent_in
from weft_rl.v1 import generate_pb2, publish_pb2, types_pb2
from weft_rl.v1 import replica_pb2 as pb
from weft_rl.v1.generate_pb2_grpc import GenerateServiceServicer
from weft_rl.v1.replica_pb2_grpc import ReplicaServiceServicer

_SLEEP_ORDER = codec(
    SleepOrder,
    pb.SleepRequest,
    given=["aborts"],
    told=["coordinator_generation", "incarnation", "when_running", "pool_id"],
)
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Context = grpc.aio.ServicerContext[Any, Any]


def _version(message: types_pb2.PolicyVersion) -> PolicyVersion:
    """Return the version that an order names."""
    check_name(message.policy, "policy")
    check_counted("version", message.version)
    return POLICY_VERSION.decode(message)


def _source(request: Any) -> OrderSource:
    has_group = isinstance(request, pb.JoinGroupRequest | pb.SendVersionRequest)
    return OrderSource(
        generation=request.coordinator_generation,
        pool_id=request.pool_id,
        epoch=request.group.epoch if has_group else 0,
        number=request.order_number if isinstance(request, pb.RefuseRequestsRequest) else 0,
    )


def _named(transfer_id: str) -> str:
    """Return the transfer that an order names. Engines use the empty name for no transfer."""
    if not transfer_id:
        raise InvalidRequestError("transfer_id is empty; it must name a transfer")
    return transfer_id


def _order(
    method: Callable[[ReplicaServicer, _Request, _Context], Coroutine[Any, Any, _Response]],
) -> Callable[[ReplicaServicer, _Request, _Context], Coroutine[Any, Any, _Response]]:
    """Let a method carry out orders of the coordinator that this replica is registered with, and
    for this process, alone."""

    @functools.wraps(method)
    async def carry_out(self: ReplicaServicer, request: _Request, context: _Context) -> _Response:
        await self.check(request)
        return await method(self, request, context)

    return carry_out


async def _check_listens(ticket: GroupTicket) -> None:
    """Refuse a place in a group of gloo, which listens at the address that the replica advertises,
    where this machine does not have it: a rank that could not listen would be waited for.

    Raises:
        InvalidRequestError: It does not; says what to do.
    """
    if ticket.backend != GLOO:
        return
    try:
        await asyncio.to_thread(check_own_address, ticket.host)
    except OSError as error:
        raise InvalidRequestError(
            f"gloo cannot listen at {ticket.host}, which this replica advertises "
            f"({error.strerror}): give --advertise-host an address of one of its interfaces that "
            "the trainer reaches"
        ) from error


class ReplicaServicer(ReplicaServiceServicer):
    """One replica's service; see protos/weft/v1/replica.proto for each call.

    Args:
        on_switched: Called with the policy and the cost of each switch.
        tracer: Tracer for the spans of loads and switches; its owner closes it.
    """

    def __init__(
        self,
        agent: Agent,
        on_switched: Callable[[str, SwitchTimes], None] | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._agent = agent
        self._tracer = tracer
        self._on_switched = on_switched or (lambda policy, times: None)

    @contextlib.contextmanager
    def _signed(self) -> Iterator[None]:
        """Add this process's incarnation to a refusal, which holds for this process only."""
        try:
            yield
        except WeftError as error:
            error.metadata["incarnation"] = self._agent.config.incarnation
            raise

    @contextlib.contextmanager
    def _traced(
        self, name: str, context: _Context, version: types_pb2.PolicyVersion
    ) -> Iterator[Span]:
        """Open a span for an order of the coordinator, under the span of its transfer."""
        replica_id = self._agent.config.replica_id
        parent = parent_in(context.invocation_metadata())
        with self._tracer.span(
            name, parent=parent, replica=replica_id, policy=version.policy, version=version.version
        ) as span:
            yield span

    async def check(self, request: Any) -> None:
        """Refuse an order that is not for this process, or of a coordinator that is not its own;
        raises as ``_order`` says."""
        registration = self._agent.registration
        generation = request.coordinator_generation
        newest = registration.coordinator_generation if registration else 0
        if generation < newest:
            raise StaleEpochError(
                f"the order is of coordinator generation {generation}, which {newest} has replaced"
            )
        await self._agent.check_source(_source(request))
        incarnation, own = getattr(request, "incarnation", ""), self._agent.config.incarnation
        if incarnation not in ("", own):
            raise StaleEpochError(
                f"the order is for process {incarnation[:80]!r} of this replica, which {own!r} "
                "has replaced"
            )

    async def _switch(
        self,
        request: pb.CommitTransferRequest | pb.SwitchVersionRequest,
        context: _Context,
        switch: Callable[[PolicyVersion], Coroutine[Any, Any, SwitchTimes]],
    ) -> dict[str, Any]:
        """Carry out an order to switch; return the fields that its answers have in common."""
        with self._signed(), self._traced("weft.switch", context, request.version) as span:
            times = await switch(_version(request.version))
            span.set(pause_seconds=times.pause_seconds, load_seconds=times.load_seconds)
        self._on_switched(request.version.policy, times)
        return {
            "version_vector": vector_to_proto(self._agent.serving.vector),
            "pause": duration_to_proto(times.pause_seconds),
            "load": duration_to_proto(times.load_seconds),
            "retained_base_versions": self._agent.serving.memory.retained_bases,
            "undo_base_versions": self._agent.serving.memory.undo_bases,
        }

    @_order
    async def JoinGroup(  # noqa: N802
        self, request: pb.JoinGroupRequest, context: _Context
    ) -> pb.JoinGroupResponse:
        agent = self._agent
        order = JoinOrder(
            ticket=self._ticket(request.group, agent.engine.capabilities),
            trainer_id=request.trainer_id,
            is_probe=request.is_probe,
        )
        await _check_listens(order.ticket)
        await agent.join_group(order)
        return pb.JoinGroupResponse()

    @_order
    async def CommitTransfer(  # noqa: N802
        self, request: pb.CommitTransferRequest, context: _Context
    ) -> pb.CommitTransferResponse:
        agent = self._agent

        def commit(version: PolicyVersion) -> Coroutine[Any, Any, SwitchTimes]:
            return agent.serving.commit(_copy(request, version))

        return pb.CommitTransferResponse(
            **await self._switch(request, context, commit),
            base_as_started=agent.serving.is_as_started(agent.serving.vector.base),
        )

    @_order
    async def LoadTransfer(  # noqa: N802
        self, request: pb.LoadTransferRequest, context: _Context
    ) -> pb.LoadTransferResponse:
        agent = self._agent
        with self._traced("weft.load", context, request.version):
            await agent.serving.load_in_place(
                _named(request.transfer_id),
                _version(request.version),
                duration_from_proto(request.timeout),
            )
        return pb.LoadTransferResponse()

    @_order
    async def SwitchVersion(  # noqa: N802
        self, request: pb.SwitchVersionRequest, context: _Context
    ) -> pb.SwitchVersionResponse:
        agent = self._agent

        def switch(version: PolicyVersion) -> Coroutine[Any, Any, SwitchTimes]:
            has_copy = request.HasField("spilled")
            return agent.serving.switch(
                version, _copy(request.spilled, version) if has_copy else None
            )

        return pb.SwitchVersionResponse(**await self._switch(request, context, switch))

    async def DescribeVersion(  # noqa: N802
        self, request: pb.DescribeVersionRequest, context: _Context
    ) -> AsyncIterator[pb.DescribeVersionResponse]:
        version = _version(request.version)
        if request.facts_of_digest:
            facts = await self._agent.serving.describe(version, request.facts_of_digest)
            yield pb.DescribeVersionResponse(facts=facts.to_proto())
            return
        manifest = await self._agent.engine.manifest(version)
        for chunk in manifest_to_chunks(manifest):
            yield pb.DescribeVersionResponse(chunk=chunk)

    async def DigestVersion(  # noqa: N802
        self, request: pb.DigestVersionRequest, context: _Context
    ) -> AsyncIterator[pb.DigestVersionResponse]:
        version = _version(request.version)
        facts = self._agent.serving.known.facts.get(version)
        adapter = facts.to_proto().adapter if facts and version.policy != BASE_POLICY else None
        found: list[StoredTensor] = []
        async with contextlib.aclosing(self._agent.engine.digest_tensors(version)) as parts:
            async for part in parts:
                found += part
                for some in chunk_ranges(len(part)):
                    tensors = map(TENSOR.encode, part[some])
                    chunk = types_pb2.TensorDigestChunk(tensors=tensors, adapter=adapter)
                    yield pb.DigestVersionResponse(chunk=chunk)
                    adapter = None
        digest = await asyncio.to_thread(checkpoint_digest, found)
        yield pb.DigestVersionResponse(chunk=types_pb2.TensorDigestChunk(digest=digest))

    @_order
    async def SendVersion(  # noqa: N802
        self, request: pb.SendVersionRequest, context: _Context
    ) -> pb.SendVersionResponse:
        agent = self._agent
        order = SendOrder(
            ticket=self._ticket(request.group, None),
            transfer_id=_named(request.transfer_id),
            version=_version(request.version),
            nonce=request.nonce,
            timeout_seconds=duration_from_proto(request.timeout),
        )
        await _check_listens(order.ticket)
        await agent.send(order)
        return pb.SendVersionResponse()

    def _ticket(self, group: publish_pb2.GroupPlan, receives: Capabilities | None) -> GroupTicket:
        """Return the ticket of this replica's receivers in a group, or of its sender.

        Raises:
            InvalidRequestError: The group has no such rank, no name, or a backend that this replica
                does not offer.
        """
        last = group.rank + (receives.num_receivers - 1 if receives else 0)
        num_senders = group.num_senders or 1
        if (group.rank < num_senders) is not (receives is None) or last >= group.size:
            raise InvalidRequestError(
                f"rank {group.rank} of a group of {group.size} does not fit "
                f"{f'{receives.num_receivers} receivers' if receives else 'a sender'}"
            )
        if not group.group_id or group.backend not in self._agent.engine.capabilities.backends:
            raise InvalidRequestError(
                f"group {group.group_id!r} over {group.backend[:40]!r}: a group needs a name and "
                f"one of the backends {', '.join(self._agent.engine.capabilities.backends)}"
            )
        config = self._agent.config
        return TICKET.decode(
            group, coordinator=config.coordinator, host=self._agent.host, site=config.site
        )

    @_order
    async def DiscardTransfer(  # noqa: N802
        self, request: pb.DiscardTransferRequest, context: _Context
    ) -> pb.DiscardTransferResponse:
        agent = self._agent
        await agent.serving.discard(_named(request.transfer_id))
        return pb.DiscardTransferResponse(
            version_vector=vector_to_proto(agent.serving.vector),
            incarnation=agent.config.incarnation,
        )

    @_order
    async def RetireVersions(  # noqa: N802
        self, request: pb.RetireVersionsRequest, context: _Context
    ) -> pb.RetireVersionsResponse:
        agent = self._agent
        mistaken = request.mistaken_versions
        await agent.serving.drop_mistaken(
            [(_version(held.version), held.content_digest) for held in mistaken]
        )
        await agent.serving.retire(
            [_version(version) for version in request.versions], frozenset(request.ended_policies)
        )
        return pb.RetireVersionsResponse(
            version_vector=vector_to_proto(agent.serving.vector),
            draining=[POLICY_VERSION.encode(version) for version in sorted(agent.serving.retiring)],
        )

    @_order
    async def RefuseRequests(  # noqa: N802
        self, request: pb.RefuseRequestsRequest, context: _Context
    ) -> pb.RefuseRequestsResponse:
        agent = self._agent
        order = OrderKey(request.coordinator_generation, request.order_number)
        agent.order_refusal(order, OUT_OF_SERVICE.decode(request.out_of_service).refusal)
        agent.hurry()
        return pb.RefuseRequestsResponse(refusing=agent.refusing, order_number=agent.order_number)

    @_order
    async def Sleep(  # noqa: N802
        self, request: pb.SleepRequest, context: _Context
    ) -> pb.SleepResponse:
        agent = self._agent
        order = _SLEEP_ORDER.decode(request, aborts=aborts_from_proto(request.when_running))
        await agent.fall_asleep(order)
        asleep = agent.engine.asleep
        return pb.SleepResponse(sleep=SLEEP.encode(asleep) if asleep else None)

    @_order
    async def WakeUp(  # noqa: N802
        self, request: pb.WakeUpRequest, context: _Context
    ) -> pb.WakeUpResponse:
        agent = self._agent
        await agent.wake_up()
        return pb.WakeUpResponse(
            version_vector=vector_to_proto(agent.serving.vector),
            dirty_reason=agent.serving.dirty_reason,
        )

    async def GetStatus(  # noqa: N802
        self, request: pb.GetStatusRequest, context: _Context
    ) -> pb.GetStatusResponse:
        agent = self._agent
        return pb.GetStatusResponse(
            replica_id=agent.config.replica_id,
            incarnation=agent.config.incarnation,
            capabilities=CAPABILITIES.encode(agent.engine.capabilities),
            staging_used_bytes=agent.serving.memory.staging_bytes,
            report=REPORT.encode(agent.report()),
        )


def _copy(order: pb.CommitTransferRequest | pb.SpilledCopy, version: PolicyVersion) -> VersionCopy:
    """Decode the copy that an order names. It has no facts if the coordinator does not name the
    layout."""
    facts = None
    if order.layout_digest:
        message = types_pb2.VersionFacts(
            content_digest=order.content_digest,
            layout_digest=order.layout_digest,
            adapter=order.adapter if order.HasField("adapter") else None,
        )
        facts = VersionFacts(order.content_digest.value, message.SerializeToString())
    return VersionCopy(
        _named(order.transfer_id),
        version,
        order.content_digest.value,
        order.adapter.config_json,
        order.alias,
        order.layout_digest,
        facts,
    )


_CHUNK = codec(SampleChunk, generate_pb2.SampleChunk, told=["adapter"])


def decode_sampling(message: generate_pb2.Sampling) -> Sampling:
    """Return the settings that a request gives."""
    stops = {"stop": tuple(message.stop), "stop_token_ids": tuple(message.stop_token_ids)}
    return SAMPLING.decode(message, **stops)


class GenerateServicer(GenerateServiceServicer):
    """One replica's service; see protos/weft/v1/generate.proto."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def Generate(  # noqa: N802
        self, request: generate_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[generate_pb2.GenerateResponse]:
        images = await self._images(request)
        version = self._agent.requested(request.policy)
        adapter = None if version.policy == BASE_POLICY else version
        sampling = decode_sampling(request.sampling)
        num_samples = check_num_samples(request.sampling.num_samples or 1, sampling)
        # Nothing is awaited since the name was resolved, so the version is still there.
        answer = self._agent.engine.generate(
            GenerateOrder(
                prompt=_prompt(request),
                images=images,
                adapter=adapter,
                num_samples=num_samples,
                sampling=sampling,
                strict=request.strict,
                exact_base=adapter is None and request.policy != BASE_POLICY,
                chunk_tokens=request.chunk_tokens,
            )
        )
        on_call_end(context, answer.end)
        try:
            admission: generate_pb2.Admission | None = None
            capabilities = self._agent.engine.capabilities
            async for chunks in answer.chunks():
                if admission is None:
                    admission = generate_pb2.Admission(
                        adapter=POLICY_VERSION.encode(adapter) if adapter else None,
                        base_version=answer.base,
                        logprobs_mode=capabilities.logprobs_mode,
                        logprobs_truncated=capabilities.logprobs_truncated,
                        prompt_token_ids=answer.prompt_token_ids,
                    )
                    yield _response(chunks, adapter, admission)
                else:
                    yield _response(chunks, adapter)
        finally:
            answer.end()

    async def _images(self, request: generate_pb2.GenerateRequest) -> Sequence[Any]:
        if not request.images:
            return ()
        return await self._agent.engine.read_images(
            [
                PromptImage(
                    file=image.file,
                    height=image.pixels.height,
                    width=image.pixels.width,
                    rgb=image.pixels.rgb,
                )
                for image in request.images
            ]
        )


def _prompt(request: generate_pb2.GenerateRequest) -> str | list[int]:
    """Return the prompt to complete: text or token ids, as given."""
    prompt = request.text or list(request.token_ids.ids)
    if not prompt:
        raise InvalidRequestError("the prompt is empty; give token_ids or text")
    return prompt


def _response(
    chunks: Sequence[SampleChunk],
    adapter: PolicyVersion | None,
    admission: generate_pb2.Admission | None = None,
) -> generate_pb2.GenerateResponse:
    made_by = POLICY_VERSION.encode(adapter) if adapter else None
    return generate_pb2.GenerateResponse(
        admission=admission,
        chunks=[
            _CHUNK.encode(chunk, adapter=made_by if chunk.finish_reason else None)
            for chunk in chunks
        ],
    )
