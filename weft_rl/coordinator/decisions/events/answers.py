"""Outcomes of effects that call replicas, or look something up."""

from __future__ import annotations

from dataclasses import dataclass

from weft_rl.contract.names import PolicyVersion, VersionVector
from weft_rl.contract.replica_report import Asleep
from weft_rl.coordinator.decisions.state.pool import FitKey
from weft_rl.coordinator.decisions.state.transfer import FreshIds
from weft_rl.coordinator.decisions.state.values import Failure, Layout, VersionFacts, VersionRecord


@dataclass(frozen=True)
class FitChecked:
    """Answer of preflight; ``failure`` is None where the version fits."""

    key: FitKey
    failure: Failure | None


@dataclass(frozen=True)
class JoinAnswered:
    """Outcome of telling a replica to join a group."""

    transfer_id: str
    replica_id: str
    failure: Failure | None


@dataclass(frozen=True)
class LoadAnswered:
    """Outcome of telling a replica to load a base in place, as it comes."""

    transfer_id: str
    replica_id: str
    failure: Failure | None


@dataclass(frozen=True)
class CommitAnswered:
    """Outcome of an order to serve a version: ``vector`` is set, or ``failure`` says why not."""

    transfer_id: str
    replica_id: str
    incarnation: str
    vector: VersionVector | None
    pause_seconds: float
    failure: Failure | None
    retained: tuple[int, ...] = ()
    base_as_started: bool = False
    """True if the base that it serves now holds the bytes of the checkpoint that it was started
    with."""


@dataclass(frozen=True)
class RetireAnswered:
    """Report of a replica on what it still holds."""

    replica_id: str
    incarnation: str
    vector: VersionVector


@dataclass(frozen=True)
class DiscardAnswered:
    """Report of a replica that it has discarded a transfer.

    It holds no staged bytes of the transfer, carries out no order of it any more, and serves
    what ``vector`` says.
    """

    replica_id: str
    transfer_id: str
    incarnation: str
    vector: VersionVector


@dataclass(frozen=True)
class RefuseAnswered:
    """Report of a replica on the refusal of requests that it enforces, by which order."""

    replica_id: str
    incarnation: str
    refusing: str
    order_number: int


@dataclass(frozen=True)
class SleepAnswered:
    """Report of a replica that it sleeps, or why not."""

    replica_id: str
    incarnation: str
    asleep: Asleep | None
    failure: Failure | None


@dataclass(frozen=True)
class WakeAnswered:
    """Report of a replica that it is awake, or why not."""

    replica_id: str
    incarnation: str
    failure: Failure | None
    dirty_reason: str = ""
    """Reason why it has nothing to serve, if so; see ``Replica.dirty_reason``."""


@dataclass(frozen=True, kw_only=True)
class LookedUp:
    """Result of a look-up: facts to bring ``version`` from ``source_id`` (maybe the replica)."""

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
    """Facts that a replica tells of a version unknown to the catalog, or why it cannot."""

    replica_id: str
    incarnation: str
    version: PolicyVersion
    digest: bytes
    facts: VersionFacts | None
    failure: Failure | None
    recorded: VersionRecord | None
    """Record that the catalog has of the version now."""


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
