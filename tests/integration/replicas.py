"""What the coordinator says of a replica."""

from __future__ import annotations

from tests.doubles.pool import Pool
from weft.rpc.channel import open_channel
from weft.v1 import inspect_pb2 as pb
from weft.v1.inspect_pb2_grpc import InspectServiceStub


def replica(pool: Pool, replica_id: str) -> pb.Replica:
    with open_channel(pool.target) as channel:
        replicas = InspectServiceStub(channel).ListReplicas(pb.ListReplicasRequest()).replicas
    return next(r for r in replicas if r.replica_id == replica_id)


def is_ready(pool: Pool, replica_id: str) -> bool:
    ready = replica(pool, replica_id).state == pb.REPLICA_STATE_READY
    return ready and pool.agents[replica_id].is_ready
