"""A transfer, its side group, and the reports of its ranks: immutable values.

Times as in ``pool``.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Final

from weft_rl.containers import replace
from weft_rl.contract.adapter_config import AdapterSpec
from weft_rl.contract.group import LinkUsage
from weft_rl.contract.manifest import SendPlan
from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.state.replica import Replica
from weft_rl.coordinator.decisions.state.values import (
    NO_LAYOUT,
    CallAnswer,
    ContentDigest,
    Failure,
    Phase,
    PolicyKind,
    VersionLayout,
    VersionRecord,
    VersionState,
)


class Activity(enum.IntEnum):
    """Activity of a rank; numbers are those of ``weft.v1.Activity``."""

    FORMING = 1
    ALLOCATING = 2
    WAITING = 3
    VERIFYING = 4
    LOADING = 5
    PACKING = 6
    SENDING = 7


@dataclass(frozen=True)
class RankReport:
    """Last report of a rank on its work; see ``weft.v1.Progress``."""

    transfer_id: str
    activity: int
    bucket: int = 0
    done: int = 0
    total: int = 0

    def __str__(self) -> str:
        match self.activity:
            case Activity.FORMING:
                return "forming the group"
            case Activity.ALLOCATING if not self.total:
                return "reading the list of tensors"
            case Activity.ALLOCATING:
                return f"allocating {self.done} of {self.total} bytes"
            case Activity.WAITING:
                return f"waiting for bucket {self.bucket}"
            case Activity.VERIFYING:
                return f"verifying bucket {self.bucket}"
            case Activity.LOADING:
                return f"loading bucket {self.bucket}"
            case Activity.PACKING:
                return f"packing bucket {self.bucket}"
            case Activity.SENDING:
                return f"sending bucket {self.bucket}"
        return "working"


#: First step that every rank of a new group owes.
FIRST_STEP = "join the group"


@dataclass(frozen=True)
class OwedStep:
    """Next step of a transfer, owed by one rank."""

    step: str
    since: float


@dataclass(frozen=True)
class GroupProgress:
    """Progress of one epoch of a transfer, as its ranks report it; times as in ``pool``."""

    heard_at: Mapping[int, float] = field(default_factory=dict)
    """Time at which each rank last said what it does, or verified a bucket."""
    reports: Mapping[int, RankReport] = field(default_factory=dict)
    num_verified: Mapping[int, int] = field(default_factory=dict)
    """Number of buckets, from the first, that each receiver has reported as verified."""
    owed_steps: Mapping[int, OwedStep] = field(default_factory=dict)
    held_up: Mapping[int, float] = field(default_factory=dict)
    """Seconds for which each receiver, at work, was what all others waited for."""
    hops: Mapping[tuple[str, str], LinkUsage] = field(default_factory=dict)
    """Bytes sent over streams, by the names of both members."""
    looked_at: float = float("inf")
    """Time at which a receiver that holds the others up was noted last; inf while there is none."""

    def heard(
        self, reports: Mapping[int, RankReport], num_verified: Mapping[int, int], now: float
    ) -> GroupProgress:
        """Return this progress with the reports and verified buckets of ranks added."""
        return replace(
            self,
            heard_at={**self.heard_at, **dict.fromkeys((*reports, *num_verified), now)},
            reports={**self.reports, **reports},
            num_verified={**self.num_verified, **num_verified},
        )

    def with_hops(self, hops: Mapping[tuple[str, str], LinkUsage]) -> GroupProgress:
        """Return this progress with the bytes of further reports added."""
        added = dict(self.hops)
        for between, hop in hops.items():
            added[between] = added[between] + hop if between in added else hop
        return replace(self, hops=added) if hops else self

    def with_owed_steps(self, steps: Mapping[int, str], now: float) -> GroupProgress:
        """Return this progress with the step that each rank owes now; one that it owed already
        keeps its beginning."""
        owed_steps = {
            rank: old
            if (old := self.owed_steps.get(rank)) and old.step == step
            else OwedStep(step, now)
            for rank, step in steps.items()
        }
        return self if owed_steps == self.owed_steps else replace(self, owed_steps=owed_steps)

    def carried(self, ranks: Mapping[int, int], step: str, now: float) -> GroupProgress:
        """Return the progress that a transfer's next epoch begins with.

        The silence of each rank is carried over, until the rank has done its first step.

        Args:
            ranks: The former rank of each new one.
            step: What each owes first.
        """
        owed_steps = {
            rank: OwedStep(step, now - silence)
            for rank, former in ranks.items()
            if (silence := self.silence(former, now)) > 0
        }
        held_up = {r: self.held_up[old] for r, old in ranks.items() if old in self.held_up}
        return GroupProgress(owed_steps=owed_steps, held_up=held_up)

    def with_holder(self, rank: int | None, now: float) -> GroupProgress:
        """Return this progress with the receiver that holds the others up noted; None is nobody.

        The time since the last look counts, a second at most: ticks are more frequent.
        """
        if rank is None:
            return self if self.looked_at == float("inf") else replace(self, looked_at=float("inf"))
        seconds = self.held_up.get(rank, 0.0) + min(1.0, max(0.0, now - self.looked_at))
        return replace(self, held_up={**self.held_up, rank: seconds}, looked_at=now)

    def silence(self, rank: int, now: float) -> float:
        """Return the seconds that a rank has owed its step without a word; 0 if it owes nothing."""
        owed = self.owed_steps.get(rank)
        return now - max(owed.since, self.heard_at.get(rank, owed.since)) if owed else 0.0

    def forgiven(self, seconds: float) -> GroupProgress:
        """Return this progress as if ``seconds`` had not passed."""
        return replace(
            self,
            heard_at={rank: at + seconds for rank, at in self.heard_at.items()},
            owed_steps={
                rank: replace(owed, since=owed.since + seconds)
                for rank, owed in self.owed_steps.items()
            },
        )


# -- the side group that it moves over -------------------------------------------


@dataclass(frozen=True)
class Member:
    """A replica's place in a side group: ranks ``first_rank`` and up."""

    replica_id: str
    incarnation: str
    first_rank: int
    num_receivers: int


def assign_ranks(
    replicas: Iterable[tuple[str, str, int]], num_senders: int = 1
) -> tuple[Member, ...]:
    """Assign ranks in a group: senders get ranks 0 and up, receivers follow in the given order.

    Args:
        replicas: Replica id, incarnation and number of receivers of each.
    """
    members: list[Member] = []
    rank = num_senders
    for replica_id, incarnation, num_receivers in replicas:
        members.append(Member(replica_id, incarnation, rank, num_receivers))
        rank += num_receivers
    return tuple(members)


def group_members(replicas: Iterable[Replica], num_senders: int = 1) -> tuple[Member, ...]:
    """Return the places of replicas in a new group."""
    return assign_ranks(
        ((r.replica_id, r.incarnation, r.capabilities.num_receivers) for r in replicas),
        num_senders,
    )


@dataclass(frozen=True)
class Group:
    """A side group: its senders (ranks 0 and up) and the receivers of its members.

    It holds all that is decided on, for all ranks; a member learns no more of it than its own
    ``weft_rl.contract.group.GroupTicket``.
    """

    group_id: str
    secret: str = field(repr=False)
    """Secret that the tokens of its ranks are derived from; never sent."""
    epoch: int
    trainer_id: str
    session_id: str
    backend: str
    members: tuple[Member, ...]
    attending: frozenset[int] = frozenset()
    is_probe: bool = False
    """True if its receivers are only asked whether they answer (see suspects.py); then there is
    no rank 0."""
    num_senders: int = 1

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return self.num_senders + self.num_receivers

    @cached_property
    def num_receivers(self) -> int:
        """Number of ranks that receive; they follow those that send."""
        return sum(member.num_receivers for member in self.members)

    @property
    def senders(self) -> range:
        """Ranks that send."""
        return range(self.num_senders)

    @property
    def receivers(self) -> range:
        """Ranks that receive."""
        return range(self.num_senders, self.size)

    def ranks_from(self, first_rank: int) -> range:
        """Return the ranks of the member that begins at ``first_rank``."""
        count = next(m.num_receivers for m in self.members if m.first_rank == first_rank)
        return range(first_rank, first_rank + count)

    def token_of(self, rank: int) -> str:
        """Return the token that authorises one rank in this epoch; it tells nothing of others."""
        text = f"{self.group_id} {self.epoch} {rank}"
        return hmac.new(self.secret.encode(), text.encode(), hashlib.sha256).hexdigest()

    @property
    def complete(self) -> bool:
        """True if every rank attends."""
        return len(self.attending) == self.size

    def member_name(self, rank: int) -> str:
        """Return the id of a rank's replica, or of the trainer, for messages."""
        if rank < self.num_senders:
            return self.trainer_id
        for member in self.members:
            if member.first_rank <= rank < member.first_rank + member.num_receivers:
                return member.replica_id
        return f"rank {rank}"

    def rank_name(self, rank: int) -> str:
        """Return ``member_name`` and, if there are several senders, which of them a rank is."""
        name = self.member_name(rank)
        return f"{name} (sender {rank})" if rank < self.num_senders > 1 else name


# -- the transfer ----------------------------------------------------------------


@dataclass(frozen=True)
class TransferIds:
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
    progress: GroupProgress = field(default_factory=GroupProgress)
    """Progress of the ranks, as they report it."""
    accusations: Mapping[int, Failure] = field(default_factory=dict)
    """Failures by the rank that says a peer is gone, without knowing which (see lifecycle.py)."""
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


#: Replicas of a transfer beyond which only the longest pause is kept.
MAX_PAUSES: Final = 64


@dataclass(frozen=True)
class PauseReport:
    """Pause of generation at a replica."""

    end_at: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Transfer(CallAnswer):
    """One attempt to have replicas serve one version: what all purposes have in common."""

    ids: TransferIds
    purpose: PurposeFacts
    """Purpose, with what only transfers of that purpose have."""
    policy: str
    kind: PolicyKind
    trainer_id: str
    """Sender: a trainer, ``replica_sender(...)``, or an operator who has nothing to send."""
    layout: VersionLayout = NO_LAYOUT
    send_plan: SendPlan | None = field(default=None, repr=False)
    """Division of the buckets among several senders. Not kept once the transfer has ended."""
    delta_from: bytes = b""
    """Content digest of the base that it changes; empty where all elements are sent."""
    delta_bytes: int = 0
    """Payload bytes of these changes."""
    whole_for: frozenset[str] = frozenset()
    """Replicas that are sent all elements beside a delta; empty while it waits for its turn."""
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
    """Longest pause of generation at any replica."""
    pauses: Mapping[str, PauseReport] = field(default_factory=dict)
    """Pause at each replica; none where more than ``MAX_PAUSES`` take part."""
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
    def sent_bytes(self) -> int:
        """Payload bytes that each replica receives, but for those that are sent all elements
        beside a delta."""
        return self.delta_bytes if self.delta_from else self.layout.total_bytes

    @property
    def is_mixed(self) -> bool:
        """True if it is a delta to some replicas and all elements to the others; not known any more
        once it has ended."""
        return self.send_plan is not None and self.send_plan.num_whole > 0

    @property
    def sent_whole(self) -> tuple[str, ...]:
        """Replicas of those that take part that are sent all elements beside a delta, sorted."""
        return tuple(sorted(self.whole_for.intersection(self.targets)))

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
