"""A fake replica and a fake trainer, for a real coordinator and its real stubs."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from typing import Any

import grpc

from weft.contract.bucket_plan import plan_buckets
from weft.contract.capabilities import Capabilities
from weft.contract.errors import LoadFailedError, WeftError, error_from_reason
from weft.contract.manifest import Manifest
from weft.contract.names import PolicyVersion
from weft.contract.reference import Reference
from weft.contract.tensors import DataType, TensorMeta
from weft.contract.versions import VersionVector
from weft.rpc.channel import open_aio_channel
from weft.rpc.codec import (
    capabilities_to_proto,
    duration_to_proto,
    vector_to_proto,
    version_from_proto,
    version_to_proto,
)
from weft.rpc.manifest_codec import ManifestDecoder, manifest_to_chunks, reference_to_chunks
from weft.rpc.server import Servicer, bind, make_server
from weft.v1 import (
    inspect_pb2_grpc,
    publish_pb2,
    publish_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
    rendezvous_pb2,
    rendezvous_pb2_grpc,
    replica_pb2,
    replica_pb2_grpc,
    types_pb2,
)

BF16 = DataType.BFLOAT16
REFERENCE = Reference(
    "TinyForCausalLM",
    (
        TensorMeta("model.embed_tokens.weight", BF16, (64, 16)),
        TensorMeta("model.layers.0.self_attn.q_proj.weight", BF16, (16, 16)),
        TensorMeta("model.layers.0.mlp.up_proj.weight", BF16, (32, 16)),
        TensorMeta("model.norm.weight", DataType.FLOAT32, (16,)),
    ),
)
CAPABILITIES = Capabilities(
    engine_version="0.26",
    base_fingerprint=REFERENCE.fingerprint,
    architecture=REFERENCE.architecture,
    base_dtype=BF16,
    adapter_dtype=BF16,
    lora_enabled=True,
    max_lora_rank=16,
    lora_modules=("q_proj", "up_proj"),
    staging_capacity_bytes=1 << 30,
    adapter_capacity_bytes=1 << 30,
)
BASE_MANIFEST = plan_buckets(REFERENCE.tensors, 2048)
_Q = "base_model.model.model.layers.0.self_attn.q_proj"
ADAPTER_METAS = (
    TensorMeta(f"{_Q}.lora_A.weight", BF16, (4, 16)),
    TensorMeta(f"{_Q}.lora_B.weight", BF16, (16, 4)),
)
ADAPTER_MANIFEST = plan_buckets(ADAPTER_METAS)
ADAPTER_CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def adapter_spec(**changes: Any) -> types_pb2.AdapterSpec:
    """An adapter of the tiny model; changes go into its config."""
    return types_pb2.AdapterSpec(
        config_json=json.dumps({**ADAPTER_CONFIG, **changes}),
        base_fingerprint=REFERENCE.fingerprint,
    )


def content_digest(manifest: Manifest, value: bytes = b"\1" * 8) -> types_pb2.ContentDigest:
    """What a rank says that it computed."""
    return types_pb2.ContentDigest(
        algorithm=types_pb2.DIGEST_ALGORITHM_XXH3_64, value=value, size_bytes=manifest.total_bytes
    )


class FakeRank:
    """One Attend stream; ``log`` are the messages that came down, by kind."""

    def __init__(self, target: str, group: publish_pb2.GroupPlan, rank: int) -> None:
        self.channel = open_aio_channel(target)
        self.stub = rendezvous_pb2_grpc.RendezvousServiceStub(self.channel)
        self.group = group
        self.rank = rank
        token = [group.token, *group.further_tokens][rank - group.rank :][:1] or [group.token]
        self.credential = rendezvous_pb2.GroupCredential(group_id=group.group_id, token=token[0])
        self.log: list[str] = []
        self.released = 0
        self.call: Any = self.stub.Attend()

    async def hello(self) -> None:
        hello = rendezvous_pb2.Hello(credential=self.credential, rank=self.rank)
        await self.call.write(rendezvous_pb2.AttendRequest(hello=hello))

    async def say(self, **message: Any) -> None:
        await self.call.write(rendezvous_pb2.AttendRequest(**message))

    async def hear(self) -> rendezvous_pb2.AttendResponse:
        message = await self.call.read()
        if message is grpc.aio.EOF:
            raise EOFError
        self.log.append(message.WhichOneof("message"))
        if message.HasField("released"):
            self.released = message.released.num_buckets
        return message

    async def staged(self, transfer_id: str, digest: types_pb2.ContentDigest) -> None:
        await self.say(staged=rendezvous_pb2.Staged(transfer_id=transfer_id, content_digest=digest))

    async def close(self) -> None:
        self.call.cancel()
        await self.channel.close()


class FakeReplica(replica_pb2_grpc.ReplicaServiceServicer):
    """A replica of the tiny model that does as its switches say."""

    def __init__(self, target: str, replica_id: str, capabilities: Capabilities = CAPABILITIES):
        self.target = target
        self.replica_id = replica_id
        self.capabilities = capabilities
        self.incarnation = secrets.token_hex(4)
        self.vector = VersionVector()
        self.refusing, self.order_number, self.obeys = "", 0, True
        self.retained: list[int] = []
        self.spilled: list[types_pb2.PolicyVersion] = []
        #: What it says of versions that it was ordered to serve.
        self.facts: dict[PolicyVersion, types_pb2.VersionFacts] = {}
        #: Digests that it names instead of theirs.
        self.digests: dict[PolicyVersion, bytes] = {}
        self.registered = registry_pb2.RegisterResponse()
        self.switches: list[replica_pb2.SwitchVersionRequest] = []
        self.digest = b"\1" * 8
        self.attends = True
        self.prepares = True
        self.join_error: WeftError | None = None
        self.stage_failure: tuple[str, str] | None = None
        self.breaks_at = ""
        self.load_error: WeftError | None = None
        self.loads: list[replica_pb2.LoadTransferRequest] = []
        self.commit_error: WeftError | None = None
        self.commit_gate = asyncio.Event()
        self.commit_gate.set()
        self.calls: list[str] = []
        self.joins: list[replica_pb2.JoinGroupRequest] = []
        self.ranks: dict[tuple[str, int], FakeRank] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self.manifests: dict[bytes, Manifest] = {}
        self.address = ""

    async def start(self, *, register: bool = True) -> FakeReplica:
        add = replica_pb2_grpc.add_ReplicaServiceServicer_to_server
        made = await make_server([Servicer("weft.v1.ReplicaService", self, add)])
        self.server = made.server
        self.address = f"127.0.0.1:{bind(self.server, '127.0.0.1:0')}"
        await self.server.start()
        self.channel = open_aio_channel(self.target)
        self.registry = registry_pb2_grpc.RegistryServiceStub(self.channel)
        if register:
            await self.register()
        return self

    async def register(self) -> registry_pb2.RegisterResponse:
        self.order_number = 0
        response = await self.registry.Register(
            registry_pb2.RegisterRequest(
                replica_id=self.replica_id,
                incarnation=self.incarnation,
                address=self.address,
                http_url="http://127.0.0.1:1",
                capabilities=capabilities_to_proto(self.capabilities),
                version_vector=vector_to_proto(self.vector),
                model_name="tiny",
                retained_base_versions=self.retained,
                spilled_versions=self.spilled,
                held_versions=self._held(),
                last_coordinator_generation=self.registered.coordinator_generation,
                last_coordinator_id=self.registered.coordinator_id,
                refusing=self.refusing,
            )
        )
        self._obey(response.refuse_reason, response.order_number)
        self.registered = response
        if response.reference_wanted:
            chunks = reference_to_chunks(REFERENCE)
            await self.registry.PutReference(
                iter([registry_pb2.PutReferenceRequest(chunk=c) for c in chunks])
            )
        return response

    async def follow(self, target: str) -> None:
        """Talk to another coordinator from now on."""
        await self.channel.close()
        self.target = target
        self.channel = open_aio_channel(target)
        self.registry = registry_pb2_grpc.RegistryServiceStub(self.channel)

    def _held(self) -> list[types_pb2.HeldVersion]:
        return [
            types_pb2.HeldVersion(
                version=version_to_proto(version),
                content_digest=self.digests.get(version, facts.content_digest.value),
            )
            for version, facts in self.facts.items()
        ]

    async def heartbeat(self) -> bool:
        response = await self.registry.Heartbeat(
            registry_pb2.HeartbeatRequest(
                replica_id=self.replica_id,
                incarnation=self.incarnation,
                version_vector=vector_to_proto(self.vector),
                retained_base_versions=self.retained,
                spilled_versions=self.spilled,
                held_versions=self._held(),
                held_versions_complete=True,
                refusing=self.refusing,
                order_number=self.order_number,
            )
        )
        self._obey(response.refuse_reason, response.order_number)
        return bool(response.ready)

    def _obey(self, reason: str, number: int) -> None:
        if number >= self.order_number and self.obeys:
            self.refusing, self.order_number = reason, number

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for rank in self.ranks.values():
            await rank.close()
        await self.channel.close()
        await self.server.stop(0)

    # -- ReplicaService --------------------------------------------------------

    async def JoinGroup(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.append("join")
        self.joins.append(request)
        if self.join_error:
            raise self.join_error
        if self.attends:
            for i in range(self.capabilities.num_receivers):
                rank = FakeRank(self.target, request.group, request.group.rank + i)
                self.ranks[request.group.group_id, rank.rank] = rank
                self.tasks.append(asyncio.create_task(self._receive(rank)))
        return replica_pb2.JoinGroupResponse()

    async def CommitTransfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.append("commit")
        await self.commit_gate.wait()
        if self.commit_error:
            raise self._signed(self.commit_error)
        version = version_from_proto(request.version)
        self.facts[version] = types_pb2.VersionFacts(
            content_digest=request.content_digest,
            layout_digest=request.layout_digest,
            adapter=request.adapter if request.HasField("adapter") else None,
        )
        if version.policy == "base":
            self.vector = self.vector.with_base(version.version)
            self.retained = [version.version, *self.retained][:2]
        else:
            self.vector = self.vector.with_adapter(version)
        return replica_pb2.CommitTransferResponse(
            version_vector=vector_to_proto(self.vector),
            pause=duration_to_proto(0.25),
            retained_base_versions=self.retained,
        )

    async def LoadTransfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.append("load")
        self.loads.append(request)
        if self.load_error:
            raise self.load_error
        return replica_pb2.LoadTransferResponse()

    async def SwitchVersion(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.append("switch")
        self.switches.append(request)
        if self.commit_error:
            raise self._signed(self.commit_error)
        version = version_from_proto(request.version)
        if version.policy == "base":
            self.vector = self.vector.with_base(version.version)
        else:
            self.vector = self.vector.with_adapter(version)
        return replica_pb2.SwitchVersionResponse(
            version_vector=vector_to_proto(self.vector),
            pause=duration_to_proto(0.25),
            retained_base_versions=self.retained,
        )

    def _signed(self, error: WeftError) -> WeftError:
        """Refused by this process, as replicas say."""
        metadata = {**error.metadata, "incarnation": self.incarnation}
        return error_from_reason(error.reason, error.message, metadata)

    async def DiscardTransfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.append("discard")
        return replica_pb2.DiscardTransferResponse(
            version_vector=vector_to_proto(self.vector), incarnation=self.incarnation
        )

    async def DescribeVersion(self, request: Any, context: Any) -> Any:  # noqa: N802
        facts = self.facts[version_from_proto(request.version)]
        assert request.facts_of_digest == facts.content_digest.value
        yield replica_pb2.DescribeVersionResponse(facts=facts)

    async def RefuseRequests(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.append("refuse")
        self._obey(request.refuse_reason, request.order_number)
        return replica_pb2.RefuseRequestsResponse(
            refusing=self.refusing, order_number=self.order_number
        )

    async def RetireVersions(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.append("retire")
        for message in (*request.versions, *(h.version for h in request.mistaken_versions)):
            self.facts.pop(version_from_proto(message), None)
            self.vector = self.vector.without_adapter(version_from_proto(message))
        return replica_pb2.RetireVersionsResponse(version_vector=vector_to_proto(self.vector))

    # -- its receivers ---------------------------------------------------------

    async def _receive(self, rank: FakeRank) -> None:
        try:
            await rank.hello()
            while True:
                message = await rank.hear()
                if message.HasField("prepare") and self.prepares:
                    await self._prepare(rank, message.prepare)
                elif message.HasField("start"):
                    await self._stage(rank, message.start.transfer_id)
        except (EOFError, grpc.RpcError, asyncio.InvalidStateError):
            return

    async def _prepare(self, rank: FakeRank, prepare: Any) -> None:
        if prepare.layout_digest not in self.manifests:
            decoder = ManifestDecoder()
            request = rendezvous_pb2.GetManifestRequest(
                credential=rank.credential, layout_digest=prepare.layout_digest
            )
            async for response in rank.stub.GetManifest(request):
                decoder.add(response.chunk)
            self.manifests[prepare.layout_digest] = decoder.finish()
        self.manifest = self.manifests[prepare.layout_digest]
        if self.breaks_at == "prepare":
            rank.call.cancel()
            return
        await rank.say(prepared=rendezvous_pb2.Prepared(transfer_id=prepare.transfer_id))

    async def _stage(self, rank: FakeRank, transfer_id: str) -> None:
        if self.breaks_at == "stage":
            rank.call.cancel()
            return
        if self.stage_failure:
            reason, message = self.stage_failure
            await rank.say(
                failed=rendezvous_pb2.RankFailed(
                    transfer_id=transfer_id, reason=reason, message=message
                )
            )
            return
        if self.capabilities.loads_in_place:
            await rank.say(load_due=rendezvous_pb2.LoadDue(transfer_id=transfer_id))
        for bucket in range(len(self.manifest.buckets)):
            verified = rendezvous_pb2.BucketVerified(transfer_id=transfer_id, bucket=bucket)
            await rank.say(bucket_verified=verified)
        if self.breaks_at != "never-staged":
            await rank.staged(transfer_id, content_digest(self.manifest, self.digest))


class FakeTrainer:
    """A trainer that owns one policy and pushes versions of it."""

    def __init__(self, target: str, trainer_id: str = "trainer", policy: str = "math") -> None:
        self.target = target
        self.trainer_id = trainer_id
        self.session_id = secrets.token_hex(4)
        self.policy = policy
        self.is_base = policy == "base"
        self.manifest = BASE_MANIFEST if self.is_base else ADAPTER_MANIFEST
        self.spec = None if self.is_base else adapter_spec()
        self.channel = open_aio_channel(target)
        self.stub = publish_pb2_grpc.PublishServiceStub(self.channel)
        self.inspect = inspect_pb2_grpc.InspectServiceStub(self.channel)
        self.sender: FakeRank | None = None
        self.token = 0

    async def acquire(self, **told: int) -> publish_pb2.Lease:
        response = await self.stub.AcquirePolicy(
            publish_pb2.AcquirePolicyRequest(
                trainer_id=self.trainer_id,
                session_id=self.session_id,
                policy=self.policy,
                kind=types_pb2.POLICY_KIND_BASE if self.is_base else types_pb2.POLICY_KIND_ADAPTER,
                **told,
            )
        )
        self.token = response.lease.fencing_token
        return response.lease

    async def put_manifest(self) -> bytes:
        async def chunks() -> AsyncIterator[publish_pb2.PutManifestRequest]:
            for chunk in manifest_to_chunks(self.manifest):
                yield publish_pb2.PutManifestRequest(chunk=chunk)

        return (await self.stub.PutManifest(chunks())).layout_digest

    async def ready(self) -> FakeTrainer:
        await self.acquire()
        await self.put_manifest()
        return self

    def begin_request(self, **changes: Any) -> publish_pb2.BeginTransferRequest:
        fields: dict[str, Any] = {
            "request_id": secrets.token_hex(8),
            "policy": self.policy,
            "fencing_token": self.token,
            "layout_digest": self.manifest.layout_digest,
            "adapter": self.spec,
            "timeout": duration_to_proto(10.0),
            "backend": "gloo",
            "group_id": self.sender.group.group_id if self.sender else "",
        }
        return publish_pb2.BeginTransferRequest(**{**fields, **changes})

    async def begin(self, **changes: Any) -> publish_pb2.BeginTransferResponse:
        return await self.stub.BeginTransfer(self.begin_request(**changes), timeout=15)

    async def attend(self, begun: publish_pb2.BeginTransferResponse) -> FakeRank:
        """The sender's stream, kept as long as its group is."""
        if self.sender and self.sender.group.group_id == begun.group.group_id:
            return self.sender
        if self.sender:
            await self.sender.close()
        self.sender = FakeRank(self.target, begun.group, 0)
        await self.sender.hello()
        return self.sender

    async def send(
        self, begun: publish_pb2.BeginTransferResponse, value: bytes = b"\1" * 8
    ) -> None:
        sender = await self.attend(begun)
        while True:
            message = await sender.hear()
            if message.HasField("start") and message.start.transfer_id == begun.transfer_id:
                break
            if message.HasField("abort"):
                return
        await sender.staged(begun.transfer_id, content_digest(self.manifest, value))

    async def wait(self, transfer_id: str) -> publish_pb2.Transfer:
        response = await self.stub.AwaitTransfer(
            publish_pb2.AwaitTransferRequest(transfer_id=transfer_id), timeout=15
        )
        return response.transfer

    async def push(self, **changes: Any) -> publish_pb2.Transfer:
        begun = await self.begin(**changes)
        await self.send(begun)
        return await self.wait(begun.transfer_id)

    async def stop(self) -> None:
        if self.sender:
            await self.sender.close()
        await self.channel.close()


LOAD_FAILED = LoadFailedError("the engine said no", metadata={"dirty": "false"})
LEFT_DIRTY = LoadFailedError("the engine broke midway", metadata={"dirty": "true"})
