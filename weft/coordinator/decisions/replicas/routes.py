"""Routes: which replicas may be sent requests. Decided by their states alone."""

from __future__ import annotations

from weft.contract.names import VersionVector
from weft.coordinator.decisions.change import Change
from weft.coordinator.decisions.effects import RoutesChanged
from weft.coordinator.decisions.state.pool import PoolState
from weft.coordinator.decisions.state.replica import Replica


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
