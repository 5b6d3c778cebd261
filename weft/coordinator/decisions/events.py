"""What can happen. Everything random or read from elsewhere comes in with the event.

``ticket`` names the waiting call that an effect will answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.contract.capabilities import Capabilities
from weft.contract.checkpoint import Checkpoint
from weft.contract.names import PolicyVersion
from weft.contract.versions import VersionVector
from weft.coordinator.decisions.state.pool import UNKNOWN_PROCESS, FitKey, TrainerProcess
from weft.coordinator.decisions.state.progress import Word
from weft.coordinator.decisions.state.replica import NOT_TOLD, OutOfService
from weft.coordinator.decisions.state.transfer import FreshIds
from weft.coordinator.decisions.state.values import (
    AdapterSpec,
    ContentDigest,
    Failure,
    HeldVersion,
    Layout,
    PolicyKind,
    VersionFacts,
    VersionRecord,
)


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class CallerGone:
    """A waiting call was cancelled."""

    ticket: int


@dataclass(frozen=True)
class AcquirePolicy:
    """A trainer asks for a policy's lease."""

    ticket: int
    trainer_id: str
    session_id: str
    policy: str
    kind: PolicyKind
    process: TrainerProcess = UNKNOWN_PROCESS
    displaced_token: int = 0
    """The lease of the same trainer that ends first, if it is live."""
    last_version: int = 0
    """Newest of the policy that the trainer was told of."""
    last_token: int = 0
    """The largest that it owned a lease by."""


@dataclass(frozen=True)
class RenewLease:
    """A trainer asks for more time."""

    ticket: int
    policy: str
    fencing_token: int
    session_id: str = ""
    """Whose lease it must be; empty for any."""


@dataclass(frozen=True)
class ReleasePolicy:
    """A trainer gives its lease back."""

    ticket: int
    policy: str
    fencing_token: int
    session_id: str = ""
    """Whose lease it must be; empty for any."""


@dataclass(frozen=True)
class DescribeTarget:
    """A trainer asks what the pool is; waits until ``deadline``."""

    ticket: int
    deadline: float


@dataclass(frozen=True, kw_only=True)
class BeginTransfer:
    """A trainer asks to push a version."""

    ticket: int
    request_id: str
    policy: str
    fencing_token: int
    layout_digest: bytes
    layout: Layout | None
    """Of that digest; None when no such manifest is known."""
    adapter: AdapterSpec | None
    min_replicas: int
    deadline: float
    answer_by: float
    backend: str
    group_id: str
    ids: FreshIds
    session_id: str = ""
    """Whose lease it must be; empty for any."""
    recorded: VersionRecord | None
    """What the catalog knows of this trainer's request id."""
    check_finite: bool = False
    refuse_other_base: bool = False


@dataclass(frozen=True)
class AwaitTransfer:
    """A trainer waits for a transfer's end."""

    ticket: int
    transfer_id: str


@dataclass(frozen=True)
class AbortTransfer:
    """A trainer gives a transfer of its policy up."""

    ticket: int
    transfer_id: str
    policy: str
    fencing_token: int
    message: str


@dataclass(frozen=True)
class DrainNote:
    """What a replica that drains says of it."""

    seconds: float
    """What is left of its time."""
    reason: str


@dataclass(frozen=True)
class Heard:
    """What a replica holds, with what the catalog says of that version."""

    held: HeldVersion
    record: VersionRecord | None


@dataclass(frozen=True, kw_only=True)
class Register:
    """A replica joins."""

    ticket: int
    replica_id: str
    incarnation: str
    address: str
    http_url: str
    model_name: str
    capabilities: Capabilities
    vector: VersionVector
    retained: tuple[int, ...] = ()
    dirty_reason: str = ""
    spilled: frozenset[PolicyVersion] = frozenset()
    drain: DrainNote | None = None
    held: tuple[Heard, ...] = ()
    """All of it."""
    last_generation: int = 0
    """Of coordinators, and of groups: the highest that it was told."""
    last_epoch: int = 0
    last_coordinator_id: str = ""
    """Of whom it has the generation."""
    checkpoint: Checkpoint = NOT_TOLD
    refusing: str = ""
    """Why it refuses new requests; empty while it is open."""


@dataclass(frozen=True)
class ReportCheckpoint:
    """A replica has read what it was started with."""

    ticket: int
    replica_id: str
    incarnation: str
    checkpoint: Checkpoint


@dataclass(frozen=True)
class Heartbeat:
    """A replica lives."""

    ticket: int
    replica_id: str
    incarnation: str
    vector: VersionVector
    adapter_used_bytes: int
    retained: tuple[int, ...] = ()
    dirty_reason: str = ""
    staged: Mapping[str, VersionRecord | None] = field(default_factory=dict)
    """Transfers it holds bytes of, with what the catalog says of each."""
    spilled: frozenset[PolicyVersion] = frozenset()
    drain: DrainNote | None = None
    pins_obeyed: frozenset[int] = frozenset()
    pinned_bytes: int = 0
    held: tuple[Heard, ...] = ()
    """What it has not told before, or all."""
    held_complete: bool = False
    refusing: str = ""
    order_number: int = 0
    """Of the order by which it refuses requests, or takes them."""


@dataclass(frozen=True)
class Leave:
    """A replica goes."""

    ticket: int
    replica_id: str
    incarnation: str


@dataclass(frozen=True)
class ReferenceKnown:
    """The tensors of the base model of that fingerprint are known."""

    fingerprint: str


@dataclass(frozen=True)
class FitChecked:
    """Preflight has answered; ``failure`` is None where the version fits."""

    key: FitKey
    failure: Failure | None


@dataclass(frozen=True)
class RankAttends:
    """A rank of a group opened its stream."""

    group_id: str
    rank: int


@dataclass(frozen=True)
class RankGone:
    """A rank's stream broke or ended."""

    group_id: str
    rank: int
    why: str


@dataclass(frozen=True)
class RanksHeard:
    """What the ranks of a group have said of their work since the last tick."""

    group_id: str
    words: Mapping[int, Word] = field(default_factory=dict)
    transfer_id: str = ""
    """Which ``num_verified`` is of."""
    num_verified: Mapping[int, int] = field(default_factory=dict)
    """Buckets, from the first, that a receiver has reported; of those that reported."""


@dataclass(frozen=True)
class RankPrepared:
    """A receiver is ready for a transfer's bytes."""

    group_id: str
    transfer_id: str
    rank: int
    num_verified: int = 0
    """Buckets, from the first, that it has from an earlier epoch."""


@dataclass(frozen=True)
class RankLoadDue:
    """A receiver wants its replica to load what it has received."""

    group_id: str
    transfer_id: str
    rank: int


@dataclass(frozen=True)
class RankStaged:
    """A rank has sent or verified everything."""

    group_id: str
    transfer_id: str
    rank: int
    digest: ContentDigest


@dataclass(frozen=True)
class RankFailed:
    """A rank cannot go on."""

    group_id: str
    transfer_id: str
    rank: int
    reason: str
    message: str


@dataclass(frozen=True)
class JoinAnswered:
    """A replica was told to join a group, or could not be."""

    transfer_id: str
    replica_id: str
    failure: Failure | None


@dataclass(frozen=True)
class LoadAnswered:
    """A replica loads a base as it comes, or could not be told to."""

    transfer_id: str
    replica_id: str
    failure: Failure | None


@dataclass(frozen=True)
class CommitAnswered:
    """A replica serves a version (``vector`` is set), or says why not."""

    transfer_id: str
    replica_id: str
    incarnation: str
    vector: VersionVector | None
    pause_seconds: float
    failure: Failure | None
    retained: tuple[int, ...] = ()


@dataclass(frozen=True)
class RetireAnswered:
    """A replica said what it still holds."""

    replica_id: str
    incarnation: str
    vector: VersionVector


@dataclass(frozen=True)
class DiscardAnswered:
    """A replica holds no staged bytes of a transfer, carries out no order of it any more,
    and serves what ``vector`` says."""

    replica_id: str
    transfer_id: str
    incarnation: str
    vector: VersionVector


@dataclass(frozen=True)
class RefuseAnswered:
    """A replica says what it enforces, by which order."""

    replica_id: str
    incarnation: str
    refusing: str
    order_number: int


@dataclass(frozen=True, kw_only=True)
class LookedUp:
    """What is needed to bring ``version`` from ``source_id`` (maybe itself)."""

    replica_id: str
    incarnation: str
    source_id: str
    version: PolicyVersion
    ids: FreshIds
    record: VersionRecord | None
    layout: Layout | None
    failure: Failure | None


@dataclass(frozen=True, kw_only=True)
class HeldDescribed:
    """What a replica says of a version that the catalog does not know, or why not."""

    replica_id: str
    incarnation: str
    version: PolicyVersion
    digest: bytes
    facts: VersionFacts | None
    failure: Failure | None
    recorded: VersionRecord | None
    """What the catalog has of it now."""


@dataclass(frozen=True)
class Rollback:
    """An operator asks to serve a former version again."""

    ticket: int
    policy: str
    to_version: int
    ids: FreshIds
    answer_by: float
    recorded: VersionRecord | None
    """What the catalog knows of the version."""


@dataclass(frozen=True)
class Pin:
    """An operator asks to keep a version, or to let it go."""

    ticket: int
    policy: str
    version: int
    pinned: bool
    recorded: VersionRecord | None
    """What the catalog knows of the version."""


@dataclass(frozen=True)
class RetireVersion:
    """An operator asks to retire an adapter version now."""

    ticket: int
    policy: str
    version: int
    recorded: VersionRecord | None
    """What the catalog knows of the version."""


@dataclass(frozen=True)
class SetRetention:
    """An operator says how many versions of an adapter are kept."""

    ticket: int
    policy: str
    num_versions: int
    """0 for as many as the coordinator was started with."""


@dataclass(frozen=True)
class TakeOutOfService:
    """An operator takes a replica out of service."""

    ticket: int
    replica_id: str
    order: OutOfService


@dataclass(frozen=True)
class Uncordon:
    """An operator puts a replica back into service."""

    ticket: int
    replica_id: str


@dataclass(frozen=True)
class RebindBase:
    """An operator lets go of the pool's base model."""

    ticket: int
    fingerprint: str
    """Of the base that is to be let go of."""


@dataclass(frozen=True)
class DrainReplica:
    """An operator lets a replica leave."""

    ticket: int
    replica_id: str
    seconds: float
    reason: str


Event = (
    Tick
    | CallerGone
    | AcquirePolicy
    | RenewLease
    | ReleasePolicy
    | DescribeTarget
    | BeginTransfer
    | AwaitTransfer
    | AbortTransfer
    | Register
    | ReportCheckpoint
    | Heartbeat
    | Leave
    | ReferenceKnown
    | FitChecked
    | RankAttends
    | RankGone
    | RanksHeard
    | RankPrepared
    | RankLoadDue
    | RankStaged
    | RankFailed
    | JoinAnswered
    | LoadAnswered
    | CommitAnswered
    | RetireAnswered
    | DiscardAnswered
    | RefuseAnswered
    | LookedUp
    | HeldDescribed
    | Rollback
    | Pin
    | RetireVersion
    | SetRetention
    | TakeOutOfService
    | Uncordon
    | DrainReplica
    | RebindBase
)
