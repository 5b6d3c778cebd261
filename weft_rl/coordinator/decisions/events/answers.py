"""What has come of the effects that call replicas, or look something up."""

from __future__ import annotations

from dataclasses import dataclass

from weft_rl.contract.names import PolicyVersion, VersionVector
from weft_rl.coordinator.decisions.state.pool import FitKey
from weft_rl.coordinator.decisions.state.sleep import Asleep
from weft_rl.coordinator.decisions.state.transfer import FreshIds
from weft_rl.coordinator.decisions.state.values import Failure, Layout, VersionFacts, VersionRecord


@dataclass(frozen=True)
class FitChecked:
    """Preflight has answered; ``failure`` is None where the version fits."""

    key: FitKey
    failure: Failure | None


@dataclass(frozen=True)
class JoinAnswered:
    """A replica was told to join a group, or could not be."""

    transfer_id: str
    replica_id: str
    failure: Failure | None


@dataclass(frozen=True)
class LoadAnswered:
    """A replica loads a base as it comes, or could not be told to."""

    transfer_id: str
    replica_id: str
    failure: Failure | None


@dataclass(frozen=True)
class CommitAnswered:
    """A replica serves a version (``vector`` is set), or says why not."""

    transfer_id: str
    replica_id: str
    incarnation: str
    vector: VersionVector | None
    pause_seconds: float
    failure: Failure | None
    retained: tuple[int, ...] = ()
    base_as_started: bool = False
    """Whether the base that it serves now holds the bytes of the checkpoint that it was
    started with."""


@dataclass(frozen=True)
class RetireAnswered:
    """A replica said what it still holds."""

    replica_id: str
    incarnation: str
    vector: VersionVector


@dataclass(frozen=True)
class DiscardAnswered:
    """A replica holds no staged bytes of a transfer, carries out no order of it any more,
    and serves what ``vector`` says."""

    replica_id: str
    transfer_id: str
    incarnation: str
    vector: VersionVector


@dataclass(frozen=True)
class RefuseAnswered:
    """A replica says what it enforces, by which order."""

    replica_id: str
    incarnation: str
    refusing: str
    order_number: int


@dataclass(frozen=True)
class SleepAnswered:
    """A replica sleeps, or says why not."""

    replica_id: str
    incarnation: str
    asleep: Asleep | None
    failure: Failure | None


@dataclass(frozen=True)
class WakeAnswered:
    """A replica is awake, or says why not."""

    replica_id: str
    incarnation: str
    failure: Failure | None
    dirty_reason: str = ""
    """Of one that has nothing to serve; see ``Replica.dirty_reason``."""


@dataclass(frozen=True, kw_only=True)
class LookedUp:
    """What is needed to bring ``version`` from ``source_id`` (maybe itself)."""

    replica_id: str
    incarnation: str
    source_id: str
    version: PolicyVersion
    ids: FreshIds
    record: VersionRecord | None
    layout: Layout | None
    failure: Failure | None


@dataclass(frozen=True, kw_only=True)
class HeldDescribed:
    """What a replica says of a version that the catalog does not know, or why not."""

    replica_id: str
    incarnation: str
    version: PolicyVersion
    digest: bytes
    facts: VersionFacts | None
    failure: Failure | None
    recorded: VersionRecord | None
    """What the catalog has of it now."""


AnswerEvent = (
    FitChecked
    | JoinAnswered
    | LoadAnswered
    | CommitAnswered
    | RetireAnswered
    | DiscardAnswered
    | RefuseAnswered
    | SleepAnswered
    | WakeAnswered
    | LookedUp
    | HeldDescribed
)
