"""A transfer that was prepared in a worker, from its first bucket to its last.

One kind is staged whole and waits for its commit; the other is loaded in place while it
arrives. The receiver treats them alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from rollout_side.memory.incoming import Inflow
from rollout_side.memory.placement import Memory
from rollout_side.memory.store import WorkerStore
from rollout_side.memory.versions import PartialTransfer, StagedVersion, is_adapter
from rollout_side.receive.in_place_landing import InPlaceLanding
from rollout_side.receive.landing import Landing, StagedLanding
from weft.contract.manifest import Manifest
from weft.contract.names import PolicyVersion
from weft.transport.digest import content_digest


class Arrival(Protocol):
    """What the receiver needs of a prepared transfer."""

    @property
    def manifest(self) -> Manifest:
        """Of its version."""

    @property
    def num_verified(self) -> int:
        """Buckets that need not come again."""

    def land_from(
        self, first_bucket: int, device: torch.device, check: Callable[[], None]
    ) -> Landing:
        """Where buckets from ``first_bucket`` on, at most ``num_verified``, are received.

        Args:
            device: Of the side group.
            check: Raises if the group has ended; asked after ``wake``.
        """

    def finish(self, check: Callable[[], None]) -> bytes:
        """After the last bucket: blocks until the version is staged, or loaded in place;
        returns its content digest.

        Raises:
            TransferAbortedError: It was discarded meanwhile.
            WeftError: It could not be loaded in place: why.
        """

    def keep(self) -> None:
        """The side group ends: keep what was verified, the transfer may go on in another.
        If it does not, the coordinator orders it discarded."""

    def drop(self) -> None:
        """Give back the memory of a transfer that was never started."""

    def wake(self) -> None:
        """Let a wait ask its ``check``; from any thread."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a side group was told to receive, and where that goes."""

    transfer_id: str
    version: PolicyVersion
    nonce: int
    deadline: float
    arrival: Arrival


class StagedArrival:
    """An ``Arrival`` that is staged.

    Args:
        store: Where it is put.
        version: What arrives.
        partial: What has arrived before; taken from the store.
    """

    def __init__(
        self, store: WorkerStore, version: PolicyVersion, partial: PartialTransfer
    ) -> None:
        self._store, self._version, self._partial = store, version, partial
        self._device_copy: list[torch.Tensor] = []

    @property
    def manifest(self) -> Manifest:
        """See ``Arrival``."""
        return self._partial.manifest

    @property
    def num_verified(self) -> int:
        """See ``Arrival``."""
        return len(self._partial.digests)

    def land_from(
        self, first_bucket: int, device: torch.device, check: Callable[[], None]
    ) -> Landing:
        """See ``Arrival``. Buckets from the first on come again, for a slower member."""
        partial, manifest = self._partial, self.manifest
        del partial.digests[first_bucket:]
        if is_adapter(self._version) and device.type != "cpu" and not partial.digests:
            # What the engine's slot is filled from.
            copy = torch.empty(manifest.wire_bytes, dtype=torch.uint8, device=device)
            self._device_copy = [copy]
        return StagedLanding(manifest, partial.digests, partial.segment, device, *self._device_copy)

    def finish(self, check: Callable[[], None]) -> bytes:
        """See ``Arrival``."""
        partial = self._partial
        digest = content_digest(partial.digests)
        self._store.put_staged(
            StagedVersion(
                partial.transfer_id,
                self._version,
                partial.manifest,
                partial.segment,
                digest,
                tuple(partial.digests),
                self._device_copy,
            )
        )
        return digest

    def keep(self) -> None:
        """See ``Arrival``."""
        self._store.put_partial(self._partial)

    def drop(self) -> None:
        """See ``Arrival``."""
        self._store.release(self._partial.transfer_id, self._partial.segment)

    def wake(self) -> None:
        """See ``Arrival``: nothing waits."""


class InPlaceArrival:
    """An ``Arrival`` that is loaded in place; the store holds its inflow already.

    Args:
        inflow: To which buckets are put; what was put stays with it.
        memory: What there is beside the engine's.
        bound_bytes: Of the buffers that it is received in, but for those that must be.
    """

    def __init__(self, inflow: Inflow, memory: Memory, bound_bytes: int) -> None:
        self._inflow, self._memory, self._bound_bytes = inflow, memory, bound_bytes

    @property
    def manifest(self) -> Manifest:
        """See ``Arrival``."""
        return self._inflow.manifest

    @property
    def num_verified(self) -> int:
        """See ``Arrival``."""
        return len(self._inflow.digests)

    def land_from(
        self, first_bucket: int, device: torch.device, check: Callable[[], None]
    ) -> Landing:
        """See ``Arrival``. What comes again, for a slower member, is verified and dropped."""
        largest = max(bucket.wire_bytes for bucket in self.manifest.buckets)
        num_more = self._memory.room_for(largest, device, self._bound_bytes)
        return InPlaceLanding(self._inflow, device, check, num_more)

    def finish(self, check: Callable[[], None]) -> bytes:
        """See ``Arrival``."""
        self._inflow.wait_complete(check)
        return content_digest(self._inflow.digests)

    def keep(self) -> None:
        """See ``Arrival``: the store keeps it until it is discarded, its loader waits."""

    def drop(self) -> None:
        """See ``Arrival``: as ``keep``; another one takes its place."""

    def wake(self) -> None:
        """See ``Arrival``."""
        self._inflow.wake()
