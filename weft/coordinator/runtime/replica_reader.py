"""What replicas are asked, over one channel for each address."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Final

import grpc

from weft.contract.errors import REASONS, NotFoundError, WeftError
from weft.contract.layout.manifest import Manifest
from weft.contract.names import PolicyVersion
from weft.coordinator.decisions.state.values import Failure, VersionFacts
from weft.coordinator.messages.wire import facts_from_proto
from weft.rpc.bounds import MAX_TEXT_CHARS
from weft.rpc.channel import open_aio_channel
from weft.rpc.codec import version_to_proto
from weft.rpc.inbound import CheckedChannel
from weft.rpc.manifest_codec import ManifestDecoder
from weft.rpc.security.credentials import NO_CREDENTIALS, Credentials
from weft.rpc.status import error_from_rpc
from weft.v1 import replica_pb2, replica_pb2_grpc, types_pb2

_DESCRIBE_SECONDS: Final = 60.0
_DIGEST_SECONDS: Final = 600.0
_GRACE_SECONDS: Final = 1.0


class ReplicaReader:
    """The channels to replicas, and questions that change nothing.

    Args:
        credentials: What is shown to replicas.
    """

    def __init__(self, credentials: Credentials = NO_CREDENTIALS) -> None:
        self._credentials = credentials
        self._channels: dict[str, tuple[grpc.aio.Channel, Any]] = {}

    async def close_channel(self, address: str) -> None:
        """Let go of an address; calls under way have a second to end."""
        entry = self._channels.pop(address, None)
        if entry is not None:
            await entry[0].close(grace=_GRACE_SECONDS)

    async def close(self) -> None:
        """Close every channel."""
        for channel, _ in self._channels.values():
            await channel.close()
        self._channels.clear()

    def stub(self, address: str) -> Any:
        """For calls to the replica at ``address``."""
        if address not in self._channels:
            channel = open_aio_channel(address, self._credentials)
            # The generated stub is typed for the channels of grpc alone.
            checked: Any = CheckedChannel(channel, f"the replica at {address}")
            self._channels[address] = (channel, replica_pb2_grpc.ReplicaServiceStub(checked))
        return self._channels[address][1]

    async def describe(self, address: str, version: PolicyVersion) -> Manifest:
        """The manifest of a version that the replica at ``address`` holds.

        Raises:
            WeftError: It does not answer, or holds no copy.
        """
        decoder = ManifestDecoder()
        request = replica_pb2.DescribeVersionRequest(version=version_to_proto(version))
        try:
            call = self.stub(address).DescribeVersion(request, timeout=_DESCRIBE_SECONDS)
            async for response in call:
                decoder.add(response.chunk)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        return await asyncio.to_thread(decoder.finish)

    async def facts(self, address: str, version: PolicyVersion, digest: bytes) -> VersionFacts:
        """What is to be recorded of a version that the replica at ``address`` holds with
        that digest.

        Raises:
            WeftError: It does not answer, or does not hold it.
        """
        request = replica_pb2.DescribeVersionRequest(
            version=version_to_proto(version), facts_of_digest=digest
        )
        try:
            call = self.stub(address).DescribeVersion(request, timeout=_DESCRIBE_SECONDS)
            async for response in call:
                return facts_from_proto(response.facts)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        raise NotFoundError(f"the replica at {address} says nothing of {version}")

    async def digests(
        self, replica_id: str, address: str, version: PolicyVersion
    ) -> AsyncGenerator[types_pb2.TensorDigestChunk, None]:
        """Digests of a version's tensors, as the replica makes them now; raises as it does."""
        request = replica_pb2.DigestVersionRequest(version=version_to_proto(version))
        try:
            stub = self.stub(address)
            async for response in stub.DigestVersion(request, timeout=_DIGEST_SECONDS):
                yield response.chunk
        except grpc.RpcError as error:
            raise failure_of(error, replica_id).error() from error


def failure_of(error: grpc.RpcError, replica_id: str) -> Failure:
    """The outcome of a failed call; no answer at all means that the peer is gone, and so
    does one that nobody can make sense of."""
    typed: WeftError = error_from_rpc(error)
    reason = typed.reason
    if reason == "COORDINATOR_AWAY" or reason not in REASONS:
        reason = "PEER_GONE"
    metadata = {key: value[:MAX_TEXT_CHARS] for key, value in typed.metadata.items()}
    return Failure(reason, typed.message[:MAX_TEXT_CHARS], {**metadata, "member": replica_id})
