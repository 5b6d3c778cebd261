"""Receiving of a delta: its changes are kept as they came, and used once all are here.

So a bucket may come again, and a transfer may resume in another group. What is served, and what can
be cloned, stays as it is until the commit. A replica that stages copies the base that it holds to
memory of its own, digests what it copies, and applies the changes there.
Where the engine's weights take deltas, they are read against these instead (``served_delta``).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import torch

from rollout_side.memory.copy_changes import apply_to_copy
from rollout_side.memory.served_delta import stage_delta
from rollout_side.memory.store import WorkerStore
from rollout_side.memory.versions import (
    BaseChanges,
    BucketContents,
    PartialTransfer,
    SendableVersion,
    ServedBase,
    StagedVersion,
    bucket_starts,
    latest_changes,
)
from rollout_side.receive.incoming_buckets import (
    ReceiveRing,
    StagingSink,
    StagingTransfer,
    arrival_buffers,
)
from weft_rl.contract.errors import CapacityError, DigestMismatchError
from weft_rl.contract.manifest import SendPlan, check_coverage
from weft_rl.contract.names import PolicyVersion
from weft_rl.transport.digests.copies import copy_digesting
from weft_rl.transport.digests.wsum64 import content_digest, part_digests
from weft_rl.transport.wire.buckets import in_manifest_order, whole_parts
from weft_rl.transport.wire.changes import await_warm

#: Threads that copy a base: more read no more of a host's memory a second.
_MOST_THREADS = 8
#: Changes that wait for the disk have at most this part of the bytes of the base: with more a
#: version is written whole.
KEPT_SHARE = 8


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
            self._await_warm(self._partial.segment.data.device)
            return super().finish(check)

    def keep(self) -> None:
        with self._loan:
            super().keep()

    def drop(self) -> None:
        with self._loan:
            super().drop()

    def _tensor_digests(self) -> list[int]:
        """Copy the base, digesting it, apply the changes to the copy, and return the digests of
        what they make of it: those of the base, plus what is changed.

        Raises:
            InvalidManifestError: Runs do not cover every element once; names a place.
            DigestMismatchError: The base here is not the one that was changed.
        """
        partial, manifest = self._partial, self.manifest
        self._check_runs()
        data, starts = partial.segment.data, bucket_starts(manifest)
        found = []
        for bucket, start in enumerate(starts):
            self._report(bucket)
            found.append(copy_bucket(self._base, bucket, data[start:])[1])
        digests = in_manifest_order(manifest, found)
        if content_digest(digests) != self.plan.delta_from:
            raise DigestMismatchError(
                f"the copy of {self._base.version} here has the digest "
                f"{content_digest(digests).hex()}, the delta changes "
                f"{self.plan.delta_from.hex()}: the weights here are not those that it was made "
                "from"
            )
        for contents in partial.verified:
            self._report(len(starts) - 1)
            apply_to_copy(contents, manifest, data, digests)
        return digests

    def _came_as(self) -> list[BaseChanges]:
        if not self._store.writes_copies:
            return []
        assert isinstance(self._base, StagedVersion), "a copy is changed"
        own = BaseChanges(self.plan.delta_from, tuple(self._partial.verified))
        most_bytes = self.manifest.total_bytes // KEPT_SHARE
        return latest_changes([*self._base.changes, own], most_bytes)

    def _await_warm(self, device: torch.device) -> None:
        await_warm(device, lambda: self._report(0))

    def _prepare_switch(self, staged: StagedVersion) -> None:
        last_bucket = len(self.manifest.buckets) - 1
        self._store.prepare_switch(staged, lambda: self._report(last_bucket))

    def _check_runs(self) -> None:
        """Refuse runs that do not cover every element once."""
        runs = [run for contents in self._partial.verified for run in contents.runs]
        check_coverage([slot.meta for slot in self.manifest.tensors], runs)


class ServedDeltaTransfer(DeltaTransfer):
    """Transfer, as ``DeltaTransfer``, of a delta that is applied where the weights lie: it takes no
    memory for a second copy of the base."""

    def finish(self, check: Callable[[], None]) -> bytes:
        with self._loan:
            self._check_runs()
            assert isinstance(self._base, ServedBase), "it was lent as such"
            partial = self._partial
            device = self._base.device
            self._await_warm(device)
            try:
                payloads = ((each.runs, _changes(each).to(device)) for each in partial.verified)
                of = self._base, partial.transfer_id, self._version
                if self._store.num_ranks == 1:
                    staged = stage_delta(*of, payloads, self._report)
                else:
                    staged = self._store.followers.stage(*of, [*payloads], self._report, check)
            except torch.OutOfMemoryError as error:
                raise CapacityError(
                    f"{device} has no room to keep what {self._version} changes: {error}"
                ) from error
            self._store.put_staged(replace(staged, received=partial))
            return staged.content_digest


def copy_bucket(
    base: SendableVersion, bucket: int, out: torch.Tensor
) -> tuple[torch.Tensor, list[int]]:
    """Copy a bucket's payload, and digest its tensors: in one reading, of a copy on the host.

    Returns:
        The payload, a view of ``out``; the digests.
    """
    parts = whole_parts(base.manifest, bucket)
    if isinstance(base, StagedVersion) and not out.is_cuda and base.segment.data.is_cpu:
        begin = bucket_starts(base.manifest)[bucket]
        size = base.manifest.buckets[bucket].payload_bytes
        payload = out[:size]
        source = base.segment.data[begin : begin + size]
        return payload, copy_digesting(source, parts, payload, _copy_threads())
    payload = base.payload(bucket, out)
    return payload, part_digests(payload, parts)


def _copy_threads() -> int:
    """Return how many threads copy a base on the host: half of the cores that this one may use,
    some at most. torch's own number is often 1 in a worker."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // 2))


def _changes(contents: BucketContents) -> torch.Tensor:
    assert contents.changes is not None, "it came in a delta's bucket"
    return contents.changes
