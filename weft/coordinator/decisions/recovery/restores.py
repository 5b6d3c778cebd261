"""Restores: a replica switches to what it has itself: a copy, what it has spilled or staged."""

from __future__ import annotations

from weft.contract.frozen import replace
from weft.coordinator.decisions.change import Change
from weft.coordinator.decisions.effects import CallCommit, CallRestore, CallSwitch
from weft.coordinator.decisions.state.pool import PoolState
from weft.coordinator.decisions.state.replica import Replica, holds
from weft.coordinator.decisions.state.transfer import Transfer
from weft.coordinator.decisions.state.values import Phase, PolicyKind


def start_restore(change: Change, transfer: Transfer, replica: Replica) -> None:
    """Order a replica to switch: there is nothing to stage first."""
    change.put_transfer(
        replace(
            transfer,
            phase=Phase.COMMITTING,
            create_time=change.state.wall(change.now),
            commit_at=change.now,
            ordered_under=change.state.policies[transfer.policy].served_version,
            targets=(replica.replica_id,),
            switching=frozenset({replica.replica_id}),
        )
    )
    version, order = transfer.policy_version, _order(change, transfer, replica)
    where = {CallRestore: "spill directory", CallSwitch: "own copy"}.get(type(order), "staging")
    text = f"{version} at {replica.replica_id}, from its {where}"
    change.announce("restore_begun", transfer.transfer_id, text)
    change.emit(order)


def _order(
    change: Change, transfer: Transfer, replica: Replica
) -> CallCommit | CallSwitch | CallRestore:
    ids, version = replica.replica_id, transfer.policy_version
    if holds(replica, version):
        return CallSwitch(transfer.transfer_id, ids, replica.incarnation, replica.address, version)
    assert transfer.content_digest is not None
    if transfer.staged_by:
        return CallCommit(
            transfer.staged_by,
            ids,
            replica.incarnation,
            replica.address,
            version,
            transfer.adapter,
            transfer.content_digest,
            alias_of(change.state, transfer),
            transfer.layout.digest,
        )
    return CallRestore(
        transfer.transfer_id,
        ids,
        replica.incarnation,
        replica.address,
        version,
        transfer.adapter,
        transfer.content_digest,
        transfer.layout.digest,
        alias_of(change.state, transfer),
        change.state.settings.clone_seconds,
    )


def alias_of(state: PoolState, transfer: Transfer) -> int:
    """What an adapter's bare name stands for once the replica has this version."""
    policy = state.policies[transfer.policy]
    return policy.served_version if policy.kind is PolicyKind.ADAPTER else 0
