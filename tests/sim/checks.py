"""What must be true, checked after every event; see section 6 of the design."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.contract.names import BASE_POLICY, PolicyVersion
from weft.coordinator import effects, events
from weft.coordinator.membership import standing
from weft.coordinator.state import ContentDigest, Phase, Standing, State, VersionState

if TYPE_CHECKING:
    from tests.sim.replica import SimReplica
    from tests.sim.trainer import Push, SimTrainer
    from tests.sim.world import World

_NEXT_STATES = {
    VersionState.STAGING: {VersionState.COMMITTED, VersionState.ABORTED},
    VersionState.COMMITTED: {VersionState.RETIRED, VersionState.ABORTED},
    VersionState.ABORTED: set[VersionState](),
    VersionState.RETIRED: set[VersionState](),
}
_HELD = (VersionState.COMMITTED, VersionState.RETIRED)
#: How late the coordinator may be: a tick, and a slow disk twice.
_SLACK_SECONDS = 5.0
_MAX_HISTORY = 100


class Violation(AssertionError):
    """Something that must be true is not."""


class Checks:
    """Sees every step, save, switch and answer of one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._owners: dict[PolicyVersion, str] = {}
        self._newest: dict[str, int] = {}
        self._digests: dict[PolicyVersion, ContentDigest] = {}
        self._sent: dict[str, ContentDigest] = {}
        self._ever_served: set[PolicyVersion] = set()
        self._holders: dict[tuple[str, int], tuple[str, str]] = {}
        self._newest_token: dict[str, int] = {}
        self._asked: dict[str, set[tuple[str, int]]] = {}

    def _fail(self, what: str) -> None:
        raise Violation(what)

    # -- decisions -----------------------------------------------------------------

    def stepped(
        self,
        before: State,
        event: events.Event,
        state: State,
        emitted: Sequence[effects.Effect],
    ) -> None:
        """After every event."""
        if self._world.tracing and not isinstance(event, events.Tick | events.Heartbeat):
            self._world.trace("step", repr(event)[:300])
        for effect in emitted:
            if isinstance(effect, effects.SaveVersion):
                if effect.record.state is VersionState.STAGING:
                    self._assigned(state, effect)
            elif isinstance(effect, effects.SavePolicy):
                self._policy_saved(effect)
        if state.transfers is not before.transfers:
            self._check_transfers(state)
        if state.groups is not before.groups:
            names = [group.trainer_id for group in state.groups.values()]
            if len(names) > len(set(names)) + len(state.transfers):
                self._fail(f"groups pile up: {names}")
        if isinstance(event, events.Tick):
            self._check_deadlines(state)

    def _assigned(self, state: State, save: effects.SaveVersion) -> None:
        record = save.record
        policy, transfer = (
            state.policies[record.version.policy],
            state.transfers.get(record.transfer_id),
        )
        lease = policy.lease
        if transfer is None:
            return  # it ended in the same step
        now = self._world.clock.now
        if lease is None or lease.expires_at <= now:
            self._fail(f"{record.version} was assigned without a lease")
        elif transfer.fencing_token != lease.fencing_token or (
            lease.fencing_token < self._newest_token.get(policy.name, 0)
        ):
            self._fail(f"{record.version} was assigned under an old lease")
        elif (lease.trainer_id, lease.fencing_token) not in self._asked[record.request_id]:
            self._fail(f"{record.version} was assigned to a fenced trainer")

    def _policy_saved(self, save: effects.SavePolicy) -> None:
        policy = save.policy
        if policy.fencing_token < self._newest_token.get(policy.name, 0):
            self._fail(f"the fencing token of {policy.name} shrank to {policy.fencing_token}")

    def _check_transfers(self, state: State) -> None:
        held: dict[str, str] = {}
        for transfer in state.transfers.values():
            if transfer.phase >= Phase.COMMITTED:
                self._fail(f"{transfer.transfer_id} ended and is still under way")
            for replica_id in transfer.targets:
                if replica_id in held:
                    self._fail(
                        f"{transfer.transfer_id} and {held[replica_id]} are both on {replica_id}"
                    )
                held[replica_id] = transfer.transfer_id

    def _check_deadlines(self, state: State) -> None:
        now = self._world.clock.now
        for transfer in state.transfers.values():
            last = transfer.deadline
            if transfer.phase is Phase.COMMITTING:
                last = transfer.commit_at + self._world.commit_seconds
            if now > last + _SLACK_SECONDS:
                self._fail(f"{transfer.transfer_id} is {transfer.phase.name} after its deadline")
            awaited = transfer.targets if transfer.uncommitted else transfer.switching
            for replica_id in awaited:
                replica = state.replicas.get(replica_id)
                if replica is None or replica.lost:
                    self._fail(f"{transfer.transfer_id} goes on with {replica_id}, which is gone")
        if len(state.history) > _MAX_HISTORY or len(state.fits) > 64:
            self._fail("the state grows without bound")

    # -- the catalog -----------------------------------------------------------------

    def saving(self, saves: Sequence[effects.Save]) -> None:
        """Before a transaction is durable."""
        for save in saves:
            if isinstance(save, effects.SaveVersion):
                self._saving_version(save)
            elif isinstance(save, effects.SavePolicy):
                policy = save.policy
                if policy.last_version < self._newest.get(policy.name, 0):
                    self._fail(f"last_version of {policy.name} shrank to {policy.last_version}")
                self._newest[policy.name] = policy.last_version

    def _saving_version(self, save: effects.SaveVersion) -> None:
        record, version = save.record, save.record.version
        owner = self._owners.setdefault(version, record.transfer_id)
        if owner != record.transfer_id:
            self._fail(f"{version} was assigned to {owner} and to {record.transfer_id}")
        other = self._world.catalog.find_request(record.trainer_id, record.request_id)
        if other is not None and other.version != version:
            self._fail(f"request {record.request_id} burnt {other.version} and {version}")
        old = self._world.catalog.versions.get(version)
        before = old.state if old else VersionState.STAGING
        if record.state is not before and record.state not in _NEXT_STATES[before]:
            self._fail(f"{version} went from {before.name} to {record.state.name}")
        if old is None and any(
            known.policy == version.policy and known.version > version.version
            for known in self._world.catalog.versions
        ):
            self._fail(f"{version} is not the newest of its policy")
        if record.state is VersionState.ABORTED and version in self._ever_served:
            self._fail(f"{version} is aborted and was served")
        if record.state is VersionState.COMMITTED:
            if record.content_digest is None:
                self._fail(f"{version} was committed without a digest")
            else:
                self._committed(version, record.transfer_id, record.content_digest)

    def _committed(self, version: PolicyVersion, transfer_id: str, digest: ContentDigest) -> None:
        if self._digests.setdefault(version, digest) != digest:
            self._fail(f"the digest of {version} changed after its commit")
        if self._sent.get(transfer_id) != digest:
            self._fail(f"{version} was committed with a digest that is not its sender's")

    # -- what is served, and what is told ----------------------------------------------

    def asking(self, trainer: SimTrainer, push: Push, token: int) -> None:
        """A trainer calls BeginTransfer."""
        self._asked.setdefault(push.request_id, set()).add((trainer.name, token))

    def sending(self, begun: effects.BeginAnswer, digest: ContentDigest) -> None:
        """A trainer was told its version."""
        record = self._world.catalog.versions.get(begun.version)
        if record is None or record.transfer_id != begun.transfer_id:
            self._fail(f"{begun.version} was told before it was on disk")
        self._sent[begun.transfer_id] = digest

    def switching(
        self,
        replica: SimReplica,
        transfer_id: str,
        version: PolicyVersion,
        digest: ContentDigest,
    ) -> None:
        """A replica is about to serve a version."""
        record = self._world.catalog.versions.get(version)
        state = record.state if record else None
        if state not in _HELD:  # retired: an order that was given before came late
            found = state.name if state else "nothing"
            self._fail(f"{replica.name} switches to {version}, the catalog has {found}")
        if digest != self._sent.get(transfer_id) or digest != self._digests.get(version):
            self._fail(f"{replica.name} serves other bytes as {version} than were sent")
        if version.policy == BASE_POLICY and version.version < replica.vector.base:
            self._fail(f"{replica.name} goes back to {version}")
        self._ever_served.add(version)

    def lease_told(self, answer: effects.LeaseAnswer) -> None:
        """A lease was granted or renewed."""
        lease = answer.lease
        holder = (lease.trainer_id, lease.session_id)
        known = self._holders.setdefault((answer.policy, lease.fencing_token), holder)
        if known != holder:
            self._fail(f"token {lease.fencing_token} of {answer.policy}: {known} and {holder}")
        newest = self._newest_token.get(answer.policy, 0)
        if lease.fencing_token < newest:
            self._fail(f"{answer.policy}: token {lease.fencing_token} after {newest}")
        self._newest_token[answer.policy] = lease.fencing_token

    def push_ended(self, trainer: SimTrainer, push: Push) -> None:
        """A trainer's push is over."""
        world = self._world
        shown = push.version or push.policy
        world.trace(trainer.name, f"pushed {shown}: {push.error or 'committed'}")
        late = world.clock.now - push.deadline
        if late > _SLACK_SECONDS and trainer.frozen_until + _SLACK_SECONDS < world.clock.now:
            self._fail(f"the push of {shown} ended {late:.1f} s after its deadline")
        if push.error is None:
            record = world.catalog.versions.get(push.version) if push.version else None
            if record is None or record.state not in _HELD:
                self._fail(f"{trainer.name} was told that {shown} is committed; it is not")

    # -- after the faults ----------------------------------------------------------------

    def settled(self) -> None:
        """Nothing is under way: nothing of it may be left."""
        world, coordinator = self._world, self._world.coordinator
        state = coordinator.state
        left = {
            "transfers": list(state.transfers),
            "waiting calls": list(coordinator.calls),
            "describers": list(state.target_tickets),
            "preflights": list(state.fits_under_way),
            "calls to replicas": [None] * coordinator.num_calls_out,
            "staged bytes": [
                (name, staged)
                for name, replica in world.replicas.items()
                for staged in replica.staged
            ],
        }
        # A heartbeat or renewal may just be on its way: let those end.
        if left["waiting calls"]:
            world.clock.run_until(world.clock.now + 0.1)
            left["waiting calls"] = [t for t in coordinator.calls if t in left["waiting calls"]]
        for what, things in left.items():
            if things:
                self._fail(f"{what} are left: {things}")
        if state.discards:
            self._fail(f"orders to discard are left: {dict(state.discards)}")
        self._check_groups(coordinator.state)

    def _check_groups(self, state: State) -> None:
        rooms = self._world.coordinator.rooms.rooms
        if set(rooms) != set(state.groups):
            self._fail(f"rooms {sorted(rooms)} are open for the groups {sorted(state.groups)}")
        for group in state.groups.values():
            links = rooms[group.group_id].links
            if not group.complete or set(links) != set(group.attending):
                self._fail(f"group {group.group_id} is kept with the ranks {sorted(links)}")
            if any(link.broken for link in links.values()):
                self._fail(f"group {group.group_id} is kept with broken streams")

    def agreed(self) -> None:
        """Every policy was just pushed: every replica serves all of it."""
        state = self._world.coordinator.state
        for name, replica in self._world.replicas.items():
            known = state.replicas.get(name)
            if known is None:
                self._fail(f"{name} lives and is not in the pool")
                return
            is_at, why = standing(state, known)
            if is_at is not Standing.READY or not replica.ready:
                self._fail(f"{name} is {is_at.name} ({why}) after pushes of everything")
            lacking = state.vector.missing_from(replica.vector)
            if lacking or replica.vector != known.vector:
                self._fail(f"{name} is taken for ready and lacks {lacking}")
            for policy in state.policies.values():
                version = PolicyVersion(policy.name, policy.served_version)
                if replica.served.get(version) != self._digests.get(version):
                    self._fail(f"{name} serves other bytes as {version} than were committed")
            self._check_kept(state, replica)

    def _check_kept(self, state: State, replica: SimReplica) -> None:
        for policy, entry in replica.vector.adapters.items():
            if len(entry.versions) > state.settings.retain:
                self._fail(f"{replica.name} keeps {entry.versions} of {policy}")
