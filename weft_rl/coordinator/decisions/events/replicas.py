"""Events that replicas cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft_rl.contract.capabilities import Capabilities
from weft_rl.contract.checkpoint import Checkpoint
from weft_rl.contract.replica_report import ReplicaReport
from weft_rl.coordinator.decisions.state.replica import NOT_TOLD, OutOfService
from weft_rl.coordinator.decisions.state.values import Heard, VersionRecord


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
    report: ReplicaReport
    held: tuple[Heard, ...] = ()
    """All versions that it holds."""
    last_generation: int = 0
    """The highest generation of a coordinator that it was told."""
    last_epoch: int = 0
    """The highest epoch of a group that it was told."""
    last_coordinator_id: str = ""
    """The coordinator whose generation that is."""
    checkpoint: Checkpoint = NOT_TOLD
    out_of_service: OutOfService | None = None
    """The operator's order that it was told last."""


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
    report: ReplicaReport
    staged: Mapping[str, VersionRecord | None] = field(default_factory=dict)
    """Transfers it holds bytes of, with what the catalog says of each."""
    held: tuple[Heard, ...] = ()
    """Versions that it has not named before, or all."""
    held_complete: bool = False


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


ReplicaEvent = Register | ReportCheckpoint | Heartbeat | Leave | ReferenceKnown
