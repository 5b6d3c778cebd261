"""Drains: a replica leaves in good order.

Either side may begin: an operator at the coordinator, which tells the replica with
the next heartbeat, or the replica, whose process was told to stop. From then on the
replica carries the drain and says so with each heartbeat, so a coordinator that is
restarted knows again.
"""

from __future__ import annotations

from weft_rl.containers.frozen import replace
from weft_rl.contract.errors import InvalidRequestError, NotFoundError
from weft_rl.contract.replica_report import DrainNote
from weft_rl.coordinator.decisions import events
from weft_rl.coordinator.decisions.effects import Done
from weft_rl.coordinator.decisions.effects.change import Change
from weft_rl.coordinator.decisions.state.replica import Drain, Replica

#: Longest that a drain may be given.
MAX_SECONDS = 86_400.0


def drain(change: Change, event: events.DrainReplica) -> None:
    """Let a replica leave; its process learns of it with its next heartbeat."""
    replica = change.state.replicas.get(event.replica_id)
    if replica is None:
        change.refuse([event.ticket], unknown_replica(event.replica_id))
    elif not 0.0 <= event.seconds <= MAX_SECONDS:
        error = InvalidRequestError(f"timeout must be between 0 and {MAX_SECONDS:.0f} seconds")
        change.refuse([event.ticket], error)
    else:
        reason = ": ".join(filter(None, ["by an operator", event.reason]))
        note = DrainNote(event.seconds, reason)
        change.put_replica(replace(replica, drain=noted(replica, note, change.now)))
        change.reply(event.ticket, Done())


def noted(replica: Replica | None, note: DrainNote | None, now: float) -> Drain | None:
    """Return a replica's drain once ``note`` is heard; nothing takes a drain back.

    Its first reason stands, and the earlier end counts.
    """
    known = replica.drain if replica else None
    if note is None:
        return known
    deadline = now + note.seconds
    if known is None:
        return Drain(deadline, note.reason)
    return replace(known, deadline=min(known.deadline, deadline))


def unknown_replica(replica_id: str) -> NotFoundError:
    """Return the error for an order that names no replica of the pool."""
    return NotFoundError(
        f"no replica {replica_id[:80]!r} is in the pool: weft status lists them",
        reason="REPLICA_UNKNOWN",
    )
