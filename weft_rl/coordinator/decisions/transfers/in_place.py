"""Loading in place: replicas that load a base as it comes, without room for a second copy.

A replica is told to load when its buffers will soon be full, and pauses generation until its
switch. The commit point stays where it is: after every rank has reported the same digest, and
before any replica answers with the new weights. A push that ends sooner is served nowhere, as
ever; but what has begun to load cannot go back, so its replica is taken out of service until a
base repairs it. Hence a push that loads in place is not given up because of one replica,
whatever its trainer requires: that is asked when it begins.
"""

from __future__ import annotations

from collections.abc import Iterable

from weft_rl.containers.frozen import replace
from weft_rl.contract.errors import with_lost_weights
from weft_rl.coordinator.decisions.effects import CallLoad
from weft_rl.coordinator.decisions.effects.change import Change
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.decisions.state.replica import Replica
from weft_rl.coordinator.decisions.state.transfer import Transfer
from weft_rl.coordinator.decisions.state.values import Failure


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
            # What it could be asked for was in its engine.
            change.put_replica(
                replace(replica, dirty_reason=why, retained=(), vector_set_at=change.now)
            )


def with_price(transfer: Transfer, failure: Failure) -> Failure:
    """Return the failure of a transfer, extended by the replicas whose weights it has cost."""
    names = ", ".join(sorted(transfer.loading.intersection(transfer.targets)))
    if not names:
        return failure
    return Failure.of(with_lost_weights(failure.error(), names))
