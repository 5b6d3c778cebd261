"""A rank's stream without a group behind it."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from weft_rl.rpc.bounds import PROTOCOL_REVISION
from weft_rl.rpc.channel import open_aio_channel
from weft_rl.v1 import publish_pb2, rendezvous_pb2, rendezvous_pb2_grpc, types_pb2


class FakeRank:
    """One Attend stream; ``log`` are the messages that came down, by kind."""

    def __init__(self, target: str, group: publish_pb2.GroupPlan, rank: int) -> None:
        self.channel = open_aio_channel(target)
        self.stub = rendezvous_pb2_grpc.RendezvousServiceStub(self.channel)
        self.group = group
        self.rank = rank
        token = [group.token, *group.further_tokens][rank - group.rank :][:1] or [group.token]
        self.credential = rendezvous_pb2.GroupCredential(group_id=group.group_id, token=token[0])
        #: Announced by a sender.
        self.num_in_flight = 0 if rank else 2
        self.log: list[str] = []
        self.released = 0
        self.call: Any = self.stub.Attend()
        #: A call of grpc.aio bears one write at a time; a rank answers while a test says something.
        self._writing = asyncio.Lock()

    async def hello(self) -> None:
        hello = rendezvous_pb2.Hello(
            credential=self.credential,
            rank=self.rank,
            protocol_revision=PROTOCOL_REVISION,
            num_buckets_in_flight=self.num_in_flight,
        )
        await self.say(hello=hello)

    async def say(self, **message: Any) -> None:
        async with self._writing:
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
