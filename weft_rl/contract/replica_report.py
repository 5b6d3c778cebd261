"""State of a replica as it reports it, at registration and with each heartbeat, and what it is told
of policies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from weft_rl.contract.names import PolicyVersion, VersionVector

#: Spilled versions that are taken note of.
MAX_SPILLED: Final = 4096


@dataclass(frozen=True, order=True)
class HeldVersion:
    """A version whose bytes a replica says that it has; see ``weft.v1.HeldVersion``."""

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
    """Sleep of a replica's engine."""

    trainer_id: str
    """Trainer that put it to sleep; empty for an operator."""
    weights_awake: bool = False
    """True if a push has woken its weights; the KV cache sleeps on."""
    level: int = field(default=1, metadata={"unset": 1})
    """Level at which it was put to sleep."""


@dataclass(frozen=True)
class DrainNote:
    """Drain of a replica, as either side tells the other."""

    time_left_seconds: float
    """Time left for it."""
    reason: str


@dataclass(frozen=True)
class ReplicaWork:
    """Work under way for the coordinator; see ``weft.v1.Work``."""

    what: str
    silence_seconds: float
    """Seconds since it made progress."""


@dataclass(frozen=True, kw_only=True)
class ReplicaReport:
    """Report of a replica; see ``weft.v1.ReplicaReport``."""

    version_vector: VersionVector = field(default_factory=VersionVector)
    """Versions that it serves."""
    retained_base_versions: tuple[int, ...] = ()
    """Versions of the base that it holds a copy of, last used first."""
    spilled_versions: frozenset[PolicyVersion] = field(
        default=frozenset(), metadata={"most": MAX_SPILLED}
    )
    """Versions that lie whole in its spill directory."""
    dirty_reason: str = ""
    """Reason why its engine may hold mixed weights; empty when it does not."""
    base_as_started: bool = False
    """True if the base that it serves was pushed with the bytes that it was started with."""
    refusing: str = ""
    """Reason why it refuses new requests, mixed weights aside; empty while it is open."""
    order_number: int = 0
    """Number of the order by which it refuses requests, or takes them."""
    sleep: Sleep | None = None
    """Set while its engine sleeps, or is about to."""
    drain: DrainNote | None = None
    """Set while it drains."""
    adapter_used_bytes: int = 0
    """Host memory of its adapters."""
    pinned_base_versions: frozenset[int] = frozenset()
    """Pinned versions of the base whose copies it keeps where it holds them."""
    pinned_base_bytes: int = 0
    """Memory of those copies."""
    draft_version: int = 0
    """Version of the base with which the model that drafts tokens came; 0 for the one that its
    engine was started with."""
    work: ReplicaWork | None = None
    """Set while it carries out an order, or its engine owes an answer."""
