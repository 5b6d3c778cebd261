"""Turns: which replicas a waiting transfer may take now, and whom it waits for.

Transfers are asked in order of their begin, unless their purpose says another place. A
transfer that waits for its turn holds back those behind it on the same replicas, so that
trainers alternate; one that waits for replicas, or for them to hear what is pinned, holds
back nobody. Nothing here is kept from one step to the next.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft_rl.coordinator.decisions.effects.change import Change
from weft_rl.coordinator.decisions.state.replica import Replica
from weft_rl.coordinator.decisions.state.transfer import Transfer
from weft_rl.coordinator.decisions.state.values import Failure, Phase
from weft_rl.coordinator.decisions.transfers import abort
from weft_rl.coordinator.decisions.transfers.purpose import Turns, purpose_of


def admit(change: Change) -> None:
    """Start every waiting transfer whose turn has come."""
    if all(t.phase is not Phase.WAITING for t in change.state.transfers.values()):
        return
    turns = Turns(change.state, change.now)
    for transfer in turns.waiting():
        turns.take(purpose_of(transfer).admit(change, transfer, turns))


def take_over(change: Change, replicas: Sequence[Replica], by: Transfer) -> None:
    """Interrupt transfers that give way on these replicas, for ``by``, which takes them now."""
    names = {replica.replica_id for replica in replicas}
    for transfer in list(change.state.transfers.values()):
        purpose = purpose_of(transfer)
        if names.intersection(transfer.occupied) and purpose.gives_way(
            change.state, transfer, change.now
        ):
            purpose.on_interrupted(change, transfer, by)


def end_unwanted(change: Change) -> None:
    """Abort uncommitted transfers that are not wanted any more.

    Looks at those whose replicas a step has touched: O(transfers) otherwise.
    """
    for transfer in list(change.state.transfers.values()):
        if (
            transfer.uncommitted
            and transfer.phase is not Phase.WAITING
            and (change.touched_all or not change.touched.isdisjoint(transfer.occupied))
            and (why := purpose_of(transfer).why_unwanted(change.state, transfer))
        ):
            abort.abort(change, transfer, Failure("TRANSFER_ABORTED", why))
