"""A replica's state, and why it is so."""

from __future__ import annotations

from collections.abc import Sequence

from weft.contract.names import PolicyVersion
from weft.coordinator.decisions.recovery.needs import lacks, outlook, takes_weights, wants
from weft.coordinator.decisions.replicas.checkpoints import doubt
from weft.coordinator.decisions.state.pool import PoolState
from weft.coordinator.decisions.state.replica import OutOfService, Replica
from weft.coordinator.decisions.state.values import ReplicaState


def replica_state(state: PoolState, replica: Replica) -> ReplicaState:
    """A replica's state; cheap."""
    if replica.lost or replica.suspicion:
        return ReplicaState.LOST
    if replica.dirty_reason or state.is_quarantined(replica.replica_id):
        return ReplicaState.QUARANTINED
    if replica.drain is not None:
        return ReplicaState.DRAINING
    if replica.replica_id in state.out_of_service:
        return ReplicaState.CORDONED
    if replica.suspect is not None:
        return ReplicaState.SUSPECT
    serves = replica.is_open and not lacks(state, replica) and not doubt(state, replica)
    return ReplicaState.READY if serves else ReplicaState.PENDING_WEIGHTS


def is_routable(state: PoolState, replica: Replica) -> bool:
    """Whether requests may be sent to a replica: it serves what the pool serves, and is
    open. The engine of a suspect answers like any other."""
    match replica_state(state, replica):
        case ReplicaState.READY:
            return True
        case ReplicaState.SUSPECT:
            return replica.is_open and not lacks(state, replica) and not doubt(state, replica)
    return False


def explain_state(state: PoolState, replica: Replica) -> tuple[ReplicaState, str]:
    """A replica's state, and why it is not ready; looks at all replicas if so."""
    if replica.lost or replica.suspicion:
        return ReplicaState.LOST, replica.suspicion or "no heartbeat"
    order = state.out_of_service.get(replica.replica_id)
    suspicion = replica.suspect.why if replica.suspect else ""
    if order and order.state is ReplicaState.QUARANTINED:
        late = "" if replica.refusing else "it has not said yet that it refuses requests"
        why = _joined(_by_operator(order), late, replica.dirty_reason, suspicion)
        return ReplicaState.QUARANTINED, why
    if replica.dirty_reason:
        repair = [f"it needs {v}{text}" for v in wants(state, replica)
                  if (text := outlook(state, replica, v))]  # fmt: skip
        return ReplicaState.QUARANTINED, _joined(replica.dirty_reason, suspicion, *repair)
    if replica.drain is not None:
        return ReplicaState.DRAINING, replica.drain.reason
    missing = _joined(_missing(state, replica), doubt(state, replica))
    if order:
        return ReplicaState.CORDONED, _joined(_by_operator(order), suspicion, missing)
    missing = _joined(missing, _closed(replica))
    if suspicion:
        return ReplicaState.SUSPECT, _joined(suspicion, missing)
    return (ReplicaState.PENDING_WEIGHTS, missing) if missing else (ReplicaState.READY, "")


def _closed(replica: Replica) -> str:
    """Why it does not answer requests; empty where it is open."""
    if replica.is_open:
        return ""
    said = f", it said last: {replica.refusing}" if replica.refusing else ""
    return f"it has not said yet that it takes requests{said}"


def _by_operator(order: OutOfService) -> str:
    return f"by an operator{': ' if order.reason else ''}{order.reason}"


def _joined(*parts: str) -> str:
    return "; ".join(filter(None, parts))


def _missing(state: PoolState, replica: Replica) -> str:
    """What it lacks and what is done about it; empty when it lacks nothing."""
    lacking = lacks(state, replica)
    if not lacking:
        return ""
    groups: dict[str, list[str]] = {}
    for name in lacking:
        text = outlook(state, replica, PolicyVersion.parse(name))
        groups.setdefault(text, []).append(name)
    reason = "; ".join(f"lacks {', '.join(names)}{text}" for text, names in groups.items())
    if replica.commit_failure:
        reason += f" ({replica.commit_failure})"
    return reason


def eligible_targets(state: PoolState) -> list[Replica]:
    """The eligible targets of any push, by id."""
    return [r for r in base_targets(state) if not r.dirty_reason]


def shared_backends(replicas: Sequence[Replica]) -> list[str]:
    """Side-group backends that all of these offer, in the first one's order."""
    if not replicas:
        return []
    rest = [r.capabilities.backends for r in replicas[1:]]
    return [b for b in replicas[0].capabilities.backends if all(b in theirs for theirs in rest)]


def base_targets(state: PoolState) -> list[Replica]:
    """The eligible targets of a base, by id: also the quarantined ones that it would repair."""
    return sorted(
        (
            r
            for r in state.replicas.values()
            if not r.lost and not r.suspicion and takes_weights(state, r)
        ),
        key=lambda r: r.replica_id,
    )
