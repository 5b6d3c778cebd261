"""A purpose: the rules of what a transfer is for.

A transfer's course is the same for all purposes, and asks its own at each turn:

    waiting ── admit ──► forming ──► staging ── on_staged ──► committing ── on_answered ──► ended
                            │           │
                            └───────────┴── on_members_lost, on_sender_stalled, on_aborted

One that needs no side group (a replica has the bytes itself) is committing once it is
admitted, and implements ``admit`` and ``on_answered`` only. Each purpose is one file in
``purposes``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence

from weft_rl.coordinator.decisions.effects.change import Change
from weft_rl.coordinator.decisions.state.group import Group
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.decisions.state.replica import Replica
from weft_rl.coordinator.decisions.state.replica_state import (
    base_targets,
    eligible_targets,
    is_joining,
)
from weft_rl.coordinator.decisions.state.transfer import PurposeFacts, Transfer
from weft_rl.coordinator.decisions.state.values import ContentDigest, Failure, Phase, PolicyKind

#: A clone or restore that a replica takes longer to switch to keeps no push waiting, even
#: where the replica is ready: of the versions beside those that it must serve.
SLOW_COMMIT_SECONDS = 10.0


class Purpose(PurposeFacts, ABC):
    """Rules of what one transfer is for: an immutable value, and what is peculiar to its kind.

    Subclasses are frozen dataclasses.
    """

    # -- its turn -----------------------------------------------------------------

    def place(self, state: PoolState, transfer: Transfer, now: float) -> int:
        """Where it stands among those that wait: lower ones are asked first, and of one
        place those that began first."""
        return 1

    @abstractmethod
    def admit(self, change: Change, transfer: Transfer, turns: Turns) -> Iterable[str]:
        """Start ``transfer``, which waits, if it may; or drop it.

        Returns:
            The replicas that those behind it must wait for.
        """

    # -- under way ----------------------------------------------------------------

    def gives_way(self, state: PoolState, transfer: Transfer, now: float) -> bool:
        """Whether a change of the pool interrupts it rather than wait for its replicas."""
        return False

    def on_interrupted(self, change: Change, transfer: Transfer, by: Transfer) -> None:
        """``by`` takes its replicas; asked only of one that gives way."""
        raise AssertionError(f"a {self.name} gives way to nobody")

    def why_unwanted(self, state: PoolState, transfer: Transfer) -> str:
        """Why it is to end before its commit point; empty while it is wanted."""
        return ""

    def requires(self, replica_id: str) -> bool:
        """Whether a failure of this replica's receivers is the transfer's."""
        return True

    def may_continue(self, transfer: Transfer, group: Group, lost: Collection[str]) -> bool:
        """Whether it goes on without these replicas of its group."""
        return False

    def on_staged(self, change: Change, transfer: Transfer, digest: ContentDigest) -> None:
        """Every rank has the same digest over all bytes: come to the commit point."""
        raise AssertionError(f"nothing is staged for a {self.name}")

    def on_members_lost(
        self, change: Change, transfer: Transfer, lost: Mapping[str, Failure]
    ) -> None:
        """Replicas of its group are gone: continue without them, or abort."""
        raise AssertionError(f"a {self.name} has no side group")

    def on_sender_stalled(self, change: Change, transfer: Transfer, failure: Failure) -> None:
        """Its sender owes the next step, and has been silent for ``Settings.stall_seconds``."""
        raise AssertionError(f"a {self.name} has no sender")

    # -- its end ------------------------------------------------------------------

    def time_is_up(self, state: PoolState, transfer: Transfer) -> str:
        """Why it ends at its deadline, for people."""
        return f"the {self.name}'s time was up"

    def on_aborted(self, change: Change, ended: Transfer) -> None:
        """It has ended without being committed: note that, and announce it."""
        raise AssertionError(f"a {self.name} has nothing to abort")

    @abstractmethod
    def on_answered(self, change: Change, transfer: Transfer) -> None:
        """Every replica that was told to switch has answered: end it."""


def purpose_of(transfer: Transfer) -> Purpose:
    """Return a transfer's purpose, with its rules."""
    assert isinstance(transfer.purpose, Purpose), "transfers are begun with one"
    return transfer.purpose


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
            if not purpose_of(transfer).gives_way(state, transfer, now):
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
        return sorted(found, key=lambda t: purpose_of(t).place(self._state, t, self._now))

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
