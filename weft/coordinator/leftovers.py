"""Staged bytes that no transfer under way speaks for: what a restart leaves behind.

The catalog decides. A version that was committed before the coordinator died is
switched to now (roll forward); anything else was aborted by the restart.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.contract.names import BASE_POLICY
from weft.coordinator.change import Change
from weft.coordinator.effects import CallCommit, CallDiscard
from weft.coordinator.state import Replica, State, VersionRecord, VersionState


def settle(change: Change, replica: Replica, staged: Mapping[str, VersionRecord | None]) -> None:
    """Order each leftover of a replica committed or discarded.

    Repeated with every heartbeat until it is gone; both orders are idempotent.
    """
    for transfer_id, record in sorted(staged.items()):
        if transfer_id in change.state.transfers:
            continue
        # What ended under this coordinator was offered to the replica, which refused
        # it or missed it for good; what it refuses now is not offered again.
        is_ours = transfer_id in change.state.history or bool(replica.commit_failure)
        if record is not None and not is_ours and _is_wanted(change.state, replica, record):
            assert record.content_digest is not None
            served = change.state.policies[record.version.policy].served_version
            change.emit(
                CallCommit(
                    transfer_id,
                    replica.replica_id,
                    replica.incarnation,
                    replica.address,
                    record.version,
                    record.adapter,
                    record.content_digest,
                    # An adapter's name may have been rolled back since.
                    0 if record.version.policy == BASE_POLICY else served,
                )
            )
        else:
            change.emit(CallDiscard(transfer_id, replica.replica_id, replica.address))


def _is_wanted(state: State, replica: Replica, record: VersionRecord) -> bool:
    policy = state.policies.get(record.version.policy)
    if record.state is not VersionState.COMMITTED or policy is None:
        return False
    if replica.dirty_reason or replica.vector.holds(record.version):
        return False
    if record.version.policy == BASE_POLICY:
        return record.version.version == policy.served_version
    return record.version.version in policy.versions
