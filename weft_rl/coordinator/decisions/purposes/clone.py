"""Clone: a replica sends another a version that it lacks, over a side group of the two.

It is the same version, with no new number and no lease; generation continues at the source. A
clone is for one replica, a push for all. So a push does not wait for clones: it interrupts those
of the replicas that it goes to. The target keeps the buckets that it has verified. The clone waits
for its turn anew and resumes from there.

Replicas must catch up under continuous pushes, too. So a clone that was interrupted often, or is
old, goes before pushes and is not interrupted again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from weft_rl.containers import replace
from weft_rl.coordinator.decisions.purposes.repair import Repair, alias_of, back_off
from weft_rl.coordinator.decisions.state.change import Change
from weft_rl.coordinator.decisions.state.effects import CallSend, EventKind, OpenGroup
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.decisions.state.replica import Replica, holds
from weft_rl.coordinator.decisions.state.replica_state import takes_clones, versions_to_bring
from weft_rl.coordinator.decisions.state.transfer import Attempt, Group, Transfer, group_members
from weft_rl.coordinator.decisions.state.values import ContentDigest, Failure, Phase
from weft_rl.coordinator.decisions.transfers import (
    abort,
    lifecycle,
    preflight,
    regrouping,
    suspects,
)
from weft_rl.coordinator.decisions.transfers.abort import discard
from weft_rl.coordinator.decisions.transfers.purpose import AdmissionQueue


@dataclass(frozen=True, kw_only=True)
class Clone(Repair):
    """Transfer in which a replica brings a version to another that lacks it."""

    name: ClassVar[str] = "clone"
    source: str = field()
    num_interruptions: int = 0
    """Number of times that it gave way to a change of the pool."""

    # -- its turn -----------------------------------------------------------------

    def place(self, state: PoolState, transfer: Transfer, now: float) -> int:
        return 0 if self._goes_first(state, transfer, now) else 2

    def _goes_first(self, state: PoolState, transfer: Transfer, now: float) -> bool:
        settings = state.settings
        was_patient = now - transfer.begin_at >= settings.clone_patience_seconds
        return was_patient or self.num_interruptions >= settings.clone_interruptions

    def _is_possible(self, state: PoolState, transfer: Transfer, replica: Replica) -> bool:
        source = state.replicas.get(self.source)
        return (
            source is not None
            and not source.is_away
            and source.suspect is None
            and not state.is_kept_out(self.source)
            and takes_clones(state, replica)
            and holds(source, transfer.policy_version)
        )

    def _fits(self, change: Change, transfer: Transfer, replica: Replica) -> bool:
        # It may have joined after what it lacks was begun, and be unlike the others.
        is_described = preflight.are_described(change.state, [replica])
        return is_described and preflight.fits(change, transfer, [replica])

    def _on_dropped(self, change: Change, transfer: Transfer) -> None:
        if self.num_interruptions:  # what was verified is of no use any more
            discard(change, transfer.transfer_id, [self.replica_id])

    def _holds_back(self, change: Change, transfer: Transfer, queue: AdmissionQueue) -> bool:
        # Not while its own target is busy with something else.
        is_first = self._goes_first(change.state, transfer, change.now)
        return is_first and self.replica_id not in queue.repaired

    def _start(self, change: Change, transfer: Transfer, replica: Replica) -> None:
        source = change.state.replicas[self.source]
        seconds = change.state.settings.clone_seconds
        name, secret = transfer.ids.group(self.num_interruptions)
        group = Group(
            name,
            secret,
            change.next_epoch(),
            transfer.trainer_id,
            "",
            transfer.backend,
            group_members([replica]),
        )
        transfer = replace(
            transfer,
            phase=Phase.FORMING,
            create_time=change.state.wall(change.now),
            group_id=group.group_id,
            epoch=group.epoch,
            targets=(replica.replica_id,),
            deadline=change.now + seconds,
        )
        change.put_group(group)
        change.put_transfer(transfer)
        change.announce_transfer(
            EventKind.CLONE_BEGUN,
            transfer,
            f" from {self.source} to {self.replica_id}, "
            f"epoch {group.epoch}, {transfer.layout.total_bytes} bytes",
        )
        change.emit(OpenGroup(group))
        change.emit(
            CallSend(
                transfer.transfer_id,
                source.replica_id,
                source.address,
                group,
                transfer.policy_version,
                transfer.ids.nonce,
                seconds,
            )
        )
        regrouping.call_to_join(change, transfer, group)

    # -- under way ----------------------------------------------------------------

    def gives_way(self, state: PoolState, transfer: Transfer, now: float) -> bool:
        under_way = transfer.phase is not Phase.WAITING and transfer.uncommitted
        return under_way and not self._goes_first(state, transfer, now)

    def on_interrupted(self, change: Change, transfer: Transfer, by: Transfer) -> None:
        why = f"a {by.purpose.name} of {by.policy} goes first"
        abort.close_group(change, transfer.group_id, f"{why}; the clone resumes after it")
        abort.abandon(change, transfer, transfer.targets, Failure("TRANSFER_ABORTED", why))
        change.put_transfer(
            replace(
                transfer,
                phase=Phase.WAITING,
                group_id="",
                epoch=0,
                targets=(),
                deadline=float("inf"),
                attempt=Attempt(),
                loading=frozenset(),
                start_at=0.0,
                purpose=replace(self, num_interruptions=self.num_interruptions + 1),
            )
        )
        change.announce_transfer(
            EventKind.CLONE_INTERRUPTED,
            transfer,
            f" from {self.source} to {self.replica_id}: {why}",
        )

    def why_unwanted(self, state: PoolState, transfer: Transfer) -> str:
        replica = state.replicas.get(self.replica_id)
        if state.is_kept_out(self.source):
            return f"{self.source} was taken out of service"
        if replica is None:
            return ""  # its loss is told in other ways
        if not takes_clones(state, replica):
            return f"{self.replica_id} was taken out of service"
        # One that is being loaded in place continues: only that makes its target's weights whole.
        if not transfer.loading and transfer.policy_version not in versions_to_bring(
            state, replica
        ):
            return f"the pool does not serve {transfer.policy_version} any more"
        return ""

    def on_members_lost(
        self, change: Change, transfer: Transfer, lost: Mapping[str, Failure]
    ) -> None:
        replica = change.state.replicas.get(self.replica_id)
        if replica is not None and replica.suspect is None and self.replica_id in lost:
            # Most often its process is dead: no other clone is begun before it is heard again.
            why = lost[self.replica_id].message
            change.put_replica(replace(replica, unheard_reason=why))
        abort.abort(change, transfer, next(iter(lost.values())))  # it is scheduled anew

    def on_sender_stalled(self, change: Change, transfer: Transfer, failure: Failure) -> None:
        suspects.suspect(change, self.source, failure.message)
        abort.abort(change, transfer, failure)

    def on_aborted(self, change: Change, ended: Transfer) -> None:
        failure, version = ended.failure, ended.policy_version
        assert failure is not None
        back_off(change, self.replica_id, version, self.source, failure)
        text = f": {failure.message} [{failure.reason}]"
        change.announce_transfer(EventKind.CLONE_FAILED, ended, text)

    def on_staged(self, change: Change, transfer: Transfer, digest: ContentDigest) -> None:
        """Commit if the digest that both replicas report is the catalog's, too; else abort."""
        expected = transfer.content_digest
        assert expected is not None
        if digest != expected:
            why = (
                f"{self.source} has {digest.value.hex()} for {transfer.policy_version}, the "
                f"catalog {expected.value.hex()}: its copy is not what was committed"
            )
            failure = Failure("DIGEST_MISMATCH", why, {"member": self.source})
            abort.abort(change, transfer, failure)
            return
        # Its source has done its part, however long the target takes to switch.
        abort.end_group(change, transfer.group_id, "its clone is staged")
        replica = change.state.replicas[self.replica_id]
        transfer = change.put_transfer(lifecycle.at_commit_point(change, transfer, [replica]))
        alias = alias_of(change.state, transfer)
        change.emit(lifecycle.call_to_commit(transfer, replica, expected, alias=alias))
