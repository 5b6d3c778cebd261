"""What is to be done about an event, in order, once its saves are durable."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.contract.errors import WeftError
from weft.contract.manifest import Manifest
from weft.contract.names import PolicyVersion
from weft.coordinator.decisions.state.pool import FitKey, Lease, Policy
from weft.coordinator.decisions.state.replica import OutOfService
from weft.coordinator.decisions.state.transfer import Group, Transfer
from weft.coordinator.decisions.state.values import (
    AdapterSpec,
    BoundCheckpoint,
    ContentDigest,
    Failure,
    HeldVersion,
    ReplicaState,
    VersionRecord,
)

# -- saves: one transaction for all of a batch ---------------------------------


@dataclass(frozen=True)
class SavePool:
    """The pool's base model is fixed."""

    fingerprint: str
    architecture: str
    durable: bool = True


@dataclass(frozen=True)
class SaveGeneration:
    """Replicas have heard of later coordinators than the catalog has."""

    generation: int
    durable: bool = True


@dataclass(frozen=True)
class SaveNumberFloor:
    """Numbers of policies that the catalog does not know begin above this."""

    number_floor: int
    durable: bool = True


@dataclass(frozen=True)
class SaveCheckpoint:
    """What base@0 is, from now on; SavePool forgets it."""

    checkpoint: BoundCheckpoint
    durable: bool = True


@dataclass(frozen=True)
class SaveEpoch:
    """The newest group's generation."""

    epoch: int
    durable: bool = True


@dataclass(frozen=True)
class SavePolicy:
    """A policy's counters and alias."""

    policy: Policy
    durable: bool = True


@dataclass(frozen=True)
class SaveVersion:
    """A version's whole record."""

    record: VersionRecord
    durable: bool = True
    """False where a restart would come to the same end by itself: written with
    the next durable save or tick."""


@dataclass(frozen=True)
class SaveRetired:
    """A committed version is no longer held."""

    version: PolicyVersion
    durable: bool = False


@dataclass(frozen=True)
class SaveCommitted:
    """A retired version is served again."""

    version: PolicyVersion
    durable: bool = True


@dataclass(frozen=True)
class SavePin:
    """A version must not be retired, or may be again."""

    version: PolicyVersion
    pinned: bool
    durable: bool = True


@dataclass(frozen=True)
class SaveOutOfService:
    """A replica is kept out of service; not any more where ``order`` is None."""

    replica_id: str
    order: OutOfService | None
    durable: bool = True


Save = (
    SavePool
    | SaveGeneration
    | SaveNumberFloor
    | SaveCheckpoint
    | SaveEpoch
    | SavePolicy
    | SaveVersion
    | SaveRetired
    | SaveCommitted
    | SavePin
    | SaveOutOfService
)

# -- answers to waiting calls --------------------------------------------------


@dataclass(frozen=True)
class LeaseAnswer:
    """To AcquirePolicy and RenewLease."""

    policy: str
    lease: Lease
    last_version: int
    time_to_live: float
    publish_again_version: int = 0
    """The version that nobody holds any more, if there is such a need."""


@dataclass(frozen=True)
class BeginAnswer:
    """To BeginTransfer; ``group`` is None when the transfer has ended."""

    transfer_id: str
    version: PolicyVersion
    nonce: int
    replica_ids: tuple[str, ...]
    group: Group | None


@dataclass(frozen=True)
class RegisterAnswer:
    """To Register."""

    heartbeat_seconds: float
    reference_wanted: bool
    generation: int
    coordinator_id: str = ""
    refuse_reason: str = ""
    """As of HeartbeatAnswer."""
    order_number: int = 0


@dataclass(frozen=True)
class HeartbeatAnswer:
    """To Heartbeat."""

    ready: bool
    drain_seconds: float | None = None
    """Time that is left to a replica that is to drain; None for others."""
    drain_reason: str = ""
    in_transfer: bool = False
    """Whether a transfer needs it."""
    pinned_bases: tuple[int, ...] = ()
    """Versions of the base whose copies it must keep."""
    refuse_reason: str = ""
    """Why it must refuse new requests; empty when it must not."""
    held_wanted: bool = False
    """Whether the next heartbeat is to name all that it holds."""
    generation: int = 0
    """Of the coordinator, which may have grown."""
    order_number: int = 0
    """Of the newest order to refuse requests, or to take them again."""


@dataclass(frozen=True)
class UncordonAnswer:
    """To Uncordon: the replica's state, if it is in the pool, and why it is so."""

    state: ReplicaState | None
    why: str


@dataclass(frozen=True)
class RollbackAnswer:
    """To Rollback."""

    version: PolicyVersion
    replaced_version: int
    replica_ids: tuple[str, ...]
    pause_seconds: float


@dataclass(frozen=True)
class RebindAnswer:
    """To RebindBase."""

    retired: tuple[PolicyVersion, ...]


@dataclass(frozen=True)
class RetentionAnswer:
    """To SetRetention."""

    num_versions: int


@dataclass(frozen=True)
class Done:
    """To calls that answer nothing."""


Answer = (
    LeaseAnswer
    | BeginAnswer
    | RegisterAnswer
    | HeartbeatAnswer
    | RollbackAnswer
    | RebindAnswer
    | RetentionAnswer
    | UncordonAnswer
    | Transfer
    | Done
)


@dataclass(frozen=True)
class Reply:
    """Answers a call."""

    ticket: int
    answer: Answer


@dataclass(frozen=True)
class Refuse:
    """Fails a call."""

    ticket: int
    error: WeftError


# -- side groups and their streams ---------------------------------------------


@dataclass(frozen=True)
class OpenGroup:
    """Makes a group's store and streams available to its members."""

    group: Group


@dataclass(frozen=True)
class DropGroup:
    """Ends a group's store and streams with EPOCH_FENCED."""

    group_id: str
    why: str


@dataclass(frozen=True)
class SendPrepare:
    """To every receiver of the group."""

    group_id: str
    transfer: Transfer
    time_left: float


@dataclass(frozen=True)
class SendStart:
    """To every rank of the group; verified buckets are counted from here."""

    group_id: str
    transfer_id: str
    num_receivers: int
    num_buckets: int
    first_bucket: int = 0


@dataclass(frozen=True)
class SendReform:
    """To the sender of a group that is about to be dropped: go on in another."""

    group_id: str
    transfer_id: str
    renewed: Group
    message: str


@dataclass(frozen=True)
class SendAbort:
    """To every rank of the group that attends."""

    group_id: str
    transfer_id: str
    failure: Failure


# -- calls to replicas; their answers come back as events ----------------------


@dataclass(frozen=True)
class CallJoin:
    """JoinGroup; ``first_rank`` is that of the replica's receiver 0."""

    transfer_id: str
    replica_id: str
    address: str
    group: Group
    first_rank: int


@dataclass(frozen=True)
class CallLoad:
    """LoadTransfer; answered as LoadAnswered."""

    transfer_id: str
    replica_id: str
    address: str
    version: PolicyVersion
    timeout_seconds: float


@dataclass(frozen=True)
class CallCommit:
    """CommitTransfer."""

    transfer_id: str
    replica_id: str
    incarnation: str
    address: str
    version: PolicyVersion
    adapter: AdapterSpec | None
    content_digest: ContentDigest
    alias: int = 0
    """What an adapter's bare name stands for afterwards; 0 is this version."""
    layout_digest: bytes = b""


@dataclass(frozen=True)
class CallSend:
    """SendVersion, to the source of a clone; a failure is answered as JoinAnswered."""

    transfer_id: str
    replica_id: str
    address: str
    group: Group
    version: PolicyVersion
    nonce: int
    timeout_seconds: float


@dataclass(frozen=True)
class CallSwitch:
    """SwitchVersion; answered as CommitAnswered."""

    transfer_id: str
    replica_id: str
    incarnation: str
    address: str
    version: PolicyVersion


@dataclass(frozen=True)
class CallRestore:
    """SwitchVersion to what is read from the replica's spill directory; answered as
    CommitAnswered."""

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
class CallDiscard:
    """DiscardTransfer; repeated until it is answered."""

    transfer_id: str
    replica_id: str
    address: str


@dataclass(frozen=True)
class CallRefuse:
    """RefuseRequests; answered as RefuseAnswered. Heartbeats repeat it."""

    replica_id: str
    incarnation: str
    address: str
    reason: str
    number: int


@dataclass(frozen=True)
class CallRetire:
    """RetireVersions."""

    replica_id: str
    incarnation: str
    address: str
    versions: tuple[PolicyVersion, ...]
    mistaken: tuple[HeldVersion, ...] = ()
    """Adapters whose bytes are not those of their numbers."""


@dataclass(frozen=True)
class CloseChannel:
    """No call will go to this address again for a while."""

    address: str


# -- others --------------------------------------------------------------------


@dataclass(frozen=True)
class CheckFit:
    """Preflight of a layout against one kind of replica; answers FitChecked."""

    key: FitKey
    manifest: Manifest = field(repr=False, compare=False)
    adapter: AdapterSpec | None


@dataclass(frozen=True)
class LookUp:
    """What is needed to bring a version to a replica; answers LookedUp."""

    replica_id: str
    incarnation: str
    source_id: str
    source_address: str
    version: PolicyVersion


@dataclass(frozen=True)
class DescribeHeld:
    """What the catalog is to record of a version; answers HeldDescribed."""

    replica_id: str
    incarnation: str
    address: str
    version: PolicyVersion
    digest: bytes


@dataclass(frozen=True)
class Announce:
    """A line of the log and of WatchEvents."""

    kind: str
    subject: str
    message: str


@dataclass(frozen=True)
class RoutesChanged:
    """Those who follow the routes are told of these replicas."""

    replica_ids: tuple[str, ...]


Effect = (
    Save
    | Reply
    | Refuse
    | OpenGroup
    | DropGroup
    | SendPrepare
    | SendStart
    | SendReform
    | SendAbort
    | CallJoin
    | CallLoad
    | CallCommit
    | CallSend
    | CallSwitch
    | CallRestore
    | CallDiscard
    | CallRetire
    | CallRefuse
    | CloseChannel
    | CheckFit
    | LookUp
    | DescribeHeld
    | Announce
    | RoutesChanged
)
