"""What must be true of leases and of the versions that are assigned under them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from weft_rl.contract.errors import LeaseFencedError, WeftError
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.pool import PoolState

if TYPE_CHECKING:
    from tests.sim.trainer import Push, SimTrainer
    from tests.sim.world import World


#: Events that may end a lease before its time.
_ENDING = (events.ReleasePolicy, events.ForgetPolicy)


class Violation(AssertionError):
    """Something that must be true is not."""


def fail(what: str) -> NoReturn:
    """End the run.

    Raises:
        Violation: Always.
    """
    raise Violation(what)


class LeaseChecks:
    """Knows who was told of which fencing token."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._holders: dict[tuple[str, int], tuple[str, str]] = {}
        self._newest_token: dict[str, int] = {}
        self._asked: dict[str, set[tuple[str, int]]] = {}
        #: Until when the last holder of a policy was told that it owns it.
        self._until: dict[str, tuple[tuple[str, str], float]] = {}
        #: What was asked under which lease, by the ticket of the coordinator that is up.
        self._calls: dict[int, tuple[str, int, str]] = {}
        self._fenced: set[tuple[str, int, str]] = set()

    def catalog_lost(self) -> None:
        """The coordinator knows only what it hears, and what an older copy has."""
        self._holders.clear()
        self._until.clear()
        self._fenced.clear()
        # Counts leap above what anybody was given; a lease that is held goes on by its token.
        self._newest_token = {
            name: policy.lease.fencing_token if policy.lease else policy.fencing_token
            for name, policy in self._world.catalog.policies.items()
        }

    def asking(self, trainer: SimTrainer, push: Push) -> None:
        """A trainer calls BeginTransfer."""
        self._asked.setdefault(push.request_id, set()).add((trainer.name, push.token))

    def told(self, answer: effects.LeaseAnswer) -> None:
        """A lease was granted or renewed."""
        lease = answer.lease
        holder = (lease.trainer_id, lease.session_id)
        known = self._holders.setdefault((answer.policy, lease.fencing_token), holder)
        if known != holder:
            fail(f"token {lease.fencing_token} of {answer.policy}: {known} and {holder}")
        if (answer.policy, lease.fencing_token, lease.session_id) in self._fenced:
            fail(f"token {lease.fencing_token} of {answer.policy} is valid again")
        last, until = self._until.get(answer.policy, (holder, 0.0))
        if last != holder and self._world.clock.now < until:
            left = until - self._world.clock.now
            fail(f"{answer.policy} was taken from {last} by {holder}, {left:.1f} s too early")
        if self._lasts(answer):
            self._until[answer.policy] = holder, lease.expires_at
        newest = self._newest_token.get(answer.policy, 0)
        if lease.fencing_token < newest:
            fail(f"{answer.policy}: token {lease.fencing_token} after {newest}")
        self._newest_token[answer.policy] = lease.fencing_token

    def _lasts(self, answer: effects.LeaseAnswer) -> bool:
        """Whether it has not ended since that was decided: an answer waits for the disk."""
        policy = self._world.coordinator.state.policies.get(answer.policy)
        token = policy.lease.fencing_token if policy and policy.lease else 0
        return token == answer.lease.fencing_token

    def stepped(self, event: events.Event, emitted: Sequence[effects.Effect]) -> None:
        """After every event: a lease ends by its owner, by force, or after its time."""
        if isinstance(event, events.RenewLease | events.BeginTransfer):
            self._calls[event.ticket] = event.policy, event.fencing_token, event.session_id
        now, by_order = self._world.clock.now, isinstance(event, _ENDING)
        for effect in emitted:
            if not isinstance(effect, effects.SaveLeaseEnded):
                continue
            holder, until = self._until.pop(effect.name, (None, 0.0))
            if isinstance(event, events.AcquirePolicy):
                is_own = (event.trainer_id, event.session_id) == holder  # by an older token
                # Where a catalog was lost, tokens do not say who was first: the larger one does
                # until the other has renewed its lease, after each start.
                is_larger = event.last_fencing_token > self._newest_token.get(event.policy, 0)
                was_lost = bool(self._world.checks.losses.num_losses)
                by_order = by_order or is_own or (is_larger and was_lost)
            if now < until and not by_order:
                fail(f"{holder}'s lease of {effect.name} ended {until - now:.1f} s too early")

    def coordinator_started(self) -> None:
        """Tickets are counted anew."""
        self._calls.clear()

    def refused(self, ticket: int, error: WeftError) -> None:
        """A caller hears that its call is refused."""
        if isinstance(error, LeaseFencedError) and (asked := self._calls.get(ticket)):
            state = self._world.coordinator.state
            policy = state.policies.get(asked[0])
            # A token that only a lost catalog has counted to may be counted to again, for a call
            # of the same session that was on its way since before.
            if asked[1] <= (policy.fencing_token if policy else state.token_floor):
                self._fenced.add(asked)

    def acquired(self, trainer: SimTrainer, policy: str, token: int, last_token: int) -> None:
        """A trainer has heard its token. Whatever became of the catalog, one that tells
        what it had is given more."""
        if token < last_token:
            fail(f"{trainer.name} was told token {token} of {policy} after {last_token}")

    def saving(self, save: effects.SavePolicy) -> None:
        """A policy is about to be saved."""
        policy = save.policy
        if policy.fencing_token < self._newest_token.get(policy.name, 0):
            fail(f"the fencing token of {policy.name} shrank to {policy.fencing_token}")

    def assigned(self, state: PoolState, save: effects.SaveVersion) -> None:
        """A push gets its version."""
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
            fail(f"{record.version} was assigned without a lease")
        elif transfer.purpose.fencing_token != lease.fencing_token or (
            lease.fencing_token < self._newest_token.get(policy.name, 0)
        ):
            fail(f"{record.version} was assigned under an old lease")
        elif (lease.trainer_id, lease.fencing_token) not in self._asked[record.request_id]:
            fail(f"{record.version} was assigned to a fenced trainer")
