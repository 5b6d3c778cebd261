"""What must be true of members that hang while their processes answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.lease_checks import fail
from weft_rl.coordinator.decisions.purposes.push import Push
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.decisions.state.transfer import Group, Transfer
from weft_rl.coordinator.decisions.state.values import Phase
from weft_rl.coordinator.decisions.transfers.purpose import purpose_of

if TYPE_CHECKING:
    from tests.sim.trainer import Push
    from tests.sim.world import World

#: How late the coordinator may find out: words and orders on a slow network, a frozen
#: sender that sends nothing, a former member of the transfer that stalled before.
_SLACK_SECONDS = 10.0
_WATCHED = (Phase.FORMING, Phase.STAGING)
#: How much longer than ``stall_seconds`` anybody may wait for a replica that is to switch.
PROMISED_SECONDS = 2.0


class StallChecks:
    """Sees every tick, and every push that has ended."""

    def __init__(self, world: World) -> None:
        self._world = world
        #: By transfer and replica, since when its worker hangs while it is waited for, in one
        #: group after the other.
        self._held_since: dict[tuple[str, str], float] = {}
        #: Of a replica whose engine hangs, how long it was not heard for meanwhile.
        self._unheard: dict[str, float] = {}
        #: When each replica was heard last, one tick ago.
        self._heard: dict[str, float] = {}

    def ticked(self, state: PoolState) -> None:
        """Nobody who hangs holds a transfer."""
        self._held_since = {
            key: since
            for key, since in self._held_since.items()
            # Nobody waits for the members of a clone that was interrupted.
            if (transfer := state.transfers.get(key[0])) and transfer.phase in _WATCHED
        }
        self._note_unheard(state)
        self._check_routes(state)
        for transfer in state.transfers.values():
            self._check_switching(transfer)
            self._check_slow(transfer)
            if transfer.phase in _WATCHED:
                self._check_members(transfer, state.groups[transfer.group_id])
                self._check_trainer(state, transfer)

    def _note_unheard(self, state: PoolState) -> None:
        for name, replica in state.replicas.items():
            # Ended by a word between two ticks, a gap is longer than it was at any of them.
            ended = replica.last_heard - self._heard.get(name, replica.last_heard)
            gap = max(ended, self._world.clock.now - replica.last_heard)
            self._heard[name] = replica.last_heard
            if not self._world.replicas[name].engine.frozen_for():
                self._unheard.pop(name, None)
            elif gap > 2 * self._world.settings.heartbeat_seconds:
                self._unheard[name] = max(gap, self._unheard.get(name, 0.0))

    def _longest(self, name: str) -> float:
        """How long anybody may wait for one that does not get on: what is promised, and what
        heartbeats that are lost, a slow network and a slow disk add to it."""
        world = self._world
        return (
            world.settings.stall_seconds
            + PROMISED_SECONDS
            + self._unheard.get(name, 0.0)
            + 3.0 * world.faults.was_slow
            + 2 * 2.0 * world.faults.was_slow_disk
        )

    def _check_switching(self, transfer: Transfer) -> None:
        """Who is to switch and hangs keeps its transfer, and whoever waits for that, no longer."""
        waited = self._world.clock.now - transfer.commit_at
        for name in transfer.switching:
            hangs_for = self._world.replicas[name].engine.frozen_for()
            if min(hangs_for, waited) > self._longest(name):
                fail(f"{transfer.transfer_id} waits for {name} to switch, whose engine hangs")

    def _check_routes(self, state: PoolState) -> None:
        """Nobody is routed to an engine that has hung for so long in what it was asked, as far
        as this coordinator can have heard of it."""
        known_for = self._world.clock.now - self._world.coordinator.started_at
        for replica in state.replicas.values():
            there = self._world.replicas[replica.replica_id]
            is_it = there.alive and there.incarnation == replica.incarnation
            owes_for = min(there.owes_for(), known_for)
            longest = self._longest(replica.replica_id)
            if is_it and replica.routed and owes_for > longest:
                fail(f"requests are routed to {replica.replica_id}, whose engine hangs")

    def _check_slow(self, transfer: Transfer) -> None:
        for name, failure in transfer.losses.items():
            if failure.reason == "TOO_SLOW" and "its link" in failure.message:
                # A kept group may say so a moment after the sender's next push has begun.
                if (transfer.trainer_id, name) not in self._world.slow_links:
                    fail(f"{transfer.transfer_id} was left by {name}, whose link is not slow")
                if purpose_of(transfer).requires(name):
                    fail(f"{transfer.transfer_id} was left by {name}, which it requires")

    def _check_members(self, transfer: Transfer, group: Group) -> None:
        if transfer.loading:
            return  # they may have until the deadline
        longest = self._world.settings.stall_seconds + _SLACK_SECONDS
        now = self._world.clock.now
        for name in transfer.occupied:
            key, hangs_for = (transfer.transfer_id, name), self._hangs_for(transfer, name)
            if not hangs_for or not self._is_waited_for(transfer, group, name):
                self._held_since.pop(key, None)
            elif min(hangs_for, now - self._held_since.setdefault(key, now)) > longest:
                fail(f"{transfer.transfer_id} goes on with {name}, whose worker hangs")

    def _hangs_for(self, transfer: Transfer, name: str) -> float:
        replica = self._world.replicas[name]
        if transfer.phase is Phase.FORMING and not transfer.attempt.prepare_sent:
            return max(replica.worker.frozen_for(), replica.engine.frozen_for())
        return replica.worker.frozen_for()

    def _is_waited_for(self, transfer: Transfer, group: Group, name: str) -> bool:
        """Whether a replica has yet to do what was asked of it. One that has verified all
        that was sent waits itself: for a sender whose link to another is cut, say."""
        is_source = name == transfer.source
        members = [member for member in group.members if member.replica_id == name]
        ranks = {m.first_rank + index for m in members for index in range(m.num_receivers)}
        if transfer.phase is Phase.FORMING and not transfer.attempt.prepare_sent:
            return not ({0} if is_source else ranks) <= group.attending
        if transfer.phase is Phase.FORMING:
            return not ranks <= transfer.attempt.prepared.keys()
        first = min(transfer.attempt.prepared.values())
        sent = self._sent(transfer, group, first)
        told = transfer.attempt.progress.num_verified
        verified = {rank: told.get(rank, first) for rank in group.receivers}
        if is_source:
            return all(count >= first + len(sent) for count in verified.values())
        if first + len(sent) == transfer.layout.num_buckets:
            return not ranks <= transfer.attempt.staged.keys()
        return any(verified[rank] in sent for rank in ranks - transfer.attempt.staged.keys())

    def _sent(self, transfer: Transfer, group: Group, first: int) -> set[int]:
        """The buckets that were sent in this group."""
        sent: set[int] = set()
        for rank in group.senders:
            data = self._world.data.get((group.group_id, transfer.transfer_id, rank))
            own = [bucket for bucket in transfer.sent_by(rank) if bucket >= first]
            sent.update(own[: data.num_sent if data else 0])
        return sent

    def _check_trainer(self, state: PoolState, transfer: Transfer) -> None:
        trainer = self._world.trainers.get(transfer.trainer_id)
        if trainer is None or not isinstance(transfer.purpose, Push):
            return
        others_wait = [
            other.transfer_id
            for other in state.transfers.values()
            if other.phase is Phase.WAITING
            and isinstance(other.purpose, Push)
            and other.waits_for == "its turn"  # and not for replicas, which may be out of service
            and self._world.clock.now - other.begin_at > _SLACK_SECONDS
        ]
        longest = self._world.settings.sender_stall_seconds + _SLACK_SECONDS
        ranks = (trainer.worker, *trainer.others)[: transfer.num_senders]
        hangs_for = max(rank.frozen_for() for rank in ranks)
        if others_wait and min(hangs_for, self._age(transfer)) > longest:
            fail(f"{transfer.transfer_id} of a trainer that hangs is waited for by {others_wait}")

    def _age(self, transfer: Transfer) -> float:
        return self._world.coordinator.state.wall(self._world.clock.now) - transfer.create_time

    def push_ended(self, push: Push) -> None:
        """A push that has failed for a member says for which."""
        error = push.error
        if error is not None and error.reason == "STALLED" and not error.metadata.get("member"):
            fail(f"the push of {push.policy} stalled, and nobody is named: {error}")
