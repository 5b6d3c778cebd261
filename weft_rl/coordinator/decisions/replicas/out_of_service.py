"""Orders that take a replica out of service: cordon and drain.

Cordons are kept by name, for replicas of the pool or not. A replica is told at once to refuse
requests, or to take them again. It says what it enforces in its answer and in every heartbeat. A
call and an answer to a heartbeat may overtake each other, so orders are numbered: the newest
counts, on both sides.

In a drain a replica leaves in good order. An operator begins it at the coordinator, which tells
the replica with the next heartbeat; or the replica does, when its process is told to stop. From
then on the replica carries the drain and says so with each heartbeat, so that a restarted
coordinator knows again.
"""

from __future__ import annotations

from weft_rl.containers import replace
from weft_rl.contract.errors import InvalidRequestError, NotFoundError, NotReadyError
from weft_rl.contract.replica_report import DrainNote, OutOfService
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.change import Change
from weft_rl.coordinator.decisions.state.effects import (
    CallRefuse,
    EmptyAnswer,
    EventKind,
    SaveOutOfService,
    UncordonAnswer,
)
from weft_rl.coordinator.decisions.state.pool import MAX_NUMBER, PoolState
from weft_rl.coordinator.decisions.state.replica import Replica, ReplicaDrain
from weft_rl.coordinator.decisions.state.replica_state import explain_state
from weft_rl.coordinator.decisions.state.values import ReplicaState


def take_out(change: Change, event: events.Cordon) -> None:
    """Take a replica out of service; an order that lets pushes in does not loosen one without."""
    state, name = change.state, event.replica_id
    if name not in state.replicas and name not in state.out_of_service:
        raise unknown_replica(name)
    if event.no_pushes or not state.is_kept_out(name):
        _put(change, name, OutOfService(event.reason, event.no_pushes))
    change.reply(event.ticket, EmptyAnswer())


def uncordon(change: Change, event: events.Uncordon) -> None:
    """Put a replica back into service; the answer says what its state is then."""
    name = event.replica_id
    if name in change.state.out_of_service:
        _put(change, name, None)
    elif name not in change.state.replicas:
        raise unknown_replica(name)
    else:
        where, why = explain_state(change.state, change.state.replicas[name])
        if where in (ReplicaState.QUARANTINED, ReplicaState.DRAINING, ReplicaState.SUSPECT):
            raise NotReadyError(
                f"no operator's order keeps {name!r} out of service, and none puts it back: {why}",
                reason="NOT_TAKEN_OUT_OF_SERVICE",
            )
    replica = change.state.replicas.get(name)
    if replica is None:
        change.reply(event.ticket, UncordonAnswer(None, ""))
    else:
        change.reply(event.ticket, UncordonAnswer(*explain_state(change.state, replica)))


def adopt(change: Change, event: events.Register) -> None:
    """Adopt an order that a replica reports and this catalog, an older copy, does not know."""
    name, told = event.replica_id, event.out_of_service
    if told == change.state.out_of_service.get(name) or not _knows_more(change.state, event):
        return
    if told is None:
        why = "it was put back into service since, as it says, and the catalog does not know: "
        why += f"if that was so, weft uncordon {name}"
    elif change.state.is_kept_out(name):
        return
    else:
        why = f"an operator took it out of service ({told.reason or 'no reason given'}), "
        why += "which the catalog does not know: taken from what it says"
        _put(change, name, told)
    change.announce(EventKind.CATALOG_BEHIND, name, why)


def _knows_more(state: PoolState, event: events.Register) -> bool:
    """Return whether a replica was told newer orders than this catalog had when it was opened, by a
    coordinator that had counted further."""
    if event.last_coordinator_id == state.coordinator_id:
        return False
    generation = state.opened_generation < event.last_coordinator_generation + 1 <= MAX_NUMBER
    return generation or state.opened_epoch_counter < event.last_epoch <= MAX_NUMBER


def _refusal(state: PoolState, replica_id: str) -> OutOfService | None:
    """Return the order by which a replica is to refuse requests; None where there is none."""
    return state.out_of_service[replica_id] if state.is_kept_out(replica_id) else None


def order_answered(change: Change, event: events.RefuseAnswered) -> None:
    """Note what a replica says that it enforces."""
    replica = change.state.replicas.get(event.replica_id)
    if replica and replica.incarnation == event.incarnation:
        change.put_replica(
            with_enforced_order(change.state, replica, event.refusing, event.order_number)
        )


def with_enforced_order(
    state: PoolState, replica: Replica, refusing: str, order_number: int
) -> Replica:
    """Return a replica once it has said what it enforces.

    What it said before it heard a later order, and came late, does not count, nor does an
    order that was never given.
    """
    if not replica.order_number <= order_number <= state.order_number:
        return replica
    return replace(replica, refusing=refusing, order_number=order_number)


def _put(change: Change, replica_id: str, order: OutOfService | None) -> None:
    before = _refusal(change.state, replica_id)
    orders = {name: o for name, o in change.state.out_of_service.items() if name != replica_id}
    if order is not None:
        orders[replica_id] = order
    change.state = replace(change.state, out_of_service=orders)
    change.touched.add(replica_id)
    change.next_epoch()
    change.emit(SaveOutOfService(replica_id, order))
    _tell(change, replica_id, before)


def _tell(change: Change, replica_id: str, before: OutOfService | None) -> None:
    """Tell a replica at once what it is to enforce; heartbeats repeat it."""
    order = _refusal(change.state, replica_id)
    if order != before:
        change.state = replace(change.state, order_number=change.state.order_number + 1)
    replica = change.state.replicas.get(replica_id)
    if replica is None or replica.lost:
        return
    if order != before:
        replica = change.put_replica(replace(replica, order_due=change.state.order_number))
    change.emit(
        CallRefuse(
            replica_id,
            replica.incarnation,
            replica.address,
            order,
            change.state.order_number,
        )
    )


# -- drains ----------------------------------------------------------------------

#: Longest that a drain may be given.
MAX_DRAIN_SECONDS = 86_400.0


def drain(change: Change, event: events.Drain) -> None:
    """Let a replica leave; its process learns of it with its next heartbeat."""
    replica = change.state.replicas.get(event.replica_id)
    if replica is None:
        raise unknown_replica(event.replica_id)
    if not 0.0 <= event.timeout_seconds <= MAX_DRAIN_SECONDS:
        raise InvalidRequestError(f"timeout must be between 0 and {MAX_DRAIN_SECONDS:.0f} seconds")
    reason = ": ".join(filter(None, ["by an operator", event.reason]))
    note = DrainNote(event.timeout_seconds, reason)
    change.put_replica(replace(replica, drain=updated_drain(replica, note, change.now)))
    change.reply(event.ticket, EmptyAnswer())


def updated_drain(
    replica: Replica | None, note: DrainNote | None, now: float
) -> ReplicaDrain | None:
    """Return a replica's drain once ``note`` is heard; nothing takes a drain back.

    Its first reason stands, and the earlier end counts.
    """
    known = replica.drain if replica else None
    if note is None:
        return known
    deadline = now + note.time_left_seconds
    if known is None:
        return ReplicaDrain(deadline, note.reason)
    return replace(known, deadline=min(known.deadline, deadline))


def unknown_replica(replica_id: str) -> NotFoundError:
    """Return the error for an order that names no replica of the pool."""
    return NotFoundError(
        f"no replica {replica_id[:80]!r} is in the pool: weft status lists them",
        reason="REPLICA_UNKNOWN",
    )
