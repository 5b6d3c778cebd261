"""Push of what the ranks of a trainer hold, as one of them carries it out."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from trainer_side.ranks.ranks import Ranks, Sum
from trainer_side.sharding.hand_over import Givers, hand_over
from trainer_side.sharding.plan import ShardPlan
from trainer_side.sources.shard_source import ShardSource
from trainer_side.sources.source import torch_dtypes
from weft_rl.contract.layout.runs import Run
from weft_rl.interrupts import Flag

_SIGN = 2**63


@dataclass
class ShardPush:
    """Push of shards: content, senders, and the sum of the senders' digests.

    Each sender has a part of each tensor's digest. All ranks add the parts up once, whatever
    becomes of the push.
    """

    source: ShardSource
    plan: ShardPlan
    ranks: Ranks
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _begun: Flag = field(default_factory=Flag)
    _sum: Sum | None = None

    def __post_init__(self) -> None:
        handed, own = self.plan.handed, self.ranks.rank
        self._dtypes = torch_dtypes(self.source.metas)
        givers = {rank: each for rank, each in handed.items() if each.to == own}
        self._givers = Givers(self.source, givers, self._dtypes, self.ranks)

    @property
    def sender(self) -> int | None:
        """Place of this rank among the senders; None if it does not send."""
        senders = self.plan.senders
        return senders.index(self.ranks.rank) if self.ranks.rank in senders else None

    def fill(self, runs: Sequence[Run], outs: Sequence[torch.Tensor]) -> None:
        """See ``Filling``: fill what this rank sends, handed elements included, in the plan's
        order."""
        self._givers.fill(runs, outs)

    def by_reference(self, runs: Sequence[Run]) -> list[torch.Tensor | None]:
        """See ``Filling``."""
        return self._givers.by_reference(runs)

    def hand_over(self) -> None:
        """Give the elements that another rank sends for this one, if there are any. Blocks until
        that rank has all, or the push has ended there.

        Raises:
            PeerUnavailableError: ``RANK_GONE``.
        """
        handed = self.plan.handed.get(self.ranks.rank)
        if handed is not None:
            hand_over(self.source, handed, self._dtypes, self.ranks)

    def add_up(self, totals: Sequence[int] | None = None) -> Sum:
        """Begin to add up digests of tensors, or nothing; further calls return the same sum.

        Raises:
            PeerUnavailableError: ``RANK_GONE``.
        """
        with self._lock:
            if self._sum is None:
                values = torch.zeros(len(self.source.metas), dtype=torch.int64)
                if totals is not None:
                    values = torch.tensor([(t + _SIGN) % 2**64 - _SIGN for t in totals])
                try:
                    self._givers.end()
                    self._sum = self.ranks.add_up(values)
                finally:
                    self._begun.set()  # or it never will
            return self._sum

    def wait_begun(self, timeout_seconds: float) -> None:
        """Block until ``add_up`` was called; what follows over the ranks' link comes after it."""
        self._begun.wait(timeout_seconds)
