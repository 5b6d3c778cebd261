"""What operators order."""

from __future__ import annotations

from dataclasses import dataclass

from weft_rl.coordinator.decisions.state.replica import OutOfService
from weft_rl.coordinator.decisions.state.transfer import FreshIds
from weft_rl.coordinator.decisions.state.values import VersionRecord


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
class ForgetPolicy:
    """An operator ends a policy."""

    ticket: int
    policy: str
    force: bool
    """Whether its owner's lease, and what it is pushing, end with it."""


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
class DrainReplica:
    """An operator lets a replica leave."""

    ticket: int
    replica_id: str
    seconds: float
    reason: str


@dataclass(frozen=True)
class SleepReplica:
    """An operator puts a replica to sleep."""

    ticket: int
    replica_id: str
    aborts: bool
    """Whether running requests are aborted, rather than finished."""
    seconds: float
    """How long those may take to end."""
    answer_by: float
    level: int = 1


@dataclass(frozen=True)
class WakeReplica:
    """An operator wakes a replica."""

    ticket: int
    replica_id: str
    answer_by: float


@dataclass(frozen=True)
class RebindBase:
    """An operator lets go of the pool's base model."""

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
