"""What watchers are told of a step: replicas' states, and the routes, which follow from them."""

from __future__ import annotations

from weft.contract.frozen import replace
from weft.contract.names import VersionVector
from weft.coordinator.decisions.change import Change
from weft.coordinator.decisions.effects import EventKind, RoutesChanged
from weft.coordinator.decisions.replicas.replica_state import (
    explain_state,
    is_routable,
    replica_state,
)
from weft.coordinator.decisions.state.pool import PoolState
from weft.coordinator.decisions.state.replica import Replica
from weft.coordinator.decisions.state.values import ReplicaState

_EVENT_KINDS = {
    ReplicaState.READY: EventKind.REPLICA_READY,
    ReplicaState.PENDING_WEIGHTS: EventKind.REPLICA_PENDING,
    ReplicaState.LOST: EventKind.REPLICA_LOST,
    ReplicaState.QUARANTINED: EventKind.REPLICA_QUARANTINED,
    ReplicaState.DRAINING: EventKind.REPLICA_DRAINING,
    ReplicaState.CORDONED: EventKind.REPLICA_CORDONED,
    ReplicaState.SUSPECT: EventKind.REPLICA_SUSPECT,
}


def announce_states(change: Change) -> None:
    """Notify watchers of the replicas whose state changed."""
    ids = list(change.state.replicas) if change.touched_all else sorted(change.touched)
    for replica_id in ids:
        replica = change.state.replicas.get(replica_id)
        if replica is None:
            continue
        now_is = replica_state(change.state, replica)
        routed = is_routable(change.state, replica)
        if routed is not replica.routed:
            replica = change.put_replica(replace(replica, routed=routed))
        if now_is is not replica.announced:
            why = explain_state(change.state, replica)[1]
            change.put_replica(replace(replica, announced=now_is))
            change.announce(_EVENT_KINDS[now_is], replica.replica_id, why)


def routes(state: PoolState) -> list[Replica]:
    """The replicas to route to, by id; O(replicas)."""
    return sorted(
        (replica for replica in state.replicas.values() if is_listed(replica)),
        key=lambda replica: replica.replica_id,
    )


def note_changes(before: PoolState, change: Change) -> None:
    """Notify readers of what a step changed; states must have been announced."""
    touched = before.replicas.keys() | change.state.replicas.keys()
    if not change.touched_all:
        touched = touched & change.touched
    changed = []
    for replica_id in touched:
        was, now_is = before.replicas.get(replica_id), change.state.replicas.get(replica_id)
        if was is not now_is and _seen(was) != _seen(now_is):
            changed.append(replica_id)
    if changed:
        change.emit(RoutesChanged(tuple(changed)))


def is_listed(replica: Replica) -> bool:
    """Whether requests may be sent to a replica."""
    return _seen(replica) is not None


def _seen(replica: Replica | None) -> tuple[str, str, VersionVector] | None:
    """What a reader sees of a replica; None where it is not listed."""
    if replica is None or not replica.routed or not replica.http_url:
        return None
    return replica.http_url, replica.model_name, replica.vector
