"""Receiving a version that is staged whole, before its commit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from rollout_side.memory.segment import Segment
from rollout_side.memory.store import WorkerStore
from rollout_side.memory.versions import (
    PartialTransfer,
    StagedVersion,
    bucket_starts,
    is_adapter,
)
from rollout_side.receive.transfer import ReceiveBuffers, make_buffers
from rollout_side.receive.wire_buckets import PlannedBuffers
from weft.contract.layout_runs import bucket_sums, run_wire_sizes
from weft.contract.manifest import Manifest
from weft.contract.names import PolicyVersion
from weft.contract.send_plan import SendPlan
from weft.transport.buckets import tensor_sums
from weft.transport.digest import content_digest
from weft.transport.payload import verify_bucket
from weft.transport.runs import DigestedRun, open_runs


class StagingTransfer:
    """An ``IncomingTransfer`` that is staged.

    Args:
        store: Where it is put.
        version: What arrives.
        partial: What has arrived before; taken from the store.
        plan: Who sends what, where several do.
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
        partial = self._partial
        return len(partial.digests if partial.carried is None else partial.carried)

    def receive_buffers(
        self,
        first_bucket: int,
        device: torch.device,
        num_in_flight: int,
        check: Callable[[], None],
    ) -> ReceiveBuffers:
        """See ``IncomingTransfer``. Buckets from the first on come again, for a slower member."""
        partial, manifest = self._partial, self.manifest
        if self._plan is not None and partial.carried is not None:
            del partial.carried[first_bucket:]
            return PlannedBuffers(partial, partial.carried, self._plan, device, num_in_flight)
        del partial.digests[first_bucket:]
        if partial.runs is not None:
            del partial.runs[first_bucket:]
            return RunBuffers(partial, partial.runs, device, num_in_flight)
        if is_adapter(self._version) and device.type != "cpu" and not partial.digests:
            # What the engine's slot is filled from.
            copy = torch.empty(manifest.wire_bytes, dtype=torch.uint8, device=device)
            self._device_copy = [copy]
        return StagingBuffers(
            manifest, partial.digests, partial.segment, device, num_in_flight, *self._device_copy
        )

    def finish(self, check: Callable[[], None]) -> bytes:
        """See ``IncomingTransfer``."""
        partial = self._partial
        digests, runs = partial.digests, None
        if partial.runs is not None:
            runs = tuple(partial.runs)
            digests = bucket_sums(partial.manifest, itertools.chain.from_iterable(runs))
        carried = None if partial.carried is None else tuple(partial.carried)
        if carried is not None:
            runs_of = [run for bucket in carried for run in bucket.runs]
            digests_of = [digest for bucket in carried for digest in bucket.digests]
            digests = tensor_sums(partial.manifest, runs_of, digests_of)
        digest = content_digest(digests)
        self._store.put_staged(
            StagedVersion(
                partial.transfer_id,
                self._version,
                partial.manifest,
                partial.segment,
                digest,
                tuple(partial.digests),
                runs,
                carried,
                self._device_copy,
            )
        )
        return digest

    def keep(self) -> None:
        """See ``IncomingTransfer``."""
        self._store.put_partial(self._partial)

    def drop(self) -> None:
        """See ``IncomingTransfer``."""
        self._store.release(self._partial.transfer_id, self._partial.segment)

    def wake(self) -> None:
        """See ``IncomingTransfer``: nothing waits."""


class StagingBuffers:
    """``ReceiveBuffers`` of a segment: buckets arrive straight there where it lies on the
    group's device, else in buffers on the device that are copied from.

    On an accelerator everything runs on the calling thread's current stream.

    Args:
        manifest: Of the version.
        digests: Of the buckets verified so far; grows.
        segment: For all its buckets, one after the other with their trailers.
        device: Where the side group receives.
        ahead: Buckets whose receives may be posted before the first of them was accepted.
        second: Memory on that device for another copy, of the same layout as the segment.
    """

    def __init__(
        self,
        manifest: Manifest,
        digests: list[int],
        segment: Segment,
        device: torch.device,
        ahead: int,
        second: torch.Tensor | None = None,
    ) -> None:
        self._second, self._digests = second, digests
        self._manifest, self._data = manifest, segment.data
        self._starts = bucket_starts(manifest)
        self._buffers: Sequence[torch.Tensor] = ()
        self.ahead = ahead
        if segment.data.device != device:
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

    def accept(self, index: int, nonce: int) -> None:
        """See ``ReceiveBuffers``."""
        wire = self.wire(index)
        digest = verify_bucket(wire, self._manifest, index, nonce)
        place = slice(self._starts[index], self._starts[index] + wire.numel())
        if self._second is not None:
            self._second[place].copy_(wire)
        if self._buffers:
            self._data[place].copy_(wire)  # blocks till both are done
        self._digests.append(digest)

    def is_load_due(self) -> bool:
        """See ``ReceiveBuffers``: it is loaded once it is committed."""
        return False


class RunBuffers:
    """``ReceiveBuffers`` of buckets that list what they carry: each arrives in a buffer, and
    its runs are copied to their places in the segment.

    On an accelerator everything runs on the calling thread's current stream.

    Args:
        partial: What was verified so far; grows.
        runs: Its runs.
        device: Where the side group receives.
        ahead: Buckets whose receives may be posted before the first of them was accepted.
    """

    def __init__(
        self,
        partial: PartialTransfer,
        runs: list[list[DigestedRun]],
        device: torch.device,
        ahead: int,
    ) -> None:
        self._partial, self._runs = partial, runs
        self._starts = bucket_starts(partial.manifest)
        self._sizes = run_wire_sizes(partial.manifest)
        self._buffers = make_buffers(self._sizes, ahead, device)
        self.ahead = ahead

    @property
    def num_kept(self) -> int:
        """See ``ReceiveBuffers``."""
        return len(self._partial.digests)

    def make_room(self, index: int, *, wait: bool) -> bool:
        """See ``ReceiveBuffers``: what was accepted is done with."""
        return True

    def wire(self, index: int) -> torch.Tensor:
        """See ``ReceiveBuffers``; its buffer is that of ``index - ahead``."""
        return self._buffers[index % len(self._buffers)][: self._sizes[index]]

    def accept(self, index: int, nonce: int) -> None:
        """See ``ReceiveBuffers``."""
        partial, wire = self._partial, self.wire(index)
        digest, runs = open_runs(wire, partial.manifest, index, nonce)
        at = 0
        for run, _ in runs:
            first = self._starts[run.bucket] + run.offset_bytes
            place = partial.segment.data[first : first + run.num_bytes]
            place.copy_(wire[at : at + run.num_bytes])
            at += run.num_bytes
        if wire.is_cuda:  # the buffer may be written as soon as this returns
            torch.cuda.current_stream(wire.device).synchronize()
        partial.digests.append(digest)
        self._runs.append(runs)

    def is_load_due(self) -> bool:
        """See ``ReceiveBuffers``: it is loaded once it is committed."""
        return False
