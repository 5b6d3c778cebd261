"""Purposes: the rules of what each transfer is for.

A transfer's course is the same for all purposes, and asks its own at each turn:

    waiting ── admit ──► forming ──► staging ── on_staged ──► committing ── on_answered ──► ended
                            │           │
                            └───────────┴── on_members_lost, on_sender_stalled, on_aborted

One that needs no side group (a replica has the bytes itself) is committing once it is
admitted, and implements ``admit`` and ``on_answered`` only. The purposes are in ``purposes``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence

from weft_rl.coordinator.decisions.state.change import Change
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.decisions.state.replica import Replica
from weft_rl.coordinator.decisions.state.replica_state import (
    base_targets,
    eligible_targets,
    is_joining,
)
from weft_rl.coordinator.decisions.state.transfer import Group, PurposeFacts, Transfer
from weft_rl.coordinator.decisions.state.values import ContentDigest, Failure, Phase, PolicyKind

#: Seconds after which a switch to a clone or restore keeps no push waiting. A ready replica has
#: such a one for a version beside those that it must serve.
SLOW_COMMIT_SECONDS = 10.0


class Purpose(PurposeFacts, ABC):
    """Rules of what one transfer is for: an immutable value, and what is peculiar to its kind.

    Subclasses are frozen dataclasses.
    """

    # -- its turn -----------------------------------------------------------------

    def place(self, state: PoolState, transfer: Transfer, now: float) -> int:
        """Return its place among the transfers that wait: lower ones are asked first.

        Of one place those are first that began first.
        """
        return 1

    @abstractmethod
    def admit(self, change: Change, transfer: Transfer, queue: AdmissionQueue) -> Iterable[str]:
        """Start a waiting ``transfer`` if it may start, or drop it.

        Returns:
            The replicas that those behind it must wait for.
        """

    # -- under way ----------------------------------------------------------------

    def gives_way(self, state: PoolState, transfer: Transfer, now: float) -> bool:
        """Return whether a change of the pool interrupts it rather than wait for its replicas."""
        return False

    def on_interrupted(self, change: Change, transfer: Transfer, by: Transfer) -> None:
        """Let ``by`` take its replicas; asked only of a transfer that gives way."""
        raise AssertionError(f"a {self.name} gives way to nobody")

    def why_unwanted(self, state: PoolState, transfer: Transfer) -> str:
        """Return why it is to end before its commit point; empty while it is wanted."""
        return ""

    def requires(self, replica_id: str) -> bool:
        """Return whether a failure of this replica's receivers is the transfer's."""
        return True

    def may_continue(self, transfer: Transfer, group: Group, lost: Collection[str]) -> bool:
        """Return whether it goes on without these replicas of its group."""
        return False

    def on_staged(self, change: Change, transfer: Transfer, digest: ContentDigest) -> None:
        """Come to the commit point: every rank has the same digest over all bytes."""
        raise AssertionError(f"nothing is staged for a {self.name}")

    def on_members_lost(
        self, change: Change, transfer: Transfer, lost: Mapping[str, Failure]
    ) -> None:
        """Continue without replicas of its group that are gone, or abort."""
        raise AssertionError(f"a {self.name} has no side group")

    def on_sender_stalled(self, change: Change, transfer: Transfer, failure: Failure) -> None:
        """React to a sender that owes a step and was silent for ``PoolSettings.stall_seconds``."""
        raise AssertionError(f"a {self.name} has no sender")

    # -- its end ------------------------------------------------------------------

    def time_is_up(self, state: PoolState, transfer: Transfer) -> str:
        """Return why it ends at its deadline, for messages."""
        return f"the {self.name}'s time was up"

    def on_aborted(self, change: Change, ended: Transfer) -> None:
        """Note and announce that it has ended without being committed."""
        raise AssertionError(f"a {self.name} has nothing to abort")

    @abstractmethod
    def on_answered(self, change: Change, transfer: Transfer) -> None:
        """End it: every replica that was told to switch has answered."""


def purpose_of(transfer: Transfer) -> Purpose:
    """Return a transfer's purpose, with its rules."""
    assert isinstance(transfer.purpose, Purpose), "transfers are begun with one"
    return transfer.purpose


class AdmissionQueue:
    """Queue of waiting transfers, and the replicas that are taken as these get their turns.

    ``taken`` holds replicas that a transfer under way occupies, or that an earlier waiting one
    needs. ``firm`` holds the same without those whose transfer gives way.
    """

    def __init__(self, state: PoolState, now: float) -> None:
        self._state, self._now = state, now
        self.taken: set[str] = set()
        self.firm: set[str] = set()
        self.repaired: set[str] = set()
        """Replicas with a transfer under way that is for them alone."""
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
        """Return the eligible targets of a policy of this kind, as they were when turns began.

        They are kept: a thousand replicas are not sorted for each transfer that waits.
        """
        if kind not in self._targets:
            # A base also goes to those that it would repair.
            eligible = base_targets if kind is PolicyKind.BASE else eligible_targets
            self._targets[kind] = eligible(self._state)
        return self._targets[kind]

    def waiting(self) -> list[Transfer]:
        """List the transfers that wait, in the order of their turns."""
        found = [t for t in self._state.transfers.values() if t.phase is Phase.WAITING]
        return sorted(found, key=lambda t: purpose_of(t).place(self._state, t, self._now))

    def take(self, replica_ids: Iterable[str]) -> None:
        """Note replicas that the transfers behind must wait for."""
        more = set(replica_ids)
        self.taken |= more
        self.firm |= more

    def must_wait(self, replicas: Iterable[Replica]) -> bool:
        """Return whether one of these replicas is taken and is waited for.

        Not waited for are replicas that are catching up by a transfer of their own, and those
        that take long to switch by themselves.
        """
        return any(map(self._is_waited_for, replicas))

    def _is_waited_for(self, replica: Replica) -> bool:
        name = replica.replica_id
        if name not in self.firm or name in self._slow:
            return False
        return not (name in self.repaired and is_joining(self._state, replica))

    def free(self, replicas: Sequence[Replica]) -> list[Replica]:
        """List the replicas of these that a change of the pool may take now, in their order."""
        return [replica for replica in replicas if replica.replica_id not in self.firm]
