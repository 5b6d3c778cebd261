"""A transfer, what it is for, and its side group, as immutable values; times as in ``state``.

A transfer's course is the same for all purposes, and asks its own at each turn:

    waiting ── admit ──► forming ──► staging ── on_staged ──► committing ── on_answered ──► ended
                            │           │
                            └───────────┴── on_members_lost, on_sender_stalled, on_aborted

One that needs no side group (a replica has the bytes itself) is committing once it is
admitted, and implements ``admit`` and ``on_answered`` only. Each purpose is one file in
``purposes``.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from weft_rl.contract.layout.send_plan import SendPlan
from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.state.progress import Watch
from weft_rl.coordinator.decisions.state.replica import Replica
from weft_rl.coordinator.decisions.state.values import (
    NOTHING,
    AdapterSpec,
    ContentDigest,
    Failure,
    Layout,
    Phase,
    PolicyKind,
    VersionRecord,
    VersionState,
)

if TYPE_CHECKING:  # what a purpose is asked with is made of transfers
    from weft_rl.coordinator.decisions.change import Change
    from weft_rl.coordinator.decisions.state.group import Group
    from weft_rl.coordinator.decisions.state.pool import PoolState
    from weft_rl.coordinator.decisions.transfers.turns import Turns


@dataclass(frozen=True)
class FreshIds:
    """Random values that a new transfer and a new group are named by."""

    transfer_id: str
    nonce: int
    group_id: str
    group_secret: str = field(repr=False)
    """The secret of the transfer's first group."""
    secret: str = field(repr=False)
    """The secrets of its further groups are derived from it; never sent."""

    def group(self, nth: int) -> tuple[str, str]:
        """The name and the secret of a transfer's nth group, from 0 on: a secret as
        unguessable as its own, which no member of any group is ever told."""
        if not nth:
            return self.group_id, self.group_secret
        secret = hashlib.sha256(f"{self.secret}.{nth}".encode()).hexdigest()
        return f"{self.group_id}.{nth}", secret


def switch_id(transfer_id: str, replica_id: str) -> str:
    """What one replica's switch to what a former transfer staged is named: each waits for
    its turn."""
    return f"{transfer_id}.{replica_id}"


@dataclass(frozen=True)
class Attempt:
    """What the ranks of a transfer's present group have said; a new group begins anew."""

    prepare_sent: bool = False
    prepared: Mapping[int, int] = field(default_factory=dict)
    """Buckets that each receiver has verified already, by rank."""
    staged: Mapping[int, ContentDigest] = field(default_factory=dict)
    pausing: Mapping[str, float] = field(default_factory=dict)
    """Replicas that load in place and have not answered yet that they have paused
    generation, and since when they are told to."""
    watch: Watch = field(default_factory=Watch)
    """What the ranks say of their work."""
    accusations: Mapping[int, Failure] = field(default_factory=dict)
    """Ranks that say a peer is gone, without knowing which (see course.py)."""
    judge_at: float = 0.0


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
    over_another_base: bool = False
    """Whether that is a base of another content than it was trained on."""
    carries_runs: bool = False
    """Whether its buckets list what they carry."""

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


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One attempt to have replicas serve one version: what all purposes have in common."""

    ids: FreshIds
    purpose: Purpose
    """What it is for, with what only transfers of that purpose have."""
    policy: str
    kind: PolicyKind
    trainer_id: str
    """Who sends: a trainer, ``replica_sender(...)``, or an operator who has nothing to send."""
    layout: Layout = NOTHING
    send_plan: SendPlan | None = field(default=None, repr=False)
    """Who sends what, where several do. Not kept once it has ended."""
    adapter: AdapterSpec | None = None
    backend: str = ""
    backend_reason: str = ""
    """Why the sender uses it, for people."""
    trial_names: frozenset[str] = frozenset()
    """Of the replicas that the sender of a one-sided transfer has tried."""
    begin_at: float
    deadline: float = float("inf")
    phase: Phase = Phase.WAITING
    waits_for: str = "its turn"
    version: int = 0
    create_time: float = 0.0
    group_id: str = ""
    epoch: int = 0
    targets: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    """Replicas that the transfer continues without, in order of their loss."""
    losses: Mapping[str, Failure] = field(default_factory=dict)
    """Why it continues without them."""
    attempt: Attempt = field(default_factory=Attempt)
    loading: frozenset[str] = frozenset()
    """Replicas that were told to load it in place, in this epoch or a former one."""
    taken_up: bool = False
    """Whether a sender has come to it: to its group, or with a word of it to the former one."""
    start_at: float = 0.0
    commit_at: float = 0.0
    end_at: float = 0.0
    content_digest: ContentDigest | None = None
    served_before: int = 0
    """What its policy served when it came to its commit point."""
    switching: frozenset[str] = frozenset()
    """Replicas whose answer to CommitTransfer is awaited."""
    served_by: frozenset[str] = frozenset()
    """Replicas that switched."""
    incarnations: Mapping[str, str] = field(default_factory=dict)
    """The processes that were told to switch, by replica."""
    refusals: Mapping[str, Failure] = field(default_factory=dict)
    """Why the others did not."""
    pause_seconds: float = 0.0
    failure: Failure | None = None
    begin_tickets: tuple[int, ...] = ()
    await_tickets: tuple[int, ...] = ()

    @property
    def replica_id(self) -> str:
        """The only replica that it is for; empty where it changes what the pool serves."""
        return self.purpose.replica_id

    @property
    def source(self) -> str:
        """The replica that sends it; empty where a trainer does, or nobody."""
        return self.purpose.source

    @property
    def occupied(self) -> tuple[str, ...]:
        """Replicas that do nothing else meanwhile; none while it waits. The source of a
        clone is free once all is staged."""
        if self.targets and self.source and self.uncommitted:
            return (*self.targets, self.source)
        return self.targets

    @property
    def num_senders(self) -> int:
        """Ranks that send."""
        return self.send_plan.num_senders if self.send_plan else 1

    def sent_by(self, sender: int) -> Sequence[int]:
        """The buckets that a rank sends, ascending."""
        if self.send_plan is None:
            return range(self.layout.num_buckets)
        return self.send_plan.sent_by(sender)

    def sender_of(self, bucket: int) -> int:
        """The rank that sends a bucket."""
        return self.send_plan.buckets[bucket].sender if self.send_plan else 0

    @property
    def transfer_id(self) -> str:
        """The transfer's name."""
        return self.ids.transfer_id

    @property
    def policy_version(self) -> PolicyVersion:
        """What it brings; version 0 while a push waits."""
        return PolicyVersion(self.policy, self.version)

    @property
    def uncommitted(self) -> bool:
        """Whether it can still be aborted with nothing changed in what is served."""
        return self.phase < Phase.COMMITTING

    def record(self, state: VersionState, commit_time: float = 0.0) -> VersionRecord:
        """What the catalog is to hold of the version that it brings; times since 1970."""
        return VersionRecord(
            version=self.policy_version,
            state=state,
            trainer_id=self.trainer_id,
            request_id=self.purpose.request_id,
            transfer_id=self.transfer_id,
            layout_digest=self.layout.digest,
            create_time=self.create_time,
            commit_time=commit_time,
            content_digest=self.content_digest,
            adapter=self.adapter,
            failure=self.failure,
        )

    @property
    def may_be_undone(self) -> bool:
        """Whether its policy goes back to what it served if no replica can follow."""
        return self.phase is Phase.COMMITTING and not self.replica_id

    @property
    def is_replaced_kept(self) -> bool:
        """Whether what it replaced is still there once it has failed everywhere."""
        return not self.loading.intersection(self.targets)
