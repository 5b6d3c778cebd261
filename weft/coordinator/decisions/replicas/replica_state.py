"""Where each replica stands, and why."""

from __future__ import annotations

from collections.abc import Sequence

from weft.contract.names import PolicyVersion
from weft.coordinator.decisions.recovery.needs import lacks, outlook, takes_weights, wants
from weft.coordinator.decisions.replicas.checkpoints import doubt
from weft.coordinator.decisions.state.pool import State
from weft.coordinator.decisions.state.replica import OutOfService, Replica
from weft.coordinator.decisions.state.values import Standing


def place(state: State, replica: Replica) -> Standing:
    """Where a replica stands; cheap."""
    if replica.lost or replica.suspicion:
        return Standing.LOST
    if replica.dirty_reason or state.is_quarantined(replica.replica_id):
        return Standing.QUARANTINED
    if replica.drain is not None:
        return Standing.DRAINING
    if replica.replica_id in state.out_of_service:
        return Standing.CORDONED
    if replica.suspect is not None:
        return Standing.SUSPECT
    serves = replica.is_open and not lacks(state, replica) and not doubt(state, replica)
    return Standing.READY if serves else Standing.PENDING_WEIGHTS


def is_routable(state: State, replica: Replica) -> bool:
    """Whether requests may be sent to a replica: it serves what the pool serves, and is
    open. The engine of a suspect answers like any other."""
    match place(state, replica):
        case Standing.READY:
            return True
        case Standing.SUSPECT:
            return replica.is_open and not lacks(state, replica) and not doubt(state, replica)
    return False


def standing(state: State, replica: Replica) -> tuple[Standing, str]:
    """Where a replica stands, and why it is not ready; looks at all replicas if so."""
    if replica.lost or replica.suspicion:
        return Standing.LOST, replica.suspicion or "no heartbeat"
    order = state.out_of_service.get(replica.replica_id)
    suspicion = replica.suspect.why if replica.suspect else ""
    if order and order.standing is Standing.QUARANTINED:
        late = "" if replica.refusing else "it has not said yet that it refuses requests"
        why = _joined(_by_operator(order), late, replica.dirty_reason, suspicion)
        return Standing.QUARANTINED, why
    if replica.dirty_reason:
        repair = [f"it needs {v}{text}" for v in wants(state, replica)
                  if (text := outlook(state, replica, v))]  # fmt: skip
        return Standing.QUARANTINED, _joined(replica.dirty_reason, suspicion, *repair)
    if replica.drain is not None:
        return Standing.DRAINING, replica.drain.reason
    missing = _joined(_missing(state, replica), doubt(state, replica))
    if order:
        return Standing.CORDONED, _joined(_by_operator(order), suspicion, missing)
    missing = _joined(missing, _closed(replica))
    if suspicion:
        return Standing.SUSPECT, _joined(suspicion, missing)
    return (Standing.PENDING_WEIGHTS, missing) if missing else (Standing.READY, "")


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


def _missing(state: State, replica: Replica) -> str:
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


def in_contact(state: State) -> list[Replica]:
    """Replicas that any push goes to, by id."""
    return [r for r in reachable(state) if not r.dirty_reason]


def shared_backends(replicas: Sequence[Replica]) -> list[str]:
    """Side-group backends that all of these offer, in the first one's order."""
    if not replicas:
        return []
    rest = [r.capabilities.backends for r in replicas[1:]]
    return [b for b in replicas[0].capabilities.backends if all(b in theirs for theirs in rest)]


def reachable(state: State) -> list[Replica]:
    """Those, and the quarantined ones that a base would repair, by id."""
    return sorted(
        (
            r
            for r in state.replicas.values()
            if not r.lost and not r.suspicion and takes_weights(state, r)
        ),
        key=lambda r: r.replica_id,
    )
