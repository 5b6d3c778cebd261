"""What a transfer is for: the interface of all purposes; each is a file in ``purposes``.

A transfer's course is the same for all of them, and asks its purpose at each turn:

    waiting ── admit ──► forming ──► staging ── on_staged ──► committing ── on_answered ──► ended
                            │           │
                            └───────────┴── on_members_lost, on_sender_stalled, on_aborted

One that needs no side group (a replica has the bytes itself) is committing once it is
admitted, and implements ``admit`` and ``on_answered`` only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:  # what a purpose is asked with is made of transfers, which have a purpose
    from weft.contract.names import PolicyVersion
    from weft.coordinator.decisions.change import Change
    from weft.coordinator.decisions.state.pool import PoolState
    from weft.coordinator.decisions.state.replica import Replica
    from weft.coordinator.decisions.state.transfer import Transfer
    from weft.coordinator.decisions.state.values import ContentDigest, Failure
    from weft.coordinator.decisions.transfers.turns import Turns


class Purpose(ABC):
    """What one transfer is for: an immutable value, and what is peculiar to its kind.

    Subclasses are frozen dataclasses. The facts below are asked of any of them; one that
    has such a fact declares it as a field, all others leave it as it is here.
    """

    name: ClassVar[str]
    """In lower case; ``weft.v1.TransferPurpose`` has the same names."""

    replica_id: str = ""
    """The only replica that it is for; empty where it changes what the pool serves."""
    source: str = ""
    """The replica that sends; empty where a trainer does, or nobody."""
    request_id: str = ""
    """The trainer's own name for it."""
    fencing_token: int | None = None
    """The token of the lease that it was begun under."""
    served_over: int | None = None
    """The version of the base that an adapter was committed over."""

    brings_version: ClassVar[bool] = False
    """Whether its version is a new one, which nobody had before."""

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

    def origin(self, replica: Replica, version: PolicyVersion) -> str:
        """Where the only replica that it is for gets the version from, for people."""
        return self.source

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
