"""Answers to waiting calls."""

from __future__ import annotations

from dataclasses import dataclass

from weft_rl.contract.errors import WeftError
from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.state.group import Group
from weft_rl.coordinator.decisions.state.pool import Lease
from weft_rl.coordinator.decisions.state.replica import OutOfService
from weft_rl.coordinator.decisions.state.transfer import Transfer
from weft_rl.coordinator.decisions.state.values import ReplicaState


@dataclass(frozen=True)
class LeaseAnswer:
    """Answer to AcquirePolicy and RenewLease."""

    policy: str
    lease: Lease
    last_version: int
    time_to_live: float
    publish_again_version: int = 0
    """Version that the owner is asked to publish again; 0 for none."""


@dataclass(frozen=True)
class BeginAnswer:
    """Answer to BeginTransfer; ``group`` is None when the transfer has ended."""

    transfer_id: str
    version: PolicyVersion
    nonce: int
    replica_ids: tuple[str, ...]
    group: Group | None


@dataclass(frozen=True)
class RegisterAnswer:
    """Answer to Register."""

    heartbeat_seconds: float
    reference_wanted: bool
    generation: int
    coordinator_id: str = ""
    refuse_reason: str = ""
    """Reason why it must refuse new requests; empty if it must not refuse any."""
    order_number: int = 0
    out_of_service: OutOfService | None = None
    """The operator's order that stands, to be told to the next coordinator."""
    epoch: int = 0
    """Number that groups and orders are counted up to."""


@dataclass(frozen=True)
class AbsentPolicy:
    """Policy that the pool served once, and the reason why it no longer does."""

    policy: str
    last_version: int
    reason: str


@dataclass(frozen=True)
class HeartbeatAnswer:
    """Answer to Heartbeat."""

    ready: bool
    drain_seconds: float | None = None
    """Seconds that are left to a replica that is to drain; None for others."""
    drain_reason: str = ""
    in_transfer: bool = False
    """True if a transfer needs it."""
    pinned_bases: tuple[int, ...] = ()
    """Versions of the base whose copies it must keep."""
    refuse_reason: str = ""
    """Reason why it must refuse new requests; empty if it must not refuse any."""
    held_wanted: bool = False
    """True if the next heartbeat is to name all that it holds."""
    generation: int = 0
    """The coordinator's generation, which may have grown."""
    order_number: int = 0
    """The number of the newest order to refuse requests, or to take them again."""
    lacking: tuple[PolicyVersion, ...] = ()
    """Versions behind the pool's aliases that the replica does not serve."""
    base_doubt: str = ""
    """Reason why its base@0 is not the pool's; empty where it is, or is not served."""
    absent: tuple[AbsentPolicy, ...] = ()
    """Policies that are lost or were forgotten, with what requests for them are told."""
    out_of_service: OutOfService | None = None
    """The operator's order that stands, as in ``RegisterAnswer``."""
    epoch: int = 0
    """Number that groups and orders are counted up to, as in ``RegisterAnswer``."""


@dataclass(frozen=True)
class UncordonAnswer:
    """Answer to Uncordon: the replica's state, if it is in the pool, and the reason for it."""

    state: ReplicaState | None
    why: str


@dataclass(frozen=True)
class RollbackAnswer:
    """Answer to Rollback."""

    version: PolicyVersion
    replaced_version: int
    replica_ids: tuple[str, ...]
    pause_seconds: float


@dataclass(frozen=True)
class RebindAnswer:
    """Answer to RebindBase."""

    retired: tuple[PolicyVersion, ...]


@dataclass(frozen=True)
class ForgetAnswer:
    """Answer to ForgetPolicy."""

    retired: tuple[PolicyVersion, ...]


@dataclass(frozen=True)
class RetentionAnswer:
    """Answer to SetRetention."""

    num_versions: int


@dataclass(frozen=True)
class SleepAnswer:
    """Answer to orders to sleep and to wake: the replicas that have done so."""

    replica_ids: tuple[str, ...]


@dataclass(frozen=True)
class Done:
    """Answer to calls that return nothing."""


Answer = (
    LeaseAnswer
    | BeginAnswer
    | RegisterAnswer
    | HeartbeatAnswer
    | RollbackAnswer
    | RebindAnswer
    | ForgetAnswer
    | RetentionAnswer
    | SleepAnswer
    | UncordonAnswer
    | Transfer
    | Done
)


@dataclass(frozen=True)
class Reply:
    """Answer to a call, by its ticket."""

    ticket: int
    answer: Answer


@dataclass(frozen=True)
class Refuse:
    """Failure of a call, by its ticket."""

    ticket: int
    error: WeftError
