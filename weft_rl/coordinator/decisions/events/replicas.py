"""Events that replicas report of themselves."""

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
    """Registration of a replica."""

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
    """Highest generation of a coordinator that it was told."""
    last_epoch: int = 0
    """Highest epoch of a group that it was told."""
    last_coordinator_id: str = ""
    """Coordinator whose generation ``last_generation`` is."""
    checkpoint: Checkpoint = NOT_TOLD
    out_of_service: OutOfService | None = None
    """Operator's order that it was told last."""


@dataclass(frozen=True)
class ReportCheckpoint:
    """Report of the checkpoint that a replica was started with, once it is read."""

    ticket: int
    replica_id: str
    incarnation: str
    checkpoint: Checkpoint


@dataclass(frozen=True)
class Heartbeat:
    """Heartbeat of a replica."""

    ticket: int
    replica_id: str
    incarnation: str
    report: ReplicaReport
    staged: Mapping[str, VersionRecord | None] = field(default_factory=dict)
    """Transfers that it holds bytes of, each with its record in the catalog."""
    held: tuple[Heard, ...] = ()
    """Versions that it has not told before; all that it holds if ``held_complete``."""
    held_complete: bool = False


@dataclass(frozen=True)
class Leave:
    """Departure of a replica."""

    ticket: int
    replica_id: str
    incarnation: str


@dataclass(frozen=True)
class ReferenceKnown:
    """Notice that the tensors of the base model of that fingerprint are known."""

    fingerprint: str


ReplicaEvent = Register | ReportCheckpoint | Heartbeat | Leave | ReferenceKnown
