"""Versions as they lie in a worker's memory, whole or in part; ``store`` holds them.

Nothing here knows vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import torch

from rollout_side.memory.placement import Memory
from rollout_side.memory.segment import SLICE_BYTES, Segment, SegmentRef
from weft_rl.contract.errors import DigestMismatchError
from weft_rl.contract.layout.manifest import Manifest, TensorSlot
from weft_rl.contract.layout.runs import Run
from weft_rl.contract.names import BASE_POLICY, PolicyVersion, is_replica_sender
from weft_rl.transport.progress import Speak
from weft_rl.transport.wire.buckets import in_manifest_order, tensor_sums


class Carried(NamedTuple):
    """Contents of a verified bucket."""

    runs: Sequence[Run]
    """Runs that it listed; empty if it lists none, and carries the tensors of its layout."""
    digests: list[int]
    """Digests of these runs or tensors, in order."""


class Sendable(Protocol):
    """Whole version that can be sent to another replica."""

    @property
    def transfer_id(self) -> str:
        """Transfer that brought it."""

    @property
    def manifest(self) -> Manifest:
        """Layout of the version."""

    @property
    def content_digest(self) -> bytes:
        """Digest of its content."""

    def payload(self, index: int, out: torch.Tensor) -> torch.Tensor:
        """Copy one bucket's payload; only reads what is served.

        Args:
            out: uint8, at least the bucket's ``payload_bytes``, on any device; overwritten.

        Returns:
            The view of ``out`` that is the payload; on an accelerator once the calling
            thread's current stream is done.
        """


@dataclass(frozen=True)
class ServedBase:
    """Base that the engine serves, read back from the engine. It exists if the base was loaded by
    plain copies and no copy was kept; it is gone with the next load.

    Args:
        read: Copies one bucket's payload, as ``Sendable.payload``.
    """

    transfer_id: str
    version: PolicyVersion
    manifest: Manifest
    content_digest: bytes
    read: Callable[[int, torch.Tensor], torch.Tensor]

    def payload(self, index: int, out: torch.Tensor) -> torch.Tensor:
        """See ``Sendable``."""
        return self.read(index, out)


@dataclass(frozen=True)
class StagedVersion:
    """Bytes of one version, received whole and verified.

    ``segment`` holds the manifest's buckets one after the other, each with its
    trailer, so bucket ``i`` starts at the sum of ``wire_bytes`` before it.
    """

    transfer_id: str
    version: PolicyVersion
    manifest: Manifest
    segment: Segment
    content_digest: bytes
    received: PartialTransfer | None = None
    """Transfer as it was received, on the rank that received it."""
    device_copy: list[torch.Tensor] = field(default_factory=list)
    """At most one tensor: the copy of an adapter that was received on the engine's device."""
    spare: list[torch.Tensor] = field(default_factory=list)
    """At most one tensor: the copy that ``own_bytes`` returns next."""

    def payload(self, index: int, out: torch.Tensor) -> torch.Tensor:
        """See ``Sendable``."""
        at, size = self._starts[index], self.manifest.buckets[index].payload_bytes
        return out[:size].copy_(self.segment.data[at : at + size])

    @cached_property
    def _starts(self) -> list[int]:
        return bucket_starts(self.manifest)

    def check(self, content_digest: bytes) -> None:
        """Check that the staged content is what is to be committed.

        Raises:
            DigestMismatchError: Other bytes are staged.
        """
        if self.content_digest != content_digest:
            raise DigestMismatchError(
                f"{self.version} was staged with digest {self.content_digest.hex()}, the commit "
                f"is for {content_digest.hex()}"
            )

    def handle(self) -> StagedHandle:
        """Return the handle by which another worker of this machine attaches it, while this object
        lives."""
        return StagedHandle(
            self.transfer_id, self.version, self.manifest, self.segment.ref, self.content_digest
        )

    def take_device_copy(self) -> torch.Tensor | None:
        """Take the copy on the device, which is then the caller's; None if there is none."""
        return self.device_copy.pop() if self.device_copy else None

    def own_bytes(self) -> torch.Tensor:
        """Return a copy of the segment that is the caller's, page-locked if the segment is."""
        if self.spare:
            return self.spare.pop()
        data = self.segment.data
        return torch.empty_like(data, pin_memory=data.is_pinned()).copy_(data)

    def tensors(self, data: torch.Tensor | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and a view of every tensor, in manifest order; no copy.

        Args:
            data: A copy of the segment; by default the segment itself.

        The views are of shared memory that a later push may reuse once this version was dropped:
        clone what must outlive it, and never write.
        """
        yield from tensors_in(self.manifest, self.segment.data if data is None else data)


def tensors_in(manifest: Manifest, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and a view of every tensor in a segment's bytes, in manifest order; no
    copy."""
    starts = bucket_starts(manifest)
    for slot in manifest.tensors:
        yield slot.meta.name, tensor_in(slot, data[starts[slot.bucket] :])


def tensor_in(slot: TensorSlot, wire: torch.Tensor) -> torch.Tensor:
    """Return the view of a tensor in its bucket's bytes (uint8, which may continue behind it)."""
    raw = wire[slot.offset_bytes : slot.offset_bytes + slot.meta.num_bytes]
    return raw.view(getattr(torch, slot.meta.dtype.torch_name)).view(slot.meta.shape)


def bucket_starts(manifest: Manifest) -> list[int]:
    """Return the offset of each bucket's first byte in a segment."""
    starts, at = [], 0
    for bucket in manifest.buckets:
        starts.append(at)
        at += bucket.wire_bytes
    return starts


@dataclass(frozen=True)
class PartialTransfer:
    """Buckets of one version, verified from the first on; the rest is to come."""

    transfer_id: str
    trainer_id: str
    manifest: Manifest
    segment: Segment
    verified: list[Carried]
    """Contents of the verified buckets."""
    lists_runs: bool = False
    """True if the buckets list their runs; else they are those of the manifest."""
    settled: bool = False
    """True if no abandoned operation can write to the segment any more."""

    @property
    def num_verified(self) -> int:
        """Number of verified buckets."""
        return len(self.verified)

    def forget(self, first_bucket: int) -> None:
        """Forget buckets from ``first_bucket`` on, which come again."""
        del self.verified[first_bucket:]

    def tensor_digests(self) -> list[int]:
        """Return the digests of the version's tensors, in manifest order, once all buckets were
        verified.

        Raises:
            InvalidManifestError: Runs do not cover every element once; names a place.
        """
        if not self.lists_runs:
            return in_manifest_order(self.manifest, [each.digests for each in self.verified])
        runs = [run for bucket in self.verified for run in bucket.runs]
        digests = [digest for bucket in self.verified for digest in bucket.digests]
        return tensor_sums(self.manifest, runs, digests)

    def moved(self, memory: Memory, speak: Speak) -> PartialTransfer:
        """Return the transfer with its verified bytes in memory that nothing else can write to.
        Blocks for the copy.

        Raises:
            CapacityError: The accelerator has no room.
        """
        was_host = self.segment.data.device.type == "cpu"
        num_bytes = self.segment.num_bytes
        fresh = memory.allocate(num_bytes, adapter=was_host, speak=speak)
        end = sum(b.wire_bytes for b in self.manifest.buckets[: self.num_verified])
        if self.lists_runs:
            end = num_bytes  # they may lie anywhere
        for start in range(0, end, SLICE_BYTES):
            part = slice(start, min(end, start + SLICE_BYTES))
            fresh.data[part].copy_(self.segment.data[part])
            speak(num_bytes, num_bytes)
        return replace(self, segment=fresh)


@dataclass(frozen=True)
class StagedHandle:
    """Handle by which another worker of the same machine adopts a staged version."""

    transfer_id: str
    version: PolicyVersion
    manifest: Manifest
    segment: SegmentRef
    content_digest: bytes

    def attach(self) -> StagedVersion:
        """Map the bytes into this process; nothing is copied.

        Raises:
            NotReadyError: The owner of the bytes is gone.
        """
        segment = self.segment.attach()
        return StagedVersion(
            self.transfer_id, self.version, self.manifest, segment, self.content_digest
        )


@dataclass(frozen=True)
class AdapterEntry:
    """An adapter version that the engine may load at any time."""

    config_json: str
    staged: StagedVersion


def is_adapter(version: PolicyVersion) -> bool:
    """Return whether a version is an adapter's, not the base's."""
    return version.policy != BASE_POLICY


class PartialTransfers:
    """Interrupted transfers, with what was verified of each; ``WorkerStore``'s lock guards them.

    A push resumes within moments or is discarded. A clone waits as long as pushes go before it.
    There is at most one such clone, and it gives way where a push needs its room.
    """

    def __init__(self) -> None:
        self._partial: dict[str, PartialTransfer] = {}

    @property
    def transfer_ids(self) -> tuple[str, ...]:
        """Transfers of which something is kept."""
        return tuple(self._partial)

    def put(self, partial: PartialTransfer) -> list[str]:
        """Keep an interrupted transfer; return the transfers that were dropped for it."""
        dropped = self.drop_clones() if is_replica_sender(partial.trainer_id) else []
        self._partial[partial.transfer_id] = partial
        return [name for name in dropped if name != partial.transfer_id]

    def settle(self, trainer_id: str) -> None:
        """Note that operations of a sender's former group have ended for good."""
        for partial in list(self._partial.values()):
            if partial.trainer_id == trainer_id:
                self._partial[partial.transfer_id] = replace(partial, settled=True)

    def pop(self, transfer_id: str) -> PartialTransfer | None:
        """Remove and return a transfer; None if it is not here."""
        return self._partial.pop(transfer_id, None)

    def drop_others(self, transfer_id: str, trainer_id: str) -> list[str]:
        """Drop a sender's other transfers, since it carries out one at a time; return their ids."""
        return self._drop(
            [
                partial.transfer_id
                for partial in self._partial.values()
                if partial.trainer_id == trainer_id and partial.transfer_id != transfer_id
            ]
        )

    def drop_clones(self) -> list[str]:
        """Drop the transfers that came from replicas; return their ids."""
        return self._drop(
            [p.transfer_id for p in self._partial.values() if is_replica_sender(p.trainer_id)]
        )

    def _drop(self, names: list[str]) -> list[str]:
        for name in names:
            del self._partial[name]
        return names
