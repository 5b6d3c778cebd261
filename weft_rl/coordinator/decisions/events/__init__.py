"""Events that the coordinator decides on.

Everything random or read from elsewhere comes in with the event. ``ticket`` names the waiting
call that an effect will answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft_rl.coordinator.decisions.events.answers import (
    AnswerEvent,
    CommitAnswered,
    DiscardAnswered,
    FitChecked,
    HeldDescribed,
    JoinAnswered,
    LoadAnswered,
    LookedUp,
    RefuseAnswered,
    RetireAnswered,
    SleepAnswered,
    WakeAnswered,
)
from weft_rl.coordinator.decisions.events.operators import (
    DrainReplica,
    ForgetPolicy,
    OperatorEvent,
    Pin,
    RebindBase,
    RetireVersion,
    Rollback,
    SetRetention,
    SleepReplica,
    TakeOutOfService,
    Uncordon,
    WakeReplica,
)
from weft_rl.coordinator.decisions.events.ranks import (
    RankAttends,
    RankEvent,
    RankFailed,
    RankGone,
    RankLoadDue,
    RankPrepared,
    RanksHeard,
    RankStaged,
)
from weft_rl.coordinator.decisions.events.replicas import (
    Heartbeat,
    Leave,
    ReferenceKnown,
    Register,
    ReplicaEvent,
    ReportCheckpoint,
)
from weft_rl.coordinator.decisions.events.trainers import (
    AbortTransfer,
    AcquirePolicy,
    AwaitTransfer,
    BeginTransfer,
    DescribeTarget,
    ReleasePolicy,
    RenewLease,
    SleepRollouts,
    TrainerEvent,
    WakeRollouts,
)

__all__ = [
    "Event",
    "Tick",
    "CallerGone",
    "AcquirePolicy",
    "RenewLease",
    "ReleasePolicy",
    "DescribeTarget",
    "BeginTransfer",
    "AwaitTransfer",
    "AbortTransfer",
    "SleepRollouts",
    "WakeRollouts",
    "Register",
    "ReportCheckpoint",
    "Heartbeat",
    "Leave",
    "ReferenceKnown",
    "RankAttends",
    "RankGone",
    "RanksHeard",
    "RankPrepared",
    "RankLoadDue",
    "RankStaged",
    "RankFailed",
    "Rollback",
    "Pin",
    "RetireVersion",
    "SetRetention",
    "ForgetPolicy",
    "TakeOutOfService",
    "Uncordon",
    "DrainReplica",
    "SleepReplica",
    "WakeReplica",
    "RebindBase",
    "FitChecked",
    "JoinAnswered",
    "LoadAnswered",
    "CommitAnswered",
    "RetireAnswered",
    "DiscardAnswered",
    "RefuseAnswered",
    "SleepAnswered",
    "WakeAnswered",
    "LookedUp",
    "HeldDescribed",
]


@dataclass(frozen=True)
class Tick:
    """Passage of time."""


@dataclass(frozen=True)
class CallerGone:
    """Cancellation of a waiting call."""

    ticket: int


Event = Tick | CallerGone | TrainerEvent | ReplicaEvent | RankEvent | OperatorEvent | AnswerEvent
