"""A side group as the coordinator decides on it: who has which rank, and who attends."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from weft_rl.coordinator.decisions.state.replica import Replica


@dataclass(frozen=True)
class Member:
    """A replica's place in a side group: ranks ``first_rank`` and up."""

    replica_id: str
    incarnation: str
    first_rank: int
    num_receivers: int


def members_of(
    replicas: Iterable[tuple[str, str, int]], num_senders: int = 1
) -> tuple[Member, ...]:
    """Assign ranks in a group: senders get ranks 0 and up, receivers follow in the given order.

    Args:
        replicas: Replica id, incarnation and number of receivers of each.
    """
    members: list[Member] = []
    rank = num_senders
    for replica_id, incarnation, num_receivers in replicas:
        members.append(Member(replica_id, incarnation, rank, num_receivers))
        rank += num_receivers
    return tuple(members)


def seats(replicas: Iterable[Replica], num_senders: int = 1) -> tuple[Member, ...]:
    """Return the places of replicas in a new group."""
    return members_of(
        ((r.replica_id, r.incarnation, r.capabilities.num_receivers) for r in replicas),
        num_senders,
    )


@dataclass(frozen=True)
class Group:
    """A side group: its senders (ranks 0 and up) and the receivers of its members.

    It holds all that is decided on, for all ranks; a member learns no more of it than its own
    ``weft_rl.contract.group.GroupTicket``.
    """

    group_id: str
    secret: str = field(repr=False)
    """Secret that the tokens of its ranks are derived from; never sent."""
    epoch: int
    trainer_id: str
    session_id: str
    backend: str
    members: tuple[Member, ...]
    attending: frozenset[int] = frozenset()
    is_probe: bool = False
    """True if its receivers are only asked whether they answer (see suspects.py); then there is
    no rank 0."""
    num_senders: int = 1

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return self.num_senders + self.num_receivers

    @cached_property
    def num_receivers(self) -> int:
        """Number of ranks that receive; they follow those that send."""
        return sum(member.num_receivers for member in self.members)

    @property
    def senders(self) -> range:
        """Ranks that send."""
        return range(self.num_senders)

    @property
    def receivers(self) -> range:
        """Ranks that receive."""
        return range(self.num_senders, self.size)

    def ranks_from(self, first_rank: int) -> range:
        """Return the ranks of the member that begins at ``first_rank``."""
        count = next(m.num_receivers for m in self.members if m.first_rank == first_rank)
        return range(first_rank, first_rank + count)

    def token_of(self, rank: int) -> str:
        """Return the token that authorises one rank in this epoch; it tells nothing of others."""
        text = f"{self.group_id} {self.epoch} {rank}"
        return hmac.new(self.secret.encode(), text.encode(), hashlib.sha256).hexdigest()

    @property
    def complete(self) -> bool:
        """True if every rank attends."""
        return len(self.attending) == self.size

    def member_name(self, rank: int) -> str:
        """Return the id of a rank's replica, or of the trainer, for messages."""
        if rank < self.num_senders:
            return self.trainer_id
        for member in self.members:
            if member.first_rank <= rank < member.first_rank + member.num_receivers:
                return member.replica_id
        return f"rank {rank}"

    def rank_name(self, rank: int) -> str:
        """Return ``member_name`` and, if there are several senders, which of them a rank is."""
        name = self.member_name(rank)
        return f"{name} (sender {rank})" if rank < self.num_senders > 1 else name
