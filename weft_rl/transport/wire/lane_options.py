"""Options of a member's lane beside its rank: where it is, what it shows, whom it tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft_rl.contract.group import ALONE, Senders
from weft_rl.rpc.security.credentials import Credentials


@dataclass(frozen=True)
class SentBytes:
    """Bytes that this member has sent to another one, and how long its link had bytes to carry."""

    rank: int
    """Rank of the receiver in the lane."""
    num_bytes: int
    busy_seconds: float
    num_waiting: int
    """Bytes that are here for it, and that it has not acknowledged."""
    between_sites: bool
    encrypted: bool


def _tell_nobody(sent: list[SentBytes]) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class LaneOptions:
    """Options of one rank's membership of a lane."""

    host: str
    """Address of this machine that the others connect to (streams, gloo)."""
    credentials: Credentials | None = None
    """Certificates that encrypt streams; None takes this process's."""
    senders: Senders = ALONE
    """Senders of the side group, and the one whose lane this is."""
    site: str = ""
    """Label of the place where this rank runs (streams)."""
    on_sent: Callable[[list[SentBytes]], None] = _tell_nobody
    """Called some times a second while this member sends over streams, with what it has sent since
    the last call; on a thread of the lane's, and must not block or raise."""
