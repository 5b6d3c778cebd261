"""The answers to waiting calls."""

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
    """Why it must refuse new requests; empty when it must not."""
    order_number: int = 0
    out_of_service: OutOfService | None = None
    """The operator's order that stands, to be told to the next coordinator."""
    epoch: int = 0
    """How far groups and orders are counted."""


@dataclass(frozen=True)
class AbsentPolicy:
    """A policy that the pool served once, and why it does not."""

    policy: str
    last_version: int
    reason: str


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
    """The coordinator's generation, which may have grown."""
    order_number: int = 0
    """The number of the newest order to refuse requests, or to take them again."""
    lacking: tuple[PolicyVersion, ...] = ()
    """Versions behind the pool's aliases that the replica does not serve."""
    base_doubt: str = ""
    """Why its base@0 is not the pool's; empty where it is, or is not served."""
    absent: tuple[AbsentPolicy, ...] = ()
    """What requests for policies are told that are lost, or were forgotten."""
    out_of_service: OutOfService | None = None
    """See ``RegisterAnswer``."""
    epoch: int = 0
    """See ``RegisterAnswer``."""


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
class ForgetAnswer:
    """To ForgetPolicy."""

    retired: tuple[PolicyVersion, ...]


@dataclass(frozen=True)
class RetentionAnswer:
    """To SetRetention."""

    num_versions: int


@dataclass(frozen=True)
class SleepAnswer:
    """To orders to sleep and to wake: what was done."""

    replica_ids: tuple[str, ...]


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
    | ForgetAnswer
    | RetentionAnswer
    | SleepAnswer
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
