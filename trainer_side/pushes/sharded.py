"""Push of what the ranks of a trainer hold, as one of them carries it out."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from trainer_side.packing.packer import Sum
from trainer_side.pushes.rank_push import RankPush
from trainer_side.ranks.ranks import Ranks
from trainer_side.sharding.hand_over import Givers, hand_over
from trainer_side.sharding.plan import ShardPlan
from trainer_side.sources.shard_source import ShardSource
from trainer_side.sources.source import torch_dtypes
from weft_rl.contract.layout.manifest import Manifest
from weft_rl.contract.layout.runs import Run
from weft_rl.interrupts import Flag

_SIGN = 2**63


class ShardedPush(RankPush):
    """Push of the shards that the ranks hold: content, senders, and the sum of their digests.

    Each sender has a part of each tensor's digest. All ranks add the parts up once, whatever
    becomes of the push.

    Args:
        source: Elements that this rank holds.
        manifest: Layout of the version.
        plan: Division of the push among the ranks.
        ranks: Ranks of the trainer.
    """

    is_prepared_together = True

    def __init__(
        self, source: ShardSource, manifest: Manifest, plan: ShardPlan, ranks: Ranks
    ) -> None:
        self.source, self._plan, self._ranks = source, plan, ranks
        self.description, self.remarks = source.description, source.remarks
        self.num_bytes = manifest.total_bytes
        self.agreed = manifest.layout_digest + plan.digest
        self.senders = plan.senders
        self.sender = plan.senders.index(ranks.rank) if ranks.rank in plan.senders else None
        self.packing = plan.packings[self.sender or 0]
        self._dtypes = torch_dtypes(source.metas)
        givers = {rank: each for rank, each in plan.handed.items() if each.to == ranks.rank}
        self._givers = Givers(source, givers, self._dtypes, ranks)
        self._lock = threading.Lock()
        self._begun = Flag()
        self._sum: Sum | None = None

    def prepare(self) -> None:
        """See ``RankPush``: gather tensors that cannot be sent as the ranks hold them."""
        if self.source.gathered:
            # A rank that is gone since they planned would be waited for in the framework's
            # collectives. What LoRA's factors are brought by notices it itself.
            self._ranks.agree()
        try:
            self.source.gather()
        except BaseException as error:
            # Others may wait for us inside it: over our own link they are told, and raise the
            # same. Inside a collective of the framework's nobody can tell them: they learn of it
            # when that ends, by the framework's own timeout.
            self._ranks.abandon(error)
            raise

    def assist(self, *, is_under_way: bool) -> None:
        """See ``RankPush``: there is nothing to add to the sum."""
        self.add_up()

    def fill(self, runs: Sequence[Run], views: Sequence[torch.Tensor]) -> None:
        """See ``Reader``; elements that other ranks hand over are included."""
        self._givers.fill(runs, views)

    def by_reference(self, runs: Sequence[Run]) -> Sequence[torch.Tensor | None]:
        """See ``Reader``."""
        return self._givers.by_reference(runs)

    def hand_over(self) -> None:
        """See ``RankPush``.

        Raises:
            PeerUnavailableError: ``RANK_GONE``.
        """
        handed = self._plan.handed.get(self._ranks.rank)
        if handed is not None:
            hand_over(self.source, handed, self._dtypes, self._ranks)

    def add_up(self, totals: Sequence[int] | None = None) -> Sum:
        """See ``Reader``.

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
                    self._sum = self._ranks.add_up(values)
                finally:
                    self._begun.set()  # or it never will
            return self._sum

    def end_sending(self) -> None:
        """See ``RankPush``: the other ranks wait for the sum in any case."""
        self.add_up()

    def release(self) -> None:
        """See ``RankPush``."""
        self.source.release()

    def wait_added_up(self, timeout_seconds: float) -> None:
        """See ``RankPush``."""
        self._begun.wait(timeout_seconds)
