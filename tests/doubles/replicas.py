"""A fake replica, for a real coordinator and its real stubs."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import replace
from typing import Any

import grpc

from tests.doubles.rank import FakeRank
from tests.doubles.registration import register
from tests.doubles.tiny_model import CAPABILITIES, REFERENCE, content_digest
from weft_rl.contract.capabilities import Capabilities
from weft_rl.contract.errors import LoadFailedError, NotFoundError, WeftError, error_from_reason
from weft_rl.contract.manifest import Manifest
from weft_rl.contract.names import PolicyVersion, VersionVector
from weft_rl.rpc.channel import open_aio_channel
from weft_rl.rpc.codec import (
    OUT_OF_SERVICE,
    POLICY_VERSION,
    duration_to_proto,
    vector_to_proto,
)
from weft_rl.rpc.manifest_codec import ManifestDecoder
from weft_rl.rpc.server import Servicer, bind, make_server
from weft_rl.v1 import (
    registry_pb2,
    registry_pb2_grpc,
    rendezvous_pb2,
    replica_pb2,
    replica_pb2_grpc,
    types_pb2,
)


class FakeReplica(replica_pb2_grpc.ReplicaServiceServicer):
    """A replica of the tiny model that does as its switches say."""

    def __init__(self, target: str, replica_id: str, capabilities: Capabilities = CAPABILITIES):
        self.target = target
        self.replica_id = replica_id
        self.reference = REFERENCE
        self.capabilities = replace(capabilities, reference_digest=REFERENCE.details_digest)
        self.incarnation = secrets.token_hex(4)
        self.vector = VersionVector()
        self.refusing, self.order_number, self.obeys = "", 0, True
        self.retained: list[int] = []
        self.undoable: list[int] = []
        self.spilled: list[types_pb2.PolicyVersion] = []
        #: What it says of versions that it was ordered to serve.
        self.facts: dict[PolicyVersion, types_pb2.VersionFacts] = {}
        #: Digests that it names instead of theirs.
        self.digests: dict[PolicyVersion, bytes] = {}
        #: What it answers who asks for the digests of tensors.
        self.tensors: dict[PolicyVersion, list[types_pb2.TensorDigestChunk] | Exception] = {}
        self.registered = registry_pb2.RegisterResponse()
        self.switches: list[replica_pb2.SwitchVersionRequest] = []
        self.digest = b"\1" * 8
        self.attends = True
        self.prepares = True
        self.join_error: WeftError | None = None
        #: What its heartbeats say that it is at.
        self.work: registry_pb2.Work | None = None
        self.stage_failure: tuple[str, str] | None = None
        self.breaks_at = ""
        self.load_error: WeftError | None = None
        self.loads: list[replica_pb2.LoadTransferRequest] = []
        self.commit_error: WeftError | None = None
        self.commit_gate = asyncio.Event()
        self.commit_gate.set()
        self.calls: list[str] = []
        self.told: registry_pb2.OutOfService | None = None
        self.epoch = 0
        #: Policies that it was told are forgotten.
        self.ended: list[str] = []
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
        response = await register(
            self.registry,
            self.capabilities,
            self.reference,
            vector=self.vector,
            replica_id=self.replica_id,
            incarnation=self.incarnation,
            address=self.address,
            http_url="http://127.0.0.1:1",
            retained_base_versions=self.retained,
            undo_base_versions=self.undoable,
            spilled_versions=self.spilled,
            held_versions=self._held(),
            last_coordinator_generation=self.registered.coordinator_generation,
            last_coordinator_id=self.registered.coordinator_id,
            pool_id=self.registered.pool_id,
            last_epoch=self.epoch,
            out_of_service=self.told,
            refusing=self.refusing,
        )
        self._obey(response.out_of_service, response.order_number)
        self._note(response)
        self.registered = response
        return response

    async def leave(self) -> None:
        """Leave the pool."""
        who = {"replica_id": self.replica_id, "incarnation": self.incarnation}
        await self.registry.Leave(registry_pb2.LeaveRequest(**who))

    async def follow(self, target: str) -> None:
        """Talk to another coordinator from now on."""
        await self.channel.close()
        self.target = target
        self.channel = open_aio_channel(target)
        self.registry = registry_pb2_grpc.RegistryServiceStub(self.channel)

    def _held(self) -> list[types_pb2.HeldVersion]:
        return [
            types_pb2.HeldVersion(
                version=POLICY_VERSION.encode(version),
                content_digest=self.digests.get(version, facts.content_digest.value),
            )
            for version, facts in self.facts.items()
        ]

    async def heartbeat(self) -> bool:
        response = await self.registry.Heartbeat(
            registry_pb2.HeartbeatRequest(
                replica_id=self.replica_id,
                incarnation=self.incarnation,
                report=registry_pb2.ReplicaReport(
                    version_vector=vector_to_proto(self.vector),
                    retained_base_versions=self.retained,
                    undo_base_versions=self.undoable,
                    spilled_versions=self.spilled,
                    refusing=self.refusing,
                    order_number=self.order_number,
                    work=self.work,
                ),
                held_versions=self._held(),
                held_versions_complete=True,
            )
        )
        self._obey(response.out_of_service, response.order_number)
        self._note(response)
        self.heard = response
        return bool(response.ready)

    def _note(self, response: Any) -> None:
        """What it was told of operators' orders."""
        self.told = response.out_of_service if response.HasField("out_of_service") else None
        self.epoch = max(self.epoch, response.epoch)

    def _obey(self, order: registry_pb2.OutOfService, number: int) -> None:
        if number >= self.order_number and self.obeys:
            self.refusing = OUT_OF_SERVICE.decode(order).refusal
            self.order_number = number

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
        version = POLICY_VERSION.decode(request.version)
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
            undo_base_versions=self.undoable,
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
        version = POLICY_VERSION.decode(request.version)
        if version.policy == "base":
            self.vector = self.vector.with_base(version.version)
        else:
            self.vector = self.vector.with_adapter(version)
        return replica_pb2.SwitchVersionResponse(
            version_vector=vector_to_proto(self.vector),
            pause=duration_to_proto(0.25),
            retained_base_versions=self.retained,
            undo_base_versions=self.undoable,
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
        facts = self.facts[POLICY_VERSION.decode(request.version)]
        assert request.facts_of_digest == facts.content_digest.value
        yield replica_pb2.DescribeVersionResponse(facts=facts)

    async def DigestVersion(self, request: Any, context: Any) -> Any:  # noqa: N802
        answer = self.tensors.get(POLICY_VERSION.decode(request.version), NotFoundError("not held"))
        if isinstance(answer, Exception):
            raise answer
        for chunk in answer:
            yield replica_pb2.DigestVersionResponse(chunk=chunk)

    async def RefuseRequests(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.append("refuse")
        self._obey(request.out_of_service, request.order_number)
        return replica_pb2.RefuseRequestsResponse(
            refusing=self.refusing, order_number=self.order_number
        )

    async def RetireVersions(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.append("retire")
        self.ended += request.ended_policies
        for message in (*request.versions, *(h.version for h in request.mistaken_versions)):
            self.facts.pop(POLICY_VERSION.decode(message), None)
            self.vector = self.vector.without_adapter(POLICY_VERSION.decode(message))
        return replica_pb2.RetireVersionsResponse(version_vector=vector_to_proto(self.vector))

    # -- its receivers ---------------------------------------------------------

    async def _receive(self, rank: FakeRank) -> None:
        """Hear all that is said at once: what was not read when a stream ends is lost."""
        heard: asyncio.Queue[Any] = asyncio.Queue()
        following = asyncio.create_task(self._follow(rank, heard))
        try:
            await rank.hello()
            while True:
                heard.put_nowait(await rank.hear())
        except (EOFError, grpc.RpcError, asyncio.InvalidStateError):
            return
        finally:
            heard.put_nowait(None)
            await following

    async def _follow(self, rank: FakeRank, heard: asyncio.Queue[Any]) -> None:
        while (message := await heard.get()) is not None:
            # What it says may come too late.
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                if message.HasField("prepare") and self.prepares:
                    await self._prepare(rank, message.prepare)
                elif message.HasField("start"):
                    await self._stage(rank, message.start.transfer_id)

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
        self.prepare = prepare
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
        planned = len(self.prepare.send_plan.buckets)
        for bucket in range(planned or len(self.manifest.buckets)):
            verified = rendezvous_pb2.BucketVerified(transfer_id=transfer_id, bucket=bucket)
            await rank.say(bucket_verified=verified)
        if self.breaks_at != "never-staged":
            await rank.staged(transfer_id, content_digest(self.manifest, self.digest))


LOAD_FAILED = LoadFailedError("the engine said no", metadata={"dirty": "false"})
LEFT_DIRTY = LoadFailedError("the engine broke midway", metadata={"dirty": "true"})
