"""Lockstep reading of a push's source on every rank of a trainer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer_side.ranks.ranks import Ranks
from trainer_side.sources.source import Source
from weft_rl.contract.layout.manifest import Manifest


class LedSource:
    """Source of the sender, which the other ranks ``follow`` in step.

    Before each bucket, all ranks learn whether all can continue.

    Args:
        source: Collective source.
        ranks: Ranks of the trainer.
    """

    is_collective = True

    def __init__(self, source: Source, ranks: Ranks) -> None:
        self.description, self.metas = source.description, source.metas
        self._source, self._ranks = source, ranks

    def read(self, first: int, count: int, views: Sequence[torch.Tensor] | None) -> None:
        """See ``Source.read``."""
        self._ranks.agree()
        try:
            self._source.read(first, count, views)
        except BaseException as error:
            self._ranks.abandon(error)  # others may wait for us inside a gather
            raise

    def end_reading(self) -> None:
        """See ``Source.end_reading``."""
        self._source.end_reading()


def follow(source: Source, ranks: Ranks, manifest: Manifest) -> None:
    """Give the elements of a rank other than the sender, bucket by bucket of a push.

    Raises:
        WeftError: The error that ended the push, the same at every rank.
    """
    led = LedSource(source, ranks)
    first = 0
    try:
        for bucket in manifest.buckets:
            led.read(first, bucket.num_tensors, None)
            first += bucket.num_tensors
    finally:
        led.end_reading()
