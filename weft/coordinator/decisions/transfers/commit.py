"""The commit point and the answers after it: every replica switches, or leaves service.

What is committed rolls forward: a replica that does not switch is no longer ready (or is
quarantined, if its engine may hold mixed weights). Once all have answered, the transfer's
purpose decides how it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.contract.frozen import replace
from weft.coordinator.decisions import events
from weft.coordinator.decisions.change import Change
from weft.coordinator.decisions.effects import CallCommit
from weft.coordinator.decisions.replicas import holdings
from weft.coordinator.decisions.state.replica import Replica
from weft.coordinator.decisions.state.transfer import Transfer, switch_id
from weft.coordinator.decisions.state.values import ContentDigest, Failure, Phase, PolicyKind
from weft.coordinator.decisions.transfers import unserved
from weft.coordinator.decisions.transfers.refusals import is_dirty


def at_commit_point(change: Change, transfer: Transfer, replicas: Sequence[Replica]) -> Transfer:
    """The transfer once these replicas are to switch, as a value: nothing is put yet."""
    ids = tuple(replica.replica_id for replica in replicas)
    return replace(
        transfer,
        phase=Phase.COMMITTING,
        create_time=transfer.create_time or change.state.wall(change.now),
        commit_at=change.now,
        served_before=change.state.policies[transfer.policy].served_version,
        targets=ids,
        switching=frozenset(ids),
        incarnations={replica.replica_id: replica.incarnation for replica in replicas},
    )


def call_to_commit(
    transfer: Transfer,
    replica: Replica,
    digest: ContentDigest,
    *,
    staged_by: str = "",
    alias: int = 0,
) -> CallCommit:
    """The order to switch to what a replica has staged.

    Args:
        staged_by: The transfer that staged it, if not this one.
        alias: As ``CallCommit`` has it.
    """
    return CallCommit(
        staged_by or transfer.transfer_id,
        replica.replica_id,
        replica.incarnation,
        replica.address,
        transfer.policy_version,
        transfer.adapter,
        digest,
        alias,
        transfer.layout.digest,
    )


def commit_answered(change: Change, event: events.CommitAnswered) -> None:
    """A replica has switched, or not; what it did not load it need not keep."""
    transfers = change.state.transfers
    own = switch_id(event.transfer_id, event.replica_id)
    transfer = transfers.get(event.transfer_id) or transfers.get(own)
    replica = change.state.replicas.get(event.replica_id)
    if replica and replica.incarnation == event.incarnation:
        if event.vector is not None:
            loaded_base = transfer is not None and transfer.kind is PolicyKind.BASE
            if transfer is not None:
                replica = holdings.switched(replica, transfer.policy_version)
            replica = replace(
                replica,
                vector=event.vector,
                vector_set_at=change.now,
                commit_failure="",
                retained=event.retained if loaded_base else replica.retained,
                dirty_reason="" if loaded_base else replica.dirty_reason,
            )
            replica = holdings.counted(change.state, replica)
        elif event.failure and is_dirty(event.failure):
            replica = replace(replica, dirty_reason=event.failure.message, vector_set_at=change.now)
        elif event.failure:
            replica = replace(replica, commit_failure=event.failure.message)
        change.put_replica(replica)
    if transfer and transfer.phase is Phase.COMMITTING:
        pause = max(transfer.pause_seconds, event.pause_seconds)
        transfer = change.put_transfer(replace(transfer, pause_seconds=pause))
        note_commit_answer(change, transfer, event.replica_id, event.failure)
    if change.state.unserved:
        unserved.commit_answered(change, event)


def note_commit_answer(
    change: Change, transfer: Transfer, replica_id: str, failure: Failure | None
) -> None:
    """Count a replica's outcome (``failure`` is None when it serves the version)."""
    if replica_id not in transfer.switching:
        return
    transfer = replace(transfer, switching=transfer.switching - {replica_id})
    if failure is None:
        transfer = replace(transfer, served_by=transfer.served_by | {replica_id})
    else:
        transfer = replace(transfer, refusals={**transfer.refusals, replica_id: failure})
    change.put_transfer(transfer)
    if not transfer.switching:
        transfer.purpose.on_answered(change, transfer)
