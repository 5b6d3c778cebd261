"""Discards: orders to drop staged bytes that nobody will commit, repeated until answered.

A replica that was cut off when its transfer ended still holds the bytes, and would run out of
staging memory. So orders are kept until they were answered. They are given again when the
replica registers and every ``REPEAT_SECONDS``, but never while the call that gave them last
may still be answered. They stay with the replica's name for a while: a late call of a dead
process can replace the living one.
"""

from __future__ import annotations

from collections.abc import Iterable

from weft_rl.containers.frozen import replace
from weft_rl.coordinator.decisions import events
from weft_rl.coordinator.decisions.effects import CallDiscard
from weft_rl.coordinator.decisions.effects.change import Change
from weft_rl.coordinator.decisions.state.replica import Replica

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
