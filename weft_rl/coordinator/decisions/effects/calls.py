"""Calls to replicas; their answers come back as events."""

from __future__ import annotations

from dataclasses import dataclass

from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.state.group import Group
from weft_rl.coordinator.decisions.state.values import AdapterSpec, ContentDigest, HeldVersion


@dataclass(frozen=True)
class CallJoin:
    """Call of JoinGroup; ``first_rank`` is that of the replica's receiver 0."""

    transfer_id: str
    replica_id: str
    address: str
    group: Group
    first_rank: int


@dataclass(frozen=True)
class CallLoad:
    """Call of LoadTransfer; answered as LoadAnswered."""

    transfer_id: str
    replica_id: str
    address: str
    version: PolicyVersion
    timeout_seconds: float


@dataclass(frozen=True)
class CallCommit:
    """Call of CommitTransfer."""

    transfer_id: str
    replica_id: str
    incarnation: str
    address: str
    version: PolicyVersion
    adapter: AdapterSpec | None
    content_digest: ContentDigest
    alias: int = 0
    """Version that an adapter's bare name stands for afterwards; 0 is this version."""
    layout_digest: bytes = b""


@dataclass(frozen=True)
class CallSend:
    """Call of SendVersion at the source of a clone; a failure is answered as JoinAnswered."""

    transfer_id: str
    replica_id: str
    address: str
    group: Group
    version: PolicyVersion
    nonce: int
    timeout_seconds: float


@dataclass(frozen=True)
class CallSwitch:
    """Call of SwitchVersion; answered as CommitAnswered."""

    transfer_id: str
    replica_id: str
    incarnation: str
    address: str
    version: PolicyVersion


@dataclass(frozen=True)
class CallRestore:
    """Call of SwitchVersion to a version in the replica's spill directory.

    Answered as CommitAnswered.
    """

    transfer_id: str
    replica_id: str
    incarnation: str
    address: str
    version: PolicyVersion
    adapter: AdapterSpec | None
    content_digest: ContentDigest
    layout_digest: bytes
    alias: int
    timeout_seconds: float


@dataclass(frozen=True)
class CallDiscard:
    """Call of DiscardTransfer; repeated until it is answered."""

    transfer_id: str
    replica_id: str
    address: str


@dataclass(frozen=True)
class CallRefuse:
    """Call of RefuseRequests; answered as RefuseAnswered. Heartbeats repeat it."""

    replica_id: str
    incarnation: str
    address: str
    reason: str
    number: int


@dataclass(frozen=True)
class CallSleep:
    """Call of Sleep; answered as SleepAnswered."""

    replica_id: str
    incarnation: str
    address: str
    trainer_id: str
    level: int
    aborts: bool
    seconds: float
    """Seconds that requests may take to end."""
    timeout_seconds: float


@dataclass(frozen=True)
class CallWake:
    """Call of WakeUp; answered as WakeAnswered."""

    replica_id: str
    incarnation: str
    address: str
    timeout_seconds: float


@dataclass(frozen=True)
class CallRetire:
    """Call of RetireVersions."""

    replica_id: str
    incarnation: str
    address: str
    versions: tuple[PolicyVersion, ...]
    mistaken: tuple[HeldVersion, ...] = ()
    """Adapters whose bytes are not those of their numbers."""
    ended: tuple[str, ...] = ()
    """Policies that were forgotten: ``versions`` may include what their names stand for."""


@dataclass(frozen=True)
class CloseChannel:
    """Notice that no call will go to this address again for a while."""

    address: str


ReplicaCall = (
    CallJoin
    | CallLoad
    | CallCommit
    | CallSend
    | CallSwitch
    | CallRestore
    | CallDiscard
    | CallRefuse
    | CallSleep
    | CallWake
    | CallRetire
)
