"""Report of a replica's state, at registration and with each heartbeat, and policies it is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from weft_rl.contract.names import PolicyVersion, VersionVector

#: Spilled versions that are taken note of.
MAX_SPILLED: Final = 4096


@dataclass(frozen=True, order=True)
class HeldVersion:
    """Version whose bytes a replica holds; ``weft.v1.HeldVersion`` describes each field."""

    version: PolicyVersion
    content_digest: bytes
    spilled: bool = False


@dataclass(frozen=True)
class AbsentPolicy:
    """Policy that the pool served once, and the reason why it no longer does."""

    policy: str
    last_version: int
    """Highest version number of the policy that will not be served."""
    reason: str
    """Reason to tell a client that asks for the policy."""


@dataclass(frozen=True)
class Sleep:
    """Sleep of a replica's engine; ``weft.v1.Sleep`` describes each field."""

    trainer_id: str
    weights_awake: bool = False
    level: int = field(default=1, metadata={"unset": 1})


@dataclass(frozen=True)
class DrainNote:
    """Drain of a replica, as either side tells the other."""

    time_left_seconds: float
    """Time left for it."""
    reason: str


@dataclass(frozen=True)
class OutOfService:
    """Operator's order that keeps a replica out of service; durable."""

    reason: str = ""
    no_pushes: bool = False
    """True if the replica is kept out of transfers, too, and refuses requests."""

    def __str__(self) -> str:
        return f"by an operator{self.reason and ': '}{self.reason}"

    @property
    def refusal(self) -> str:
        """Reason with which the replica refuses requests; empty if it takes them."""
        if not self.no_pushes:
            return ""
        return f"an operator took this replica out of service{self.reason and ': '}{self.reason}"


@dataclass(frozen=True)
class ReplicaWork:
    """Work under way for the coordinator; ``weft.v1.Work`` describes each field."""

    what: str
    silence_seconds: float


@dataclass(frozen=True)
class EngineReport:
    """Facts that an engine tells of itself, passed on as they are; see ``weft.v1.EngineReport``."""

    draft_version: int = 0


@dataclass(frozen=True, kw_only=True)
class ReplicaReport:
    """Report of a replica; ``weft.v1.ReplicaReport`` describes each field."""

    version_vector: VersionVector = field(default_factory=VersionVector)
    retained_base_versions: tuple[int, ...] = ()
    spilled_versions: frozenset[PolicyVersion] = field(
        default=frozenset(), metadata={"most": MAX_SPILLED}
    )
    dirty_reason: str = ""
    base_as_started: bool = False
    refusing: str = ""
    order_number: int = 0
    sleep: Sleep | None = None
    drain: DrainNote | None = None
    adapter_used_bytes: int = 0
    pinned_base_versions: frozenset[int] = frozenset()
    pinned_base_bytes: int = 0
    engine: EngineReport | None = None
    work: ReplicaWork | None = None
    undo_base_versions: tuple[int, ...] = ()
    takes_deltas: bool = False
