"""Contents of a version at the replicas of a pool, asked through the coordinator."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc

from weft_rl.cli.console.connection import CALL_SECONDS
from weft_rl.contract.checkpoint import StoredTensor, checkpoint_digest
from weft_rl.contract.errors import NotFoundError, PeerUnavailableError
from weft_rl.contract.names import BASE_POLICY, PolicyVersion, check_name
from weft_rl.rpc.checkpoint_codec import tensors_from_proto
from weft_rl.rpc.codec import vector_from_proto, version_to_proto
from weft_rl.rpc.pool_listing import get_pool
from weft_rl.rpc.status import error_from_rpc
from weft_rl.v1 import inspect_pb2 as pb
from weft_rl.v1 import types_pb2
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

# A little longer than the coordinator waits for a replica.
_DIGEST_SECONDS = 610.0
_AT_ONCE = 8


@dataclass(frozen=True)
class Held:
    """Content of a version at one replica."""

    replica: pb.Replica
    version: PolicyVersion
    digest: bytes = b""
    """Digest over all tensors; empty where they could not be had."""
    config_json: str = ""
    """PEFT's config of an adapter."""
    error: str = ""


@dataclass
class Contents:
    """Contents that replicas hold, each once, by its digest."""

    held: list[Held] = field(default_factory=list)
    tensors: dict[bytes, list[StoredTensor]] = field(default_factory=dict)


class PoolView:
    """A pool as it stood when this was made.

    Raises:
        PeerUnavailableError: ``POOL_EMPTY``: no replica is ready.
        grpc.RpcError: The coordinator does not answer.
    """

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = InspectServiceStub(channel)
        self.pool = get_pool(self._stub, CALL_SECONDS)
        ready = pb.REPLICA_STATE_READY
        self.ready = [replica for replica in self.pool.replicas if replica.state == ready]
        self.others = [replica for replica in self.pool.replicas if replica.state != ready]
        if not self.ready:
            raise PeerUnavailableError("no replica is ready", reason="POOL_EMPTY")

    def version(self, asked: str) -> PolicyVersion:
        """Return the version that ``base``, ``math`` or ``math@17`` names in this pool.

        Raises:
            NotFoundError: It names nothing that is served.
        """
        policy, _, number = asked.partition("@")
        check_name(policy, "policy")
        if number:
            return PolicyVersion.parse(asked)
        served = served_of(self.pool.version_vector, policy)
        if served is None:
            raise NotFoundError(f"the pool serves no {policy!r}", reason="POLICY_UNKNOWN")
        return served

    def record(self, version: PolicyVersion) -> pb.Version:
        """Return what the catalog says of a version; empty where it says nothing."""
        request = pb.ListVersionsRequest(
            policy=version.policy, page_size=1, page_token=str(version.version + 1)
        )
        listed = self._stub.ListVersions(request, timeout=CALL_SECONDS).versions
        is_it = listed and listed[0].version.version == version.version
        return listed[0] if is_it else pb.Version()

    def contents(self, version_of: Callable[[pb.Replica], PolicyVersion]) -> Contents:
        """Ask what every ready replica holds, read there now."""
        contents = Contents()
        with ThreadPoolExecutor(min(_AT_ONCE, len(self.ready))) as threads:
            asked = [(replica, version_of(replica)) for replica in self.ready]
            for held, tensors in threads.map(lambda of: self._digests(*of), asked):
                contents.held.append(held)
                if held.digest:
                    contents.tensors.setdefault(held.digest, tensors)
        return contents

    def _digests(
        self, replica: pb.Replica, version: PolicyVersion
    ) -> tuple[Held, list[StoredTensor]]:
        if not vector_from_proto(replica.version_vector).holds(version):
            serves = served_of(replica.version_vector, version.policy)
            return Held(replica, version, error=f"serves {serves or f'no {version.policy}'}"), []
        request = pb.DigestTensorsRequest(
            replica_id=replica.replica_id, version=version_to_proto(version)
        )
        tensors: list[StoredTensor] = []
        config_json = ""
        try:
            for response in self._stub.DigestTensors(request, timeout=_DIGEST_SECONDS):
                tensors += tensors_from_proto(response.chunk.tensors)
                config_json = config_json or response.chunk.adapter.config_json
        except grpc.RpcError as failed:
            error = error_from_rpc(failed)
            return Held(replica, version, error=f"{error.message} ({error.reason})"), []
        return Held(replica, version, checkpoint_digest(tensors), config_json), tensors


def served_of(vector: types_pb2.VersionVector, policy: str) -> PolicyVersion | None:
    """Return the version that a bare name stands for."""
    known = vector_from_proto(vector)
    if policy == BASE_POLICY:
        return PolicyVersion(BASE_POLICY, known.base) if known.base >= 0 else None
    entry = known.adapters.get(policy)
    return PolicyVersion(policy, entry.alias) if entry and entry.alias else None
