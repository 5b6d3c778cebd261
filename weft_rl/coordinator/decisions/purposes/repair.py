"""Repairs: one replica is brought what the pool serves already, without a trainer.

What clones and restores have in common, and restores. A failure changes nothing but the time
of the next attempt.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from weft_rl.containers import replace
from weft_rl.contract.errors import WeftError
from weft_rl.contract.names import BASE_POLICY, PolicyVersion, replica_sender
from weft_rl.coordinator.decisions.state.change import Change
from weft_rl.coordinator.decisions.state.effects import (
    CallCommit,
    CallRestore,
    CallSwitch,
    EventKind,
)
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.decisions.state.replica import Backoff, Replica, can_switch
from weft_rl.coordinator.decisions.state.replica_state import obeys_pins, versions_to_bring
from weft_rl.coordinator.decisions.state.transfer import Transfer, TransferIds
from weft_rl.coordinator.decisions.state.values import (
    Failure,
    Phase,
    PolicyKind,
    VersionLayout,
    VersionRecord,
)
from weft_rl.coordinator.decisions.transfers import lifecycle
from weft_rl.coordinator.decisions.transfers.purpose import AdmissionQueue, Purpose

#: Between two attempts; doubled with each failure, from the first to the second.
FIRST_BACKOFF_SECONDS = 1.0
LONGEST_BACKOFF_SECONDS = 60.0


def back_off(
    change: Change, replica_id: str, version: PolicyVersion, source: str, failure: Failure
) -> None:
    """Postpone the next attempt at bringing a version to a replica."""
    replica = change.state.replicas.get(replica_id)
    if replica is None:
        return
    old = replica.backoffs.get(version)
    count = old.count + 1 if old else 1
    delay = min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** min(count - 1, 30))
    why = f"{failure.message} [{failure.reason}]"
    backoff = Backoff(count, change.now + delay, source, why)
    change.put_replica(replace(replica, backoffs={**replica.backoffs, version: backoff}))


@dataclass(frozen=True, kw_only=True)
class Repair(Purpose):
    """Transfer that brings one replica a version that the pool serves."""

    replica_id: str = field()

    def admit(self, change: Change, transfer: Transfer, queue: AdmissionQueue) -> Iterable[str]:
        state = change.state
        replica = state.replicas.get(self.replica_id)
        if (
            replica is None
            or replica.is_away
            or transfer.policy_version not in versions_to_bring(state, replica)
            or not self._is_possible(state, transfer, replica)
        ):
            change.drop_transfer(transfer.transfer_id)
            self._on_dropped(change, transfer)
            return ()
        if transfer.kind is PolicyKind.BASE and not obeys_pins(state, replica):
            return ()
        try:
            if not self._fits(change, transfer, replica):
                return ()
        except WeftError as error:
            change.drop_transfer(transfer.transfer_id)
            self._on_dropped(change, transfer)
            self._on_failed(change, transfer, Failure.of(error))
            return ()
        needed = {self.replica_id, self.source or self.replica_id}
        if queue.taken & needed:
            return needed if self._holds_back(change, transfer, queue) else ()
        self._start(change, transfer, replica)
        return needed

    def _fits(self, change: Change, transfer: Transfer, replica: Replica) -> bool:
        """Return whether the version fits; False while that is looked up, an error if not."""
        return True

    @abstractmethod
    def _is_possible(self, state: PoolState, transfer: Transfer, replica: Replica) -> bool:
        """Return whether what the repair needs is still there."""

    @abstractmethod
    def _holds_back(self, change: Change, transfer: Transfer, queue: AdmissionQueue) -> bool:
        """Return whether it keeps what it needs from those behind it while it cannot start."""

    @abstractmethod
    def _start(self, change: Change, transfer: Transfer, replica: Replica) -> None:
        """Start the transfer, since its turn has come."""

    def _on_dropped(self, change: Change, transfer: Transfer) -> None:
        """Clean up after it was dropped while it waited: not wanted or not possible any more."""

    def on_answered(self, change: Change, transfer: Transfer) -> None:
        """End it: the replica serves the version, or it will be tried again."""
        failure = next(iter(transfer.refusals.values()), None)
        phase = Phase.ABORTED if failure else Phase.COMMITTED
        change.end_transfer(replace(transfer, phase=phase, failure=failure))
        if failure:
            self._on_failed(change, transfer, failure)
            return
        seconds = change.now - transfer.begin_at
        text = f" served by {self.replica_id}, {transfer.layout.total_bytes} bytes"
        change.announce_transfer(
            EventKind(f"{self.name}_ended"), transfer, f"{text}, {seconds:.3f} seconds"
        )

    def _on_failed(self, change: Change, transfer: Transfer, failure: Failure) -> None:
        version, replica_id = transfer.policy_version, self.replica_id
        back_off(change, replica_id, version, self.source, failure)
        text = f" at {replica_id}: {failure.message} [{failure.reason}]"
        change.announce_transfer(EventKind(f"{self.name}_failed"), transfer, text)


def waiting_repair(
    purpose: Repair,
    ids: TransferIds,
    record: VersionRecord,
    layout: VersionLayout,
    now: float,
    backend: str = "",
) -> Transfer:
    """Return a transfer that waits to bring the version of ``record``."""
    version: PolicyVersion = record.version
    return Transfer(
        ids=ids,
        purpose=purpose,
        policy=version.policy,
        kind=PolicyKind.BASE if version.policy == BASE_POLICY else PolicyKind.ADAPTER,
        trainer_id=replica_sender(purpose.source or purpose.replica_id),
        layout=layout,
        adapter=record.adapter,
        backend=backend,
        begin_at=now,
        version=version.version,
        content_digest=record.content_digest,
    )


def alias_of(state: PoolState, transfer: Transfer) -> int:
    """Return what an adapter's bare name stands for once the replica has this version."""
    policy = state.policies[transfer.policy]
    return policy.served_version if policy.kind is PolicyKind.ADAPTER else 0


@dataclass(frozen=True, kw_only=True)
class Restore(Repair):
    """Transfer in which a replica switches to what it holds itself."""

    name: ClassVar[str] = "restore"
    staged_by: str = ""
    """The transfer of a former coordinator that staged what it switches to."""

    def _is_possible(self, state: PoolState, transfer: Transfer, replica: Replica) -> bool:
        version = transfer.policy_version
        has_it = bool(self.staged_by) or can_switch(replica, version) or version in replica.spilled
        is_free = replica.suspect is None and not state.is_kept_out(self.replica_id)
        return has_it and is_free

    def _holds_back(self, change: Change, transfer: Transfer, queue: AdmissionQueue) -> bool:
        # Not by waiting for what a push interrupts.
        return self.replica_id in queue.firm

    def _start(self, change: Change, transfer: Transfer, replica: Replica) -> None:
        transfer = change.put_transfer(lifecycle.at_commit_point(change, transfer, [replica]))
        order = self._order(change.state, transfer, replica)
        where = {CallRestore: "spill directory", CallSwitch: "own copy"}.get(type(order), "staging")
        text = f" at {self.replica_id}, from its {where}"
        change.announce_transfer(EventKind.RESTORE_BEGUN, transfer, text)
        change.emit(order)

    def origin(self, replica: Replica, version: PolicyVersion) -> str:
        if self.staged_by:
            return "what it has staged"
        return "its own copy" if can_switch(replica, version) else "its spill directory"

    def _order(
        self, state: PoolState, transfer: Transfer, replica: Replica
    ) -> CallCommit | CallSwitch | CallRestore:
        ids, version, digest = self.replica_id, transfer.policy_version, transfer.content_digest
        if can_switch(replica, version):
            return CallSwitch(
                transfer.transfer_id, ids, replica.incarnation, replica.address, version
            )
        assert digest is not None
        alias = alias_of(state, transfer)
        if self.staged_by:
            return lifecycle.call_to_commit(
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
