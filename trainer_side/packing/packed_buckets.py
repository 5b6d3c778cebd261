"""Packed buckets of one push: whole tensors, runs, or a rank's shards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import torch

from trainer_side.packing.packer import Packer
from trainer_side.packing.run_packer import RunPacker
from trainer_side.packing.shard_packer import ShardPacker
from trainer_side.sharding.push import ShardPush
from trainer_side.sources.source import Source
from weft_rl.contract.layout.manifest import Manifest
from weft_rl.transport.wire.buckets import Sealed, in_manifest_order


class BufferedPacker(Protocol):
    """Interface of all packers: reused buffers that hold some buckets."""

    manifest: Manifest
    buffers: list[torch.Tensor]

    def wire(self, index: int) -> torch.Tensor:
        """Return the uint8 bytes of a held, packed bucket, with room for its tail; no copy."""

    def move(self, held: range) -> None:
        """Put the held buckets into fresh buffers.

        For a transfer that continues after its group was abandoned: operations that nobody can stop
        may still read the old buffers.
        """


class PackedBuckets(ABC):
    """Buckets that a packer fills for one push; see ``Buckets``.

    Args:
        packer: Packer that is kept across pushes, or made for this one.
    """

    def __init__(self, packer: BufferedPacker) -> None:
        self.packer = packer
        self.manifest = packer.manifest
        self.num_buffers = len(packer.buffers)
        #: Whether the source has failed, or gave what must not be sent: no other group helps.
        self.spoiled = False

    def make(self, index: int, speak: Callable[[], None]) -> Sealed:
        """See ``Buckets``: read a bucket's elements from their source, digest and seal it."""
        try:
            return self._pack(index, speak)
        except BaseException:
            self.spoiled = True
            raise

    @abstractmethod
    def _pack(self, index: int, speak: Callable[[], None]) -> Sealed:
        """Pack a bucket for ``make``, which records a failure."""

    def are_summed(self) -> bool:
        """See ``Buckets``: one rank sends all."""
        return True

    @abstractmethod
    def digests(self, made: list[int]) -> list[int]:
        """See ``Buckets``."""

    def wire(self, index: int) -> torch.Tensor:
        """See ``Buckets``."""
        return self.packer.wire(index)

    def move(self, held: range) -> None:
        """Put the held buckets into fresh buffers; see ``BufferedPacker``."""
        self.packer.move(held)


class WholeBuckets(PackedBuckets):
    """Buckets of a source's whole tensors, in the order of their layout."""

    def __init__(self, packer: Packer, source: Source, nonce: int, check_finite: bool) -> None:
        super().__init__(packer)
        self._packer, self._source = packer, source
        self._nonce, self._check_finite = nonce, check_finite
        self._digests: list[list[int]] = []

    def _pack(self, index: int, speak: Callable[[], None]) -> Sealed:
        sealed, digests = self._packer.pack(index, self._source, self._nonce, self._check_finite)
        self._digests.append(digests)
        return sealed

    def digests(self, made: list[int]) -> list[int]:
        """See ``Buckets``."""
        return in_manifest_order(self.manifest, self._digests)


class RunBuckets(PackedBuckets):
    """Buckets of named tensors, in the order that they come in."""

    def __init__(self, packer: RunPacker, nonce: int, check_finite: bool) -> None:
        super().__init__(packer)
        self._packer, self._nonce, self._check_finite = packer, nonce, check_finite

    def _pack(self, index: int, speak: Callable[[], None]) -> Sealed:
        return self._packer.pack(index, self._nonce, speak, finite=self._check_finite)

    def digests(self, made: list[int]) -> list[int]:
        """See ``Buckets``."""
        return self._packer.digests()


class ShardBuckets(PackedBuckets):
    """Buckets of the shards that one rank of a trainer holds."""

    def __init__(
        self, packer: ShardPacker, push: ShardPush, nonce: int, check_finite: bool
    ) -> None:
        super().__init__(packer)
        self._packer, self._push = packer, push
        self._nonce, self._check_finite = nonce, check_finite
        self._totals = [0] * len(packer.manifest.tensors)

    def _pack(self, index: int, speak: Callable[[], None]) -> Sealed:
        push, totals = self._push, self._totals
        return self._packer.pack(index, push, self._nonce, totals, finite=self._check_finite)

    def are_summed(self) -> bool:
        """See ``Buckets``: return whether the ranks have added up their parts."""
        return self._push.add_up(self._totals).done

    def digests(self, made: list[int]) -> list[int]:
        """See ``Buckets``: return the sums over all ranks' parts."""
        return [total % 2**64 for total in self._push.add_up().result()]
