"""Sleep: replicas that share a GPU with a trainer give its memory back for a while.

A trainer's order is a part of its lease of the base: when that ends, the replicas wake. An
operator's stands until an operator wakes them. Orders are carried out by calls. These are
repeated until the replica says of itself what was ordered, also after its restart.

Orders are durable, and so is their end. A replica carries its sleep, too: a coordinator whose
catalog was lost, or is an older copy, adopts the order from it.
"""

from __future__ import annotations

from weft_rl.containers import replace
from weft_rl.contract.errors import (
    NotReadyError,
    RequestConflictError,
    TransferTimeoutError,
    WeftError,
    error_from_reason,
)
from weft_rl.contract.names import BASE_POLICY
from weft_rl.contract.options import DISCARDS, SWITCH_SECONDS
from weft_rl.coordinator.decisions.replicas.out_of_service import unknown_replica
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.change import Change
from weft_rl.coordinator.decisions.state.effects import (
    CallSleep,
    CallWake,
    SaveSleep,
    SleepAnswer,
)
from weft_rl.coordinator.decisions.state.pool import Lease, live_lease, require_lease
from weft_rl.coordinator.decisions.state.replica import Replica, SleepWait, StandingSleepOrder
from weft_rl.coordinator.decisions.state.replica_state import is_unsettled
from weft_rl.coordinator.decisions.state.values import Failure

#: Between two calls to a replica that does not do as it is told.
RETRY_SECONDS = 2.0
_NEVER = float("inf")
# Replicas that an error names as left asleep.
_MAX_NAMED = 8
# Reasons that are no refusal: the call is made again.
_TRANSIENT = {"PEER_GONE", "EPOCH_FENCED"}


def sleep_rollouts(change: Change, event: events.SleepRollouts) -> None:
    """Put the replicas to sleep that share a GPU with the owner of the base's lease."""
    state, token = change.state, event.fencing_token
    _, lease = require_lease(state, BASE_POLICY, token, change.now, event.session_id)
    names = {
        replica.replica_id
        for replica in state.replicas.values()
        if not replica.lost and not event.gpu_uuids.isdisjoint(replica.capabilities.gpu_uuids)
    }
    # Ordered before a restart, and not back yet: the call may be one that was made again.
    names |= {
        name
        for name, order in state.sleeps.items()
        if order.fencing_token == token and name not in state.replicas
    }
    order = StandingSleepOrder(
        trainer_id=lease.trainer_id,
        fencing_token=token,
        level=event.level,
        aborts=event.aborts,
        seconds=event.timeout_seconds,
    )
    _sleep(change, event.ticket, sorted(names), order, event.answer_by)


def sleep_replica(change: Change, event: events.SleepReplica) -> None:
    """Put one replica to sleep, by an operator's order, which replaces a trainer's."""
    if event.replica_id not in change.state.replicas:
        raise unknown_replica(event.replica_id)
    order = StandingSleepOrder(
        trainer_id="", level=event.level, aborts=event.aborts, seconds=event.timeout_seconds
    )
    _sleep(change, event.ticket, [event.replica_id], order, event.answer_by)


def _sleep(
    change: Change, ticket: int, names: list[str], order: StandingSleepOrder, answer_by: float
) -> None:
    replicas = [change.state.replicas[name] for name in names if name in change.state.replicas]
    unable = [replica for replica in replicas if not replica.capabilities.can_sleep]
    if unable:
        raise NotReadyError(
            f"replica {unable[0].replica_id!r} cannot sleep: start it with --enable-sleep",
            reason="SLEEP_DISABLED",
            metadata={"member": unable[0].replica_id},
        )
    stuck = [r for r in replicas if order.level == DISCARDS and r.capabilities.base_refusal]
    if stuck:
        raise NotReadyError(
            f"replica {stuck[0].replica_id!r} cannot sleep at level {DISCARDS}, which discards its "
            f"weights: none can be loaded into it, {stuck[0].capabilities.base_refusal}; take "
            "level 1",
            reason="SLEEP_DISABLED",
            metadata={"member": stuck[0].replica_id},
        )
    for replica in replicas:
        known = change.state.sleeps.get(replica.replica_id)
        if known is not None and not known.trainer_id and order.trainer_id:
            continue  # an operator's stands
        _put(change, replica.replica_id, order)
        _call(change, change.state.replicas[replica.replica_id])
    _wait(change, ticket, SleepWait(tuple(names), True, answer_by))


def wake_rollouts(change: Change, event: events.WakeRollouts) -> None:
    """Wake the replicas that the owner of the base's lease has put to sleep."""
    require_lease(change.state, BASE_POLICY, event.fencing_token, change.now, event.session_id)
    _adopt_token(change)
    names = sorted(
        name
        for name, order in change.state.sleeps.items()
        if order.trainer_id and order.fencing_token == event.fencing_token
    )
    _wake(change, event.ticket, names, event.answer_by)


def wake_replica(change: Change, event: events.WakeReplica) -> None:
    """Wake one replica, whoever put it to sleep."""
    if event.replica_id not in change.state.replicas:
        raise unknown_replica(event.replica_id)
    _wake(change, event.ticket, [event.replica_id], event.answer_by)


def _wake(change: Change, ticket: int, names: list[str], answer_by: float) -> None:
    for name in names:
        _drop(change, name)
        replica = change.state.replicas.get(name)
        if replica is not None and is_unsettled(replica):
            _call(change, replica)
    _wait(change, ticket, SleepWait(tuple(names), False, answer_by))


def adopt(change: Change, event: events.Register) -> None:
    """Adopt the order behind the sleep that a replica carries from a former coordinator."""
    state = change.state
    known_here = event.last_coordinator_id == state.coordinator_id
    asleep, known = event.report.sleep, state.sleeps.get(event.replica_id)
    if asleep is None or known_here:
        return
    if known is not None:  # by the catalog, which does not say whether it was carried out
        _put(change, event.replica_id, replace(known, confirmed=True))
        return
    if 0 < event.last_coordinator_generation < state.opened_generation and (
        event.last_epoch <= state.opened_epoch_counter
    ):
        return  # this catalog would know of it: it is over
    trainer_id, level = asleep.trainer_id, asleep.level
    until = change.now + state.settings.lease_seconds if trainer_id else _NEVER
    order = StandingSleepOrder(trainer_id=trainer_id, level=level, until=until, confirmed=True)
    _put(change, event.replica_id, order)


def sleep_answered(change: Change, event: events.SleepAnswered) -> None:
    """Note that a replica sleeps; a refusal ends its order, so that it is not asked again."""
    replica = change.state.replicas.get(event.replica_id)
    if replica is None or replica.incarnation != event.incarnation:
        return
    order = change.state.sleeps.get(event.replica_id)
    if event.failure is None:
        change.put_replica(replace(replica, asleep=event.asleep, sleep_call_until=float("-inf")))
        if order is not None:
            _put(change, event.replica_id, replace(order, confirmed=True))
        return
    if event.failure.reason in _TRANSIENT:
        if order is not None:  # else it is being woken, by a call of its own
            _call_again(change, replica)
    else:
        # The call may have come too late, or was refused: the replica is told to wake in any case.
        change.put_replica(replace(replica, sleep_call_until=change.now))
        _drop(change, event.replica_id)
        _fail(change, event.replica_id, event.failure, asleep=True)


def wake_answered(change: Change, event: events.WakeAnswered) -> None:
    """Note that a replica is awake; one that is not is called again.

    A replica that has no weights to wake with is brought a base before it is routed to, like
    any whose weights may be mixed.
    """
    replica = change.state.replicas.get(event.replica_id)
    if replica is None or replica.incarnation != event.incarnation:
        return
    if event.failure is None:
        replica = replace(replica, asleep=None, sleep_call_until=float("-inf"))
        if event.dirty_reason:
            replica = replace(
                replica, dirty_reason=event.dirty_reason, order_answered_at=change.now
            )
        change.put_replica(replica)
        return
    _call_again(change, replica)
    if event.failure.reason not in _TRANSIENT:
        _fail(change, event.replica_id, event.failure, asleep=False)


def watch(change: Change) -> None:
    """End the orders of leases that have ended, and have replicas do what is ordered."""
    _adopt_token(change)
    lease = _base_lease(change)
    token = lease.fencing_token if lease else 0
    # After a restart a replica may load its model for minutes before it registers.
    forgets = (
        change.now >= change.state.restart_over_at + change.state.settings.forget_after_seconds
    )
    for name, order in list(change.state.sleeps.items()):
        ended = order.fencing_token != token if order.fencing_token else change.now >= order.until
        is_gone = forgets and name not in change.state.replicas
        if (ended and order.trainer_id) or is_gone:
            _drop(change, name)
    for replica in list(change.state.replicas.values()):
        due = change.now >= replica.sleep_call_until and not replica.lost
        known = change.state.sleeps.get(replica.replica_id)
        if known is None:
            due = due and is_unsettled(replica)
        else:
            due = due and (not known.confirmed or replica.asleep is None)
        if due:
            _call(change, replica)


def settle(change: Change) -> None:
    """Answer the calls that wait, at the end of each step."""
    for ticket, wait in list(change.state.sleep_waits.items()):
        pending = [name for name in wait.replica_ids if _is_pending(change, name, wait)]
        present = [n for n in wait.replica_ids if n in change.state.replicas]
        undone = [n for n in present if wait.asleep is not (n in change.state.sleeps)]
        if undone:
            ordered = "wake" if wait.asleep else "sleep"
            why = f"replica {undone[0]!r} was ordered to {ordered} meanwhile"
            _refuse(change, ticket, wait, RequestConflictError(why))
        elif not pending:
            _end_wait(change, ticket)
            change.reply(ticket, SleepAnswer(tuple(present)))
        elif change.now >= wait.deadline:
            for name in pending if wait.asleep else ():
                _drop(change, name)
            verb = "sleep" if wait.asleep else "are awake"
            late = f"it was not known in time whether {', '.join(pending[:8])} {verb}"
            error = TransferTimeoutError(late, metadata={"member": pending[0]})
            _refuse(change, ticket, wait, error)


def forget_caller(change: Change, ticket: int) -> bool:
    """End the wait of a call that was cancelled; its orders stand.

    Returns whether the call is one that waits here.
    """
    if ticket not in change.state.sleep_waits:
        return False
    _end_wait(change, ticket)
    return True


def _is_pending(change: Change, name: str, wait: SleepWait) -> bool:
    replica, order = change.state.replicas.get(name), change.state.sleeps.get(name)
    if replica is None:  # it may come back awake
        return wait.asleep and order is not None and change.now < change.state.restart_over_at
    if replica.lost:
        return False
    if wait.asleep:  # an order that is gone was ended meanwhile
        return order is not None and not order.confirmed
    return order is None and is_unsettled(replica)


def _base_lease(change: Change) -> Lease | None:
    base = change.state.policies.get(BASE_POLICY)
    return live_lease(base, change.now) if base else None


def _adopt_token(change: Change) -> None:
    """Make orders that replicas have told of part of the lease that their trainer has."""
    lease = _base_lease(change)
    for name, order in list(change.state.sleeps.items()):
        if lease and not order.fencing_token and order.trainer_id == lease.trainer_id:
            _put(change, name, replace(order, fencing_token=lease.fencing_token))


def _call(change: Change, replica: Replica) -> None:
    name = replica.replica_id
    order = change.state.sleeps.get(name)
    where = (name, replica.incarnation, replica.address)
    seconds = SWITCH_SECONDS + (order.seconds if order else 0.0)
    change.put_replica(replace(replica, sleep_call_until=change.now + seconds))
    if order is None:
        change.emit(CallWake(*where, seconds))
    else:
        change.emit(
            CallSleep(*where, order.trainer_id, order.level, order.aborts, order.seconds, seconds)
        )


def _call_again(change: Change, replica: Replica) -> None:
    change.put_replica(replace(replica, sleep_call_until=change.now + RETRY_SECONDS))


def restored(order: StandingSleepOrder, now: float, seconds: float) -> StandingSleepOrder:
    """Return an order of the catalog as a coordinator starts with it.

    Args:
        seconds: Time after which it ends if its trainer is not heard, where no lease does.
    """
    return replace(order, confirmed=False, until=now + seconds if order.trainer_id else _NEVER)


def _put(change: Change, name: str, order: StandingSleepOrder) -> None:
    change.touched.add(name)
    known = change.state.sleeps.get(name)
    if known is None or restored(known, 0.0, 0.0) != restored(order, 0.0, 0.0):
        change.next_epoch()  # a replica that has heard of it knows more than an older catalog
        change.emit(SaveSleep(name, order))
    change.state = replace(change.state, sleeps={**change.state.sleeps, name: order})


def end(change: Change, name: str) -> None:
    """End the order to a replica that leaves the pool, if there is one."""
    if name in change.state.sleeps:
        _drop(change, name)


def _drop(change: Change, name: str) -> None:
    """End an order. Who is about to sleep by it is woken at the next look."""
    change.touched.add(name)
    if name in change.state.sleeps:
        change.next_epoch()
        change.emit(SaveSleep(name, None))
    replica = change.state.replicas.get(name)
    if replica is not None and replica.sleep_call_until > change.now:
        change.put_replica(replace(replica, sleep_call_until=change.now))
    sleeps = {known: order for known, order in change.state.sleeps.items() if known != name}
    change.state = replace(change.state, sleeps=sleeps)


def _wait(change: Change, ticket: int, wait: SleepWait) -> None:
    change.state = replace(change.state, sleep_waits={**change.state.sleep_waits, ticket: wait})


def _end_wait(change: Change, ticket: int) -> None:
    waits = {known: wait for known, wait in change.state.sleep_waits.items() if known != ticket}
    change.state = replace(change.state, sleep_waits=waits)


def _fail(change: Change, name: str, failure: Failure, *, asleep: bool) -> None:
    """Refuse the calls that wait for a replica which says that it cannot."""
    for ticket, wait in list(change.state.sleep_waits.items()):
        if wait.asleep is asleep and name in wait.replica_ids:
            _refuse(change, ticket, wait, failure.error())


def _refuse(change: Change, ticket: int, wait: SleepWait, error: WeftError) -> None:
    """Refuse a call that cannot be done for all; the error names those that are left asleep."""
    _end_wait(change, ticket)
    left = [name for name in wait.replica_ids if wait.asleep and name in change.state.sleeps]
    if left:
        more = f" and {len(left) - _MAX_NAMED} more" if len(left) > _MAX_NAMED else ""
        names = ", ".join(left[:_MAX_NAMED]) + more
        text = f"{error.message}; asleep until they are woken: {names}"
        error = error_from_reason(error.reason, text, {**error.metadata, "asleep": names})
    change.refuse([ticket], error)
