"""Restore: a replica switches to what it has itself: a copy, what it has spilled or staged.

That is a retained base, an adapter whose alias stands elsewhere, a version in its spill
directory, or what it had staged when a former coordinator committed it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.effects import CallCommit, CallRestore, CallSwitch, EventKind
from weft_rl.coordinator.decisions.effects.change import Change
from weft_rl.coordinator.decisions.purposes.repair import Repair, alias_of
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.decisions.state.replica import Replica, holds
from weft_rl.coordinator.decisions.state.transfer import Transfer
from weft_rl.coordinator.decisions.transfers import course
from weft_rl.coordinator.decisions.transfers.purpose import Turns


@dataclass(frozen=True, kw_only=True)
class Restore(Repair):
    """Transfer in which a replica switches to what it holds itself."""

    name: ClassVar[str] = "restore"
    staged_by: str = ""
    """The transfer of a former coordinator that staged what it switches to."""

    def _is_possible(self, state: PoolState, transfer: Transfer, replica: Replica) -> bool:
        version = transfer.policy_version
        has_it = bool(self.staged_by) or holds(replica, version) or version in replica.spilled
        is_free = replica.suspect is None and not state.is_quarantined(self.replica_id)
        return has_it and is_free

    def _holds_back(self, change: Change, transfer: Transfer, turns: Turns) -> bool:
        # Not by waiting for what a push interrupts.
        return self.replica_id in turns.firm

    def _start(self, change: Change, transfer: Transfer, replica: Replica) -> None:
        """Order the replica to switch: there is nothing to stage first."""
        transfer = change.put_transfer(course.at_commit_point(change, transfer, [replica]))
        order = self._order(change.state, transfer, replica)
        where = {CallRestore: "spill directory", CallSwitch: "own copy"}.get(type(order), "staging")
        text = f"{transfer.policy_version} at {self.replica_id}, from its {where}"
        change.announce(EventKind.RESTORE_BEGUN, transfer.transfer_id, text)
        change.emit(order)

    def origin(self, replica: Replica, version: PolicyVersion) -> str:
        if self.staged_by:
            return "what it has staged"
        return "its own copy" if holds(replica, version) else "its spill directory"

    def _order(
        self, state: PoolState, transfer: Transfer, replica: Replica
    ) -> CallCommit | CallSwitch | CallRestore:
        ids, version, digest = self.replica_id, transfer.policy_version, transfer.content_digest
        if holds(replica, version):
            return CallSwitch(
                transfer.transfer_id, ids, replica.incarnation, replica.address, version
            )
        assert digest is not None
        alias = alias_of(state, transfer)
        if self.staged_by:
            return course.call_to_commit(
                transfer, replica, digest, staged_by=self.staged_by, alias=alias
            )
        return CallRestore(
            transfer.transfer_id,
            ids,
            replica.incarnation,
            replica.address,
            version,
            transfer.adapter,
            digest,
            transfer.layout.digest,
            alias,
            state.settings.clone_seconds,
        )
