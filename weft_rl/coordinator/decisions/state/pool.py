"""What the coordinator knows, as immutable values.

Times are seconds of one monotonic clock, handed to ``step`` as ``now``; adding
``PoolState.wall_offset_seconds`` gives seconds since 1970 for what is recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Final

from weft_rl.containers.frozen import replace
from weft_rl.contract.capabilities import Capabilities
from weft_rl.contract.errors import LeaseFencedError
from weft_rl.contract.names import BASE_POLICY, AdapterVersions, PolicyVersion, VersionVector
from weft_rl.coordinator.decisions.state.group import Group
from weft_rl.coordinator.decisions.state.replica import OutOfService, Replica, held_versions
from weft_rl.coordinator.decisions.state.sleep import SleepOrder, SleepWait
from weft_rl.coordinator.decisions.state.transfer import Transfer
from weft_rl.coordinator.decisions.state.values import (
    BoundCheckpoint,
    ContentDigest,
    Failure,
    Phase,
    PolicyKind,
    ReplicaState,
    base_content,
)

#: Versions of the base whose content is remembered, the newest; older ones are taken for others.
MAX_BASE_CONTENTS = 1024
#: The content of base@0, whose bytes lie in files, in no layout of a push.
_STARTED_WITH: Final = b""

#: Nobody counts so far: a larger number is an error of who says it, and is not followed.
#: What is counted from there is still within the bounds of ``weft.v1``.
MAX_NUMBER: Final = 2**52


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options that decisions depend on; ``CoordinatorConfig`` explains them."""

    lease_seconds: float = 10.0
    heartbeat_seconds: float = 2.0
    lost_after_seconds: float = 10.0
    retain: int = 4
    forget_after_seconds: float = 3600.0
    """A replica lost for so long is no longer listed."""
    retire_retry_seconds: float = 2.0
    """Between two requests to drop versions that one replica still holds."""
    clone_seconds: float = 600.0
    """Longest that a clone, or reading a spilled version, may take once it is its turn."""
    stall_seconds: float = 10.0
    """How long a member of a transfer may owe the next step without a word."""
    sender_stall_seconds: float = 60.0
    """How long a trainer may owe it where another transfer waits for a replica of its push."""
    max_transfer_seconds: float = 3600.0
    """Longest that a push may take once it is its turn."""
    clone_interruptions: int = 3
    """A clone that pushes have ended so often goes before them."""
    clone_patience_seconds: float = 60.0
    """So does one that is so old."""
    max_policies_per_trainer: int = 1024
    """Policies that one trainer may have at a time, owned or served."""
    publish_again_after_seconds: float = 5.0
    """How long a version must be held by nobody before its owner is asked for it: of
    a pool that restarts, another replica may hold it."""


@dataclass(frozen=True)
class TrainerProcess:
    """The process that owns a lease, as it says; see ``weft.v1.TrainerProcess``."""

    host: str = ""
    host_key: str = ""
    pid: int = 0
    start_time: float = 0.0
    """Seconds since 1970."""

    def __str__(self) -> str:
        if not self.pid:
            return "another process"
        started = datetime.fromtimestamp(self.start_time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"process {self.pid} on {self.host}, started {started}"


#: Of callers that did not say.
UNKNOWN_PROCESS = TrainerProcess()


@dataclass(frozen=True)
class Lease:
    """A trainer's ownership of a policy until ``expires_at``."""

    trainer_id: str
    session_id: str
    fencing_token: int
    expires_at: float
    process: TrainerProcess = UNKNOWN_PROCESS
    num_renewals: int = 0
    """Grows with each sign of life of its owner."""


@dataclass(frozen=True)
class Policy:
    """A stream of versions. All but ``lease`` and ``owner`` is durable."""

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
    trained_on: Mapping[int, int] = field(default_factory=dict)
    """By version of an adapter, the version of the base that it was trained on, where
    that is known. In the catalog with each version's record."""
    forgotten: bool = False
    """Whether an operator has forgotten it, and nothing of it was committed since."""
    owner: str = ""
    """Who took its lease last, as ``events.AcquirePolicy.owner``; empty since a restart."""


def live_lease(policy: Policy, now: float) -> Lease | None:
    """The lease, if it has not run out."""
    lease = policy.lease
    return lease if lease and now < lease.expires_at else None


def num_retained(policy: Policy, settings: Settings) -> int:
    """How many of the newest versions of an adapter are kept."""
    return policy.retain or settings.retain


@dataclass(frozen=True)
class FitKey:
    """What a preflight's answer depends on."""

    layout_digest: bytes
    config_digest: bytes
    capabilities: Capabilities


@dataclass(frozen=True)
class Republish:
    """A served version that a replica lacks and no replica in contact can bring: its owner
    is asked to publish it again."""

    version: int
    since: float
    is_asked: bool = False
    """Whether the owner is asked already: a lack must last a while."""


@dataclass(frozen=True)
class Inquiry:
    """A replica is asked what is to be recorded of a version."""

    replica_id: str
    again_at: float
    """When somebody is asked again."""


@dataclass(frozen=True)
class Question:
    """What a policy stands for is in question: its catalog is an older copy than replicas know."""

    served: int
    """What the catalog says."""
    since: float


@dataclass(frozen=True)
class Unserved:
    """A committed version that no replica is known to serve (see unserved.py)."""

    transfer: Transfer
    """That brought it, as it ended."""
    silent: frozenset[str]
    """Replicas that have not reported without it."""


@dataclass(frozen=True)
class PoolState:
    """Everything; replaced, never changed."""

    settings: Settings = field(default_factory=Settings)
    generation: int = 1
    coordinator_id: str = ""
    """Random for each process."""
    secret: str = field(default="", repr=False)
    """So is this, which is never sent: what the tokens of probes are derived from."""
    wall_offset_seconds: float = 0.0
    fingerprint: str = ""
    """The fingerprint of the pool's base model; durable, empty before the first replica."""
    architecture: str = ""
    checkpoint: BoundCheckpoint | None = None
    """What base@0 is; durable, None until a replica has told it."""
    base_contents: Mapping[int, bytes] = field(default_factory=dict)
    """By version of the base, ``base_content``; in the catalog with its record. Bounded."""
    as_started: frozenset[bytes] = frozenset()
    """Those of them that are the bytes of base@0; durable."""
    checkpoint_unseen_since: float | None = None
    """Since when replicas with another checkpoint are there, and none with this one."""
    epoch: int = 0
    """The newest group's epoch, or the number of an operator's order since; durable."""
    opened_generation: int = 1
    """The generation, and ``opened_epoch`` the epoch, of the catalog as it was opened: who has
    heard of more knows more than it."""
    opened_epoch: int = 0
    reference_known: bool = False
    replicas: Mapping[str, Replica] = field(default_factory=dict)
    policies: Mapping[str, Policy] = field(default_factory=dict)
    forgotten: Mapping[str, Policy] = field(default_factory=dict)
    """Policies that operators have forgotten, of which only the numbers count: a trainer
    that takes one up continues above them. None of them is in ``policies``."""
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
    restart_over_at: float = float("-inf")
    """When replicas that were there before a restart have registered, or are lost."""
    tick_at: float = float("-inf")
    """When the last tick was."""
    discards: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Replica to the transfers whose staged bytes it was not heard to drop."""
    discard_at: float = float("-inf")
    """When to repeat those orders."""
    target_tickets: Mapping[int, float] = field(default_factory=dict)
    """Callers of DescribeTarget that wait, with their deadlines."""
    schedule_at: float = float("-inf")
    """When the end of a clone may next give rise to a schedule."""
    lookups: frozenset[str] = frozenset()
    """Replicas for which a version is being looked up."""
    republish: Mapping[str, Republish] = field(default_factory=dict)
    """By policy."""
    lost: Mapping[str, int] = field(default_factory=dict)
    """By policy, the version that it serves and that is lost: see ``republish``."""
    unserved: Mapping[PolicyVersion, Unserved] = field(default_factory=dict)
    """Committed versions that nobody is known to serve. Bounded; not durable."""
    out_of_service: Mapping[str, OutOfService] = field(default_factory=dict)
    """By replica, of the pool or not; durable."""
    number_floor: int = 0
    """Numbers and tokens of policies that are new to the catalog begin above; durable."""
    token_floor: int = 0
    """Tokens of policies that are new to it begin above this, too: of one that never had a
    version nothing else is kept. Durable."""
    unrecorded_since: Mapping[str, float] = field(default_factory=dict)
    """By policy, since when a replica holds versions that the catalog does not know."""
    in_question: Mapping[str, Question] = field(default_factory=dict)
    """By policy: nothing is brought for it, nor asked of replicas, until that is decided."""
    inquiries: Mapping[PolicyVersion, Inquiry] = field(default_factory=dict)
    """Unrecorded versions whose facts a holder is asked for."""
    adopted: Mapping[PolicyVersion, bytes] = field(default_factory=dict)
    """The digests of those that were recorded since the start."""
    conflicts: Mapping[PolicyVersion, Mapping[bytes, tuple[str, ...]]] = field(default_factory=dict)
    """Versions under whose number replicas hold unlike bytes: who holds which, by digest."""
    sleeps: Mapping[str, SleepOrder] = field(default_factory=dict)
    """By replica of the pool, that it is to sleep; not durable, the replica remembers it."""
    sleep_waits: Mapping[int, SleepWait] = field(default_factory=dict)
    """By call."""
    order_number: int = 0
    """The number of the newest order to refuse requests, or to take them again."""

    def is_lost(self, policy: Policy) -> bool:
        """Whether nobody can bring what a policy serves, nor anybody is asked to."""
        return self.lost.get(policy.name) == policy.served_version

    @cached_property
    def vector(self) -> VersionVector:
        """What a ready replica serves: the base, and the adapters that are neither lost nor in
        question."""
        base = self.policies.get(BASE_POLICY)
        return VersionVector(
            base=base.served_version if base else 0,
            adapters={
                policy.name: AdapterVersions(policy.versions, policy.served_version)
                for policy in self.policies.values()
                if policy.kind is PolicyKind.ADAPTER
                and policy.served_version
                and not self.is_lost(policy)
                and policy.name not in self.in_question
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
        order = self.out_of_service.get(replica_id)
        return order is not None and order.state is ReplicaState.QUARANTINED

    def is_changing(self, policy: str) -> bool:
        """Whether a push or a rollback of a policy is under way, whichever replicas are
        concerned: the next one would decide without knowing how it ends."""
        return any(
            t.policy == policy and not t.replica_id and t.phase is not Phase.WAITING
            for t in self.transfers.values()
        )

    def is_other_base(self, trained_on: int | None) -> bool:
        """Return whether the pool serves a base of another content than an adapter was trained on.

        Numbers do not tell: what is pushed again has a new one.

        Args:
            trained_on: Version of the base; None, where nobody knows, is no other.
        """
        served = self.vector.base
        if trained_on is None or trained_on == served:
            return False
        was, now = (self._content_of_base(version) for version in (trained_on, served))
        return was is None or was != now

    def is_over_another_base(self, version: PolicyVersion) -> bool:
        """Return whether an adapter's version can be requested, over another base than it was
        trained on."""
        policy = self.policies.get(version.policy)
        if policy is None or version.version not in policy.versions:
            return False
        return self.is_other_base(policy.trained_on.get(version.version))

    def over_another_base(self) -> list[PolicyVersion]:
        """List the versions that are served over another base than they were trained on, sorted."""
        return sorted(
            version
            for policy in self.policies.values()
            for number in policy.trained_on
            if self.is_over_another_base(version := PolicyVersion(policy.name, number))
        )

    def with_base_content(
        self, version: int, layout_digest: bytes, digest: ContentDigest
    ) -> PoolState:
        """Return the state that remembers the content of a version of the base."""
        known = {**self.base_contents, version: base_content(layout_digest, digest)}
        newest = sorted(known)[-MAX_BASE_CONTENTS:]
        return replace(self, base_contents={number: known[number] for number in newest})

    def _content_of_base(self, version: int) -> bytes | None:
        """Return what tells the content of a version from that of others; None if unknown."""
        content = _STARTED_WITH if version == 0 else self.base_contents.get(version)
        return _STARTED_WITH if content in self.as_started else content

    def wall(self, now: float) -> float:
        """``now`` in seconds since 1970."""
        return now + self.wall_offset_seconds


def require_lease(
    state: PoolState, policy_name: str, fencing_token: int, now: float, session_id: str = ""
) -> tuple[Policy, Lease]:
    """The policy and its lease, if the token is that lease's, and the session where one
    is named: a catalog that was lost may have given the token before.

    Raises:
        LeaseFencedError: The lease expired, was taken over, or never was.
    """
    policy = state.policies.get(policy_name)
    lease = live_lease(policy, now) if policy else None
    if policy is None or lease is None:
        raise LeaseFencedError(
            f"no lease of policy {policy_name[:80]!r} is held: it expired or was never taken; "
            "acquire it again"
        )
    if lease.fencing_token != fencing_token or session_id not in ("", lease.session_id):
        raise LeaseFencedError(
            f"token {fencing_token} of policy {policy_name!r} was superseded by "
            f"{lease.fencing_token}, held by trainer {lease.trainer_id!r} ({lease.process})",
            metadata={"holder": lease.trainer_id},
        )
    return policy, lease
