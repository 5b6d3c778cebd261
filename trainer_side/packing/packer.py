"""Packer of a source's tensors into reused buffers, in the order of their layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer_side.packing.finite import check_finite
from trainer_side.sources.source import LyingSource, Source
from weft_rl.contract.capabilities import GLOO
from weft_rl.contract.layout.manifest import ALIGN_BYTES, Manifest, align_up
from weft_rl.transport.backends import allocate
from weft_rl.transport.digests.copied import Place, pack_tensors
from weft_rl.transport.digests.copied_on_host import PIECE_BYTES, pack_digesting
from weft_rl.transport.digests.wsum64 import Digests, start_digests
from weft_rl.transport.group import CPU, window
from weft_rl.transport.wire.buckets import Sealed, seal_bucket, whole_parts


class Packer:
    """Reused buffers (as many as ``group.window``), and the views into them for one layout.

    Views are made once a layout: making them anew costs more than copying into
    them for models of many small tensors.

    Args:
        manifest: The layout to pack.
        buffers: Buffers of an earlier packer; those that are large enough are used again.
        device: Device of the buffers. On an accelerator all work is that of the calling thread's
            current stream.
        backend: Backend that they are sent over.
    """

    def __init__(
        self,
        manifest: Manifest,
        buffers: list[torch.Tensor] | None = None,
        device: torch.device = CPU,
        backend: str = GLOO,
    ) -> None:
        self.manifest = manifest
        self._device, self._backend = device, backend
        self._sizes = tuple(bucket.wire_bytes for bucket in manifest.buckets)
        self.buffers = made_buffers(self._sizes, buffers or [], device, backend)
        self._make_views()

    def _make_views(self) -> None:
        """Find the places of each bucket's tensors, and the padding between them."""
        manifest = self.manifest
        self._firsts: list[int] = []
        self._views: list[list[torch.Tensor]] = []
        self._paddings: list[list[torch.Tensor]] = []
        self._places: list[tuple[Place, ...]] = []
        position = 0
        for index, bucket in enumerate(manifest.buckets):
            buffer = self._buffer(index)
            self._firsts.append(position)
            slots = manifest.tensors[position : position + bucket.num_tensors]
            position += bucket.num_tensors
            self._views.append(
                [
                    buffer[slot.offset_bytes : slot.offset_bytes + slot.meta.num_bytes]
                    .view(getattr(torch, slot.meta.dtype.torch_name))
                    .view(slot.meta.shape)
                    for slot in slots
                ]
            )
            self._places.append(
                tuple([Place(slot.offset_bytes, 0, slot.meta.num_bytes) for slot in slots])
            )
            ends = [slot.offset_bytes + slot.meta.num_bytes for slot in slots]
            self._paddings.append([buffer[e : align_up(e)] for e in ends if e % ALIGN_BYTES])

    def pack(
        self, index: int, source: Source, nonce: int, finite: bool = False
    ) -> tuple[Sealed, list[int]]:
        """Fill bucket ``index`` and seal it.

        Blocks for the copies and the digesting. The buffer is that of bucket
        ``index - len(buffers)``, which must have been released.

        Args:
            index: Number of the bucket.
            source: Source that fills it.
            nonce: Nonce of the transfer.
            finite: Read it once more, and refuse NaN and infinities.

        Returns:
            The sealed bucket, and the digests of its tensors in order. Its bytes are
            ``wire(index)``, but for its tail, until bucket ``index + len(buffers)`` is packed.

        Raises:
            NotFiniteError: Names the tensor.
            WeftError: The source's own.
        """
        bucket = self.manifest.buckets[index]
        buffer = self._buffer(index)
        first = self._firsts[index]
        payload = buffer[: bucket.payload_bytes]
        # What follows a tensor in its last block is digested with it.
        if self._paddings[index]:
            torch._foreach_zero_(self._paddings[index])
        begun = self._pack_lying(index, payload, source)
        if begun is None:
            source.read(first, bucket.num_tensors, self._views[index])
        if begun is None:
            begun = start_digests(payload, whole_parts(self.manifest, index))
        if finite:
            check_finite(payload, self.manifest.tensors[first : first + bucket.num_tensors])
        digests = begun.wait()
        return seal_bucket(len(payload), nonce, index, digests), digests

    def _pack_lying(self, index: int, payload: torch.Tensor, source: Source) -> Digests | None:
        """Copy and digest tensors in one reading, if all lie on the payload's device as they
        travel. Return None, with nothing done, where not all do, or nothing is gained."""
        views, first = self._views[index], self._firsts[index]
        if not isinstance(source, LyingSource) or not is_worth_it(views):
            return None
        held = source.by_reference(first, len(views))
        found = lying(held, [view.dtype for view in views])
        if found is not None and not payload.is_cuda:
            digests = pack_digesting(found, views, payload, whole_parts(self.manifest, index))
            return None if digests is None else Digests(digests)
        return None if found is None else pack_tensors(found, self._places[index], payload)

    def wire(self, index: int) -> torch.Tensor:
        """Return the uint8 bytes of a held, packed bucket, with room for its tail; no copy."""
        return self._buffer(index)[: self._sizes[index]]

    def move(self, held: range) -> None:
        """Put the held buckets into fresh buffers; see ``BufferedPacker``."""
        old, self.buffers = self.buffers, made_buffers(self._sizes, [], self._device, self._backend)
        self._make_views()
        for index in held:
            self.wire(index).copy_(old[index % len(old)][: self._sizes[index]])

    def _buffer(self, index: int) -> torch.Tensor:
        return self.buffers[index % len(self.buffers)]


def is_worth_it(views: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors are copied and digested in one reading. True for tensors on an
    accelerator, and on the host where any is large."""
    return any(view.is_cuda or view.nbytes >= PIECE_BYTES for view in views)


def lying(
    held: Sequence[torch.Tensor | None], dtypes: Sequence[torch.dtype]
) -> list[torch.Tensor] | None:
    """Return the tensors if all are there, in the dtypes that they travel in; else None."""
    found = [t for t, dtype in zip(held, dtypes, strict=True) if t is not None and t.dtype == dtype]
    return found if len(found) == len(held) else None


def made_buffers(
    sizes: Sequence[int], kept: list[torch.Tensor], device: torch.device, backend: str
) -> list[torch.Tensor]:
    """Return as many buffers as are in flight, each large enough for any bucket. Large enough ones
    of ``kept``, which are of the same backend, are used again."""
    need, count = max(sizes), min(window(device, backend), len(sizes))
    buffers = [buffer for buffer in kept if buffer.numel() >= need][:count]
    fresh = range(count - len(buffers))
    return buffers + [allocate(backend, need, device) for _ in fresh]
