"""Effects of an event: what is to be done in order, once its saves are durable.

One file: a closed list of values without behaviour, which the driver carries out one by one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from weft_rl.contract.adapter_config import AdapterSpec
from weft_rl.contract.errors import WeftError
from weft_rl.contract.manifest import Manifest
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.replica_report import AbsentPolicy, DrainNote, HeldVersion, OutOfService
from weft_rl.coordinator.decisions.state.pool import FitKey, Lease, Policy
from weft_rl.coordinator.decisions.state.replica import StandingSleepOrder
from weft_rl.coordinator.decisions.state.transfer import Group, Transfer
from weft_rl.coordinator.decisions.state.values import (
    BoundCheckpoint,
    ContentDigest,
    Failure,
    ReplicaState,
    VersionRecord,
)
from weft_rl.coordinator.decisions.state.values import (
    CallAnswer as CallAnswer,
)


class Effect:
    """Something to be done."""


@dataclass(frozen=True)
class Save(Effect):
    """Change of the catalog."""

    durable: bool = field(default=True, kw_only=True)
    """False where a restart would come to the same end by itself: it is then written with the
    next durable save or tick."""


# -- saves to the catalog: one transaction for all saves of a batch -------------


@dataclass(frozen=True)
class SavePool(Save):
    """Base model that the pool is bound to; empty where an operator let go of it."""

    fingerprint: str
    architecture: str


@dataclass(frozen=True)
class SavePoolId(Save):
    """Identity of the pool; see pool_identity.py."""

    pool_id: str


@dataclass(frozen=True)
class SaveGeneration(Save):
    """Generation above those of later coordinators that replicas have heard of."""

    generation: int


@dataclass(frozen=True)
class SaveNumberFloor(Save):
    """Number above which numbers of policies begin that the catalog does not know."""

    number_floor: int


@dataclass(frozen=True)
class SaveCheckpoint(Save):
    """Checkpoint that base@0 is from now on; SavePool forgets it."""

    checkpoint: BoundCheckpoint


@dataclass(frozen=True)
class SaveAsStarted(Save):
    """Content of a pushed base that holds the bytes of base@0; SavePool forgets it."""

    content: bytes
    durable: bool = field(default=False, kw_only=True)
    """False, since replicas tell it again."""


@dataclass(frozen=True)
class SaveEpoch(Save):
    """Epoch of the newest group, or the number of an operator's order since."""

    epoch: int


@dataclass(frozen=True)
class SavePolicy(Save):
    """Counters, alias, owner and lease of a policy."""

    policy: Policy


@dataclass(frozen=True)
class SavePolicyDropped(Save):
    """Removal of a policy that never had a version; tokens of new ones begin above a floor."""

    name: str
    token_floor: int
    durable: bool = field(default=False, kw_only=True)
    """False, since a policy that is still there after a restart is dropped again."""


@dataclass(frozen=True)
class SaveVersion(Save):
    """Whole record of a version."""

    record: VersionRecord


@dataclass(frozen=True)
class SaveRetired(Save):
    """Committed version that is no longer held."""

    version: PolicyVersion
    durable: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class SaveCommitted(Save):
    """Retired version that is served again."""

    version: PolicyVersion


@dataclass(frozen=True)
class SavePin(Save):
    """Pin of a version, which must not be retired, or its removal."""

    version: PolicyVersion
    pinned: bool


@dataclass(frozen=True)
class SaveOutOfService(Save):
    """Order that keeps a replica out of service; None where it is over."""

    replica_id: str
    order: OutOfService | None


@dataclass(frozen=True)
class SaveLeaseEnded(Save):
    """End of the lease of a policy, whose owner stays its last one."""

    name: str


@dataclass(frozen=True)
class SaveSleep(Save):
    """Order to a replica to sleep; None where it is over."""

    replica_id: str
    order: StandingSleepOrder | None


@dataclass(frozen=True)
class SaveEvent(Save):
    """Event that outlives the coordinator; see ``event_kinds``."""

    time: float
    """Seconds since 1970."""
    event: Announce
    durable: bool = field(default=False, kw_only=True)
    """False, since nothing is decided by it."""


# -- answers to waiting calls ----------------------------------------------------


@dataclass(frozen=True)
class LeaseAnswer(CallAnswer):
    """Lease that was taken, or renewed."""

    policy: str
    lease: Lease
    last_version: int
    publish_again_version: int = 0
    pool_id: str = ""


@dataclass(frozen=True)
class BeginAnswer(CallAnswer):
    """Push that has begun; ``group`` is None when the transfer has ended."""

    transfer_id: str
    version: PolicyVersion
    nonce: int
    replica_ids: tuple[str, ...]
    group: Group | None


@dataclass(frozen=True)
class RegisterAnswer(CallAnswer):
    """Numbers that a new replica counts from, and orders that stand for it."""

    heartbeat_interval_seconds: float
    reference_wanted: bool
    coordinator_generation: int
    coordinator_id: str = ""
    order_number: int = 0
    out_of_service: OutOfService | None = None
    epoch: int = 0
    pool_id: str = ""


@dataclass(frozen=True)
class HeartbeatAnswer(CallAnswer):
    """Orders that stand for a replica, and what it lacks of what the pool serves."""

    ready: bool
    drain: DrainNote | None = None
    in_transfer: bool = False
    pinned_base_versions: tuple[int, ...] = ()
    held_versions_wanted: bool = False
    coordinator_generation: int = 0
    order_number: int = 0
    lacking: tuple[PolicyVersion, ...] = ()
    lacking_more: bool = False
    base_doubt: str = ""
    absent_policies: tuple[AbsentPolicy, ...] = ()
    out_of_service: OutOfService | None = None
    epoch: int = 0
    pool_id: str = ""


@dataclass(frozen=True)
class UncordonAnswer(CallAnswer):
    """State of a replica that is in service again, if it is in the pool, and the reason for it."""

    state: ReplicaState | None
    state_reason: str


@dataclass(frozen=True)
class RollbackAnswer(CallAnswer):
    """Version that is served, and the one that it has replaced."""

    version: PolicyVersion
    replaced_version: int
    replica_ids: tuple[str, ...]
    pause_seconds: float


@dataclass(frozen=True)
class RetiredAnswer(CallAnswer):
    """Versions that an order has ended."""

    retired_versions: tuple[PolicyVersion, ...]


@dataclass(frozen=True)
class RetentionAnswer(CallAnswer):
    """Number of versions that are kept."""

    num_versions: int


@dataclass(frozen=True)
class SleepAnswer(CallAnswer):
    """Answer to orders to sleep and to wake: the replicas that have done so."""

    replica_ids: tuple[str, ...]


@dataclass(frozen=True)
class EmptyAnswer(CallAnswer):
    """Answer to calls that return nothing."""


@dataclass(frozen=True)
class Reply(Effect):
    """Answer to a call, by its ticket."""

    ticket: int
    answer: CallAnswer


@dataclass(frozen=True)
class Refuse(Effect):
    """Failure of a call, by its ticket."""

    ticket: int
    error: WeftError


# -- side groups, and messages on the streams of their ranks ---------------------


@dataclass(frozen=True)
class OpenGroup(Effect):
    """Opening of a group's store and streams to its members."""

    group: Group


@dataclass(frozen=True)
class DropGroup(Effect):
    """End of a group's store and streams."""

    group_id: str
    why: str
    is_failure: bool = True
    """True if somebody may wait in it: the streams end with EPOCH_FENCED, not normally."""


@dataclass(frozen=True)
class SendPrepare(Effect):
    """Message to every receiver of the group: prepare for a transfer."""

    group_id: str
    transfer: Transfer
    time_left: float


@dataclass(frozen=True)
class SendStart(Effect):
    """Message to every rank of the group: start; verified buckets are counted from here."""

    group_id: str
    transfer_id: str
    num_receivers: int
    num_buckets: int
    first_bucket: int = 0


@dataclass(frozen=True)
class SendReform(Effect):
    """Message to each sender of a group that is about to be dropped: resume in another."""

    group_id: str
    transfer_id: str
    renewed: Group
    message: str


@dataclass(frozen=True)
class SendAbort(Effect):
    """Message to every rank of the group that attends: abort."""

    group_id: str
    transfer_id: str
    failure: Failure


# -- calls to replicas; their answers come back as events -----------------------


class ReplicaCall(Effect):
    """Order to a replica."""

    replica_id: str
    address: str


@dataclass(frozen=True)
class CallJoin(ReplicaCall):
    """Order to join a group; ``first_rank`` is that of the replica's receiver 0."""

    transfer_id: str
    replica_id: str
    address: str
    group: Group
    first_rank: int


@dataclass(frozen=True)
class CallLoad(ReplicaCall):
    """Order to load in place; answered as LoadAnswered."""

    transfer_id: str
    replica_id: str
    address: str
    version: PolicyVersion
    timeout_seconds: float


@dataclass(frozen=True)
class CallCommit(ReplicaCall):
    """Order to serve what was staged; answered as CommitAnswered."""

    transfer_id: str
    replica_id: str
    incarnation: str
    address: str
    version: PolicyVersion
    adapter: AdapterSpec | None
    content_digest: ContentDigest
    alias: int = 0
    """Version that an adapter's bare name stands for afterwards; 0 is this version."""
    layout_digest: bytes = b""


@dataclass(frozen=True)
class CallSend(ReplicaCall):
    """Order to the source of a clone; a failure is answered as JoinAnswered."""

    transfer_id: str
    replica_id: str
    address: str
    group: Group
    version: PolicyVersion
    nonce: int
    timeout_seconds: float


@dataclass(frozen=True)
class CallSwitch(ReplicaCall):
    """Order to serve a version that it holds; answered as CommitAnswered."""

    transfer_id: str
    replica_id: str
    incarnation: str
    address: str
    version: PolicyVersion


@dataclass(frozen=True)
class CallRestore(ReplicaCall):
    """Order to serve a version of its spill directory; answered as CommitAnswered."""

    transfer_id: str
    replica_id: str
    incarnation: str
    address: str
    version: PolicyVersion
    adapter: AdapterSpec | None
    content_digest: ContentDigest
    layout_digest: bytes
    alias: int
    timeout_seconds: float


@dataclass(frozen=True)
class CallDiscard(ReplicaCall):
    """Order to drop what was staged; repeated until it is answered."""

    transfer_id: str
    replica_id: str
    address: str


@dataclass(frozen=True)
class CallRefuse(ReplicaCall):
    """Order to refuse requests; answered as RefuseAnswered. Heartbeats repeat it."""

    replica_id: str
    incarnation: str
    address: str
    out_of_service: OutOfService | None
    order_number: int


@dataclass(frozen=True)
class CallSleep(ReplicaCall):
    """Order to sleep; answered as SleepAnswered."""

    replica_id: str
    incarnation: str
    address: str
    trainer_id: str
    level: int
    aborts: bool
    timeout_seconds: float
    """Seconds that requests may take to end."""
    call_seconds: float


@dataclass(frozen=True)
class CallWake(ReplicaCall):
    """Order to wake; answered as WakeAnswered."""

    replica_id: str
    incarnation: str
    address: str
    call_seconds: float


@dataclass(frozen=True)
class CallRetire(ReplicaCall):
    """Order to drop versions."""

    replica_id: str
    incarnation: str
    address: str
    versions: tuple[PolicyVersion, ...]
    mistaken_versions: tuple[HeldVersion, ...] = ()
    """Adapters whose bytes are not those of their numbers."""
    ended_policies: tuple[str, ...] = ()
    """Policies that were forgotten: ``versions`` may include what their names stand for."""


@dataclass(frozen=True)
class CloseChannel(Effect):
    """Notice that no call will go to this address again for a while."""

    address: str


# -- questions to answer first; the answers come back as events ------------------


@dataclass(frozen=True)
class CheckFit(Effect):
    """Preflight of a layout against one kind of replica; answered as FitChecked."""

    key: FitKey
    manifest: Manifest = field(repr=False, compare=False)
    adapter: AdapterSpec | None


@dataclass(frozen=True)
class LookUp(Effect):
    """Look-up of what is needed to bring a version to a replica; answered as LookedUp."""

    replica_id: str
    incarnation: str
    source_id: str
    source_address: str
    version: PolicyVersion


@dataclass(frozen=True)
class DescribeVersion(Effect):
    """Request for what the catalog is to record of a version; answered as HeldDescribed."""

    replica_id: str
    incarnation: str
    address: str
    version: PolicyVersion
    digest: bytes


# -- announcements ---------------------------------------------------------------


class EventKind(enum.StrEnum):
    """Kind of an announced event; in capitals, the names are those of ``weft.v1.EventKind``.

    That enum says what each means.
    """

    REPLICA_READY = enum.auto()
    REPLICA_PENDING_WEIGHTS = enum.auto()
    REPLICA_LOST = enum.auto()
    REPLICA_QUARANTINED = enum.auto()
    REPLICA_DRAINING = enum.auto()
    REPLICA_OUT_OF_SERVICE = enum.auto()
    REPLICA_SUSPECT = enum.auto()
    REPLICA_ANSWERS = enum.auto()
    LEASE_ACQUIRED = enum.auto()
    LEASE_RELEASED = enum.auto()
    TRANSFER_BEGUN = enum.auto()
    TRANSFER_REFORMED = enum.auto()
    TRANSFER_STAGED = enum.auto()
    TRANSFER_COMMITTED = enum.auto()
    TRANSFER_ABORTED = enum.auto()
    VERSION_FAILED = enum.auto()
    VERSION_RETIRED = enum.auto()
    VERSION_PINNED = enum.auto()
    VERSION_UNPINNED = enum.auto()
    RETENTION_SET = enum.auto()
    ROLLED_BACK = enum.auto()
    ROLLBACK_FAILED = enum.auto()
    CLONE_BEGUN = enum.auto()
    CLONE_INTERRUPTED = enum.auto()
    CLONE_ENDED = enum.auto()
    CLONE_FAILED = enum.auto()
    RESTORE_BEGUN = enum.auto()
    RESTORE_ENDED = enum.auto()
    RESTORE_FAILED = enum.auto()
    PUBLISH_AGAIN_WANTED = enum.auto()
    BASE_BOUND = enum.auto()
    BASE_UNBOUND = enum.auto()
    CHECKPOINT_BOUND = enum.auto()
    CATALOG_BEHIND = enum.auto()
    UNRECORDED_VERSIONS = enum.auto()
    VERSION_ADOPTED = enum.auto()
    VERSION_NOT_ADOPTED = enum.auto()
    VERSION_CONFLICT = enum.auto()
    REPLICA_ASLEEP = enum.auto()
    POLICY_FORGOTTEN = enum.auto()
    POLICY_LOST = enum.auto()
    POLICY_FOUND = enum.auto()
    COORDINATOR_STARTED = enum.auto()
    REPLICA_LEFT = enum.auto()


@dataclass(frozen=True)
class Announce(Effect):
    """Line of the log and of WatchEvents."""

    kind: EventKind
    subject: str
    message: str
    concerns: PolicyVersion | None = None
    """Version that it concerns, of number 0 where it concerns a policy; None for neither."""


@dataclass(frozen=True)
class RoutesChanged(Effect):
    """Notification of the watchers of the routes that these replicas have changed."""

    replica_ids: tuple[str, ...]
