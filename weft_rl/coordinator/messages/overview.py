"""Overview of a pool as a whole."""

from __future__ import annotations

from collections import Counter
from typing import Final

from weft_rl import __version__
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.decisions.state.replica_state import replica_state
from weft_rl.coordinator.messages.pages import cut
from weft_rl.coordinator.messages.wire import bound_to_proto, out_of_service_to_proto
from weft_rl.rpc.bounds import PROTOCOL_REVISION
from weft_rl.rpc.codec import timestamp_to_proto
from weft_rl.v1 import inspect_pb2

#: Of GetPool, which stays below 1 MiB.
_ORDERS_BYTES: Final = 128 * 1024


def pool_to_proto(state: PoolState, unix_seconds: float) -> inspect_pb2.GetPoolResponse:
    """Encode a pool without its replicas, policies, transfers and version vector; O(replicas +
    operators' orders)."""
    orders = cut(
        sorted(state.out_of_service),
        lambda name: out_of_service_to_proto(name, state.out_of_service[name]),
        max_bytes=_ORDERS_BYTES,
    ).entries
    counts = Counter(r.announced or replica_state(state, r) for r in state.replicas.values())
    return inspect_pb2.GetPoolResponse(
        base_fingerprint=state.fingerprint,
        weft_version=__version__,
        coordinator_generation=state.generation,
        out_of_service=orders,
        num_more_out_of_service=len(state.out_of_service) - len(orders),
        replica_counts=[
            inspect_pb2.ReplicaCount(
                state=inspect_pb2.ReplicaState.ValueType(int(where)), num_replicas=count
            )
            for where, count in sorted(counts.items())
        ],
        base_checkpoint=bound_to_proto(state.checkpoint) if state.checkpoint else None,
        protocol_revision=PROTOCOL_REVISION,
        time=timestamp_to_proto(unix_seconds),
    )
