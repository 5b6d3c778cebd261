"""Transfer of a version that is staged whole before its commit."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rollout_side.memory.store import WorkerStore
from rollout_side.memory.versions import (
    Carried,
    PartialTransfer,
    StagedVersion,
    bucket_starts,
    is_adapter,
)
from rollout_side.receive.ring import Ring, arrival_buffers
from weft_rl.contract.layout.manifest import Manifest
from weft_rl.contract.layout.send_plan import SendPlan
from weft_rl.contract.names import PolicyVersion
from weft_rl.transport.digests.wsum64 import content_digest
from weft_rl.transport.wire.buckets import Assembly


class StagingTransfer:
    """``IncomingTransfer`` that is staged.

    Args:
        store: Store that the version is put in.
        version: Version that arrives.
        partial: Part that has arrived before; taken from the store.
        plan: Plan of its buckets as they come.
    """

    def __init__(
        self,
        store: WorkerStore,
        version: PolicyVersion,
        partial: PartialTransfer,
        plan: SendPlan,
    ) -> None:
        self._store, self._version, self._partial, self.plan = store, version, partial, plan
        self._device_copy: list[torch.Tensor] = []

    @property
    def manifest(self) -> Manifest:
        """See ``IncomingTransfer``."""
        return self._partial.manifest

    @property
    def num_verified(self) -> int:
        """See ``IncomingTransfer``."""
        return self._partial.num_verified

    def ring(
        self,
        first_bucket: int,
        device: torch.device,
        num_in_flight: int,
        check: Callable[[], None],
    ) -> Ring:
        """See ``IncomingTransfer``. Buckets from the first on come again, for a slower member."""
        partial, manifest, plan = self._partial, self.manifest, self.plan
        partial.forget(first_bucket)
        data = partial.segment.data
        if is_adapter(self._version) and device.type != "cpu":
            # What the engine's slot is filled from, while it is copied to the host.
            copy = torch.empty(manifest.wire_bytes, dtype=torch.uint8, device=device)
            if partial.num_verified:
                copy.copy_(data[: len(copy)])
            data, self._device_copy = copy, [copy]
        sink, buffers = StagingSink(partial, data, device), {}
        if plan.lists_runs or data.device != device:
            buffers = arrival_buffers(plan, num_in_flight, device)
        return Ring(manifest, plan, sink, buffers, num_in_flight)

    def finish(self, check: Callable[[], None]) -> bytes:
        """See ``IncomingTransfer``."""
        partial = self._partial
        self._copy_to_segment()
        digest = content_digest(partial.tensor_digests())
        self._store.put_staged(
            StagedVersion(
                partial.transfer_id,
                self._version,
                partial.manifest,
                partial.segment,
                digest,
                partial,
                self._device_copy,
            )
        )
        return digest

    def keep(self) -> None:
        """See ``IncomingTransfer``."""
        if self._partial.num_verified:
            self._copy_to_segment()
        self._store.put_partial(self._partial)

    def _copy_to_segment(self) -> None:
        """Begin to copy what was received on the device to the segment that keeps it."""
        for copy in self._device_copy:
            self._partial.segment.fill(copy)

    def drop(self) -> None:
        """See ``IncomingTransfer``."""
        self._store.release(self._partial.transfer_id, self._partial.segment)

    def wake(self) -> None:
        """See ``IncomingTransfer``: nothing waits."""


class StagingSink:
    """``Sink`` that is the version in one piece.

    Args:
        partial: What is kept of the transfer; grows.
        data: uint8, for all buckets of the layout, one after the other with their trailers.
        device: Device on which the side group receives.
    """

    def __init__(self, partial: PartialTransfer, data: torch.Tensor, device: torch.device) -> None:
        self._partial, self._data = partial, data
        self._starts = bucket_starts(partial.manifest)
        self._sizes = [bucket.wire_bytes for bucket in partial.manifest.buckets]
        self._is_on_device = data.device == device

    @property
    def num_kept(self) -> int:
        """See ``Sink``."""
        return self._partial.num_verified

    def make_room(self, bucket: int, *, wait: bool) -> bool:
        """See ``Sink``: each bucket has a place of its own."""
        return True

    def place(self, bucket: int) -> torch.Tensor | None:
        """See ``Sink``."""
        return self._place(bucket) if self._is_on_device else None

    def assembly(self, bucket: int) -> Assembly | None:
        """See ``Sink``."""
        return Assembly(self._data, self._starts)

    def put(self, index: int, wire: torch.Tensor, carried: Carried) -> None:
        """See ``Sink``."""
        if not self._partial.lists_runs and not self._is_on_device:
            self._place(index).copy_(wire)  # blocks
        self._partial.verified.append(carried)

    def is_load_due(self) -> bool:
        """See ``Sink``: it is loaded once it is committed."""
        return False

    def _place(self, bucket: int) -> torch.Tensor:
        return self._data[self._starts[bucket] : self._starts[bucket] + self._sizes[bucket]]
