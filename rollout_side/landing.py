"""Where the buckets of one transfer are received, verified and put."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollout_side.segment import Segment
from rollout_side.staged import bucket_starts
from weft.contract.manifest import TRAILER_BYTES, Manifest, check_trailer
from weft.transport.digest import payload_digest
from weft.transport.group import window


class Landing:
    """Buckets arrive straight in the segment where it lies on the group's device, else in
    buffers there that are copied from.

    On an accelerator everything runs on the calling thread's current stream.

    Args:
        manifest: Of the version.
        segment: For all its buckets, one after the other with their trailers.
        device: Where the side group receives.
        second: Memory on that device for another copy, of the same layout as the segment.
    """

    def __init__(
        self,
        manifest: Manifest,
        segment: Segment,
        device: torch.device,
        second: torch.Tensor | None = None,
    ) -> None:
        self._second = second
        self._manifest, self._data = manifest, segment.data
        self._starts = bucket_starts(manifest)
        self._buffers: Sequence[torch.Tensor] = ()
        #: Buckets whose receives may be posted before the first of them has landed.
        self.ahead = window(device)
        if segment.data.device != device:
            need = max(bucket.wire_bytes for bucket in manifest.buckets)
            count = min(self.ahead, len(manifest.buckets))
            self._buffers = [
                torch.empty(need, dtype=torch.uint8, device=device) for _ in range(count)
            ]

    def wire(self, index: int) -> torch.Tensor:
        """Where bucket ``index`` is received; its buffer is that of ``index - ahead``."""
        size = self._manifest.buckets[index].wire_bytes
        if self._buffers:
            return self._buffers[index % len(self._buffers)][:size]
        return self._data[self._starts[index] : self._starts[index] + size]

    def land(self, index: int, nonce: int) -> int:
        """Verify a bucket that has arrived and put it in its place; blocks till it is.

        Returns:
            The payload's digest.

        Raises:
            DigestMismatchError: Other bytes arrived than were sent.
        """
        manifest, bucket = self._manifest, self._manifest.buckets[index]
        wire = self.wire(index)
        digest = payload_digest(wire[: bucket.payload_bytes], manifest.digest_algorithm)
        end = bucket.payload_bytes + TRAILER_BYTES
        check_trailer(
            wire[bucket.payload_bytes : end].cpu().numpy().data,
            digest=digest,
            nonce=nonce,
            bucket=index,
            payload_bytes=bucket.payload_bytes,
        )
        place = slice(self._starts[index], self._starts[index] + bucket.wire_bytes)
        if self._second is not None:
            self._second[place].copy_(wire)
        if self._buffers:
            self._data[place].copy_(wire)  # blocks till both are done
        return digest
