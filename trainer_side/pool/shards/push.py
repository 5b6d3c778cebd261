"""One push of what the ranks of a trainer hold, as one of them carries it out."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from trainer_side.pool.shards.plan import ShardPlan
from trainer_side.ranks import Ranks, Sum
from trainer_side.sources.shard_source import ShardSource

_SIGN = 2**63


@dataclass
class ShardPush:
    """What is sent, by whom, and the sum of the senders' digests: of each tensor every sender has
    a part, and all ranks add them up once, whatever becomes of the push."""

    source: ShardSource
    plan: ShardPlan
    ranks: Ranks
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _begun: threading.Event = field(default_factory=threading.Event)
    _sum: Sum | None = None

    @property
    def sender(self) -> int | None:
        """This rank's place among those that send, if it does."""
        senders = self.plan.senders
        return senders.index(self.ranks.rank) if self.ranks.rank in senders else None

    def add_up(self, totals: Sequence[int] | None = None) -> Sum:
        """Begin to add up digests of tensors, or nothing; a further call returns the same.

        Raises:
            PeerUnavailableError: ``RANK_GONE``.
        """
        with self._lock:
            if self._sum is None:
                values = torch.zeros(len(self.source.metas), dtype=torch.int64)
                if totals is not None:
                    values = torch.tensor([(t + _SIGN) % 2**64 - _SIGN for t in totals])
                try:
                    self._sum = self.ranks.add_up(values)
                finally:
                    self._begun.set()  # or it never will
            return self._sum

    def wait_begun(self, timeout_seconds: float) -> None:
        """Block until ``add_up`` was called: what follows over the ranks' link comes after it."""
        self._begun.wait(timeout_seconds)
