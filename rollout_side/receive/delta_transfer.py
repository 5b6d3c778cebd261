"""Receiving of a delta: its changes are kept as they came, and used once all are here.

So a bucket may come again, and a transfer may resume in another group. What is served, and what can
be cloned, stays as it is until the commit. A replica that stages applies the changes to a copy of
the base that it holds, in memory of its own, and digests the result whole, as bytes that came are.
One that loads in place reads them against the weights that it serves (``served_delta``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import torch

from rollout_side.memory.served_delta import stage_delta
from rollout_side.memory.store import WorkerStore
from rollout_side.memory.versions import (
    BucketContents,
    PartialTransfer,
    SendableVersion,
    ServedBase,
    bucket_starts,
)
from rollout_side.receive.incoming_buckets import (
    ReceiveRing,
    StagingSink,
    StagingTransfer,
    arrival_buffers,
)
from weft_rl.contract.manifest import Run, SendPlan, check_coverage
from weft_rl.contract.names import PolicyVersion
from weft_rl.transport.digests.wsum64 import part_digests
from weft_rl.transport.wire.buckets import in_manifest_order, whole_parts
from weft_rl.transport.wire.changes import RunPlace, apply_changes


class ChangesSink(StagingSink):
    """Destination of a delta's verified buckets: what is known of the transfer."""

    def place(self, bucket: int) -> None:
        return None

    def assembly(self, bucket: int) -> None:
        return None

    def put(self, index: int, wire: torch.Tensor, carried: BucketContents) -> None:
        self._partial.verified.append(carried)


class DeltaTransfer(StagingTransfer):
    """Prepared transfer of a delta, which is staged.

    Args:
        store: Store that has reserved the partial transfer's memory.
        version: Version that the delta makes.
        partial: Transfer, and what was verified of it in a former group.
        plan: Plan of its buckets.
        base: Base that it changes, lent until ``loan`` is closed.
        loan: Closed once the transfer is staged, kept or dropped.
        report: Called with the bucket of the layout that is worked on, now and then.
    """

    def __init__(
        self,
        store: WorkerStore,
        version: PolicyVersion,
        partial: PartialTransfer,
        plan: SendPlan,
        base: SendableVersion,
        loan: ExitStack,
        report: Callable[[int], None],
    ) -> None:
        super().__init__(store, version, partial, plan)
        self._base, self._loan, self._report = base, loan, report

    def ring(
        self,
        first_bucket: int,
        device: torch.device,
        num_in_flight: int,
        check: Callable[[], None],
    ) -> ReceiveRing:
        self._partial.forget(first_bucket)
        sink = ChangesSink(self._partial, self._partial.segment.data, device)
        buffers = arrival_buffers(self.plan, num_in_flight, device)
        return ReceiveRing(self.manifest, self.plan, sink, buffers, num_in_flight)

    def finish(self, check: Callable[[], None]) -> bytes:
        with self._loan:
            return super().finish(check)

    def keep(self) -> None:
        with self._loan:
            super().keep()

    def drop(self) -> None:
        with self._loan:
            super().drop()

    def _tensor_digests(self) -> list[int]:
        """Copy the base, apply the changes to the copy, and return the digests of its tensors.

        Raises:
            InvalidManifestError: Runs do not cover every element once; names a place.
            DigestMismatchError: The base here is not the one that was changed.
        """
        partial, manifest = self._partial, self.manifest
        self._check_runs()
        contents_of: dict[int, list[BucketContents]] = {}
        for wire, contents in zip(self.plan.buckets, partial.verified, strict=True):
            contents_of.setdefault(wire.bucket, []).append(contents)
        found = []
        for bucket, start in enumerate(bucket_starts(manifest)):
            self._report(bucket)
            payload = self._base.payload(bucket, partial.segment.data[start:])
            for contents in contents_of[bucket]:
                self._apply(contents, payload)
            found.append(part_digests(payload, whole_parts(manifest, bucket)))
        return in_manifest_order(manifest, found)

    def _check_runs(self) -> None:
        """Refuse runs that do not cover every element once."""
        runs = [run for contents in self._partial.verified for run in contents.runs]
        check_coverage([slot.meta for slot in self.manifest.tensors], runs)

    def _apply(self, contents: BucketContents, payload: torch.Tensor) -> None:
        changes = _changes(contents)
        sizes = [self._itemsize(run) for run in contents.runs]
        places = [self._place(run) for run in contents.runs]
        apply_changes(changes.to(payload.device), contents.runs, sizes, payload, places)

    def _itemsize(self, run: Run) -> int:
        return self.manifest.tensors[run.tensor].meta.dtype.itemsize_bytes

    def _place(self, run: Run) -> RunPlace:
        """Return the place of a run in its bucket of the layout."""
        at = self.manifest.tensors[run.tensor].offset_bytes + run.first * self._itemsize(run)
        return RunPlace(at, run.count, run.stride)


class ServedDeltaTransfer(DeltaTransfer):
    """Transfer, as ``DeltaTransfer``, of a replica that loads in place: it takes no memory for a
    second copy of the base."""

    def finish(self, check: Callable[[], None]) -> bytes:
        with self._loan:
            self._check_runs()
            assert isinstance(self._base, ServedBase), "it was lent as such"
            partial = self._partial
            device = self._base.places(0)[0].bits.device
            staged = stage_delta(
                self._base,
                partial.transfer_id,
                self._version,
                ((each.runs, _changes(each).to(device)) for each in partial.verified),
                self._report,
            )
            self._store.put_staged(replace(staged, received=partial))
            return staged.content_digest


def _changes(contents: BucketContents) -> torch.Tensor:
    assert contents.changes is not None, "it came in a delta's bucket"
    return contents.changes
