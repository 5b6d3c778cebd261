"""What must be true, checked after every event.

A version is assigned once. Its commit point is one durable write, after every replica that
takes part has reported the same digest, which is the sender's, and before the first of
them serves it. A push that fails before is served nowhere; after it the pool rolls
forward, and a replica that does not follow is not ready until it is repaired. Replicas
serve what was committed, in the bytes that were committed, and go back only where the
pool has decided so. tests/sim/README.md says more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tests.sim.lease_checks import LeaseChecks, fail
from tests.sim.loss_checks import LossChecks
from tests.sim.operator_checks import OperatorChecks
from tests.sim.sleep_checks import SleepChecks
from tests.sim.stall_checks import StallChecks
from tests.sim.transfer_checks import SLACK_SECONDS, TransferChecks
from weft_rl.contract.names import BASE_POLICY, PolicyVersion
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.decisions.state.transfer import Group
from weft_rl.coordinator.decisions.state.values import (
    ContentDigest,
    StateReason,
    VersionRecord,
    VersionState,
)
from weft_rl.coordinator.decisions.transfers.abort import is_loading

if TYPE_CHECKING:
    from tests.sim.replica import SimReplica
    from tests.sim.store import Copy
    from tests.sim.trainer import Push, SimTrainer
    from tests.sim.world import World

_NEXT_STATES = {
    VersionState.STAGING: {VersionState.COMMITTED, VersionState.ABORTED},
    VersionState.COMMITTED: {VersionState.FAILED},
    VersionState.ABORTED: set[VersionState](),
    VersionState.RETIRED: set[VersionState](),
    VersionState.FAILED: set[VersionState](),
}
_HELD = (VersionState.COMMITTED, VersionState.RETIRED)
_RETIRING = (events.Retire, events.SetRetention, events.ForgetPolicy)


class Checks:
    """Sees every step, save, switch and answer of one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.leases = LeaseChecks(world)
        self.orders = OperatorChecks(world)
        self.sleeps = SleepChecks()
        self.losses = LossChecks(world)
        self.stalls = StallChecks(world)
        self.transfers = TransferChecks(world)
        self._owners: dict[PolicyVersion, str] = {}
        self._newest: dict[str, int] = {}
        self._digests: dict[PolicyVersion, ContentDigest] = {}
        self._sent: dict[str, ContentDigest] = {}
        self._ever_served: set[PolicyVersion] = set()
        self._served: dict[str, list[int]] = {}
        self._newest_epoch = 0
        self._secrets: set[str] = set()

    def catalog_lost(self, transfer_ids: set[str]) -> None:
        """The catalog is empty, or what it was some time ago; these transfers are lost."""
        catalog = self._world.catalog
        self.losses.catalog_lost(transfer_ids)
        self.leases.catalog_lost()
        self.sleeps.catalog_lost()
        self.orders.catalog_lost()
        self._owners = {v: record.transfer_id for v, record in catalog.versions.items()}
        self._newest = {name: policy.last_version for name, policy in catalog.policies.items()}
        self._digests = {
            version: record.content_digest
            for version, record in catalog.versions.items()
            if record.content_digest is not None
        }
        self._ever_served.clear()
        self._served = {
            name: [0, *self._known(name), policy.served_version]
            for name, policy in catalog.policies.items()
        }
        self._newest_epoch = catalog.epoch

    def _known(self, policy: str) -> list[int]:
        """Versions that were served once, as far as the catalog knows."""
        records = self._world.catalog.versions.items()
        return sorted(v.version for v, r in records if v.policy == policy and r.state in _HELD)

    # -- decisions -----------------------------------------------------------------

    def stepped(
        self,
        before: PoolState,
        event: events.Event,
        state: PoolState,
        emitted: Sequence[effects.Effect],
    ) -> None:
        """After every event."""
        if self._world.tracing and not isinstance(event, events.Tick | events.Heartbeat):
            self._world.trace("step", repr(event)[:300])
        for effect in emitted:
            if isinstance(effect, effects.SaveVersion):
                if isinstance(event, events.VersionDescribed):
                    self.losses.adopting(effect.record)
                elif effect.record.state is VersionState.STAGING:
                    self.leases.assigned(state, effect)
                    self.losses.assigned(before, effect.record.version)
                    self.transfers.assigned(state, effect.record.transfer_id)
                elif effect.record.state is VersionState.COMMITTED:
                    self.transfers.decided(state, effect)
            elif isinstance(effect, effects.SavePolicy):
                self.leases.saving(effect)
            elif isinstance(effect, effects.CallRetire | effects.SaveRetired):
                self._retired(state, effect, by_order=isinstance(event, _RETIRING))
            elif isinstance(event, events.Heartbeat) and isinstance(effect, effects.Reply):
                answer = effect.answer
                if isinstance(answer, effects.HeartbeatAnswer):
                    self.orders.told(event, state, answer)
                    if answer.ready:
                        self._told_ready(state, event)
            elif isinstance(effect, effects.Announce):
                self._announced(state, effect)
        self.transfers.stepped(before, state)
        if isinstance(event, events.Tick):
            self.transfers.ticked(state)
            self.stalls.ticked(state)
        self.orders.stepped(before, event, state)
        self.leases.stepped(event, emitted)
        self.sleeps.stepped(event, state, emitted)

    def _announced(self, state: PoolState, told: effects.Announce) -> None:
        if told.kind == "replica_ready" and state.replicas[told.subject].dirty_reason:
            fail(f"{told.subject} is said to be ready and is dirty")

    def _told_ready(self, state: PoolState, beat: events.Heartbeat) -> None:
        """A replica hears that it may serve."""
        pool, replica = state.vector, self._world.replicas[beat.replica_id]
        if replica.incarnation != beat.incarnation:
            return  # it died meanwhile
        for transfer in state.transfers.values():
            switching = beat.replica_id in transfer.switching
            if switching and not transfer.replica_id:
                return  # until its own switch it serves what it should
        # What was said last may be older, or newer, than what it serves now.
        if pool.missing_from(beat.report.version_vector) and pool.missing_from(replica.vector):
            lacking = pool.missing_from(replica.vector)
            fail(f"{beat.replica_id} was told that it is ready and lacks {lacking}")
        if (
            beat.report.dirty_reason
            and replica.dirty_reason
            and not is_loading(state, replica.name)
        ):
            fail(f"{beat.replica_id} was told that it is ready and is dirty")

    def group_opened(self, group: Group) -> None:
        """Members are let in, and may be told of it."""
        self.losses.group_opened(self._world.coordinator.state, group)
        if group.epoch <= self._newest_epoch:
            fail(f"epoch {group.epoch} after {self._newest_epoch}")
        if group.secret in self._secrets:
            fail(f"the secret of {group.group_id} was another group's")
        self._newest_epoch = group.epoch
        self._secrets.add(group.secret)

    def _retired(
        self, state: PoolState, effect: effects.CallRetire | effects.SaveRetired, *, by_order: bool
    ) -> None:
        """Versions leave a replica, or the catalog says that they are gone."""
        versions = effect.versions if isinstance(effect, effects.CallRetire) else (effect.version,)
        pinned = self._world.operator.pinned.intersection(versions)
        # A base is retired where it is replaced; pinned, replicas keep their copies of it.
        pinned = {version for version in pinned if version.policy != BASE_POLICY}
        if pinned:
            fail(f"{sorted(pinned)} are pinned and retired")
        if by_order:
            return  # replicas drop it by and by
        if isinstance(effect, effects.SaveRetired) and effect.version.policy != BASE_POLICY:
            for replica in state.replicas.values():
                if not replica.lost and replica.vector.holds(effect.version):
                    fail(f"{effect.version} is retired and {replica.replica_id} serves it")

    # -- the catalog -----------------------------------------------------------------

    def saving(self, saves: Sequence[effects.Save]) -> None:
        """Before a transaction is durable."""
        self.orders.saving(saves)
        again: set[PolicyVersion] = set()  # what the same transaction makes COMMITTED before
        records: dict[PolicyVersion, VersionRecord] = {}  # and what it has written before
        for save in saves:
            if isinstance(save, effects.SaveVersion):
                self._saving_version(save, again, records)
                records[save.record.version] = save.record
            elif isinstance(save, effects.SavePolicy):
                policy = save.policy
                if policy.last_version < self._newest.get(policy.name, 0):
                    fail(f"last_version of {policy.name} shrank to {policy.last_version}")
                self._newest[policy.name] = policy.last_version
                served = self._served.setdefault(policy.name, [0])
                is_newest = policy.served_version == policy.last_version
                leapt = self.losses.num_losses > 0  # beyond what was being pushed
                if policy.served_version not in served and not (is_newest or leapt):
                    fail(f"{policy.name} goes back to {policy.served_version}, never served")
                if served[-1] != policy.served_version:
                    served.append(policy.served_version)
            elif isinstance(save, effects.SaveCommitted):
                record = self._world.catalog.versions.get(save.version)
                if save.version.version and (record is None or record.state not in _HELD):
                    fail(f"{save.version} is served again and was never committed")
                again.add(save.version)

    def saved(self) -> None:
        """After a transaction."""
        catalog = self._world.catalog
        for policy in catalog.policies.values():
            version = PolicyVersion(policy.name, policy.served_version)
            record = catalog.versions.get(version)
            if version.version and (record is None or record.state is not VersionState.COMMITTED):
                found = record.state.name if record else "nothing"
                fail(f"the pool serves {version}, the catalog has {found}")

    def num_served(self, policy: str) -> int:
        """How often the pool changed to another version of a policy."""
        return len(self._served.get(policy, ()))

    def served_last(self, policy: str) -> int:
        """What the last durable decision says."""
        return self._served.get(policy, [0])[-1]

    def rolled_back(self, answer: effects.RollbackAnswer, number: int) -> None:
        """An operator was told; ``number`` is ``num_served`` when it was asked."""
        policy, version = answer.version.policy, answer.version.version
        since = self._served.get(policy, [0])[max(0, number - 1) :]
        if version not in since:
            fail(f"{answer.version} was said to be served again; since then: {since}")

    def _saving_version(
        self,
        save: effects.SaveVersion,
        again: set[PolicyVersion],
        records: Mapping[PolicyVersion, VersionRecord],
    ) -> None:
        record, version = save.record, save.record.version
        owner = self._owners.setdefault(version, record.transfer_id)
        is_adopted = record.transfer_id == f"adopted:{version}"
        if owner != record.transfer_id:
            fail(f"{version} was assigned to {owner} and to {record.transfer_id}")
        other = self._world.catalog.find_request(record.trainer_id, record.request_id)
        if other is not None and other.version != version:
            fail(f"request {record.request_id} burnt {other.version} and {version}")
        old = records.get(version) or self._world.catalog.versions.get(version)
        before = old.state if old else VersionState.STAGING
        if version in again:  # a rollback from it that nobody could follow
            before = VersionState.COMMITTED
        if old is not None and old.state is VersionState.ABORTED and not old.content_digest:
            # It may have been committed in what an older copy of the catalog has lost.
            is_adopted |= record.state in _HELD and self.losses.num_losses > 0
        if is_adopted:
            pass
        elif record.state is not before and record.state not in _NEXT_STATES[before]:
            fail(f"{version} went from {before.name} to {record.state.name}")
        if (
            old is None
            and not is_adopted
            and any(
                known.policy == version.policy and known.version > version.version
                for known in self._world.catalog.versions
            )
        ):
            fail(f"{version} is not the newest of its policy")
        if record.state is VersionState.ABORTED and version in self._ever_served:
            fail(f"{version} is aborted and was served")
        if record.state is VersionState.FAILED:
            self._failed(version)
        if record.state is VersionState.COMMITTED or is_adopted:
            if record.content_digest is None:
                fail(f"{version} was committed without a digest")
            elif is_adopted:
                self._digests[version] = record.content_digest
                self._served.setdefault(version.policy, [0]).insert(1, version.version)
            else:
                self._committed(version, record.transfer_id, record.content_digest)

    def _failed(self, version: PolicyVersion) -> None:
        """It was undone: nobody serves it, and nobody will (see ``loaded``). One that was
        not heard yet may have the number of a catalog that was lost, with other bytes."""
        digest = self._digests.get(version)
        for replica in self._world.replicas.values():
            is_it = replica.vector.holds(version) and replica.served.get(version) == digest
            if replica.alive and is_it:
                fail(f"{version} has failed and {replica.name} serves it")

    def _committed(self, version: PolicyVersion, transfer_id: str, digest: ContentDigest) -> None:
        self.losses.committed(version, digest)
        if self._digests.setdefault(version, digest) != digest:
            fail(f"the digest of {version} changed after its commit")
        if self._sent.get(transfer_id) != digest:
            fail(f"{version} was committed with a digest that is not its sender's")

    # -- what is served, and what is told ----------------------------------------------

    def sending(self, begun: effects.BeginAnswer, digest: ContentDigest) -> None:
        """A trainer was told its version."""
        if self.losses.is_lost(begun.transfer_id):
            return
        record = self._world.catalog.versions.get(begun.version)
        if record is None or record.transfer_id != begun.transfer_id:
            fail(f"{begun.version} was told before it was on disk")
        self._sent[begun.transfer_id] = digest

    def loaded(self, replica: SimReplica, copy: Copy, stands_for: int, *, is_late: bool) -> None:
        """A replica is about to serve a version; its bare name is to stand for one."""
        version = copy.version
        self.losses.serving(replica, version, copy.digest)
        if self._is_of_lost(is_late=is_late) and self.losses.was_committed(version, copy.digest):
            return
        record = self._world.catalog.versions.get(version)
        state = record.state if record else None
        if state not in _HELD:  # retired: an order that was given before came late
            found = state.name if state else "nothing"
            fail(f"{replica.name} switches to {version}, the catalog has {found}")
        if copy.digest != self._digests.get(version):
            fail(f"{replica.name} serves other bytes as {version} than were committed")
        self.standing_for(replica, PolicyVersion(version.policy, stands_for), is_late=is_late)
        self._ever_served.add(version)

    def _is_of_lost(self, *, is_late: bool) -> bool:
        """Whether an order may be that of a coordinator whose catalog is lost."""
        is_late = is_late or not self._world.coordinator.alive
        return is_late and self.losses.num_losses > 0

    def standing_for(self, replica: SimReplica, version: PolicyVersion, *, is_late: bool) -> None:
        """The base, or an adapter's name, is about to stand for a version.

        Of replicas in contact: bases go where the pool decided later than on the one
        before; an adapter's name may stand for each of its versions until it stands for
        the pool's.
        """
        policy = version.policy
        if self._is_of_lost(is_late=is_late):
            return
        decided = self._served.get(policy, [0])
        last = {number: place for place, number in enumerate(decided)}
        if version.version not in last:
            fail(f"{replica.name} switches to {version}, which the pool never served")
        if policy == BASE_POLICY:
            goes_back = last[version.version] < last.get(replica.vector.base, -1)
        else:
            entry = replica.vector.adapters.get(policy)
            goes_back = entry is not None and version.version != entry.alias == decided[-1]
        state = self._world.coordinator.state
        known = state.replicas.get(replica.name)
        in_service = known is not None and known.in_contact
        # Until a clone's order that was overtaken by a rollback is answered, it is not ready.
        if in_service and known.announced is not StateReason.READY:
            in_service = not any(
                t.replica_id == replica.name and t.policy == policy and replica.name in t.switching
                for t in state.transfers.values()
            )
        # An order that nobody waits for any more may still be carried out, and what was
        # lost may have come back meanwhile; its next heartbeat tells.
        if goes_back and in_service and not is_late:
            fail(f"{replica.name} goes back to {version} by itself; decided: {decided}")

    def retiring(self, replica: SimReplica, version: PolicyVersion) -> None:
        """A replica is about to drop a version."""
        if version in self._world.operator.pinned:
            fail(f"{replica.name} drops {version}, which is pinned")

    def dropping(self, replica: SimReplica, version: PolicyVersion, *, is_late: bool) -> None:
        """A replica in contact has dropped its copy of a base, as it loaded another."""
        known = self._world.coordinator.state.replicas.get(replica.name)
        in_contact = known is not None and known.in_contact
        if version in self._world.operator.pinned and in_contact and not is_late:
            fail(f"{replica.name} dropped its copy of {version}, which is pinned")

    def push_ended(self, trainer: SimTrainer, push: Push) -> None:
        """A trainer's push is over."""
        world = self._world
        shown = push.version or push.policy
        world.trace(trainer.name, f"pushed {shown}: {push.error or 'committed'}")
        late = world.clock.now - push.deadline
        awake_at = max(trainer.frozen_until, trainer.worker.frozen_until)
        if late > SLACK_SECONDS and awake_at + SLACK_SECONDS < world.clock.now:
            fail(f"the push of {shown} ended {late:.1f} s after its deadline")
        self.stalls.push_ended(push)
        if push.error is not None and push.error.reason == "DELTA_REFUSED":
            fail(f"the push of {shown} ended with {push.error!r} and was not sent whole")
        if push.error is None and not self.losses.is_lost(push.transfer_id):
            record = world.catalog.versions.get(push.version) if push.version else None
            if record is None or record.state not in _HELD:
                fail(f"{trainer.name} was told that {shown} is committed; it is not")

    def digest_of(self, version: PolicyVersion) -> ContentDigest | None:
        """What was committed."""
        return self._digests.get(version)
