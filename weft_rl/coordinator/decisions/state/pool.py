"""State of the pool as the coordinator knows it: immutable values, and queries of it.

Times are seconds of one monotonic clock, handed to ``step`` as ``now``; adding
``PoolState.wall_offset_seconds`` gives seconds since 1970 for what is recorded.
One file: values that ``PoolState`` is made of, and what is asked of several of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Final

from weft_rl.containers import replace
from weft_rl.contract.capabilities import Capabilities
from weft_rl.contract.errors import InvalidRequestError, LeaseFencedError, NotFoundError
from weft_rl.contract.manifest import DIGEST_BYTES
from weft_rl.contract.names import (
    BASE_POLICY,
    MAX_FOLLOWED,
    AdapterVersions,
    PolicyVersion,
    VersionVector,
)
from weft_rl.contract.options import setting
from weft_rl.contract.replica_report import OutOfService
from weft_rl.coordinator.decisions.state.replica import (
    Replica,
    SleepWait,
    StandingSleepOrder,
    held_versions,
)
from weft_rl.coordinator.decisions.state.transfer import Group, Transfer
from weft_rl.coordinator.decisions.state.values import (
    BoundCheckpoint,
    ContentDigest,
    Failure,
    Phase,
    PolicyKind,
    VersionRecord,
    VersionState,
    base_content,
)

#: Versions of the base whose content is remembered, the newest; older ones are taken for others.
MAX_BASE_CONTENTS = 1024
#: Ticks come every 0.25 s.
_MAX_TICK_GAP_SECONDS = 1.0
# Bounds of a machine's name, and of the key that tells its runs apart.
_MAX_PROCESS_CHARS = 128
_LATEST_TIME = float(2**32)
#: The content of base@0, whose bytes lie in files, in no layout of a push.
_STARTED_WITH: Final = b""

#: A larger number that a peer reports is its error, and is refused.
MAX_NUMBER: Final = MAX_FOLLOWED
_VERSIONS: Final = "Versions and policies"


def _seconds(default: float, text: str = "") -> float:
    heading = "When a process is given up"
    return setting(default, text, "SECONDS", panel=heading, bounds=(0.01, 86_400))


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """Options that decisions depend on; those with a text are options of ``weft coordinator``."""

    retain_versions: int = setting(
        4,
        "Number of newest versions of each adapter that can still be requested; `weft retain` sets "
        "it for one adapter.",
        "VERSIONS",
        panel=_VERSIONS,
        bounds=(1, 1_000_000),
    )
    """The version that the bare name stands for can always be requested."""
    max_policies_per_trainer: int = setting(
        1024,
        "Number of policies that one trainer may have at a time.",
        "POLICIES",
        panel=_VERSIONS,
        bounds=(1, 1_000_000),
    )
    """Owned or served. A trainer is an identity of the access file, or a trainer_id where callers
    are not identified."""
    heartbeat_seconds: float = _seconds(2.0, "Interval of replicas' heartbeats.")
    lost_after_seconds: float = _seconds(10.0, "A replica without a heartbeat for so long is lost.")
    """Several heartbeats."""
    lease_seconds: float = _seconds(
        10.0, "A trainer that does not renew its lease for so long no longer owns the policy."
    )
    stall_seconds: float = _seconds(
        10.0,
        "A replica that sends heartbeats, but does not do its next step of a transfer for so long, "
        "is left out of the transfer.",
    )
    """Its process may live while its working thread hangs."""
    sender_stall_seconds: float = _seconds(
        60.0,
        "A push of which nothing is sent for so long is aborted, if another push waits for its "
        "replicas.",
    )
    max_transfer_seconds: float = _seconds(
        3600.0, "Longest time of a push, from when it is its turn."
    )
    """Its own deadline bounds the wait before."""
    publish_again_after_seconds: float = _seconds(5.0)
    """Time that a served version must be held by nobody before its owner is asked to push it again.
    While a pool restarts, another replica may hold it."""
    recover: bool = setting(
        False,
        "Take an empty catalog for that of a pool whose own was lost: the first replica or trainer "
        "that comes back says which, and what it holds is served.",
    )
    """No effect on a catalog that belongs to a pool."""
    forget_after_seconds: float = 3600.0
    """Seconds after which a lost replica is no longer listed."""
    retire_retry_seconds: float = 2.0
    """Seconds between two requests to drop versions that one replica still holds."""
    clone_seconds: float = 600.0
    """Seconds that a clone, or reading a spilled version, may take at most from its turn on."""
    clone_interruptions: int = 3
    """Number of interruptions by pushes after which a clone goes before them."""
    clone_patience_seconds: float = 60.0
    """Seconds after which a clone that has not ended goes before pushes, too."""


@dataclass(frozen=True)
class TrainerProcess:
    """Process that owns a lease, by its own account; see ``weft.v1.TrainerProcess``.

    Raises:
        InvalidRequestError: A text is too long, or the start time is out of range.
    """

    host: str = ""
    host_key: str = ""
    pid: int = 0
    start_time: float = 0.0
    """Seconds since 1970."""

    def __post_init__(self) -> None:
        """Check the texts and the time."""
        if max(len(self.host), len(self.host_key)) > _MAX_PROCESS_CHARS or not (
            0 <= self.start_time < _LATEST_TIME
        ):
            raise InvalidRequestError(
                "a trainer's process has a host and a host_key of at most "
                f"{_MAX_PROCESS_CHARS} characters, and a start_time between 1970 and 2106",
                metadata={"field": "TrainerProcess"},
            )

    def __str__(self) -> str:
        if not self.pid:
            return "another process"
        started = datetime.fromtimestamp(self.start_time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"process {self.pid} on {self.host}, started {started}"


#: Process of callers that do not say theirs.
UNKNOWN_PROCESS = TrainerProcess()


@dataclass(frozen=True)
class Lease:
    """A trainer's ownership of a policy until ``expires_at``.

    Durable: who holds it, by which token, and for how long at a time. When it expires is not: a
    renewal would cost a write each.
    """

    trainer_id: str
    session_id: str
    fencing_token: int
    expires_at: float
    process: TrainerProcess = UNKNOWN_PROCESS
    num_renewals: int = 0
    """Number of renewals; grows with each sign of life of the owner, from 0 at each start of the
    coordinator."""
    time_to_live: float = 0.0
    """Seconds until it expires, as the owner was told."""

    def is_outdated(self, token: int) -> bool:
        """Return whether the lease was followed by another one, as a larger token shows that a
        trainer was given.

        So it is where the catalog is an older copy. A lease that its owner has renewed since the
        start is no such one.
        """
        return self.num_renewals == 0 and self.fencing_token < token <= MAX_NUMBER


@dataclass(frozen=True)
class Policy:
    """A stream of versions; durable, but for the time at which ``lease`` expires."""

    name: str
    kind: PolicyKind
    last_version: int = 0
    fencing_token: int = 0
    served_version: int = 0
    versions: tuple[int, ...] = ()
    """Versions that are committed and not retired, ascending."""
    lease: Lease | None = None
    pinned: tuple[int, ...] = ()
    """Versions that are never retired, ascending; durable."""
    retain: int = 0
    """Number of newest versions of an adapter that are kept; 0: as ``PoolSettings`` says."""
    trained_on: Mapping[int, int] = field(default_factory=dict)
    """Version of the base that each version of an adapter was trained on, where that is known.
    In the catalog it is part of each version's record."""
    forgotten: bool = False
    """True if an operator has forgotten it, and nothing of it was committed since."""
    owner: str = ""
    """Last owner of its lease, as ``events.AcquirePolicy.owner``."""

    @property
    def is_over(self) -> bool:
        """True if it was forgotten and no trainer has taken it up since."""
        return self.forgotten and self.lease is None


def with_whole_lease(policy: Policy, settings: PoolSettings, now: float) -> Policy:
    """Return a policy of the catalog as a coordinator starts with it.

    Its lease lives on for as long as its owner was told, or is told from now on: the owner may
    have been heard just before the former coordinator ended.
    """
    lease = policy.lease
    if lease is None:
        return policy
    grace = max(lease.time_to_live, settings.lease_seconds)
    return replace(policy, lease=replace(lease, expires_at=now + grace, num_renewals=0))


def live_lease(policy: Policy, now: float) -> Lease | None:
    """Return the lease of a policy; None if it has run out."""
    lease = policy.lease
    return lease if lease and now < lease.expires_at else None


def is_overdue(state: PoolState, name: str, now: float) -> bool:
    """Return whether the lease of a policy has run out since the last tick, which would have ended
    it."""
    policy = state.policies.get(name)
    return policy is not None and policy.lease is not None and live_lease(policy, now) is None


def num_retained(policy: Policy, settings: PoolSettings) -> int:
    """Return the number of newest versions of an adapter that are kept."""
    return policy.retain or settings.retain_versions


@dataclass(frozen=True)
class FitKey:
    """Key of a preflight's answer: all that the answer depends on."""

    layout_digest: bytes
    config_digest: bytes
    capabilities: Capabilities


@dataclass(frozen=True)
class RepublishRequest:
    """Served version that a replica lacks and no replica in contact can bring.

    Its owner is asked to publish it again.
    """

    version: int
    since: float
    is_asked: bool = False
    """True once the owner is asked: a lack must last a while first."""


@dataclass(frozen=True)
class DescriptionRequest:
    """Request to a replica for what is to be recorded of a version."""

    replica_id: str
    again_at: float
    """Time at which a replica is asked again."""


@dataclass(frozen=True)
class UncertainAlias:
    """Doubt about the version that a policy stands for.

    The catalog is an older copy than replicas know.
    """

    served: int
    """Version that is served according to the catalog."""
    since: float


@dataclass(frozen=True)
class UnservedVersion:
    """Committed version that no replica is known to serve (see withdrawals.py)."""

    transfer: Transfer
    """Transfer that brought it, as it ended."""
    silent: frozenset[str]
    """Replicas that have not yet reported to be without it."""


@dataclass(frozen=True)
class PoolState:
    """State of the whole pool; replaced, never changed."""

    settings: PoolSettings = field(default_factory=PoolSettings)
    generation: int = 1
    coordinator_id: str = ""
    """Id of the coordinator, random for each process."""
    pool_id: str = ""
    """Identity of the pool; durable, empty until the first replica or trainer has come to a new
    catalog."""
    fresh_pool_id: str = ""
    """Identity that a new catalog is given if nobody tells one; random for each process."""
    started_at: float = float("-inf")
    secret: str = field(default="", repr=False)
    """Secret that the tokens of probes are derived from; random for each process, never sent."""
    wall_offset_seconds: float = 0.0
    fingerprint: str = ""
    """The fingerprint of the pool's base model; durable, empty before the first replica."""
    architecture: str = ""
    checkpoint: BoundCheckpoint | None = None
    """Checkpoint that base@0 is; durable, None until a replica has told it."""
    base_contents: Mapping[int, bytes] = field(default_factory=dict)
    """Contents (``base_content``) by version of the base; in the catalog with its record.
    Bounded."""
    as_started: frozenset[bytes] = frozenset()
    """Contents of the base that are the bytes of base@0; durable."""
    checkpoint_unseen_since: float | None = None
    """Time since which replicas with another checkpoint are there, and none with this one."""
    epoch_counter: int = 0
    """Counter that the epochs of groups are taken from. Operators' orders advance it, too: an older
    copy of the catalog is recognised by it. Durable."""
    opened_generation: int = 1
    """Generation in the catalog as it was opened. A replica that has heard of a higher one, or of
    a higher ``opened_epoch_counter``, knows more than the catalog."""
    opened_epoch_counter: int = 0
    references_known: frozenset[str] = frozenset()
    """Descriptions of the base that are known, by ``Capabilities.reference_digest``."""
    drafts_known: frozenset[str] = frozenset({""})
    """Drafts whose tensors are known, by fingerprint; "" is of replicas that take none."""
    replicas: Mapping[str, Replica] = field(default_factory=dict)
    policies: Mapping[str, Policy] = field(default_factory=dict)
    forgotten: Mapping[str, Policy] = field(default_factory=dict)
    """Policies that operators have forgotten; only their numbers count. A trainer that takes
    one up continues above them. None of them is in ``policies``."""
    groups: Mapping[str, Group] = field(default_factory=dict)
    transfers: Mapping[str, Transfer] = field(default_factory=dict)
    """Transfers under way, in order of their begin."""
    history: Mapping[str, Transfer] = field(default_factory=dict)
    """Transfers that ended last, oldest first."""
    fits: Mapping[FitKey, Failure | None] = field(default_factory=dict)
    """Answers of preflight: a refusal, or None where the version fits. Bounded."""
    fits_under_way: frozenset[FitKey] = frozenset()
    retire_at: float = float("-inf")
    """Time of the next look for versions to retire."""
    restart_over_at: float = float("-inf")
    """Time when replicas that were there before a restart have registered, or are lost."""
    tick_at: float = float("-inf")
    """Time of the last tick."""
    discards: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Transfers, by replica, whose staged bytes the replica has not yet said that it dropped."""
    discard_at: float = float("-inf")
    """Time at which orders in ``discards`` are repeated."""
    target_tickets: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """Callers of DescribeTarget that wait, with their deadlines."""
    schedule_at: float = float("-inf")
    """Earliest time at which the end of a clone gives rise to a schedule."""
    lookups: frozenset[str] = frozenset()
    """Replicas for which a version is being looked up."""
    republish: Mapping[str, RepublishRequest] = field(default_factory=dict)
    """Versions that are to be published again, by policy."""
    lost: Mapping[str, int] = field(default_factory=dict)
    """Versions that are served and lost, by policy; see ``republish``."""
    unserved: Mapping[PolicyVersion, UnservedVersion] = field(default_factory=dict)
    """Committed versions that no replica is known to serve. Bounded; not durable."""
    out_of_service: Mapping[str, OutOfService] = field(default_factory=dict)
    """Operators' orders by replica, of the pool or not; durable."""
    number_floor: int = 0
    """Number above which numbers and tokens of policies begin that are new to the catalog;
    durable."""
    token_floor: int = 0
    """Number above which tokens of policies new to the catalog begin, too. Of a policy that
    never had a version nothing else is kept. Durable."""
    unrecorded_since: Mapping[str, float] = field(default_factory=dict)
    """Time, by policy, since which a replica holds versions that the catalog does not know."""
    uncertain_aliases: Mapping[str, UncertainAlias] = field(default_factory=dict)
    """Policies whose served version is in question. Until that is decided, nothing is brought
    for them, nor asked of replicas."""
    description_requests: Mapping[PolicyVersion, DescriptionRequest] = field(default_factory=dict)
    """Unrecorded versions whose facts a holder is asked for."""
    adopted: Mapping[PolicyVersion, bytes] = field(default_factory=dict)
    """Digests of the unrecorded versions that were recorded since the start."""
    conflicts: Mapping[PolicyVersion, Mapping[bytes, tuple[str, ...]]] = field(default_factory=dict)
    """Versions under whose number replicas hold unlike bytes; holders by digest."""
    sleeps: Mapping[str, StandingSleepOrder] = field(default_factory=dict)
    """Orders to sleep, by replica; durable, and the replica remembers its own, too."""
    sleep_waits: Mapping[int, SleepWait] = field(default_factory=dict)
    """Calls that wait for replicas to sleep or wake, by ticket."""
    order_number: int = 0
    """The number of the newest order to refuse requests, or to take them again."""

    def is_lost(self, policy: Policy) -> bool:
        """Return whether a policy's served version is lost: nobody can bring it or is asked to."""
        return self.lost.get(policy.name) == policy.served_version

    @cached_property
    def vector(self) -> VersionVector:
        """Versions a ready replica serves: the base, and adapters neither lost nor in question."""
        base = self.policies.get(BASE_POLICY)
        return VersionVector(
            base=base.served_version if base else 0,
            adapters={
                policy.name: AdapterVersions(policy.versions, policy.served_version)
                for policy in self.policies.values()
                if policy.kind is PolicyKind.ADAPTER
                and policy.served_version
                and not self.is_lost(policy)
                and policy.name not in self.uncertain_aliases
            },
        )

    @cached_property
    def copies(self) -> frozenset[PolicyVersion]:
        """Versions that a replica in contact has a copy of for others, in memory or spilled."""
        return frozenset(
            version
            for replica in self.replicas.values()
            if not replica.lost and not self.is_kept_out(replica.replica_id)
            for version in (*held_versions(replica), *replica.spilled)
        )

    @property
    def pinned_bases(self) -> tuple[int, ...]:
        """Versions of the base that replicas are to keep copies of, ascending."""
        base = self.policies.get(BASE_POLICY)
        return base.pinned if base else ()

    def is_kept_out(self, replica_id: str) -> bool:
        """Return whether an operator keeps a replica out of transfers, too."""
        order = self.out_of_service.get(replica_id)
        return order is not None and order.no_pushes

    def is_changing(self, policy: str) -> bool:
        """Return whether a push or a rollback of a policy is under way, on whichever replicas.

        The next one would decide without knowing how it ends.
        """
        return any(
            t.policy == policy and not t.replica_id and t.phase is not Phase.WAITING
            for t in self.transfers.values()
        )

    def is_other_base(self, trained_on: int | None) -> bool:
        """Return whether the pool serves a base of another content than an adapter was trained on.

        Numbers do not tell: what is pushed again has a new one.

        Args:
            trained_on: Version of the base; None (unknown) does not count as another.
        """
        served = self.vector.base
        if trained_on is None or trained_on == served:
            return False
        was, now = (self._content_of_base(version) for version in (trained_on, served))
        return was is None or was != now

    def is_over_another_base(self, version: PolicyVersion) -> bool:
        """Return whether an adapter version can be requested over a base it was not trained on."""
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

    @property
    def served_base_content(self) -> bytes:
        """Content (``base_content``) of the served base; empty for base@0 and where unknown."""
        return self.base_contents.get(self.vector.base, b"")

    @property
    def served_base_digests(self) -> tuple[bytes, bytes]:
        """Layout and content digest of the served base; empty as ``served_base_content``."""
        content = self.served_base_content
        return content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]

    def with_base_content(
        self, version: int, layout_digest: bytes, digest: ContentDigest
    ) -> PoolState:
        """Return the state that remembers the content of a version of the base."""
        known = {**self.base_contents, version: base_content(layout_digest, digest)}
        newest = sorted(known)[-MAX_BASE_CONTENTS:]
        return replace(self, base_contents={number: known[number] for number in newest})

    def _content_of_base(self, version: int) -> bytes | None:
        """Return a value that identifies the content of a version of the base; None if unknown."""
        content = _STARTED_WITH if version == 0 else self.base_contents.get(version)
        return _STARTED_WITH if content in self.as_started else content

    def missed_seconds(self, now: float) -> float:
        """Return for how long the coordinator itself was stopped or starved, as its ticks show; 0
        while they come in time. Others' silence meanwhile says nothing."""
        gap = now - self.tick_at
        return gap if _MAX_TICK_GAP_SECONDS < gap < float("inf") else 0.0

    def wall(self, now: float) -> float:
        """Convert ``now`` to seconds since 1970."""
        return now + self.wall_offset_seconds


def registered_replica(state: PoolState, replica_id: str, incarnation: str) -> Replica:
    """Return the replica of that process, if it is registered and not given up.

    Raises:
        NotFoundError: It is not, or not any more.
    """
    replica = state.replicas.get(replica_id)
    if replica is None or replica.lost or replica.incarnation != incarnation:
        raise NotFoundError(
            f"replica {replica_id[:80]!r} is not registered (any more): register again",
            reason="REPLICA_UNKNOWN",
        )
    return replica


#: Metadata of LEASE_FENCED where the caller may acquire the lease anew.
NOBODY_HOLDS_IT: Final = {"free": "true"}


def require_lease(
    state: PoolState, policy_name: str, fencing_token: int, now: float, session_id: str = ""
) -> tuple[Policy, Lease]:
    """Return a policy and its lease, if the token is that lease's.

    If a session is named, it must be the lease's, too: a catalog that was lost may have given
    the token before.

    Raises:
        LeaseFencedError: The lease expired, was taken over, or never was.
    """
    policy = state.policies.get(policy_name)
    lease = live_lease(policy, now) if policy else None
    if policy is None or lease is None or lease.is_outdated(fencing_token):
        raise LeaseFencedError(
            f"no lease of policy {policy_name[:80]!r} is held: it expired or was never taken; "
            "acquire it again",
            metadata=NOBODY_HOLDS_IT,
        )
    if lease.fencing_token != fencing_token or session_id not in ("", lease.session_id):
        raise LeaseFencedError(
            f"token {fencing_token} of policy {policy_name!r} was superseded by "
            f"{lease.fencing_token}, held by trainer {lease.trainer_id!r} ({lease.process})",
            metadata={"holder": lease.trainer_id},
        )
    return policy, lease


# -- versions of a policy that are kept ------------------------------------------

_SERVED_ONCE = (VersionState.COMMITTED, VersionState.RETIRED)


def kept_versions(policy: Policy, settings: PoolSettings) -> frozenset[int]:
    """Return the newest versions, the pinned ones, and always the one behind the alias."""
    newest = policy.versions[-num_retained(policy, settings) :]
    return frozenset((*newest, *policy.pinned, policy.served_version))


def keepable_versions(state: PoolState, policy: Policy) -> frozenset[int]:
    """Return the versions that are kept, or would be if the change under way were undone."""
    kept = kept_versions(policy, state.settings)
    for transfer in state.transfers.values():
        if transfer.policy == policy.name and transfer.may_be_undone:
            brought = {transfer.version} if transfer.purpose.brings_version else set()
            versions = tuple(v for v in policy.versions if v not in brought)
            before = replace(policy, versions=versions, served_version=transfer.served_before)
            kept |= kept_versions(before, state.settings)
    for version, case in state.unserved.items():
        if version.policy == policy.name:
            others = tuple(v for v in policy.versions if v != version.version)
            replaced = case.transfer.served_before
            before = replace(policy, versions=others, served_version=replaced)
            kept |= kept_versions(before, state.settings)
    return kept


def requestable_versions(state: PoolState, policy: Policy) -> list[int]:
    """List the versions of an adapter that can be requested and will not leave by themselves."""
    kept = kept_versions(policy, state.settings)
    return [version for version in policy.versions if version in kept]


def rollback_versions(state: PoolState, policy: Policy) -> list[int]:
    """List the versions that an adapter can go back to now."""
    return [
        number
        for number in requestable_versions(state, policy)
        if number != policy.served_version and PolicyVersion(policy.name, number) in state.copies
    ]


def known_policy(state: PoolState, version: PolicyVersion, record: VersionRecord | None) -> Policy:
    """Return the policy of a version that was served once.

    Raises:
        NotFoundError: There is no such policy, or the version was never served.
    """
    policy = state.policies.get(version.policy)
    if policy is None:
        raise unknown_policy(state, version.policy)
    started_with = version == PolicyVersion(BASE_POLICY, 0)
    if not started_with and (record is None or record.state not in _SERVED_ONCE):
        why = f": weft versions {version.policy} lists those that were"
        if record is not None and record.failure is not None:
            is_refused = record.state is VersionState.FAILED
            what = "every replica refused it" if is_refused else "its push failed"
            why = f", {what}: {record.failure.message}"
        raise NotFoundError(f"{version} was never served{why}")
    return policy


def unknown_policy(state: PoolState, policy: str) -> NotFoundError:
    """Return the error for a call that names an unknown or a forgotten policy."""
    why = f"no policy {policy[:80]!r} is known: weft versions lists those that are"
    if policy == BASE_POLICY:
        why = "no version of the base was pushed: base@0 is what replicas were started with"
    if policy in state.forgotten:
        why = f"the policy {policy!r} was forgotten by an operator: a push begins it anew"
    return NotFoundError(why, reason="POLICY_UNKNOWN")
