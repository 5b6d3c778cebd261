"""Saves to the catalog: one transaction for all saves of a batch."""

from __future__ import annotations

from dataclasses import dataclass

from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.state.pool import Policy
from weft_rl.coordinator.decisions.state.replica import OutOfService
from weft_rl.coordinator.decisions.state.values import BoundCheckpoint, VersionRecord


@dataclass(frozen=True)
class SavePool:
    """Base model that the pool is bound to; empty where an operator let go of it."""

    fingerprint: str
    architecture: str
    durable: bool = True


@dataclass(frozen=True)
class SaveGeneration:
    """Generation above those of later coordinators that replicas have heard of."""

    generation: int
    durable: bool = True


@dataclass(frozen=True)
class SaveNumberFloor:
    """Number above which numbers of policies begin that the catalog does not know."""

    number_floor: int
    durable: bool = True


@dataclass(frozen=True)
class SaveCheckpoint:
    """Checkpoint that base@0 is from now on; SavePool forgets it."""

    checkpoint: BoundCheckpoint
    durable: bool = True


@dataclass(frozen=True)
class SaveAsStarted:
    """Content of a pushed base that holds the bytes of base@0; SavePool forgets it."""

    content: bytes
    durable: bool = False
    """False, since replicas tell it again."""


@dataclass(frozen=True)
class SaveEpoch:
    """Epoch of the newest group, or the number of an operator's order since."""

    epoch: int
    durable: bool = True


@dataclass(frozen=True)
class SavePolicy:
    """Counters and alias of a policy."""

    policy: Policy
    durable: bool = True


@dataclass(frozen=True)
class SavePolicyDropped:
    """Removal of a policy that never had a version; tokens of new ones begin above a floor."""

    name: str
    token_floor: int
    durable: bool = False
    """False, since a policy that is still there after a restart is dropped again."""


@dataclass(frozen=True)
class SaveVersion:
    """Whole record of a version."""

    record: VersionRecord
    durable: bool = True
    """False where a restart would come to the same end by itself. The record is then written
    with the next durable save or tick."""


@dataclass(frozen=True)
class SaveRetired:
    """Committed version that is no longer held."""

    version: PolicyVersion
    durable: bool = False


@dataclass(frozen=True)
class SaveCommitted:
    """Retired version that is served again."""

    version: PolicyVersion
    durable: bool = True


@dataclass(frozen=True)
class SavePin:
    """Pin of a version, which must not be retired, or its removal."""

    version: PolicyVersion
    pinned: bool
    durable: bool = True


@dataclass(frozen=True)
class SaveOutOfService:
    """Order that keeps a replica out of service; None where it is over."""

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
