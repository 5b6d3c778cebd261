"""What the coordinator says of a replica."""

from __future__ import annotations

from tests.doubles.pool import Pool
from weft_rl.contract.checkpoint import StoredTensor, checkpoint_digest
from weft_rl.contract.names import PolicyVersion
from weft_rl.rpc.channel import open_channel
from weft_rl.rpc.codec import POLICY_VERSION, TENSOR
from weft_rl.v1 import inspect_pb2 as pb
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub


def replica(pool: Pool, replica_id: str) -> pb.Replica:
    with open_channel(pool.target) as channel:
        replicas = InspectServiceStub(channel).ListReplicas(pb.ListReplicasRequest()).replicas
    return next(r for r in replicas if r.replica_id == replica_id)


def is_ready(pool: Pool, replica_id: str) -> bool:
    ready = replica(pool, replica_id).state == pb.REPLICA_STATE_READY
    return ready and pool.agents[replica_id].is_ready


def digests(pool: Pool, replica_id: str, version: str) -> dict[str, StoredTensor]:
    """What a replica answers; the digest of all is that of them."""
    request = pb.DigestTensorsRequest(
        replica_id=replica_id, version=POLICY_VERSION.encode(PolicyVersion.parse(version))
    )
    with open_channel(pool.target) as channel:
        chunks = [r.chunk for r in InspectServiceStub(channel).DigestTensors(request, timeout=20)]
    found = [TENSOR.decode(t) for chunk in chunks for t in chunk.tensors]
    assert chunks[-1].digest == checkpoint_digest(found)
    return {tensor.name: tensor for tensor in found}
