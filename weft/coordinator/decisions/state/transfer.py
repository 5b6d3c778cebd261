"""A transfer and its side group, as immutable values; times as in ``state``."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from weft.contract.names import PolicyVersion
from weft.coordinator.decisions.state.progress import Watch
from weft.coordinator.decisions.state.purpose import Purpose
from weft.coordinator.decisions.state.values import (
    NOTHING,
    AdapterSpec,
    ContentDigest,
    Failure,
    Layout,
    Phase,
    PolicyKind,
)


@dataclass(frozen=True)
class Member:
    """A replica's place in a side group: ranks ``first_rank`` and up."""

    replica_id: str
    incarnation: str
    first_rank: int
    num_receivers: int


def members_of(replicas: Iterable[tuple[str, str, int]]) -> tuple[Member, ...]:
    """Places in a group: the sender is rank 0, receivers follow in the given order.

    Args:
        replicas: Replica id, incarnation and number of receivers of each.
    """
    members: list[Member] = []
    rank = 1
    for replica_id, incarnation, num_receivers in replicas:
        members.append(Member(replica_id, incarnation, rank, num_receivers))
        rank += num_receivers
    return tuple(members)


@dataclass(frozen=True)
class Group:
    """A side group: the sender (rank 0) and the receivers of its members.

    All that is decided on, for all ranks; a member learns of it no more than its own
    ``weft.contract.group.GroupTicket``.
    """

    group_id: str
    secret: str = field(repr=False)
    """What the tokens of its ranks are derived from; never sent."""
    epoch: int
    trainer_id: str
    session_id: str
    backend: str
    members: tuple[Member, ...]
    attending: frozenset[int] = frozenset()
    is_probe: bool = False
    """Whether its receivers are only asked whether they answer (see suspects.py); then
    nobody is rank 0."""

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return 1 + sum(member.num_receivers for member in self.members)

    def token_of(self, rank: int) -> str:
        """What authorises one rank, in this epoch; it tells nothing of another's."""
        text = f"{self.group_id} {self.epoch} {rank}"
        return hmac.new(self.secret.encode(), text.encode(), hashlib.sha256).hexdigest()

    @property
    def complete(self) -> bool:
        """Whether every rank attends."""
        return len(self.attending) == self.size

    def member_name(self, rank: int) -> str:
        """Who a rank is, for people: a replica's id or the trainer's."""
        if rank == 0:
            return self.trainer_id
        for member in self.members:
            if member.first_rank <= rank < member.first_rank + member.num_receivers:
                return member.replica_id
        return f"rank {rank}"


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
    pausing: frozenset[str] = frozenset()
    """Replicas that load in place and have not answered yet that they have paused
    generation."""
    watch: Watch = field(default_factory=Watch)
    """What the ranks say of their work."""
    accusations: Mapping[int, Failure] = field(default_factory=dict)
    """Ranks that say a peer is gone, without knowing which (see staging.py)."""
    judge_at: float = 0.0


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
    adapter: AdapterSpec | None = None
    backend: str = ""
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

    @property
    def may_be_undone(self) -> bool:
        """Whether its policy goes back to what it served if no replica can follow."""
        return self.phase is Phase.COMMITTING and not self.replica_id
