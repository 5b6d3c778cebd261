"""What must be true of replicas out of service, of what is retired by order, and of
whom is asked to publish again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tests.sim.lease_checks import fail
from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.policies.republishing import publish_again_version
from weft_rl.coordinator.decisions.purposes.clone import Clone
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.decisions.state.replica import Replica, can_switch
from weft_rl.coordinator.decisions.state.replica_state import is_asleep, is_routable
from weft_rl.coordinator.decisions.state.values import Phase

if TYPE_CHECKING:
    from tests.sim.world import World

#: Beyond the time after which an owner is asked: a few ticks, and a slow disk.
_SLACK_SECONDS = 3.0
#: For a replica that is in contact: calls and answers that are lost and late, a few times.
_ENFORCED_SECONDS = 15.0


def out_of_transfers(state: PoolState, replica: Replica) -> bool:
    """Whether nothing new is brought to a replica: it drains, is suspect, or is kept out by
    order."""
    is_free = replica.drain is None and replica.suspect is None
    return not is_free or state.is_kept_out(replica.replica_id)


class OperatorChecks:
    """Sees every step, and what an operator was told."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._retired: set[PolicyVersion] = set()
        self._unheld_since: dict[PolicyVersion, float] = {}
        self._answers_since: dict[str, float] = {}
        self._sleeps_since: dict[tuple[str, str], float] = {}

    def catalog_lost(self) -> None:
        """What operators had ordered is lost with the catalog."""
        self._retired.clear()
        self._unheld_since.clear()
        self._world.operator.catalog_lost()

    def stepped(self, before: PoolState, event: events.Event, state: PoolState) -> None:
        """After every event."""
        if state.transfers is not before.transfers:
            self._check_taken(before, state)
            self._check_turns(state)
        self._check_clones(state)
        if isinstance(event, events.Tick):
            self._check_asked(state)
            self._check_enforced(state)
        self._check_open(state)

    def _check_open(self, state: PoolState) -> None:
        """Who is routed takes requests, at once and not with its next heartbeat."""
        now = self._world.clock.now
        for replica in state.replicas.values():
            process = self._world.replicas[replica.replica_id]
            is_it = process.alive and process.incarnation == replica.incarnation
            if is_it and is_routable(state, replica) and process.refusing:
                fail(f"{replica.replica_id} is ready and refuses requests: {process.refusing}")
            key = (replica.replica_id, replica.incarnation)
            sleeps = is_it and (process.asleep is not None or process.sleep.refuses)
            if not (sleeps and is_routable(state, replica)):
                self._sleeps_since.pop(key, None)
            # An order that was given up, and came late, is heard of with a heartbeat: till then
            # the replica refuses.
            elif now - self._sleeps_since.setdefault(key, now) > state.settings.lost_after_seconds:
                fail(f"{replica.replica_id} is routed and sleeps")

    def _check_enforced(self, state: PoolState) -> None:
        """Who is kept out by order refuses requests soon, where it can be told."""
        now, answers = self._world.clock.now, {}
        for name, process in self._world.replicas.items():
            replica = state.replicas.get(name)
            if replica is None or replica.lost or replica.incarnation != process.incarnation:
                continue
            thawed = process.alive and process.frozen_until < now
            if state.is_kept_out(name) and thawed and not process.refusing:
                answers[name] = self._answers_since.get(name, now)
                if now > answers[name] + _ENFORCED_SECONDS:
                    fail(f"{name} is kept out and answers requests")
        self._answers_since = answers

    def _check_taken(self, before: PoolState, state: PoolState) -> None:
        """What a transfer takes when its turn comes."""
        for transfer in state.transfers.values():
            old = before.transfers.get(transfer.transfer_id)
            if not transfer.occupied or (old is not None and old.occupied):
                continue
            for name in transfer.targets:
                replica = state.replicas.get(name)
                if replica is not None and out_of_transfers(state, replica):
                    fail(f"{transfer.transfer_id} goes to {name}, which is out of service")
            if transfer.source and state.is_kept_out(transfer.source):
                fail(f"{transfer.transfer_id} comes from {transfer.source}, which is kept out")

    def _check_turns(self, state: PoolState) -> None:
        """A policy changes once at a time."""
        under_way: dict[str, str] = {}
        for transfer in state.transfers.values():
            if transfer.replica_id or transfer.phase is Phase.WAITING:
                continue
            other = under_way.setdefault(transfer.policy, transfer.transfer_id)
            if other != transfer.transfer_id:
                fail(f"{other} and {transfer.transfer_id} change {transfer.policy} at once")

    def _check_clones(self, state: PoolState) -> None:
        """None goes on to a replica that is out of service, or from one that is kept out."""
        for transfer in state.transfers.values():
            if not isinstance(transfer.purpose, Clone) or not transfer.uncommitted:
                continue
            for name in transfer.occupied:
                replica = state.replicas[name]
                if state.is_kept_out(name) or (
                    name != transfer.source
                    and (
                        replica.drain is not None
                        or name in state.out_of_service
                        or name in state.sleeps
                    )
                ):
                    fail(f"{transfer.transfer_id} goes on, and {name} is out of service")

    def _check_asked(self, state: PoolState) -> None:
        """An owner is asked for what is served and nobody may send, while somebody lacks it."""
        after = state.settings.publish_again_after_seconds + _SLACK_SECONDS
        now, unheld = self._world.clock.now, {}
        for policy in state.policies.values():
            version = PolicyVersion(policy.name, policy.served_version)
            if policy.name in state.uncertain_aliases:  # nothing is brought for it, nor asked
                continue
            if _may_go_back(state, version):
                continue
            if version.version and version not in state.copies and _is_lacked(state, version):
                unheld[version] = self._unheld_since.get(version, now)
                asked = publish_again_version(state, policy.name)
                if now > unheld[version] + after and asked < version.version:
                    fail(f"nobody can send {version}, and its owner is not asked for it")
        self._unheld_since = unheld

    def told(
        self, beat: events.Heartbeat, state: PoolState, answer: effects.HeartbeatAnswer
    ) -> None:
        """A replica hears where it stands."""
        order = state.out_of_service.get(beat.replica_id)
        if order is None and beat.replica_id in self._world.operator.out_of_service:
            fail(f"{beat.replica_id} was taken out of service and is put back by nobody")
        if answer.ready and (order or state.replicas[beat.replica_id].drain):
            fail(f"{beat.replica_id} was told that it is ready and is out of service")
        refuses = bool(answer.out_of_service and answer.out_of_service.refusal)
        if refuses is not state.is_kept_out(beat.replica_id):
            fail(f"{beat.replica_id} was told to refuse requests: {answer.out_of_service}")

    def retired(self, version: PolicyVersion) -> None:
        """An operator was told so."""
        self._retired.add(version)

    def saving(self, saves: Sequence[effects.Save]) -> None:
        """Before a transaction is durable."""
        for save in saves:
            if isinstance(save, effects.SavePolicy):
                served = PolicyVersion(save.policy.name, save.policy.served_version)
                if served in self._retired:
                    fail(f"{served} is served again and was retired by order")
            elif (
                isinstance(save, effects.SavePin) and save.pinned and save.version in self._retired
            ):
                fail(f"{save.version} is pinned and was retired by order")


def _may_go_back(state: PoolState, version: PolicyVersion) -> bool:
    """Whether a replica may yet take deltas back to a version, of which it can send no copy."""
    return any(
        can_switch(replica, version)
        for replica in state.replicas.values()
        if not replica.lost and not state.is_kept_out(replica.replica_id)
    )


def _is_lacked(state: PoolState, version: PolicyVersion) -> bool:
    """Whether a replica that takes weights cannot serve what it should."""
    for replica in state.replicas.values():
        if replica.lost or out_of_transfers(state, replica) or is_asleep(state, replica):
            continue
        lacking = str(version) in state.vector.missing_from(replica.vector)
        if version.policy == "base" and (lacking or replica.dirty_reason):
            return True
        if lacking and not replica.dirty_reason:
            return True
    return False
