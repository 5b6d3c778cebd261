"""Abort of a transfer before its commit point: nothing that is served has changed."""

from __future__ import annotations

from weft_rl.containers.frozen import replace
from weft_rl.coordinator.decisions.effects import DropGroup, SendAbort
from weft_rl.coordinator.decisions.effects.change import Change
from weft_rl.coordinator.decisions.state.transfer import Transfer
from weft_rl.coordinator.decisions.state.values import Failure, Phase
from weft_rl.coordinator.decisions.transfers import in_place
from weft_rl.coordinator.decisions.transfers.discard import discard
from weft_rl.coordinator.decisions.transfers.purpose import purpose_of


def abort(change: Change, transfer: Transfer, failure: Failure) -> None:
    """End an uncommitted transfer with ``failure``.

    One that still waits never got a version: its callers are refused and nothing
    is recorded. The group goes too, since a collective may be half done in it.
    """
    assert transfer.uncommitted
    failure = in_place.with_price(transfer, failure)
    if transfer.phase is Phase.WAITING:
        change.refuse((*transfer.begin_tickets, *transfer.await_tickets), failure.error())
        change.drop_transfer(transfer.transfer_id)
        return
    ended = change.end_transfer(replace(transfer, phase=Phase.ABORTED, failure=failure))
    change.emit(SendAbort(transfer.group_id, transfer.transfer_id, failure))
    close_group(change, transfer.group_id, f"its transfer was given up: {failure.message}")
    discard(change, transfer.transfer_id, transfer.targets)
    in_place.abandon(change, transfer, transfer.targets, failure)
    purpose_of(transfer).on_aborted(change, ended)


def close_group(change: Change, group_id: str, why: str) -> None:
    """Forget a group; whoever waits in it wakes with EPOCH_FENCED."""
    if group_id in change.state.groups:
        change.drop_group(group_id)
        change.emit(DropGroup(group_id, why))


def peer_gone(member: str, why: str, who: str = "") -> Failure:
    """Return the failure of a transfer that lost a member; ``who`` names its rank for messages."""
    return Failure("PEER_GONE", f"{who or member} is gone: {why}", {"member": member})
