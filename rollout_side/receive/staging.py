"""Transfer of a version that is staged whole before its commit, and its receive buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rollout_side.memory.store import WorkerStore
from rollout_side.memory.versions import (
    Carried,
    PartialTransfer,
    StagedVersion,
    bucket_starts,
    is_adapter,
)
from rollout_side.receive.transfer import ReceiveBuffers, make_buffers
from rollout_side.receive.wire_buckets import PlannedBuffers, take_runs
from weft_rl.contract.layout.manifest import Manifest
from weft_rl.contract.layout.runs import carried_sizes
from weft_rl.contract.layout.send_plan import SendPlan
from weft_rl.contract.names import PolicyVersion
from weft_rl.transport.digests.wsum64 import content_digest
from weft_rl.transport.wire.buckets import Assembly, start_bucket
from weft_rl.transport.wire.options import IN_ITS_BUFFER, Arrived


class StagingTransfer:
    """``IncomingTransfer`` that is staged.

    Args:
        store: Store that the version is put in.
        version: Version that arrives.
        partial: Part that has arrived before; taken from the store.
        plan: Plan of which rank sends what, if several send.
    """

    def __init__(
        self,
        store: WorkerStore,
        version: PolicyVersion,
        partial: PartialTransfer,
        plan: SendPlan | None = None,
    ) -> None:
        self._store, self._version, self._partial, self._plan = store, version, partial, plan
        self._device_copy: list[torch.Tensor] = []

    @property
    def manifest(self) -> Manifest:
        """See ``IncomingTransfer``."""
        return self._partial.manifest

    @property
    def num_verified(self) -> int:
        """See ``IncomingTransfer``."""
        return self._partial.num_verified

    def receive_buffers(
        self,
        first_bucket: int,
        device: torch.device,
        num_in_flight: int,
        check: Callable[[], None],
    ) -> ReceiveBuffers:
        """See ``IncomingTransfer``. Buckets from the first on come again, for a slower member."""
        partial, manifest = self._partial, self.manifest
        partial.forget(first_bucket)
        data = partial.segment.data
        if is_adapter(self._version) and device.type != "cpu":
            # What the engine's slot is filled from, while it is copied to the host.
            copy = torch.empty(manifest.wire_bytes, dtype=torch.uint8, device=device)
            if partial.num_verified:
                copy.copy_(data[: len(copy)])
            data, self._device_copy = copy, [copy]
        if partial.carried is not None:
            given = (manifest, partial.carried, Assembly(data, bucket_starts(manifest)))
            if self._plan is not None:
                return PlannedBuffers(*given, self._plan, device, num_in_flight)
            return RunBuffers(*given, device, num_in_flight)
        return StagingBuffers(manifest, partial.digests, data, device, num_in_flight)

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
                tuple(partial.digests),
                None if partial.carried is None else tuple(partial.carried),
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


class StagingBuffers:
    """``ReceiveBuffers`` of a version in one piece.

    Buckets arrive straight in their place if it lies on the group's device. Else they arrive in
    buffers on that device, and are copied from there. On an accelerator everything runs on the
    calling thread's current stream.

    Args:
        manifest: Manifest of the version.
        digests: Digests of the tensors of each bucket verified so far; grows.
        data: uint8, for all its buckets, one after the other with their trailers.
        device: Device on which the side group receives.
        ahead: Buckets whose receives may be posted before the first of them was accepted.
    """

    copies_lent = True

    def __init__(
        self,
        manifest: Manifest,
        digests: list[list[int]],
        data: torch.Tensor,
        device: torch.device,
        ahead: int,
    ) -> None:
        self._manifest, self._digests, self._data = manifest, digests, data
        self._starts = bucket_starts(manifest)
        self._buffers: Sequence[torch.Tensor] = ()
        self.ahead = ahead
        if data.device != device:
            self._buffers = make_buffers([b.wire_bytes for b in manifest.buckets], ahead, device)

    @property
    def num_kept(self) -> int:
        """See ``ReceiveBuffers``."""
        return len(self._digests)

    def make_room(self, index: int, *, wait: bool) -> bool:
        """See ``ReceiveBuffers``: what was accepted is done with."""
        return True

    def wire(self, index: int) -> torch.Tensor:
        """See ``ReceiveBuffers``; its buffer is that of ``index - ahead``."""
        size = self._manifest.buckets[index].wire_bytes
        if self._buffers:
            return self._buffers[index % len(self._buffers)][:size]
        return self._data[self._starts[index] : self._starts[index] + size]

    def payload_bytes(self, index: int) -> int:
        """See ``ReceiveBuffers``."""
        return self._manifest.buckets[index].payload_bytes

    def accept(
        self, index: int, nonce: int, arrived: Arrived = IN_ITS_BUFFER
    ) -> Callable[[], None]:
        """See ``ReceiveBuffers``."""
        wire = self.wire(index)
        verified = start_bucket(wire, self._manifest, index, nonce, arrived)

        def end() -> None:
            digests = verified()
            if self._buffers:
                start = self._starts[index]
                self._data[start : start + wire.numel()].copy_(wire)  # blocks
            self._digests.append(digests)

        return end

    def is_load_due(self) -> bool:
        """See ``ReceiveBuffers``: it is loaded once it is committed."""
        return False


class RunBuffers:
    """``ReceiveBuffers`` of whole tensors in an order of their sender's.

    Buckets list what they carry. Each arrives in a buffer, and its runs are copied to their places.
    On an accelerator everything runs on the calling thread's current stream.

    Args:
        manifest: Manifest of the version.
        carried: Contents of the buckets verified so far; grows.
        into: Assembly that puts the version's buckets together.
        device: Device on which the side group receives.
        ahead: Buckets whose receives may be posted before the first of them was accepted.
    """

    copies_lent = False

    def __init__(
        self,
        manifest: Manifest,
        carried: list[Carried],
        into: Assembly,
        device: torch.device,
        ahead: int,
    ) -> None:
        self._manifest, self._carried, self._into = manifest, carried, into
        self._sizes = carried_sizes(manifest)
        self._buffers = make_buffers([size.wire_bytes for size in self._sizes], ahead, device)
        self.ahead = ahead

    @property
    def num_kept(self) -> int:
        """See ``ReceiveBuffers``."""
        return len(self._carried)

    def make_room(self, index: int, *, wait: bool) -> bool:
        """See ``ReceiveBuffers``: what was accepted is done with."""
        return True

    def wire(self, index: int) -> torch.Tensor:
        """See ``ReceiveBuffers``; its buffer is that of ``index - ahead``."""
        return self._buffers[index % len(self._buffers)][: self._sizes[index].wire_bytes]

    def payload_bytes(self, index: int) -> int:
        """See ``ReceiveBuffers``."""
        return self._sizes[index].payload_bytes

    def accept(
        self, index: int, nonce: int, arrived: Arrived = IN_ITS_BUFFER
    ) -> Callable[[], None]:
        """See ``ReceiveBuffers``."""
        wire, size = self.wire(index), self._sizes[index].payload_bytes
        taken = take_runs(wire, size, self._manifest, index, nonce, self._into, arrived=arrived)

        def end() -> None:
            self._carried.append(taken())

        return end

    def is_load_due(self) -> bool:
        """See ``ReceiveBuffers``: it is loaded once it is committed."""
        return False
