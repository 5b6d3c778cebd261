"""Push of named tensors, in the order that they come in at rank 0."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainer_side.packing.packer import Announced, Packing
from trainer_side.pushes.rank_push import RankPush
from trainer_side.sources.named_source import DESCRIPTION, RunSource
from trainer_side.sources.named_tensors import NamedSteps


class NamedPush(RankPush):
    """Push of named tensors at rank 0, which announces what each bucket carries.

    Args:
        source: Tensors of the push, from their beginning.
        packing: Buckets of the push.
    """

    description = DESCRIPTION

    def __init__(self, source: RunSource, packing: Packing) -> None:
        self._source, self.packing = source, packing
        self.num_bytes = packing.manifest.total_bytes
        self.sender = packing.sender
        source.begin(packing.manifest)

    def announce(self, payload: torch.Tensor, speak: Callable[[], None]) -> Announced:
        """See ``Reader``."""
        return Announced(*self._source.fill(payload, speak))


class FollowedPush(RankPush):
    """Push of named tensors at the other ranks, which iterate in step with rank 0.

    Args:
        steps: This rank's iteration.
    """

    description = DESCRIPTION

    def __init__(self, steps: NamedSteps) -> None:
        self._steps = steps

    def assist(self, *, is_under_way: bool) -> None:
        """See ``RankPush``.

        Raises:
            WeftError: The error that ended the push, the same at every rank.
        """
        if is_under_way:
            self._steps.follow()
