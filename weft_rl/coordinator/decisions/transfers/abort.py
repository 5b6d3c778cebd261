"""Abort of a transfer before its commit point, and what becomes of the bytes that replicas hold.

Nothing that is served has changed, with one exception: a replica that loads a base in place.

*Discards* are orders to drop staged bytes that nobody will commit. A replica that was cut off
when its transfer ended still holds the bytes, and would run out of staging memory. So orders
are kept until they were answered. They are given again when the replica registers and every
``REPEAT_SECONDS``, but never while the call that gave them last may still be answered. They
stay with the replica's name for a while: a late call of a dead process can replace the living
one.

*Loading in place* is for replicas without room for a second copy of a base. Such a replica is
told to load when its buffers will soon be full, and pauses generation until its switch. The
commit point stays where it is: after every rank has reported the same digest, and before any
replica answers with the new weights. A push that ends sooner is served nowhere. But a replica
that has begun to load cannot go back: it is out of service until a base repairs it. Hence a
push that loads in place is not given up because of one replica, whatever its trainer requires.
"""

from __future__ import annotations

from collections.abc import Iterable

from weft_rl.containers import replace
from weft_rl.contract.errors import with_lost_weights
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.change import Change
from weft_rl.coordinator.decisions.state.effects import CallDiscard, CallLoad, DropGroup, SendAbort
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.decisions.state.replica import Replica
from weft_rl.coordinator.decisions.state.transfer import Transfer
from weft_rl.coordinator.decisions.state.values import Failure, Phase
from weft_rl.coordinator.decisions.transfers.purpose import purpose_of


def abort(change: Change, transfer: Transfer, failure: Failure) -> None:
    """End an uncommitted transfer with ``failure``.

    One that still waits never got a version: its callers are refused and nothing
    is recorded. The group goes too, since a collective may be half done in it.
    """
    assert transfer.uncommitted
    failure = name_dirty_replicas(transfer, failure)
    if transfer.phase is Phase.WAITING:
        change.refuse((*transfer.begin_tickets, *transfer.await_tickets), failure.error())
        change.drop_transfer(transfer.transfer_id)
        return
    ended = change.end_transfer(replace(transfer, phase=Phase.ABORTED, failure=failure))
    change.emit(SendAbort(transfer.group_id, transfer.transfer_id, failure))
    close_group(change, transfer.group_id, f"its transfer was given up: {failure.message}")
    discard(change, transfer.transfer_id, transfer.targets)
    abandon(change, transfer, transfer.targets, failure)
    purpose_of(transfer).on_aborted(change, ended)


def close_group(change: Change, group_id: str, why: str) -> None:
    """Forget a group in which a transfer was under way; whoever waits in it wakes with
    EPOCH_FENCED."""
    _forget_group(change, group_id, why, is_failure=True)


def end_group(change: Change, group_id: str, why: str) -> None:
    """Forget a group in which nobody waits: for its members it ends normally."""
    _forget_group(change, group_id, why, is_failure=False)


def _forget_group(change: Change, group_id: str, why: str, *, is_failure: bool) -> None:
    if group_id in change.state.groups:
        change.drop_group(group_id)
        change.emit(DropGroup(group_id, why, is_failure))


def peer_gone(member: str, why: str, who: str = "") -> Failure:
    """Return the failure of a transfer that lost a member; ``who`` names its rank for messages."""
    return Failure("PEER_GONE", f"{who or member} is gone: {why}", {"member": member})


# -- discards --------------------------------------------------------------------

#: Longer than one call may take.
REPEAT_SECONDS = 6.0
#: Orders kept for one replica; the newest ones.
MAX_DISCARDS = 64


def discard(change: Change, transfer_id: str, replica_ids: Iterable[str]) -> None:
    """Order replicas to drop what was staged for a transfer."""
    for replica_id in replica_ids:
        _keep(change, replica_id, (*change.state.discards.get(replica_id, ()), transfer_id))
        replica = change.state.replicas.get(replica_id)
        if replica and not replica.lost:
            change.emit(CallDiscard(transfer_id, replica_id, replica.address))


def repeat_discards(change: Change) -> None:
    """Give orders again that were not answered in time; cheap when there are none."""
    if change.state.discards and change.now >= change.state.discard_at:
        change.state = replace(change.state, discard_at=change.now + REPEAT_SECONDS)
        for replica_id in list(change.state.discards):
            replica = change.state.replicas.get(replica_id)
            if replica is None:
                _keep(change, replica_id, ())
            elif not replica.lost:
                _tell(change, replica, until=change.now - REPEAT_SECONDS)


def discard_answered(change: Change, event: events.DiscardAnswered) -> None:
    """Forget an order whose replica holds nothing of the transfer any more."""
    kept = change.state.discards.get(event.replica_id, ())
    _keep(change, event.replica_id, tuple(t for t in kept if t != event.transfer_id))


def tell_at_registration(change: Change, replica: Replica) -> None:
    """Give a replica its orders again; these calls, too, get ``REPEAT_SECONDS``."""
    if replica.replica_id in change.state.discards:
        at = max(change.state.discard_at, change.now + REPEAT_SECONDS)
        change.state = replace(change.state, discard_at=at)
        _tell(change, replica, until=change.now)


def _tell(change: Change, replica: Replica, until: float) -> None:
    """Give a replica its orders that were given at ``until`` or before."""
    history = change.state.history
    for transfer_id in change.state.discards.get(replica.replica_id, ()):
        # Ordered when the transfer ended; what history has forgotten is old enough.
        ended = history.get(transfer_id)
        if ended is None or ended.end_at <= until:
            change.emit(CallDiscard(transfer_id, replica.replica_id, replica.address))


def _keep(change: Change, replica_id: str, transfer_ids: tuple[str, ...]) -> None:
    discards = {k: v for k, v in change.state.discards.items() if k != replica_id}
    if transfer_ids:
        discards[replica_id] = transfer_ids[-MAX_DISCARDS:]
    change.state = replace(change.state, discards=discards)


# -- loading in place ------------------------------------------------------------


def order_load(change: Change, transfer: Transfer, replica: Replica) -> None:
    """Order a replica to load what it has received, and all that comes.

    It is told again in a new group; if it loads already it answers at once.
    """
    ordered = {replica.replica_id}
    pausing = {replica.replica_id: change.now, **transfer.attempt.pausing}
    attempt = replace(transfer.attempt, pausing=pausing)
    change.put_transfer(replace(transfer, loading=transfer.loading | ordered, attempt=attempt))
    change.emit(
        CallLoad(
            transfer.transfer_id,
            replica.replica_id,
            replica.address,
            transfer.policy_version,
            transfer.deadline - change.now,
        )
    )


def is_loading(state: PoolState, replica_id: str) -> bool:
    """Return whether a replica's weights are mixed because a transfer under way loads them."""
    return any(
        replica_id in transfer.loading and replica_id in transfer.targets
        for transfer in state.transfers.values()
    )


def abandon(
    change: Change, transfer: Transfer, replica_ids: Iterable[str], failure: Failure
) -> None:
    """Mark replicas dirty whose in-place load was cut short, until they report what they are."""
    for replica_id in transfer.loading.intersection(replica_ids):
        replica = change.state.replicas.get(replica_id)
        if replica is not None:
            why = f"{transfer.policy_version} was not loaded whole: {failure.message}"
            # The copy that it could be asked for was in its engine.
            lost = replace(replica, retained=(), undoable=())
            change.put_replica(replace(lost, dirty_reason=why, order_answered_at=change.now))


def name_dirty_replicas(transfer: Transfer, failure: Failure) -> Failure:
    """Return the failure of a transfer, extended by the replicas whose weights it has cost."""
    names = ", ".join(sorted(transfer.loading.intersection(transfer.targets)))
    if not names:
        return failure
    return Failure.of(with_lost_weights(failure.error(), names))
