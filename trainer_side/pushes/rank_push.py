"""Push as one rank of a trainer carries it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from trainer_side.packing.packer import Announced, KnownSum, Packing, Sum
from trainer_side.ranks.ranks import SENDER, Ranks
from trainer_side.sources.source import Source
from weft_rl.contract.layout.runs import Run


class RankPush:
    """Part of one rank in a push: what it reads, sends, and does for the ranks that send.

    A ``Reader`` at ranks that send. Methods are collective where they say so; what a kind of push
    has no use for does nothing.
    """

    description: str
    """Description of what is read, for messages."""
    num_bytes: int = 0
    """Payload bytes of the push; 0 where only rank 0 knows."""
    agreed: bytes = b""
    """Digest of what every rank must have planned alike; empty where rank 0 plans alone."""
    remarks: tuple[str, ...] = ()
    """Remarks that the push's success does not show."""
    senders: tuple[int, ...] = (SENDER,)
    """Ranks of the trainer that send, by their ranks in the side group."""
    sender: int | None = None
    """Place of this rank among them; None if it does not send."""
    packing: Packing
    """Buckets that this rank packs; at rank 0 also if it sends none."""
    is_prepared_together: bool = False
    """True if all ranks come to the push, and ``prepare``, before any of them sends."""

    def prepare(self) -> None:
        """Bring together what cannot be sent as the ranks hold it. Collective, blocks."""

    def assist(self, *, is_under_way: bool) -> None:
        """Take part at a rank that does not send, until those that send have read all; blocks.

        Args:
            is_under_way: False for a retried call of a push that has ended.
        """

    def hand_over(self) -> None:
        """Give the elements that another rank sends for this one, if there are any. Blocks until
        that rank has all, or the push has ended there."""

    def fill(self, runs: Sequence[Run], views: Sequence[torch.Tensor]) -> None:
        """See ``Reader``."""
        raise NotImplementedError

    def by_reference(self, runs: Sequence[Run]) -> Sequence[torch.Tensor | None]:
        """See ``Reader``."""
        return [None] * len(runs)

    def announce(self, payload: torch.Tensor, speak: Callable[[], None]) -> Announced:
        """See ``Reader``."""
        raise NotImplementedError

    def add_up(self, totals: Sequence[int] | None = None) -> Sum:
        """See ``Reader``; without ``totals``, this rank has nothing to add."""
        return KnownSum(totals or ())

    def wait_added_up(self, timeout_seconds: float) -> None:
        """Block until ``add_up`` was called, on any thread; what follows over the ranks' link comes
        after it."""

    def end_sending(self) -> None:
        """End what the ranks that send have to end, however sending has ended."""

    def release(self) -> None:
        """Free what was kept for this push, once it has ended."""


class GatheredPush(RankPush):
    """Push of a source, bucket by bucket in the order of its layout.

    A collective source is read in lockstep: before each bucket, all ranks learn whether all can
    continue.

    Args:
        source: Tensors of the push.
        ranks: Ranks of the trainer.
        packing: Buckets of the push.
        is_laid_out_alike: False if rank 0 alone knows the layout.
    """

    def __init__(
        self, source: Source, ranks: Ranks, packing: Packing, *, is_laid_out_alike: bool = True
    ) -> None:
        self._source, self._ranks, self.packing = source, ranks, packing
        self.description = source.description
        self.num_bytes = packing.manifest.total_bytes
        self.agreed = packing.manifest.layout_digest if is_laid_out_alike else b""
        self.sender = packing.sender if ranks.rank == SENDER else None

    def assist(self, *, is_under_way: bool) -> None:
        """See ``RankPush``; give the elements of this rank to a collective source.

        Raises:
            WeftError: The error that ended the push, the same at every rank.
        """
        if not is_under_way or not self._source.is_collective:
            return
        first = 0
        try:
            for bucket in self.packing.manifest.buckets:
                self._read(first, bucket.num_tensors, None)
                first += bucket.num_tensors
        finally:
            self._source.end_reading()

    def fill(self, runs: Sequence[Run], views: Sequence[torch.Tensor]) -> None:
        """See ``Reader``."""
        self._read(runs[0].tensor, len(runs), views)

    def by_reference(self, runs: Sequence[Run]) -> Sequence[torch.Tensor | None]:
        """See ``Reader``."""
        if self._source.is_collective:
            return super().by_reference(runs)
        return self._source.by_reference(runs[0].tensor, len(runs))

    def end_sending(self) -> None:
        """See ``RankPush``."""
        self._source.end_reading()

    def _read(self, first: int, count: int, views: Sequence[torch.Tensor] | None) -> None:
        if not self._source.is_collective:
            self._source.read(first, count, views)
            return
        self._ranks.agree()
        try:
            self._source.read(first, count, views)
        except BaseException as error:
            self._ranks.abandon(error)  # others may wait for us inside a gather
            raise
