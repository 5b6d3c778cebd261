"""Effects of an event: what is to be done in order, once its saves are durable."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from weft_rl.coordinator.decisions.effects.answers import (
    AbsentPolicy,
    Answer,
    BeginAnswer,
    Done,
    ForgetAnswer,
    HeartbeatAnswer,
    LeaseAnswer,
    RebindAnswer,
    Refuse,
    RegisterAnswer,
    Reply,
    RetentionAnswer,
    RollbackAnswer,
    SleepAnswer,
    UncordonAnswer,
)
from weft_rl.coordinator.decisions.effects.calls import (
    CallCommit,
    CallDiscard,
    CallJoin,
    CallLoad,
    CallRefuse,
    CallRestore,
    CallRetire,
    CallSend,
    CallSleep,
    CallSwitch,
    CallWake,
    CloseChannel,
    ReplicaCall,
)
from weft_rl.coordinator.decisions.effects.groups import (
    DropGroup,
    GroupEffect,
    OpenGroup,
    SendAbort,
    SendPrepare,
    SendReform,
    SendStart,
)
from weft_rl.coordinator.decisions.effects.questions import (
    CheckFit,
    DescribeHeld,
    LookUp,
    Question,
)
from weft_rl.coordinator.decisions.effects.saves import (
    Save,
    SaveAsStarted,
    SaveCheckpoint,
    SaveCommitted,
    SaveEpoch,
    SaveGeneration,
    SaveNumberFloor,
    SaveOutOfService,
    SavePin,
    SavePolicy,
    SavePolicyDropped,
    SavePool,
    SaveRetired,
    SaveVersion,
)

__all__ = [
    "Effect",
    "SavePool",
    "SaveGeneration",
    "SaveNumberFloor",
    "SaveCheckpoint",
    "SaveAsStarted",
    "SaveEpoch",
    "SavePolicy",
    "SavePolicyDropped",
    "SaveVersion",
    "SaveRetired",
    "SaveCommitted",
    "SavePin",
    "SaveOutOfService",
    "Save",
    "AbsentPolicy",
    "LeaseAnswer",
    "BeginAnswer",
    "RegisterAnswer",
    "HeartbeatAnswer",
    "UncordonAnswer",
    "RollbackAnswer",
    "RebindAnswer",
    "ForgetAnswer",
    "RetentionAnswer",
    "SleepAnswer",
    "Done",
    "Answer",
    "Reply",
    "Refuse",
    "OpenGroup",
    "DropGroup",
    "SendPrepare",
    "SendStart",
    "SendReform",
    "SendAbort",
    "CallJoin",
    "CallLoad",
    "CallCommit",
    "CallSend",
    "CallSwitch",
    "CallRestore",
    "CallDiscard",
    "CallRefuse",
    "CallSleep",
    "CallWake",
    "CallRetire",
    "ReplicaCall",
    "CloseChannel",
    "CheckFit",
    "LookUp",
    "DescribeHeld",
    "EventKind",
    "Announce",
    "RoutesChanged",
]


class EventKind(enum.StrEnum):
    """Kind of an announced event; in capitals, the names are those of ``weft.v1.EventKind``.

    That enum says what each means.
    """

    REPLICA_READY = enum.auto()
    REPLICA_PENDING = enum.auto()
    REPLICA_LOST = enum.auto()
    REPLICA_QUARANTINED = enum.auto()
    REPLICA_DRAINING = enum.auto()
    REPLICA_CORDONED = enum.auto()
    REPLICA_SUSPECT = enum.auto()
    REPLICA_ANSWERS = enum.auto()
    LEASE_ACQUIRED = enum.auto()
    LEASE_RELEASED = enum.auto()
    TRANSFER_BEGUN = enum.auto()
    TRANSFER_REFORMED = enum.auto()
    TRANSFER_STAGED = enum.auto()
    TRANSFER_COMMITTED = enum.auto()
    TRANSFER_ABORTED = enum.auto()
    VERSION_FAILED = enum.auto()
    VERSION_RETIRED = enum.auto()
    VERSION_PINNED = enum.auto()
    VERSION_UNPINNED = enum.auto()
    RETENTION_SET = enum.auto()
    ROLLED_BACK = enum.auto()
    ROLLBACK_FAILED = enum.auto()
    CLONE_BEGUN = enum.auto()
    CLONE_INTERRUPTED = enum.auto()
    CLONE_ENDED = enum.auto()
    CLONE_FAILED = enum.auto()
    RESTORE_BEGUN = enum.auto()
    RESTORE_ENDED = enum.auto()
    RESTORE_FAILED = enum.auto()
    PUBLISH_AGAIN_WANTED = enum.auto()
    BASE_BOUND = enum.auto()
    BASE_UNBOUND = enum.auto()
    CHECKPOINT_BOUND = enum.auto()
    CATALOG_BEHIND = enum.auto()
    UNRECORDED_VERSIONS = enum.auto()
    VERSION_ADOPTED = enum.auto()
    VERSION_NOT_ADOPTED = enum.auto()
    VERSION_CONFLICT = enum.auto()
    REPLICA_ASLEEP = enum.auto()
    POLICY_FORGOTTEN = enum.auto()
    POLICY_LOST = enum.auto()
    POLICY_FOUND = enum.auto()


@dataclass(frozen=True)
class Announce:
    """Line of the log and of WatchEvents."""

    kind: EventKind
    subject: str
    message: str


@dataclass(frozen=True)
class RoutesChanged:
    """Notification of the watchers of the routes that these replicas have changed."""

    replica_ids: tuple[str, ...]


Effect = (
    Save
    | Reply
    | Refuse
    | GroupEffect
    | ReplicaCall
    | CloseChannel
    | Question
    | Announce
    | RoutesChanged
)
