"""Packing of a source's whole tensors by one rank."""

from __future__ import annotations

from typing import Any

import torch

from trainer_side.packing.packer import PackedBucket, Packer, whole_packing
from trainer_side.pushes.rank_push import HeldPush
from trainer_side.ranks.ranks import OneRank
from trainer_side.sharding.plan import ShardPlan
from trainer_side.sources.source import HeldTensors
from weft_rl.contract.manifest import Manifest
from weft_rl.transport.group import CPU


class SourcePacker:
    """A packer of one source, which it reads as a push does."""

    def __init__(
        self, source: Any, manifest: Manifest, device: torch.device = CPU, buffers: Any = ()
    ) -> None:
        packing = whole_packing(manifest)
        self.packer = Packer(packing, buffers, device)
        source.description = getattr(source, "description", "test")
        source.is_collective = getattr(source, "is_collective", False)
        num_tensors = len(manifest.tensors)
        elements = getattr(source, "elements", lambda index: None)
        tensors = HeldTensors([elements(index) for index in range(num_tensors)])
        source.metas = tuple(slot.meta for slot in manifest.tensors)
        plan = ShardPlan((0,), (packing,), b"")
        self._reader = HeldPush(source, tensors, manifest, plan, OneRank())

    def pack(self, index: int, nonce: int = 1, *, finite: bool = False) -> PackedBucket:
        return self.packer.pack(index, self._reader, nonce, finite=finite)

    def wire(self, index: int) -> torch.Tensor:
        return self.packer.wire(index)
