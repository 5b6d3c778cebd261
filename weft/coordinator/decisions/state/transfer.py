"""A transfer and its side group, as immutable values; times as in ``state``."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from weft.contract.names import PolicyVersion
from weft.coordinator.decisions.state.progress import Watch
from weft.coordinator.decisions.state.values import (
    AdapterSpec,
    ContentDigest,
    Failure,
    Layout,
    Phase,
    PolicyKind,
    Purpose,
)


@dataclass(frozen=True)
class Member:
    """A replica's place in a side group: ranks ``first_rank`` and up."""

    replica_id: str
    incarnation: str
    first_rank: int
    num_receivers: int


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


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One attempt to bring one version to the pool."""

    ids: FreshIds
    request_id: str
    policy: str
    kind: PolicyKind
    trainer_id: str
    session_id: str
    fencing_token: int
    layout: Layout
    adapter: AdapterSpec | None
    min_replicas: int
    require_all: bool = True
    """Whether the loss of one of ``required`` fails the push."""
    required: frozenset[str] = frozenset()
    """Replicas that were ready when it took its turn (all that take part, if none was);
    the others take part as long as they can, and catch up otherwise."""
    refuse_other_base: bool = False
    """Whether an adapter is refused over another base than it was trained on."""
    check_finite: bool = False
    """Whether the sender gives up at the first bucket that holds NaN or infinity."""
    backend: str
    wanted_group_id: str
    begin_at: float
    deadline: float
    answer_by: float
    """When BeginTransfer must have been answered, at most ``deadline``."""
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
    prepare_sent: bool = False
    prepared: Mapping[int, int] = field(default_factory=dict)
    """Buckets that each receiver has verified already, by rank."""
    staged: Mapping[int, ContentDigest] = field(default_factory=dict)
    loading: frozenset[str] = frozenset()
    """Replicas that were told to load it in place, in this epoch or a former one."""
    pausing: frozenset[str] = frozenset()
    """Replicas of these that have not answered yet that they have paused generation."""
    watch: Watch = field(default_factory=Watch)
    """What the ranks of this epoch say of their work."""
    admitted_at: float = 0.0
    """When it was its turn."""
    start_at: float = 0.0
    commit_at: float = 0.0
    end_at: float = 0.0
    content_digest: ContentDigest | None = None
    replaced_version: int = 0
    """What was served before the commit point."""
    served_over: int | None = None
    """The version of the base when the adapter was committed; None of a base."""
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
    accusations: Mapping[int, Failure] = field(default_factory=dict)
    """Ranks that say a peer is gone, without knowing which (see staging.py)."""
    judge_at: float = 0.0
    begin_tickets: tuple[int, ...] = ()
    await_tickets: tuple[int, ...] = ()
    purpose: Purpose = Purpose.PUSH
    source: str = ""
    """The replica that sends a clone."""
    replica_id: str = ""
    """The replica that a clone or a restore is for."""
    staged_by: str = ""
    """The transfer of a former coordinator that staged what a restore switches to."""
    ordered_under: int = 0
    """What its policy served when the replica of a clone or a restore was told to switch."""
    num_interruptions: int = 0
    """How often a clone was ended for the sake of a push."""

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
