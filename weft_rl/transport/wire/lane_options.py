"""Options of a member's lane beside its rank: where it is, what it shows, whom it tells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from weft_rl.contract.group import ALONE, LinkUsage, Senders
from weft_rl.rpc.security.credentials import Credentials


def _tell_nobody(sent: Mapping[int, LinkUsage]) -> None:
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
    on_sent: Callable[[Mapping[int, LinkUsage]], None] = _tell_nobody
    """Called some times a second while this member sends over streams, with what it has sent since
    the last call, by the receiver's rank in the lane; on a thread of the lane's, and must not
    block or raise."""
