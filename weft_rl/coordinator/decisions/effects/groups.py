"""What is to be done with side groups, and said on the streams of their ranks."""

from __future__ import annotations

from dataclasses import dataclass

from weft_rl.coordinator.decisions.state.group import Group
from weft_rl.coordinator.decisions.state.transfer import Transfer
from weft_rl.coordinator.decisions.state.values import Failure


@dataclass(frozen=True)
class OpenGroup:
    """Makes a group's store and streams available to its members."""

    group: Group


@dataclass(frozen=True)
class DropGroup:
    """Ends a group's store and streams with EPOCH_FENCED."""

    group_id: str
    why: str


@dataclass(frozen=True)
class SendPrepare:
    """To every receiver of the group."""

    group_id: str
    transfer: Transfer
    time_left: float


@dataclass(frozen=True)
class SendStart:
    """To every rank of the group; verified buckets are counted from here."""

    group_id: str
    transfer_id: str
    num_receivers: int
    num_buckets: int
    first_bucket: int = 0


@dataclass(frozen=True)
class SendReform:
    """To each sender of a group that is about to be dropped: resume in another."""

    group_id: str
    transfer_id: str
    renewed: Group
    message: str


@dataclass(frozen=True)
class SendAbort:
    """To every rank of the group that attends."""

    group_id: str
    transfer_id: str
    failure: Failure


GroupEffect = OpenGroup | DropGroup | SendPrepare | SendStart | SendReform | SendAbort
