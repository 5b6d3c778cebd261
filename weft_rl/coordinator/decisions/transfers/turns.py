"""Turns: which replicas a waiting transfer may take now, and whom it waits for.

Transfers are asked in order of their begin, unless their purpose says another place. A
transfer that waits for its turn holds back those behind it on the same replicas, so that
trainers alternate; one that waits for replicas, or for them to hear what is pinned, holds
back nobody. Nothing here is kept from one step to the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft_rl.coordinator.decisions.change import Change
from weft_rl.coordinator.decisions.replicas.replica_state import (
    base_targets,
    eligible_targets,
    is_joining,
)
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.decisions.state.replica import Replica
from weft_rl.coordinator.decisions.state.transfer import Transfer
from weft_rl.coordinator.decisions.state.values import Failure, Phase, PolicyKind
from weft_rl.coordinator.decisions.transfers import abort

#: A clone or restore that a replica takes longer to switch to keeps no push waiting, even
#: where the replica is ready: of the versions beside those that it must serve.
SLOW_COMMIT_SECONDS = 10.0


class Turns:
    """The replicas that are taken, as waiting transfers are given their turns.

    ``taken`` are those that a transfer under way takes, or that wait for one that goes
    before; ``firm`` the same without those whose transfer gives way.
    """

    def __init__(self, state: PoolState, now: float) -> None:
        self._state, self._now = state, now
        self.taken: set[str] = set()
        self.firm: set[str] = set()
        self.repaired: set[str] = set()
        """Replicas that a transfer for them alone is under way to."""
        self._slow: set[str] = set()
        self._targets: dict[PolicyKind, list[Replica]] = {}
        for transfer in state.transfers.values():
            self.taken.update(transfer.occupied)
            if not transfer.purpose.gives_way(state, transfer, now):
                self.firm.update(transfer.occupied)
            if transfer.replica_id and transfer.phase is not Phase.WAITING:
                self.repaired.add(transfer.replica_id)
                if not transfer.uncommitted and now >= transfer.commit_at + SLOW_COMMIT_SECONDS:
                    self._slow.add(transfer.replica_id)

    def targets(self, kind: PolicyKind) -> list[Replica]:
        """The eligible targets of a policy of this kind, as they were when turns began:
        a thousand replicas are not sorted for each transfer that waits."""
        if kind not in self._targets:
            # A base also goes to those that it would repair.
            eligible = base_targets if kind is PolicyKind.BASE else eligible_targets
            self._targets[kind] = eligible(self._state)
        return self._targets[kind]

    def waiting(self) -> list[Transfer]:
        """The transfers that wait, in the order of their turns."""
        found = [t for t in self._state.transfers.values() if t.phase is Phase.WAITING]
        return sorted(found, key=lambda t: t.purpose.place(self._state, t, self._now))

    def take(self, replica_ids: Iterable[str]) -> None:
        """Note replicas that those behind must wait for."""
        more = set(replica_ids)
        self.taken |= more
        self.firm |= more

    def must_wait(self, replicas: Iterable[Replica]) -> bool:
        """Whether one of these that is waited for is taken: not one that has still to catch
        up, and is at it, nor one that takes long to switch by itself."""
        return any(map(self._is_waited_for, replicas))

    def _is_waited_for(self, replica: Replica) -> bool:
        name = replica.replica_id
        if name not in self.firm or name in self._slow:
            return False
        return not (name in self.repaired and is_joining(self._state, replica))

    def free(self, replicas: Sequence[Replica]) -> list[Replica]:
        """The replicas of these that a change of the pool may take now, in their order."""
        return [replica for replica in replicas if replica.replica_id not in self.firm]


def admit(change: Change) -> None:
    """Start every waiting transfer whose turn has come."""
    if all(t.phase is not Phase.WAITING for t in change.state.transfers.values()):
        return
    turns = Turns(change.state, change.now)
    for transfer in turns.waiting():
        turns.take(transfer.purpose.admit(change, transfer, turns))


def take_over(change: Change, replicas: Sequence[Replica], by: Transfer) -> None:
    """Interrupt what gives way on these replicas, for ``by``, which takes them now."""
    names = {replica.replica_id for replica in replicas}
    for transfer in list(change.state.transfers.values()):
        purpose = transfer.purpose
        if names.intersection(transfer.occupied) and purpose.gives_way(
            change.state, transfer, change.now
        ):
            purpose.on_interrupted(change, transfer, by)


def end_unwanted(change: Change) -> None:
    """Abort what is not wanted any more before it is committed.

    Looks at those whose replicas a step has touched: O(transfers) otherwise.
    """
    for transfer in list(change.state.transfers.values()):
        if (
            transfer.uncommitted
            and transfer.phase is not Phase.WAITING
            and (change.touched_all or not change.touched.isdisjoint(transfer.occupied))
            and (why := transfer.purpose.why_unwanted(change.state, transfer))
        ):
            abort.abort(change, transfer, Failure("TRANSFER_ABORTED", why))
