"""Effects on side groups, and messages on the streams of their ranks."""

from __future__ import annotations

from dataclasses import dataclass

from weft_rl.coordinator.decisions.state.group import Group
from weft_rl.coordinator.decisions.state.transfer import Transfer
from weft_rl.coordinator.decisions.state.values import Failure


@dataclass(frozen=True)
class OpenGroup:
    """Opening of a group's store and streams to its members."""

    group: Group


@dataclass(frozen=True)
class DropGroup:
    """End of a group's store and streams, with EPOCH_FENCED."""

    group_id: str
    why: str


@dataclass(frozen=True)
class SendPrepare:
    """Message to every receiver of the group: prepare for a transfer."""

    group_id: str
    transfer: Transfer
    time_left: float


@dataclass(frozen=True)
class SendStart:
    """Message to every rank of the group: start; verified buckets are counted from here."""

    group_id: str
    transfer_id: str
    num_receivers: int
    num_buckets: int
    first_bucket: int = 0


@dataclass(frozen=True)
class SendReform:
    """Message to each sender of a group that is about to be dropped: resume in another."""

    group_id: str
    transfer_id: str
    renewed: Group
    message: str


@dataclass(frozen=True)
class SendAbort:
    """Message to every rank of the group that attends: abort."""

    group_id: str
    transfer_id: str
    failure: Failure


GroupEffect = OpenGroup | DropGroup | SendPrepare | SendStart | SendReform | SendAbort
