"""A transfer, the facts of its purpose, and the reports of its ranks: immutable values.

Times as in ``state``.
"""

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
    """Secret that the secrets of its further groups are derived from; never sent."""

    def group(self, nth: int) -> tuple[str, str]:
        """Return the name and the secret of a transfer's nth group, from 0 on.

        Each secret is as unguessable as the transfer's own, which no member of any group is
        ever told.
        """
        if not nth:
            return self.group_id, self.group_secret
        secret = hashlib.sha256(f"{self.secret}.{nth}".encode()).hexdigest()
        return f"{self.group_id}.{nth}", secret


def switch_id(transfer_id: str, replica_id: str) -> str:
    """Return the id of one replica's switch to what a former transfer staged.

    Each such switch waits for its turn.
    """
    return f"{transfer_id}.{replica_id}"


@dataclass(frozen=True)
class Attempt:
    """Reports of the ranks of a transfer's present group; a new group begins anew."""

    prepare_sent: bool = False
    prepared: Mapping[int, int] = field(default_factory=dict)
    """Number of buckets that each receiver has verified already, by rank."""
    staged: Mapping[int, ContentDigest] = field(default_factory=dict)
    pausing: Mapping[str, float] = field(default_factory=dict)
    """Replicas that load in place and have not answered yet that they have paused generation,
    with the time since which they are told to."""
    watch: Watch = field(default_factory=Watch)
    """Progress of the ranks, as they report it."""
    accusations: Mapping[int, Failure] = field(default_factory=dict)
    """Failures by the rank that says a peer is gone, without knowing which (see course.py)."""
    judge_at: float = 0.0


class PurposeFacts:
    """Facts of a transfer's purpose: the part that is known without the purpose's rules.

    A purpose that has such a fact declares it as a field; others leave it as it is here. The
    rules are in ``transfers/purpose.py``.
    """

    name: ClassVar[str]
    """Name in lower case; ``weft.v1.TransferPurpose`` has the same names."""
    brings_version: ClassVar[bool] = False
    """True if its version is a new one, which nobody had before."""

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
    """True if that is a base of another content than it was trained on."""
    carries_runs: bool = False
    """True if its buckets list what they carry."""

    def origin(self, replica: Replica, version: PolicyVersion) -> str:
        """Return where the only replica that it is for gets the version from, for messages."""
        return self.source


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One attempt to have replicas serve one version: what all purposes have in common."""

    ids: FreshIds
    purpose: PurposeFacts
    """Purpose, with what only transfers of that purpose have."""
    policy: str
    kind: PolicyKind
    trainer_id: str
    """Sender: a trainer, ``replica_sender(...)``, or an operator who has nothing to send."""
    layout: Layout = NOTHING
    send_plan: SendPlan | None = field(default=None, repr=False)
    """Division of the buckets among several senders. Not kept once the transfer has ended."""
    adapter: AdapterSpec | None = None
    backend: str = ""
    backend_reason: str = ""
    """Reason why the sender uses this backend, for messages."""
    trial_names: frozenset[str] = frozenset()
    """Trial names of the replicas that the sender of a one-sided transfer has tried."""
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
    """Reasons why it continues without them, by replica."""
    attempt: Attempt = field(default_factory=Attempt)
    loading: frozenset[str] = frozenset()
    """Replicas that were told to load it in place, in this epoch or a former one."""
    taken_up: bool = False
    """True once a sender has joined its group, or has reported on it in a group kept from the
    former transfer."""
    start_at: float = 0.0
    commit_at: float = 0.0
    end_at: float = 0.0
    content_digest: ContentDigest | None = None
    served_before: int = 0
    """Version that its policy served when it came to its commit point."""
    switching: frozenset[str] = frozenset()
    """Replicas whose answer to CommitTransfer is awaited."""
    served_by: frozenset[str] = frozenset()
    """Replicas that switched."""
    incarnations: Mapping[str, str] = field(default_factory=dict)
    """The processes that were told to switch, by replica."""
    refusals: Mapping[str, Failure] = field(default_factory=dict)
    """Reasons why the others did not switch, by replica."""
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
        """Number of ranks that send."""
        return self.send_plan.num_senders if self.send_plan else 1

    def sent_by(self, sender: int) -> Sequence[int]:
        """Return the buckets that a rank sends, ascending."""
        if self.send_plan is None:
            return range(self.layout.num_buckets)
        return self.send_plan.sent_by(sender)

    def sender_of(self, bucket: int) -> int:
        """Return the rank that sends a bucket."""
        return self.send_plan.buckets[bucket].sender if self.send_plan else 0

    @property
    def transfer_id(self) -> str:
        """The transfer's name."""
        return self.ids.transfer_id

    @property
    def policy_version(self) -> PolicyVersion:
        """Version that it brings; its number is 0 while a push waits."""
        return PolicyVersion(self.policy, self.version)

    @property
    def uncommitted(self) -> bool:
        """True if it can still be aborted with nothing changed in what is served."""
        return self.phase < Phase.COMMITTING

    def record(self, state: VersionState, commit_time: float = 0.0) -> VersionRecord:
        """Return the catalog's record of its version; times in seconds since 1970."""
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
        """True if its policy goes back to what it served if no replica can follow."""
        return self.phase is Phase.COMMITTING and not self.replica_id

    @property
    def is_replaced_kept(self) -> bool:
        """True if what it replaced is still there once it has failed everywhere."""
        return not self.loading.intersection(self.targets)
