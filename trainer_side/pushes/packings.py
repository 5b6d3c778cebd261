"""Layouts of pushes and their division among ranks, kept for the next push of the same tensors."""

from __future__ import annotations

import torch

from trainer_side.packing.packer import Packing, announced_packing, whole_packing
from trainer_side.pushes.named import NamedPush
from trainer_side.pushes.rank_push import GatheredPush, RankPush
from trainer_side.pushes.sharded import ShardedPush
from trainer_side.ranks.ranks import Ranks
from trainer_side.sharding.plan import DEFAULT_MAX_SENDERS, ShardPlans
from trainer_side.sources.named_source import OrderedSource, RunSource
from trainer_side.sources.shard_source import ShardSource, shard_source
from trainer_side.sources.source import Source
from weft_rl.containers.lru import Lru
from weft_rl.contract.capabilities import NCCL, ONE_SIDED
from weft_rl.contract.layout.manifest import DEFAULT_BUCKET_BYTES, plan_buckets
from weft_rl.contract.tensors import TensorMeta

_MAX_KEPT = 32

#: Between two H200s a base of 16 GB was staged in 51 ms with buckets of 1 GiB and in 62 ms
#: with 512 MiB: a bucket must take longer than the release of the one before it.
DEVICE_BUCKET_BYTES = 2**30


def packs_on_device(backend: str) -> bool:
    """Return whether buckets for a backend are packed on an accelerator; the same on every rank."""
    return backend == NCCL or (backend == ONE_SIDED and torch.cuda.is_available())


def bucket_capacity(backend: str, chosen: int | None) -> int:
    """Return the payload bytes of a bucket over a backend, or the user's choice. It is the same on
    every rank."""
    return chosen or (DEVICE_BUCKET_BYTES if packs_on_device(backend) else DEFAULT_BUCKET_BYTES)


class Packings:
    """Maker of the pushes of one rank.

    Args:
        ranks: Ranks of the trainer.
        bucket_bytes: Payload of a bucket; None is what suits the backend.
        max_senders: Most ranks that send. If more hold shards, the others pass theirs to those that
            send; with 1, rank 0 gathers whole tensors.
    """

    def __init__(
        self, ranks: Ranks, bucket_bytes: int | None, max_senders: int = DEFAULT_MAX_SENDERS
    ) -> None:
        self.ranks = ranks
        self._bucket_bytes, self._max_senders = bucket_bytes, max_senders
        self._shard_plans = ShardPlans(max_senders)
        self._kept: Lru[tuple[int, tuple[TensorMeta, ...]], Packing] = Lru(_MAX_KEPT)
        self._last: tuple[int, tuple[TensorMeta, ...], Packing] | None = None

    def weights_push(self, source: Source, backend: str) -> RankPush:
        """Make the push of a source that every rank has: of the shards that the ranks hold, or
        gathered at rank 0."""
        packing, ranks = self._packing(source.metas, backend), self.ranks
        gathered = GatheredPush(source, ranks, packing)
        if ranks.size == 1 or self._max_senders == 1:
            return gathered
        shards = shard_source(source, ranks)
        if not isinstance(shards, ShardSource):
            gathered.remarks = () if shards is None else shards.remarks
            return gathered
        plan = self._shard_plans.plan(packing.manifest, shards.held)
        if isinstance(plan, str):
            gathered.remarks = (f"rank 0 gathered all: {plan}",)
            return gathered
        return ShardedPush(shards, packing.manifest, plan, ranks)

    def ordered_push(self, source: OrderedSource, backend: str) -> RankPush:
        """Make the push, at rank 0, of named tensors whose order is known beforehand."""
        packing = self._packing(source.metas, backend)
        return GatheredPush(source, self.ranks, packing, is_laid_out_alike=False)

    def announced_push(self, source: RunSource, backend: str) -> RankPush:
        """Make the push, at rank 0, of named tensors in the order that they come in."""
        packing = self._packing(source.metas, backend)
        return NamedPush(source, announced_packing(packing.manifest))

    def _packing(self, metas: tuple[TensorMeta, ...], backend: str) -> Packing:
        """Return the packing of whole tensors."""
        capacity, last = bucket_capacity(backend, self._bucket_bytes), self._last
        if last is not None and last[0] == capacity and last[1] is metas:
            return last[2]  # without a look at thousands of tensors
        packing = self._kept.get((capacity, metas))
        if packing is None:
            packing = whole_packing(plan_buckets(metas, capacity))
            self._kept.put((capacity, metas), packing)
        self._last = capacity, metas, packing
        return packing
