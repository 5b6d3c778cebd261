"""A side group as its members know it: their places in it, and how large it may be."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

#: Labels the place where a process runs: weights cross between two places once.
SITE_VARIABLE: Final = "WEFT_SITE"
#: Members that one replica may add to a side group.
MAX_RECEIVERS: Final = 1024
#: Ranks of one side group, the senders included. The coordinator forms no larger one,
#: and a replica joins none: what a rank keeps of each other one adds up.
MAX_GROUP_SIZE: Final = 16_384
#: Senders of one side group: a receiver has a lane to each.
MAX_SENDERS: Final = 256
#: Buckets that a sender may keep at once: each costs every receiver a buffer, too.
MAX_BUCKETS_IN_FLIGHT: Final = 8
#: Links between members that one message lists.
MAX_HOPS: Final = 64


@dataclass(frozen=True)
class Senders:
    """Senders of a side group, and the one whose lane is meant."""

    own: int
    num: int


ALONE: Final = Senders(0, 1)


@dataclass(frozen=True)
class LinkUsage:
    """Usage of the link between two members over streams, as its source measures it."""

    num_bytes: int
    """Bytes that the target has acknowledged."""
    busy_seconds: float
    """Seconds for which some were under way that it had room for."""
    num_waiting: int = 0
    """Bytes that the source had for it last, and that it had not acknowledged."""
    between_sites: bool = False
    encrypted: bool = False

    def __add__(self, later: LinkUsage) -> LinkUsage:
        """Return both together: the facts are the later one's."""
        return replace(
            later,
            num_bytes=self.num_bytes + later.num_bytes,
            busy_seconds=self.busy_seconds + later.busy_seconds,
        )

    @property
    def rate(self) -> float:
        """Bytes a second that the link has carried; 0 before it was measured."""
        return self.num_bytes / self.busy_seconds if self.busy_seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class GroupTicket:
    """Information that a process needs to join a side group at one rank; plain and picklable.

    The coordinator hands it out as a ``weft.v1.GroupPlan``, to which the member adds how it
    reaches the coordinator and is reached itself.
    """

    coordinator: str
    """HOST:PORT of the RendezvousService."""
    host: str
    """Address of this machine that the side group binds, and that peers connect to."""
    group_id: str
    token: str = field(repr=False)
    """Token that authorises this rank alone."""
    epoch: int
    rank: int
    """Rank in the group: a sender's is below ``num_senders``; of a replica that has several
    receivers it is that of the first."""
    size: int
    backend: str
    num_senders: int = field(default=1, metadata={"unset": 1})
    site: str = ""
    """Label of the place where this member runs; see ``SITE_VARIABLE``."""
