"""Where each replica stands, and why."""

from __future__ import annotations

from weft.contract.names import PolicyVersion
from weft.coordinator.holders import lacks, outlook, wants
from weft.coordinator.state import Replica, Standing, State


def place(state: State, replica: Replica) -> Standing:
    """Where a replica stands; cheap."""
    if replica.lost or replica.suspicion:
        return Standing.LOST
    if replica.dirty_reason:
        return Standing.QUARANTINED
    return Standing.PENDING_WEIGHTS if lacks(state, replica) else Standing.READY


def standing(state: State, replica: Replica) -> tuple[Standing, str]:
    """Where a replica stands, and why it is not ready; looks at all replicas if so."""
    if replica.lost or replica.suspicion:
        return Standing.LOST, replica.suspicion or "no heartbeat"
    if replica.dirty_reason:
        repair = [f"it needs {v}{text}" for v in wants(state, replica)
                  if (text := outlook(state, replica, v))]  # fmt: skip
        return Standing.QUARANTINED, "; ".join([replica.dirty_reason, *repair])
    lacking = lacks(state, replica)
    if not lacking:
        return Standing.READY, ""
    groups: dict[str, list[str]] = {}
    for name in lacking:
        text = outlook(state, replica, PolicyVersion.parse(name))
        groups.setdefault(text, []).append(name)
    reason = "; ".join(f"lacks {', '.join(names)}{text}" for text, names in groups.items())
    if replica.commit_failure:
        reason += f" ({replica.commit_failure})"
    return Standing.PENDING_WEIGHTS, reason


def in_contact(state: State) -> list[Replica]:
    """Replicas that any push goes to, by id."""
    return sorted((r for r in state.replicas.values() if r.in_contact), key=lambda r: r.replica_id)


def reachable(state: State) -> list[Replica]:
    """Those, and the quarantined ones that a base would repair, by id."""
    return sorted(
        (r for r in state.replicas.values() if not r.lost and not r.suspicion),
        key=lambda r: r.replica_id,
    )
