"""Events that the coordinator decides on.

Everything random or read from elsewhere comes in with the event. ``ticket`` names the waiting
call that an effect will answer.

One file: a closed list of values without behaviour, which ``step`` tells apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft_rl.contract.adapter_config import AdapterSpec
from weft_rl.contract.capabilities import Capabilities
from weft_rl.contract.checkpoint import Checkpoint
from weft_rl.contract.group import LinkUsage
from weft_rl.contract.manifest import SendPlan
from weft_rl.contract.names import PolicyVersion, VersionVector
from weft_rl.contract.options import DEFAULT_REQUESTS_SECONDS
from weft_rl.contract.replica_report import OutOfService, ReplicaReport, Sleep
from weft_rl.coordinator.decisions.state.pool import UNKNOWN_PROCESS, FitKey, TrainerProcess
from weft_rl.coordinator.decisions.state.replica import NOT_TOLD
from weft_rl.coordinator.decisions.state.transfer import RankReport, TransferIds
from weft_rl.coordinator.decisions.state.values import (
    ContentDigest,
    Failure,
    HeldVersionRecord,
    PolicyKind,
    RecordedFacts,
    VersionLayout,
    VersionRecord,
)


class Event:
    """Something that the coordinator decides on."""


@dataclass(frozen=True)
class Call(Event):
    """Call that waits for an answer: its fields are those of the request, as its proto says."""

    ticket: int


# -- requests of trainers -----------------------------------------------------------


@dataclass(frozen=True)
class AcquirePolicy(Call):
    """Trainer's request for a policy's lease."""

    trainer_id: str
    session_id: str
    policy: str
    kind: PolicyKind
    process: TrainerProcess = UNKNOWN_PROCESS
    displaced_token: int = 0
    last_version: int = 0
    last_fencing_token: int = 0
    identity: str = ""
    """Identity that its credentials have shown; empty where nobody is asked."""
    pool_id: str = ""

    @property
    def owner(self) -> str:
        """Owner whose policies are counted together: names of trainers are their own choice."""
        return self.identity or self.trainer_id


@dataclass(frozen=True)
class RenewLease(Call):
    """Trainer's request for more time of its lease."""

    policy: str
    fencing_token: int
    session_id: str = ""
    pool_id: str = ""


@dataclass(frozen=True)
class ReleasePolicy(Call):
    """Trainer's request to give its lease back."""

    policy: str
    fencing_token: int
    session_id: str = ""


@dataclass(frozen=True)
class DescribeTarget(Call):
    """Trainer's request for a description of the pool; waits until ``answer_by``, for replicas
    that have not described their base beside others until ``patience`` alone."""

    answer_by: float
    patience: float = float("inf")


@dataclass(frozen=True, kw_only=True)
class BeginTransfer(Call):
    """Trainer's request to push a version."""

    request_id: str
    policy: str
    fencing_token: int
    layout_digest: bytes
    layout: VersionLayout | None
    """Layout of that digest; None when no such manifest is known."""
    adapter: AdapterSpec | None
    min_replicas: int
    deadline: float
    answer_by: float
    backend: str
    group_id: str
    ids: TransferIds
    session_id: str = ""
    recorded: VersionRecord | None
    """Record that the catalog has of this trainer's request id."""
    check_finite: bool = False
    refuse_other_base: bool = False
    carries_runs: bool = False
    send_plan: SendPlan | None = None
    backend_reason: str = ""
    trial_names: frozenset[str] = frozenset()


@dataclass(frozen=True)
class AwaitTransfer(Call):
    """Trainer's request to wait for a transfer's end."""

    transfer_id: str


@dataclass(frozen=True)
class AbortTransfer(Call):
    """Trainer's request to give a transfer of its policy up."""

    transfer_id: str
    policy: str
    fencing_token: int
    message: str
    request_id: str = ""


@dataclass(frozen=True, kw_only=True)
class SleepRollouts(Call):
    """Request of the owner of the base's lease to put the replicas on its GPUs to sleep."""

    fencing_token: int
    session_id: str
    gpu_uuids: frozenset[str]
    level: int = field(default=1, metadata={"unset": 1})
    aborts: bool
    timeout_seconds: float
    answer_by: float


@dataclass(frozen=True)
class WakeRollouts(Call):
    """Request of the owner of the base's lease to wake what it has put to sleep."""

    fencing_token: int
    session_id: str
    answer_by: float


# -- events that replicas report of themselves ------------------------------------


@dataclass(frozen=True, kw_only=True)
class Register(Call):
    """Registration of a replica."""

    replica_id: str
    incarnation: str
    address: str
    http_url: str
    model_name: str
    capabilities: Capabilities
    report: ReplicaReport
    held: tuple[HeldVersionRecord, ...] = ()
    """All versions that it holds."""
    last_coordinator_generation: int = 0
    last_epoch: int = 0
    last_coordinator_id: str = ""
    checkpoint: Checkpoint = NOT_TOLD
    out_of_service: OutOfService | None = None
    pool_id: str = ""


@dataclass(frozen=True)
class ReportCheckpoint(Call):
    """Report of the checkpoint that a replica was started with, once it is read."""

    replica_id: str
    incarnation: str
    checkpoint: Checkpoint


@dataclass(frozen=True)
class Heartbeat(Call):
    """Heartbeat of a replica."""

    replica_id: str
    incarnation: str
    report: ReplicaReport
    staged: Mapping[str, VersionRecord | None] = field(default_factory=dict)
    """Transfers that it holds bytes of, each with its record in the catalog."""
    held: tuple[HeldVersionRecord, ...] = ()
    """Versions that it has not told before, or all that it holds."""
    held_versions_complete: bool = False


@dataclass(frozen=True)
class Leave(Call):
    """Departure of a replica."""

    replica_id: str
    incarnation: str


@dataclass(frozen=True)
class ReferenceKnown(Event):
    """Notice that the tensors of the base model of that fingerprint are known."""

    fingerprint: str
    draft_fingerprint: str = ""
    """``Reference.draft_fingerprint``, where the tensors of a draft came with them."""
    reference_digest: str = ""
    """``Capabilities.reference_digest`` of the replica that described it."""


# -- messages of the ranks of a side group, on their streams ----------------------


@dataclass(frozen=True)
class RankAttends(Event):
    """Opening of a rank's stream."""

    group_id: str
    rank: int


@dataclass(frozen=True)
class RankGone(Event):
    """End of a rank's stream, broken or closed."""

    group_id: str
    rank: int
    why: str


@dataclass(frozen=True)
class RanksHeard(Event):
    """Reports of the ranks of a group on their work since the last tick."""

    group_id: str
    reports: Mapping[int, RankReport] = field(default_factory=dict)
    transfer_id: str = ""
    """The transfer that ``num_verified`` is of."""
    num_verified: Mapping[int, int] = field(default_factory=dict)
    """Number of buckets, from the first, that receivers have reported; only of those that
    reported."""
    hops: Mapping[tuple[int, int], LinkUsage] = field(default_factory=dict)
    """Bytes that were sent over streams, by the ranks of both ends."""


@dataclass(frozen=True)
class RankPrepared(Event):
    """Report of a receiver that it is ready for a transfer's bytes."""

    group_id: str
    transfer_id: str
    rank: int
    num_verified: int = 0
    """Number of buckets, from the first, that it has from an earlier epoch."""


@dataclass(frozen=True)
class RankLoadDue(Event):
    """Request of a receiver that its replica load what it has received."""

    group_id: str
    transfer_id: str
    rank: int


@dataclass(frozen=True)
class RankStaged(Event):
    """Report of a rank that it has sent or verified everything."""

    group_id: str
    transfer_id: str
    rank: int
    digest: ContentDigest


@dataclass(frozen=True)
class RankFailed(Event):
    """Report of a rank that it cannot continue its transfer."""

    group_id: str
    transfer_id: str
    rank: int
    reason: str
    message: str


# -- orders of operators ----------------------------------------------------------


@dataclass(frozen=True)
class Rollback(Call):
    """Operator's order to serve a former version again."""

    policy: str
    to_version: int
    ids: TransferIds
    answer_by: float
    recorded: VersionRecord | None


@dataclass(frozen=True)
class Pin(Call):
    """Operator's order to keep a version, or to let it go."""

    version: PolicyVersion
    pinned: bool
    recorded: VersionRecord | None


@dataclass(frozen=True)
class Retire(Call):
    """Operator's order to retire an adapter version now."""

    version: PolicyVersion
    recorded: VersionRecord | None


@dataclass(frozen=True)
class SetRetention(Call):
    """Operator's order on how many of the newest versions of an adapter to keep."""

    policy: str
    num_versions: int


@dataclass(frozen=True)
class ForgetPolicy(Call):
    """Operator's order to end a policy."""

    policy: str
    force: bool


@dataclass(frozen=True)
class Cordon(Call):
    """Operator's order to take a replica out of service; see ``OutOfService``."""

    replica_id: str
    reason: str = ""
    no_pushes: bool = False


@dataclass(frozen=True)
class Uncordon(Call):
    """Operator's order to put a replica back into service."""

    replica_id: str


@dataclass(frozen=True)
class Drain(Call):
    """Operator's order to let a replica leave."""

    replica_id: str
    timeout_seconds: float = 300.0
    reason: str = ""


@dataclass(frozen=True)
class CancelTransfer(Call):
    """Operator's order to end a transfer before its commit."""

    transfer_id: str
    reason: str = ""


@dataclass(frozen=True)
class SleepReplica(Call):
    """Operator's order to put a replica to sleep."""

    replica_id: str
    aborts: bool
    timeout_seconds: float = DEFAULT_REQUESTS_SECONDS
    answer_by: float = float("inf")
    level: int = field(default=1, metadata={"unset": 1})


@dataclass(frozen=True)
class WakeReplica(Call):
    """Operator's order to wake a replica."""

    replica_id: str
    answer_by: float


@dataclass(frozen=True)
class RebindBase(Call):
    """Operator's order to let go of the pool's base model."""

    base_fingerprint: str


# -- outcomes of effects that call replicas, or look something up ------------------


@dataclass(frozen=True)
class FitChecked(Event):
    """Answer of preflight; ``failure`` is None where the version fits."""

    key: FitKey
    failure: Failure | None


@dataclass(frozen=True)
class JoinAnswered(Event):
    """Outcome of telling a replica to join a group."""

    transfer_id: str
    replica_id: str
    failure: Failure | None


@dataclass(frozen=True)
class LoadAnswered(Event):
    """Outcome of telling a replica to load a base in place, as it comes."""

    transfer_id: str
    replica_id: str
    failure: Failure | None


@dataclass(frozen=True)
class CommitAnswered(Event):
    """Outcome of an order to serve a version: ``vector`` is set, or ``failure`` says why not."""

    transfer_id: str
    replica_id: str
    incarnation: str
    vector: VersionVector | None
    pause_seconds: float
    failure: Failure | None
    retained: tuple[int, ...] = ()
    base_as_started: bool = False
    undoable: tuple[int, ...] = ()


@dataclass(frozen=True)
class RetireAnswered(Event):
    """Report of a replica on what it still holds."""

    replica_id: str
    incarnation: str
    vector: VersionVector


@dataclass(frozen=True)
class DiscardAnswered(Event):
    """Report of a replica that it has discarded a transfer.

    It holds no staged bytes of the transfer, carries out no order of it any more, and serves
    what ``vector`` says.
    """

    replica_id: str
    transfer_id: str
    incarnation: str
    vector: VersionVector


@dataclass(frozen=True)
class RefuseAnswered(Event):
    """Report of a replica on the refusal of requests that it enforces, by which order."""

    replica_id: str
    incarnation: str
    refusing: str
    order_number: int


@dataclass(frozen=True)
class SleepAnswered(Event):
    """Report of a replica that it sleeps, or why not."""

    replica_id: str
    incarnation: str
    asleep: Sleep | None
    failure: Failure | None


@dataclass(frozen=True)
class WakeAnswered(Event):
    """Report of a replica that it is awake, or why not."""

    replica_id: str
    incarnation: str
    failure: Failure | None
    dirty_reason: str = ""
    """Reason why it has nothing to serve, if so; see ``Replica.dirty_reason``."""


@dataclass(frozen=True, kw_only=True)
class LookedUp(Event):
    """Result of a look-up: facts to bring ``version`` from ``source_id`` (maybe the replica)."""

    replica_id: str
    incarnation: str
    source_id: str
    version: PolicyVersion
    ids: TransferIds
    record: VersionRecord | None
    layout: VersionLayout | None
    failure: Failure | None


@dataclass(frozen=True, kw_only=True)
class VersionDescribed(Event):
    """Facts that a replica tells of a version unknown to the catalog, or why it cannot."""

    replica_id: str
    incarnation: str
    version: PolicyVersion
    digest: bytes
    facts: RecordedFacts | None
    failure: Failure | None
    recorded: VersionRecord | None
    """Record that the catalog has of the version now."""


@dataclass(frozen=True)
class Tick(Event):
    """Passage of time."""


@dataclass(frozen=True)
class CallerGone(Call):
    """Cancellation of a waiting call."""
