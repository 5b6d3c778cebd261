"""Turns: which replicas a waiting transfer may take now, and whom it waits for.

Transfers are asked in order of their begin, but for clones: those that push after push has
ended or kept waiting come first, the others last, since a push ends them once they run.
Nothing here is kept from one step to the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.coordinator.decisions.recovery.interruptions import goes_first, is_interruptible
from weft.coordinator.decisions.recovery.needs import is_joining
from weft.coordinator.decisions.state.pool import PoolState
from weft.coordinator.decisions.state.replica import Replica
from weft.coordinator.decisions.state.transfer import Transfer
from weft.coordinator.decisions.state.values import Phase, Purpose

#: A clone or restore that a replica takes longer to switch to keeps no push waiting, even
#: where the replica is ready: of the versions beside those that it must serve.
SLOW_COMMIT_SECONDS = 10.0


class Turns:
    """The replicas that are taken, as waiting transfers are given their turns.

    ``taken`` are those that a transfer under way takes, or that wait for one that goes
    before; ``firm`` the same without clones that a push would end.
    """

    def __init__(self, state: PoolState, now: float) -> None:
        self._state, self._now = state, now
        self.taken: set[str] = set()
        self.firm: set[str] = set()
        self._alone: set[str] = set()
        self._slow: set[str] = set()
        for transfer in state.transfers.values():
            self.taken.update(transfer.occupied)
            if not is_interruptible(state, transfer, now):
                self.firm.update(transfer.occupied)
            if transfer.replica_id and transfer.phase is not Phase.WAITING:
                self._alone.add(transfer.replica_id)
                if not transfer.uncommitted and now >= transfer.commit_at + SLOW_COMMIT_SECONDS:
                    self._slow.add(transfer.replica_id)

    def waiting(self) -> list[Transfer]:
        """The transfers that wait, in the order of their turns."""

        def place(transfer: Transfer) -> int:
            if transfer.purpose is not Purpose.CLONE:
                return 1
            return 0 if goes_first(self._state, transfer, self._now) else 2

        found = [t for t in self._state.transfers.values() if t.phase is Phase.WAITING]
        return sorted(found, key=place)

    def take(self, replica_ids: Iterable[str]) -> None:
        """Note replicas that those behind must wait for."""
        more = set(replica_ids)
        self.taken |= more
        self.firm |= more

    def is_next(self, transfer: Transfer, needed: set[str]) -> bool:
        """Whether a clone or a restore that cannot start now keeps those behind it from
        what it needs: not by waiting for what a push ends, and a clone not while its own
        target is busy with something else."""
        if transfer.purpose is Purpose.CLONE:
            first = goes_first(self._state, transfer, self._now)
            return first and transfer.replica_id not in self._alone
        return bool(self.firm & needed)

    def must_wait(self, replicas: Iterable[Replica]) -> bool:
        """Whether one of these that is waited for is taken: not one that has still to catch
        up, and is at it, nor one that takes long to switch by itself."""
        return any(map(self._is_waited_for, replicas))

    def _is_waited_for(self, replica: Replica) -> bool:
        name = replica.replica_id
        if name not in self.firm or name in self._slow:
            return False
        return not (name in self._alone and is_joining(self._state, replica))

    def free(self, replicas: Sequence[Replica]) -> list[Replica]:
        """The replicas of these that a push may take now, in their order."""
        return [replica for replica in replicas if replica.replica_id not in self.firm]
