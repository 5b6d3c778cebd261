"""What is to be done about an event, in order, once its saves are durable."""

from __future__ import annotations

from dataclasses import dataclass

from weft.coordinator.decisions.effects.answers import (
    Answer,
    BeginAnswer,
    Done,
    HeartbeatAnswer,
    LeaseAnswer,
    RebindAnswer,
    Refuse,
    RegisterAnswer,
    Reply,
    RetentionAnswer,
    RollbackAnswer,
    UncordonAnswer,
)
from weft.coordinator.decisions.effects.calls import (
    CallCommit,
    CallDiscard,
    CallJoin,
    CallLoad,
    CallRefuse,
    CallRestore,
    CallRetire,
    CallSend,
    CallSwitch,
    CloseChannel,
    ReplicaCall,
)
from weft.coordinator.decisions.effects.groups import (
    DropGroup,
    GroupEffect,
    OpenGroup,
    SendAbort,
    SendPrepare,
    SendReform,
    SendStart,
)
from weft.coordinator.decisions.effects.questions import (
    CheckFit,
    DescribeHeld,
    LookUp,
    Question,
)
from weft.coordinator.decisions.effects.saves import (
    Save,
    SaveCheckpoint,
    SaveCommitted,
    SaveEpoch,
    SaveGeneration,
    SaveNumberFloor,
    SaveOutOfService,
    SavePin,
    SavePolicy,
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
    "SaveEpoch",
    "SavePolicy",
    "SaveVersion",
    "SaveRetired",
    "SaveCommitted",
    "SavePin",
    "SaveOutOfService",
    "Save",
    "LeaseAnswer",
    "BeginAnswer",
    "RegisterAnswer",
    "HeartbeatAnswer",
    "UncordonAnswer",
    "RollbackAnswer",
    "RebindAnswer",
    "RetentionAnswer",
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
    "CallRetire",
    "ReplicaCall",
    "CloseChannel",
    "CheckFit",
    "LookUp",
    "DescribeHeld",
    "Announce",
    "RoutesChanged",
]


@dataclass(frozen=True)
class Announce:
    """A line of the log and of WatchEvents."""

    kind: str
    subject: str
    message: str


@dataclass(frozen=True)
class RoutesChanged:
    """Watchers of the routes are notified of these replicas."""

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
