"""Packer of tensors in the order that they come in; each bucket lists its runs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainer_side.packing.finite import check_finite
from trainer_side.packing.packer import made_buffers
from trainer_side.sources.named_source import Piece, RunSource
from weft_rl.contract.capabilities import GLOO
from weft_rl.contract.layout.manifest import Manifest, TensorSlot
from weft_rl.contract.layout.runs import Run, carried_sizes
from weft_rl.contract.tensors import TensorMeta
from weft_rl.transport.group import CPU
from weft_rl.transport.wire.buckets import Sealed, seal_bucket, tensor_sums


class RunPacker:
    """Reused buffers for the buckets of one push, from a source in any order; see ``Packer``.

    Args:
        manifest: The layout that the source's tensors belong in.
        source: Source that fills them, from its beginning.
        buffers: Buffers of an earlier packer; those that are large enough are used again.
        device: Device of the buffers. On an accelerator all work is that of the calling thread's
            current stream.
        backend: Backend that they are sent over.
    """

    def __init__(
        self,
        manifest: Manifest,
        source: RunSource,
        buffers: list[torch.Tensor] | None = None,
        device: torch.device = CPU,
        backend: str = GLOO,
    ) -> None:
        self.manifest = manifest
        self._source, self._device, self._backend = source, device, backend
        self._sizes = [size.wire_bytes for size in carried_sizes(manifest)]
        self._runs: list[Run] = []
        self._digests: list[int] = []
        self.buffers = made_buffers(self._sizes, buffers or [], device, backend)
        source.begin(manifest)

    def pack(
        self, index: int, nonce: int, speak: Callable[[], None], *, finite: bool = False
    ) -> Sealed:
        """Fill a bucket with what comes next and seal it; see ``Packer.pack``."""
        size = self.manifest.buckets[index].payload_bytes
        payload = self.wire(index)[:size]
        pieces = self._source.fill(payload, speak)
        if finite:
            check_finite(payload, [_as_slot(piece) for piece in pieces])
        runs, digests = [piece.run for piece in pieces], [piece.digest for piece in pieces]
        self._runs += runs
        self._digests += digests
        return seal_bucket(size, nonce, index, digests, runs)

    def digests(self) -> list[int]:
        """Return the digests of the layout's tensors, once all are packed."""
        return tensor_sums(self.manifest, self._runs, self._digests)

    def wire(self, index: int) -> torch.Tensor:
        """Return a bucket's bytes as ``Packer.wire`` does, also of a bucket whose turn has come."""
        return self.buffers[index % len(self.buffers)][: self._sizes[index]]

    def move(self, held: range) -> None:
        """Put the held buckets into fresh buffers; see ``BufferedPacker``."""
        old, self.buffers = self.buffers, made_buffers(self._sizes, [], self._device, self._backend)
        for index in held:
            self.wire(index).copy_(old[index % len(old)][: self._sizes[index]])


def _as_slot(piece: Piece) -> TensorSlot:
    """Return a piece as a tensor of its bucket, for checks of the bucket's tensors."""
    meta = piece.slot.meta
    return TensorSlot(TensorMeta(meta.name, meta.dtype, (piece.run.count,)), 0, piece.at)
