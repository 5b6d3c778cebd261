"""A transfer, the facts of what it is for, and its side group, as immutable values; times as in
``state``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

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


class PurposeFacts:
    """Facts of what one transfer is for: the part of a purpose that is known without its rules.

    One that has such a fact declares it as a field, all others leave it as it is here. The rules
    are in ``transfers/purpose.py``.
    """

    name: ClassVar[str]
    """In lower case; ``weft.v1.TransferPurpose`` has the same names."""
    brings_version: ClassVar[bool] = False
    """Whether its version is a new one, which nobody had before."""

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

    def origin(self, replica: Replica, version: PolicyVersion) -> str:
        """Return where the only replica that it is for gets the version from, for people."""
        return self.source


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One attempt to have replicas serve one version: what all purposes have in common."""

    ids: FreshIds
    purpose: PurposeFacts
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
