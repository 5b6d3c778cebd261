"""Where the buckets of one transfer are received, verified and put."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol

import torch

from rollout_side.memory.segment import Segment
from rollout_side.memory.versions import bucket_starts
from weft.contract.errors import CapacityError
from weft.contract.manifest import TRAILER_BYTES, Manifest, check_trailer
from weft.transport.digest import payload_digest
from weft.transport.group import window


class Landing(Protocol):
    """Memory that buckets are received in, one after the other, in one side group."""

    ahead: int
    """Buckets whose receives may be posted before the first of them has landed."""

    def make_room(self, index: int, *, wait: bool) -> bool:
        """Whether a receive to ``wire(index)`` may be posted now, every one before it having
        been posted; with ``wait`` it blocks until one may.

        Raises:
            WeftError: It never may: why.
        """

    def wire(self, index: int) -> torch.Tensor:
        """Where bucket ``index`` is received."""

    def land(self, index: int, nonce: int) -> None:
        """Verify a bucket that has arrived and put it where it is wanted; blocks till it is.

        Raises:
            DigestMismatchError: Other bytes arrived than were sent.
        """

    def is_load_due(self) -> bool:
        """Whether the replica is to be told to load now; never again after a True."""


def verify(wire: torch.Tensor, manifest: Manifest, index: int, nonce: int) -> int:
    """Check a bucket that has arrived against its trailer; returns its payload's digest.

    Raises:
        DigestMismatchError: Other bytes arrived than were sent.
    """
    bucket = manifest.buckets[index]
    digest = payload_digest(wire[: bucket.payload_bytes], manifest.digest_algorithm)
    end = bucket.payload_bytes + TRAILER_BYTES
    check_trailer(
        wire[bucket.payload_bytes : end].cpu().numpy().data,
        digest=digest,
        nonce=nonce,
        bucket=index,
        payload_bytes=bucket.payload_bytes,
    )
    return digest


def make_buffers(
    manifest: Manifest, count: int, device: torch.device, *, more: int = 0
) -> list[torch.Tensor]:
    """Buffers, each for any bucket; no more than there are buckets.

    Args:
        more: As many further ones as there is memory for, at most.

    Raises:
        CapacityError: The accelerator has no room for ``count`` of them.
    """
    need = max(bucket.wire_bytes for bucket in manifest.buckets)
    count = min(count, len(manifest.buckets))
    try:
        made = [torch.empty(need, dtype=torch.uint8, device=device) for _ in range(count)]
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"{device} has no room for the {count} buffers of {need:,} bytes that a push is "
            "received in: push smaller buckets (bucket_bytes), or start the replica with a "
            "smaller --gpu-memory-utilization"
        ) from error
    with contextlib.suppress(torch.OutOfMemoryError):
        for _ in range(min(more, len(manifest.buckets) - count)):
            made.append(torch.empty(need, dtype=torch.uint8, device=device))
    return made


class StagedLanding:
    """A ``Landing`` in a segment: buckets arrive straight there where it lies on the group's
    device, else in buffers on the device that are copied from.

    On an accelerator everything runs on the calling thread's current stream.

    Args:
        manifest: Of the version.
        digests: Of the buckets verified so far; grows.
        segment: For all its buckets, one after the other with their trailers.
        device: Where the side group receives.
        second: Memory on that device for another copy, of the same layout as the segment.
    """

    def __init__(
        self,
        manifest: Manifest,
        digests: list[int],
        segment: Segment,
        device: torch.device,
        second: torch.Tensor | None = None,
    ) -> None:
        self._second, self._digests = second, digests
        self._manifest, self._data = manifest, segment.data
        self._starts = bucket_starts(manifest)
        self._buffers: Sequence[torch.Tensor] = ()
        #: Buckets whose receives may be posted before the first of them has landed.
        self.ahead = window(device)
        if segment.data.device != device:
            self._buffers = make_buffers(manifest, self.ahead, device)

    def make_room(self, index: int, *, wait: bool) -> bool:
        """See ``Landing``: what landed is done with."""
        return True

    def wire(self, index: int) -> torch.Tensor:
        """See ``Landing``; its buffer is that of ``index - ahead``."""
        size = self._manifest.buckets[index].wire_bytes
        if self._buffers:
            return self._buffers[index % len(self._buffers)][:size]
        return self._data[self._starts[index] : self._starts[index] + size]

    def land(self, index: int, nonce: int) -> None:
        """See ``Landing``."""
        wire = self.wire(index)
        digest = verify(wire, self._manifest, index, nonce)
        place = slice(self._starts[index], self._starts[index] + wire.numel())
        if self._second is not None:
            self._second[place].copy_(wire)
        if self._buffers:
            self._data[place].copy_(wire)  # blocks till both are done
        self._digests.append(digest)

    def is_load_due(self) -> bool:
        """See ``Landing``: it is loaded once it is committed."""
        return False
