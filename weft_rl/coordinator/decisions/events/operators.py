"""Orders of operators."""

from __future__ import annotations

from dataclasses import dataclass

from weft_rl.coordinator.decisions.state.replica import OutOfService
from weft_rl.coordinator.decisions.state.transfer import FreshIds
from weft_rl.coordinator.decisions.state.values import VersionRecord


@dataclass(frozen=True)
class Rollback:
    """Operator's order to serve a former version again."""

    ticket: int
    policy: str
    to_version: int
    ids: FreshIds
    answer_by: float
    recorded: VersionRecord | None
    """Record that the catalog has of the version."""


@dataclass(frozen=True)
class Pin:
    """Operator's order to keep a version, or to let it go."""

    ticket: int
    policy: str
    version: int
    pinned: bool
    recorded: VersionRecord | None
    """Record that the catalog has of the version."""


@dataclass(frozen=True)
class RetireVersion:
    """Operator's order to retire an adapter version now."""

    ticket: int
    policy: str
    version: int
    recorded: VersionRecord | None
    """Record that the catalog has of the version."""


@dataclass(frozen=True)
class SetRetention:
    """Operator's order on how many of the newest versions of an adapter to keep."""

    ticket: int
    policy: str
    num_versions: int
    """Number of versions to keep; 0 for as many as the coordinator was started with."""


@dataclass(frozen=True)
class ForgetPolicy:
    """Operator's order to end a policy."""

    ticket: int
    policy: str
    force: bool
    """True if its owner's lease, and what the owner is pushing, end with it."""


@dataclass(frozen=True)
class TakeOutOfService:
    """Operator's order to take a replica out of service."""

    ticket: int
    replica_id: str
    order: OutOfService


@dataclass(frozen=True)
class Uncordon:
    """Operator's order to put a replica back into service."""

    ticket: int
    replica_id: str


@dataclass(frozen=True)
class DrainReplica:
    """Operator's order to let a replica leave."""

    ticket: int
    replica_id: str
    seconds: float
    reason: str


@dataclass(frozen=True)
class SleepReplica:
    """Operator's order to put a replica to sleep."""

    ticket: int
    replica_id: str
    aborts: bool
    """True if running requests are aborted, rather than finished."""
    seconds: float
    """Seconds that running requests may take to end."""
    answer_by: float
    level: int = 1


@dataclass(frozen=True)
class WakeReplica:
    """Operator's order to wake a replica."""

    ticket: int
    replica_id: str
    answer_by: float


@dataclass(frozen=True)
class RebindBase:
    """Operator's order to let go of the pool's base model."""

    ticket: int
    fingerprint: str
    """The fingerprint of the base that is to be let go of."""


OperatorEvent = (
    Rollback
    | Pin
    | RetireVersion
    | SetRetention
    | ForgetPolicy
    | TakeOutOfService
    | Uncordon
    | DrainReplica
    | SleepReplica
    | WakeReplica
    | RebindBase
)
