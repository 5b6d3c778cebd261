"""What must be true of transfers: who takes part, who has staged what, when they end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.lease_checks import fail
from tests.sim.operator_checks import out_of_transfers
from weft_rl.contract.names import BASE_POLICY, is_replica_sender
from weft_rl.coordinator.decisions.purposes.clone import Clone
from weft_rl.coordinator.decisions.purposes.rollback import RollbackPurpose
from weft_rl.coordinator.decisions.state import effects
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.decisions.state.transfer import Transfer
from weft_rl.coordinator.decisions.state.values import ContentDigest, Phase

if TYPE_CHECKING:
    from tests.sim.receiver import Receiver
    from tests.sim.world import World

#: How late the coordinator may be: a tick, and a slow disk twice.
SLACK_SECONDS = 5.0
_MAX_HISTORY = 100


class TransferChecks:
    """Remembers with whom transfers began, and what their receivers have."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._begun: dict[str, tuple[str, ...]] = {}
        self._staged: dict[tuple[str, str], dict[int, ContentDigest]] = {}
        self._bases: dict[tuple[str, str, int], bytes] = {}
        self._cloned: dict[tuple[str, str, str], set[int]] = {}

    def assigned(self, state: PoolState, transfer_id: str) -> None:
        """A transfer has a version, and those who take part."""
        if transfer_id in state.transfers:
            self._begun[transfer_id] = state.transfers[transfer_id].targets

    def stepped(self, before: PoolState, state: PoolState) -> None:
        """After every event."""
        if state.transfers is not before.transfers:
            self._check_transfers(state)
            self._check_rollbacks(before, state)
        if state.history is not before.history:
            self._check_ended(before, state)
        if state.groups is not before.groups:
            names = [group.trainer_id for group in state.groups.values()]
            if len(names) > len(set(names)) + len(state.transfers):
                fail(f"groups pile up: {names}")

    def decided(self, state: PoolState, save: effects.SaveVersion) -> None:
        """A push reached its commit point: who has staged what?"""
        record = save.record
        transfer = state.transfers.get(record.transfer_id)
        if transfer is None or transfer.phase is not Phase.COMMITTING:
            fail(f"{record.version} was committed by nobody")
        num_staged = sum(
            self._has_staged(state, transfer, replica_id, record.content_digest)
            for replica_id in transfer.targets
        )
        # What is loaded in place already is committed by those that are left.
        wanted = 1 if transfer.loading else transfer.purpose.min_replicas
        if num_staged < len(transfer.targets) or num_staged < wanted:
            fail(f"{record.version} was committed with {num_staged} replicas that have it")
        was_begun_by = self._begun.get(transfer.transfer_id)
        required = [name for name in was_begun_by or () if name in transfer.purpose.required]
        lacking = set(required).difference(transfer.targets)
        if transfer.purpose.require_all and not transfer.loading and lacking:
            fail(f"{record.version} requires all and was committed without one")
        if transfer.delta_from:
            self._check_delta(state, transfer)
        if transfer.lost:
            self._world.trace("coordinator", f"{record.version} is committed by the survivors")

    def _check_delta(self, state: PoolState, transfer: Transfer) -> None:
        """A delta is at its commit point: over the base that it is from, at every receiver."""
        group, version = state.groups[transfer.group_id], transfer.policy_version
        served = state.base_contents.get(transfer.served_before)
        if served != transfer.layout.digest + transfer.delta_from:
            fail(f"{version} is a delta and was committed over another base than it is from")
        for member in group.members:
            if member.replica_id in transfer.whole_for:
                continue  # it made it of all elements
            for index in range(member.num_receivers):
                key = transfer.transfer_id, member.replica_id, index
                if self._bases.get(key) != transfer.delta_from:
                    fail(f"{member.replica_id} made {version} of another base than it is from")
        text = f", and whole to {', '.join(transfer.sent_whole)}" if transfer.sent_whole else ""
        self._world.trace("coordinator", f"{version} is committed as a delta{text}")

    def applying(self, receiver: Receiver, transfer_id: str, base: bytes) -> None:
        """A receiver makes a version of a base and the changes that it gets."""
        self._bases[transfer_id, receiver.replica.name, receiver.index] = base

    def _has_staged(
        self, state: PoolState, transfer: Transfer, replica_id: str, digest: ContentDigest | None
    ) -> bool:
        staged = self._staged.get((transfer.group_id, replica_id), {})
        members = state.groups[transfer.group_id].members
        num_receivers = next(m.num_receivers for m in members if m.replica_id == replica_id)
        return len(staged) == num_receivers and set(staged.values()) == {digest}

    def receiving(self, receiver: Receiver, transfer_id: str, bucket: int, expected: int) -> None:
        """A bucket came."""
        replica = receiver.replica
        if bucket != expected:
            fail(f"{replica.name} got bucket {bucket} of {transfer_id}, its next is {expected}")
        # Several receivers of a replica go on from what the slowest of them has.
        if is_replica_sender(receiver.group.trainer_id) and replica.kind.num_receivers == 1:
            had = self._cloned.setdefault((replica.name, replica.incarnation, transfer_id), set())
            if bucket in had and not replica.kind.in_place:
                fail(f"{replica.name} got bucket {bucket} of {transfer_id} twice")
            had.add(bucket)

    def staging(self, receiver: Receiver, transfer_id: str, digest: ContentDigest) -> None:
        """A receiver has everything; it is about to say so."""
        key = receiver.group.group_id, receiver.replica.name
        self._staged.setdefault(key, {})[receiver.index] = digest

    def _check_rollbacks(self, before: PoolState, state: PoolState) -> None:
        """The pool goes back to a base only if it goes on serving."""
        for transfer in state.transfers.values():
            if (
                not isinstance(transfer.purpose, RollbackPurpose)
                or transfer.phase is not Phase.COMMITTING
            ):
                continue
            old = before.transfers.get(transfer.transfer_id)
            if transfer.policy != BASE_POLICY or (old and old.phase is Phase.COMMITTING):
                continue
            for replica in state.replicas.values():
                serves = replica.in_contact and not before.vector.missing_from(replica.vector)
                serves = serves and not out_of_transfers(before, replica)
                if serves and replica.replica_id not in transfer.targets:
                    fail(f"{replica.replica_id} cannot go back to {transfer.policy_version}")

    def _check_ended(self, before: PoolState, state: PoolState) -> None:
        """A rollback that failed: undone if nobody followed and nothing changed."""
        new = [ended for name, ended in state.history.items() if name not in before.history]
        rollbacks = [
            transfer
            for transfer in (*new, *state.transfers.values())
            if isinstance(transfer.purpose, RollbackPurpose) and transfer.phase >= Phase.COMMITTING
        ]
        for ended in new:
            version = ended.policy_version
            others = [t for t in rollbacks if t.policy == version.policy and t is not ended]
            if not isinstance(ended.purpose, RollbackPurpose) or not ended.failure or others:
                continue  # or another one began in the same step
            stands = state.policies[version.policy].served_version == version.version
            followers = [
                name
                for name in ended.targets
                if (replica := self._world.replicas[name]).alive and replica.stands_for(version)
            ]
            if followers and not stands:
                fail(f"{version} was undone and {followers} serve it")
            reasons = {failure.reason for failure in ended.refusals.values()}
            dirty = any(self._world.replicas[name].dirty_reason for name in ended.targets)
            if stands and reasons == {"LOAD_FAILED"} and not dirty:
                fail(f"the pool stands at {version}, to which nobody could go back")

    def _check_transfers(self, state: PoolState) -> None:
        held: dict[str, str] = {}
        for transfer in state.transfers.values():
            if transfer.phase >= Phase.COMMITTED:
                fail(f"{transfer.transfer_id} ended and is still under way")
            if isinstance(transfer.purpose, Clone):
                num_interruptions = transfer.purpose.num_interruptions
                if num_interruptions > state.settings.clone_interruptions:
                    fail(f"{transfer.transfer_id} was ended {num_interruptions} times")
            for replica_id in transfer.occupied:
                if replica_id in held:
                    fail(f"{transfer.transfer_id} and {held[replica_id]} are both on {replica_id}")
                held[replica_id] = transfer.transfer_id

    def ticked(self, state: PoolState) -> None:
        """No transfer outlives its deadline, or one that takes part."""
        now = self._world.clock.now
        for transfer in state.transfers.values():
            last = transfer.deadline
            if transfer.phase is Phase.COMMITTING:
                last = transfer.commit_at + self._world.commit_seconds
            if now > last + SLACK_SECONDS:
                fail(f"{transfer.transfer_id} is {transfer.phase.name} after its deadline")
            awaited = transfer.targets if transfer.uncommitted else transfer.switching
            for replica_id in awaited:
                replica = state.replicas.get(replica_id)
                if replica is None or replica.lost:
                    fail(f"{transfer.transfer_id} goes on with {replica_id}, which is gone")
        if len(state.history) > _MAX_HISTORY or len(state.fits) > 64:
            fail("the state grows without bound")
