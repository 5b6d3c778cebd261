"""What the catalog is to keep: one transaction for all saves of a batch."""

from __future__ import annotations

from dataclasses import dataclass

from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.state.pool import Policy
from weft_rl.coordinator.decisions.state.replica import OutOfService
from weft_rl.coordinator.decisions.state.values import BoundCheckpoint, VersionRecord


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
class SaveAsStarted:
    """A pushed base of this content holds the bytes of base@0; SavePool forgets it."""

    content: bytes
    durable: bool = False
    """Replicas tell it again."""


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
class SavePolicyDropped:
    """A policy that never had a version is gone; tokens of new ones begin above a floor."""

    name: str
    token_floor: int
    durable: bool = False
    """One that is still there after a restart is dropped again."""


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
    | SaveAsStarted
    | SaveEpoch
    | SavePolicy
    | SavePolicyDropped
    | SaveVersion
    | SaveRetired
    | SaveCommitted
    | SavePin
    | SaveOutOfService
)
