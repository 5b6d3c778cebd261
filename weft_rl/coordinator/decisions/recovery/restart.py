"""Restart: staged bytes left behind that belong to no transfer under way.

The catalog decides. A version that was committed before the coordinator died is
switched to (roll forward) where it is still wanted, in turn with all else that is done
to a replica; anything else was aborted by the restart, or is brought in other ways.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft_rl.coordinator.decisions.effects import CallDiscard
from weft_rl.coordinator.decisions.effects.change import Change
from weft_rl.coordinator.decisions.purposes.repair import repair
from weft_rl.coordinator.decisions.purposes.restore import Restore
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.decisions.state.replica import Replica
from weft_rl.coordinator.decisions.state.replica_state import wants
from weft_rl.coordinator.decisions.state.transfer import FreshIds, Transfer, switch_id
from weft_rl.coordinator.decisions.state.values import Layout, VersionRecord, VersionState


def restore_or_discard(
    change: Change, replica: Replica, staged: Mapping[str, VersionRecord | None]
) -> None:
    """Let a replica switch to what it has staged, as its turn comes, or discard it.

    Repeated with every heartbeat until it is gone; both orders are idempotent.
    """
    for transfer_id, record in sorted(staged.items()):
        name = switch_id(transfer_id, replica.replica_id)
        if transfer_id in change.state.transfers or name in change.state.transfers:
            continue
        # What ended under this coordinator was offered to the replica, which refused
        # it or missed it for good; what it refuses now is not offered again.
        history = change.state.history
        is_ours = transfer_id in history or name in history or bool(replica.commit_failure)
        if record is not None and not is_ours and _is_wanted(change.state, replica, record):
            change.put_transfer(_restore(change.now, name, replica, record))
        else:
            change.emit(CallDiscard(transfer_id, replica.replica_id, replica.address))


def _restore(now: float, name: str, replica: Replica, record: VersionRecord) -> Transfer:
    digest = record.content_digest
    assert digest is not None
    size = digest.size_bytes
    return repair(
        Restore(replica_id=replica.replica_id, staged_by=record.transfer_id),
        FreshIds(name, 0, "", "", ""),
        record,
        Layout(None, record.layout_digest, size, size, 0),
        now,
    )


def _is_wanted(state: PoolState, replica: Replica, record: VersionRecord) -> bool:
    if record.state is not VersionState.COMMITTED:
        return False
    return record.version in wants(state, replica) and not replica.vector.holds(record.version)
