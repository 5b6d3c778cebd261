"""What the coordinator knows, as immutable values.

Times are seconds of one monotonic clock, handed to ``step`` as ``now``; adding
``State.wall_offset_seconds`` gives seconds since 1970 for what is recorded.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from weft.contract.capabilities import Capabilities
from weft.contract.errors import WeftError, error_from_reason
from weft.contract.manifest import Manifest
from weft.contract.names import BASE_POLICY, PolicyVersion
from weft.contract.versions import AdapterVersions, VersionVector


class PolicyKind(enum.IntEnum):
    """Numbers are those of ``weft.v1.PolicyKind``."""

    BASE = 1
    ADAPTER = 2


class VersionState(enum.IntEnum):
    """Numbers are those of ``weft.v1.VersionState``."""

    STAGING = 1
    COMMITTED = 2
    ABORTED = 3
    RETIRED = 4


class Standing(enum.IntEnum):
    """Numbers are those of ``weft.v1.ReplicaState``."""

    PENDING_WEIGHTS = 1
    READY = 2
    LOST = 3
    QUARANTINED = 4
    DRAINING = 5
    CORDONED = 6


class Phase(enum.IntEnum):
    """Where a transfer stands; WAITING and FORMING are both FORMING on the wire."""

    WAITING = 0
    """Begun, without a version: for replicas, for preflight, or for its turn."""
    FORMING = 1
    STAGING = 2
    COMMITTING = 3
    COMMITTED = 4
    ABORTED = 5


class Errand(enum.IntEnum):
    """What a transfer is for."""

    PUSH = 0
    """A trainer brings a new version to the pool."""
    CLONE = 1
    """A replica brings a version to another that lacks it."""
    RESTORE = 2
    """A replica switches to what it holds itself."""
    ROLLBACK = 3
    """The pool goes back to a version that all hold."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options that decisions depend on; ``CoordinatorConfig`` explains them."""

    lease_seconds: float = 10.0
    heartbeat_seconds: float = 2.0
    lost_after_seconds: float = 6.0
    retain: int = 4
    forget_after_seconds: float = 3600.0
    """A replica lost for so long is no longer listed."""
    retire_retry_seconds: float = 2.0
    """Between two requests to drop versions that one replica still holds."""
    clone_seconds: float = 600.0
    """Longest that a clone, or reading a spilled version, may take once it is its turn."""
    publish_again_after_seconds: float = 5.0
    """How long a version must be held by nobody before its owner is asked for it: of
    a pool that restarts, another replica may hold it."""


@dataclass(frozen=True)
class ContentDigest:
    """See ``weft.v1.ContentDigest``."""

    algorithm: int
    value: bytes
    size_bytes: int


@dataclass(frozen=True)
class AdapterSpec:
    """See ``weft.v1.AdapterSpec``; ``config_digest`` is SHA-256 of the config."""

    config_json: str
    config_digest: bytes
    base_fingerprint: str = ""
    trained_on_base_version: int = 0


@dataclass(frozen=True)
class Failure:
    """Why something ended, as a value that an error can be made of."""

    reason: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)

    def error(self) -> WeftError:
        """The typed error to answer callers with."""
        return error_from_reason(self.reason, self.message, dict(self.metadata))

    @classmethod
    def of(cls, error: WeftError) -> Failure:
        """The value behind an error."""
        return cls(error.reason, error.message, error.metadata)


@dataclass(frozen=True)
class Layout:
    """A manifest and the sums that decisions need."""

    manifest: Manifest | None = field(repr=False, compare=False)
    """Not kept once a transfer has ended."""
    digest: bytes
    total_bytes: int
    wire_bytes: int
    num_buckets: int

    @classmethod
    def of(cls, manifest: Manifest) -> Layout:
        """Sum once; O(buckets)."""
        return cls(
            manifest,
            manifest.layout_digest,
            manifest.total_bytes,
            manifest.wire_bytes,
            len(manifest.buckets),
        )


@dataclass(frozen=True)
class VersionRecord:
    """A version as the catalog holds it; times are seconds since 1970, 0 when not yet."""

    version: PolicyVersion
    state: VersionState
    trainer_id: str
    request_id: str
    transfer_id: str
    layout_digest: bytes
    create_time: float
    commit_time: float = 0.0
    content_digest: ContentDigest | None = None
    adapter: AdapterSpec | None = None
    failure: Failure | None = None


@dataclass(frozen=True)
class Lease:
    """A trainer's hold on a policy until ``expires_at``."""

    trainer_id: str
    session_id: str
    fencing_token: int
    expires_at: float


@dataclass(frozen=True)
class Policy:
    """A stream of versions. All but ``lease`` is durable."""

    name: str
    kind: PolicyKind
    last_version: int = 0
    fencing_token: int = 0
    served_version: int = 0
    versions: tuple[int, ...] = ()
    """Committed and not retired, ascending."""
    lease: Lease | None = None
    pinned: tuple[int, ...] = ()
    """Never retired, ascending; durable."""
    retain: int = 0
    """Newest versions of an adapter that are kept; 0 is ``Settings.retain``."""


@dataclass(frozen=True)
class Setback:
    """A version that could not be brought to a replica."""

    count: int
    retry_at: float
    source: str
    """Who was to send it last."""
    why: str


@dataclass(frozen=True)
class Withdrawn:
    """An operator's order that keeps a replica out of service; durable."""

    standing: Standing
    """CORDONED or QUARANTINED."""
    reason: str


@dataclass(frozen=True)
class Drain:
    """A replica leaves in good order, at ``deadline`` at the latest."""

    deadline: float
    reason: str


@dataclass(frozen=True)
class Replica:
    """A replica as last heard of."""

    replica_id: str
    incarnation: str
    address: str
    http_url: str
    model_name: str
    capabilities: Capabilities
    vector: VersionVector
    last_heard: float
    adapter_used_bytes: int = 0
    lost: bool = False
    suspicion: str = ""
    """Why it may be dead: a transfer lost it, and it was not heard of since."""
    dirty_reason: str = ""
    """Why its engine may hold mixed weights: it stays out of service."""
    commit_failure: str = ""
    """Why it did not switch to a committed version."""
    vector_set_at: float = float("-inf")
    """When a CommitTransfer last told what it serves."""
    retire_at: float = float("-inf")
    """When it may next be asked to drop versions."""
    announced: Standing | None = None
    """The standing that was last told to watchers."""
    retained: tuple[int, ...] = ()
    """Versions of the base that it holds a copy of, last used first."""
    setbacks: Mapping[PolicyVersion, Setback] = field(default_factory=dict)
    """What could not be brought to it yet."""
    spilled: frozenset[PolicyVersion] = frozenset()
    """Versions that lie in its spill directory."""
    drain: Drain | None = None
    """Set while it is to leave."""
    pins_obeyed: frozenset[int] = frozenset()
    """Versions of the base that it keeps copies of where it holds them."""
    pinned_bytes: int = 0
    """Of those copies."""

    @property
    def in_contact(self) -> bool:
        """Whether it is heard and its weights are whole; ``standing.in_contact`` says which
        of these a push goes to."""
        return not self.lost and not self.suspicion and not self.dirty_reason


def holds(replica: Replica, version: PolicyVersion) -> bool:
    """Whether a replica has a copy of a version's bytes in memory, to send or load."""
    if version.policy == BASE_POLICY:
        return version.version in replica.retained
    return replica.vector.holds(version)


def held_versions(replica: Replica) -> Iterator[PolicyVersion]:
    """Every version that ``holds`` is true of."""
    for number in replica.retained:
        yield PolicyVersion(BASE_POLICY, number)
    for name, entry in replica.vector.adapters.items():
        for number in entry.versions:
            yield PolicyVersion(name, number)


@dataclass(frozen=True)
class Member:
    """A replica's place in a side group: ranks ``first_rank`` and up."""

    replica_id: str
    incarnation: str
    first_rank: int
    num_receivers: int


@dataclass(frozen=True)
class Group:
    """A side group: the sender (rank 0) and the receivers of its members."""

    group_id: str
    token: str = field(repr=False)
    epoch: int
    trainer_id: str
    session_id: str
    backend: str
    members: tuple[Member, ...]
    attending: frozenset[int] = frozenset()

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return 1 + sum(member.num_receivers for member in self.members)

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
    token: str = field(repr=False)
    secret: str = field(repr=False)
    """Tokens of further groups of the transfer are derived from it; never sent."""


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
    """Whether the loss of one replica fails the push."""
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
    """Replicas that the transfer goes on without, in order of their loss."""
    prepare_sent: bool = False
    prepared: Mapping[int, int] = field(default_factory=dict)
    """Buckets that each receiver has verified already, by rank."""
    staged: Mapping[int, ContentDigest] = field(default_factory=dict)
    loading: frozenset[str] = frozenset()
    """Replicas that were told to load it in place, in this epoch or a former one."""
    start_at: float = 0.0
    commit_at: float = 0.0
    end_at: float = 0.0
    content_digest: ContentDigest | None = None
    replaced_version: int = 0
    """What was served before the commit point."""
    switching: frozenset[str] = frozenset()
    """Replicas whose answer to CommitTransfer is awaited."""
    served_by: frozenset[str] = frozenset()
    """Replicas that switched."""
    refusals: Mapping[str, Failure] = field(default_factory=dict)
    """Why the others did not."""
    pause_seconds: float = 0.0
    failure: Failure | None = None
    accusations: Mapping[int, Failure] = field(default_factory=dict)
    """Ranks that say a peer is gone, without knowing which (see staging.py)."""
    judge_at: float = 0.0
    begin_tickets: tuple[int, ...] = ()
    await_tickets: tuple[int, ...] = ()
    errand: Errand = Errand.PUSH
    source: str = ""
    """The replica that sends a clone."""
    replica_id: str = ""
    """The replica that a clone or a restore is for."""
    leftover: str = ""
    """The transfer of a former coordinator whose staged bytes a restore switches to."""

    @property
    def held(self) -> tuple[str, ...]:
        """Replicas that do nothing else meanwhile; none while it waits."""
        return (*self.targets, self.source) if self.targets and self.source else self.targets

    @property
    def transfer_id(self) -> str:
        """Its name."""
        return self.ids.transfer_id

    @property
    def policy_version(self) -> PolicyVersion:
        """What it brings; version 0 while a push waits."""
        return PolicyVersion(self.policy, self.version)

    @property
    def uncommitted(self) -> bool:
        """Whether it can still be aborted with nothing changed in what is served."""
        return self.phase < Phase.COMMITTING


@dataclass(frozen=True)
class FitKey:
    """What a preflight's answer depends on."""

    layout_digest: bytes
    config_digest: bytes
    capabilities: Capabilities


@dataclass(frozen=True)
class Demand:
    """A served version that a replica lacks and no replica in contact can bring."""

    version: int
    since: float
    is_asked: bool = False
    """Whether its owner is asked to publish again."""


@dataclass(frozen=True)
class State:
    """Everything; replaced, never changed."""

    settings: Settings = field(default_factory=Settings)
    generation: int = 1
    wall_offset_seconds: float = 0.0
    fingerprint: str = ""
    """Of the pool's base model; durable, empty before the first replica."""
    architecture: str = ""
    epoch: int = 0
    """Of the newest group; durable."""
    reference_known: bool = False
    replicas: Mapping[str, Replica] = field(default_factory=dict)
    policies: Mapping[str, Policy] = field(default_factory=dict)
    groups: Mapping[str, Group] = field(default_factory=dict)
    transfers: Mapping[str, Transfer] = field(default_factory=dict)
    """Under way, in order of their begin."""
    history: Mapping[str, Transfer] = field(default_factory=dict)
    """The last ended ones, oldest first."""
    fits: Mapping[FitKey, Failure | None] = field(default_factory=dict)
    """Answers of preflight; None where the version fits. Bounded."""
    fits_under_way: frozenset[FitKey] = frozenset()
    retire_at: float = float("-inf")
    """When to look next for versions to retire."""
    tick_at: float = float("-inf")
    """When the last tick was."""
    discards: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Replica to the transfers whose staged bytes it was not heard to drop."""
    discard_at: float = float("-inf")
    """When to repeat those orders."""
    target_tickets: Mapping[int, float] = field(default_factory=dict)
    """Callers of DescribeTarget that wait, with their deadlines."""
    plan_at: float = float("-inf")
    """When the end of a clone may next give rise to a plan."""
    lookups: frozenset[str] = frozenset()
    """Replicas for which a version is being looked up."""
    demands: Mapping[str, Demand] = field(default_factory=dict)
    """By policy."""
    withdrawn: Mapping[str, Withdrawn] = field(default_factory=dict)
    """By replica, of the pool or not; durable."""

    @cached_property
    def vector(self) -> VersionVector:
        """What a ready replica serves."""
        base = self.policies.get(BASE_POLICY)
        return VersionVector(
            base=base.served_version if base else 0,
            adapters={
                policy.name: AdapterVersions(policy.versions, policy.served_version)
                for policy in self.policies.values()
                if policy.kind is PolicyKind.ADAPTER and policy.served_version
            },
        )

    @cached_property
    def copies(self) -> frozenset[PolicyVersion]:
        """Versions that a replica in contact holds a copy of that others may have, in
        memory or spilled."""
        return frozenset(
            version
            for replica in self.replicas.values()
            if not replica.lost and not self.is_quarantined(replica.replica_id)
            for version in (*held_versions(replica), *replica.spilled)
        )

    @property
    def pinned_bases(self) -> tuple[int, ...]:
        """Versions of the base that replicas are to keep copies of, ascending."""
        base = self.policies.get(BASE_POLICY)
        return base.pinned if base else ()

    def is_quarantined(self, replica_id: str) -> bool:
        """Whether an operator keeps a replica out of service and out of transfers."""
        order = self.withdrawn.get(replica_id)
        return order is not None and order.standing is Standing.QUARANTINED

    def wall(self, now: float) -> float:
        """``now`` in seconds since 1970."""
        return now + self.wall_offset_seconds
