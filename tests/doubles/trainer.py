"""A fake trainer, for a real coordinator and its real stubs."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Any

from tests.doubles.rank import FakeRank
from tests.doubles.tiny_model import ADAPTER_MANIFEST, BASE_MANIFEST, adapter_spec, content_digest
from weft_rl.rpc.bounds import PROTOCOL_REVISION
from weft_rl.rpc.channel import open_aio_channel
from weft_rl.rpc.codec import duration_to_proto
from weft_rl.rpc.manifest_codec import manifest_to_chunks
from weft_rl.v1 import inspect_pb2_grpc, publish_pb2, publish_pb2_grpc, types_pb2


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
            "require": publish_pb2.Requirement(min_replicas=0),  # all: a test says otherwise
            "backend": "gloo",
            "group_id": self.sender.group.group_id if self.sender else "",
            "protocol_revision": PROTOCOL_REVISION,
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
