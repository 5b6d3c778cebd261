"""Withdrawals: replicas that an operator keeps out of service, in the pool or not."""

from __future__ import annotations

from dataclasses import replace

from weft.contract.errors import InvalidRequestError
from weft.coordinator import events
from weft.coordinator.change import Change
from weft.coordinator.drains import unknown_replica
from weft.coordinator.effects import Done, SaveWithdrawn
from weft.coordinator.replica import Withdrawn
from weft.coordinator.values import Standing


def withdraw(change: Change, event: events.Withdraw) -> None:
    """Cordon or quarantine a replica; a cordon does not loosen a quarantine."""
    state, name, order = change.state, event.replica_id, event.order
    if name not in state.replicas and name not in state.withdrawn:
        change.refuse([event.ticket], unknown_replica(name))
        return
    if order.standing is Standing.QUARANTINED and not order.reason:
        error = InvalidRequestError("say why, so that somebody can tell when it may serve again")
        change.refuse([event.ticket], error)
        return
    if order.standing is Standing.QUARANTINED or not state.is_quarantined(name):
        _put(change, name, order)
    change.reply(event.ticket, Done())


def uncordon(change: Change, event: events.Uncordon) -> None:
    """Put a replica back into service."""
    if event.replica_id in change.state.withdrawn:
        _put(change, event.replica_id, None)
    elif event.replica_id not in change.state.replicas:
        change.refuse([event.ticket], unknown_replica(event.replica_id))
        return
    change.reply(event.ticket, Done())


def _put(change: Change, replica_id: str, order: Withdrawn | None) -> None:
    orders = {name: o for name, o in change.state.withdrawn.items() if name != replica_id}
    if order is not None:
        orders[replica_id] = order
    change.state = replace(change.state, withdrawn=orders)
    change.touched.add(replica_id)
    change.emit(SaveWithdrawn(replica_id, order))
