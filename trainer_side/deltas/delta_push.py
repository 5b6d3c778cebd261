"""Push of what has changed since the version that the pool committed last."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from trainer_side.deltas.committed_copy import CommittedCopy
from trainer_side.packing.packer import PackedLayout, check_finite, resident
from trainer_side.pushes.rank_push import RankPush
from trainer_side.ranks.ranks import RankSum
from trainer_side.sources.source import torch_dtypes
from weft_rl.contract.manifest import Run, WireBucket, make_send_plan
from weft_rl.transport.wire.changes import EncodedChanges, compares_in_place, encode_changes


@dataclass(frozen=True)
class RankChanges:
    """Changes of the elements that a rank sends, as they were compared with its copy."""

    coded: Sequence[EncodedChanges]
    """Changes of each of its wire buckets."""
    seconds: float
    """Time that reading, comparing and coding took."""

    @property
    def sizes(self) -> list[int]:
        """Bytes of each wire bucket's payload."""
        return [len(each.payload) for each in self.coded]

    @property
    def num_changes(self) -> int:
        """Number of elements that differ."""
        return sum(each.num_changes for each in self.coded)

    def totals(self, copy: CommittedCopy) -> list[int]:
        """Return, for each tensor, the sum of its runs' digests once they are changed."""
        totals, runs = list(copy.totals), copy.packing.runs
        assert runs is not None
        for own, each in zip(runs, self.coded, strict=True):
            for run, change in zip(own, each.sums, strict=True):
                totals[run.tensor] = (totals[run.tensor] + change) % 2**64
        return totals


NO_CHANGES = RankChanges((), 0.0)


def compare(
    push: RankPush,
    copy: CommittedCopy,
    device: torch.device,
    *,
    finite: bool,
    going_on: Callable[[], None] = lambda: None,
) -> RankChanges:
    """Compare what a rank would send with its copy, bucket by bucket. Blocks for one reading of
    both.

    Args:
        push: Push of all elements, prepared.
        device: Device that buckets are packed on.
        finite: Refuse NaN and infinities.
        going_on: Called before each bucket.

    Raises:
        NotFiniteError: Names the tensor.
        ModelChangedError: It changed while it was read.
    """
    began, packing = time.monotonic(), push.packing
    assert packing.runs is not None
    in_place = compares_in_place(device) and not finite
    coded = []
    for nth, runs in enumerate(packing.runs):
        going_on()
        old = copy.payload(nth).to(device, non_blocking=True)
        new: torch.Tensor | Sequence[torch.Tensor] | None = None
        if in_place:
            new = _lying(push, runs)
        if new is None:
            new, slots = copy.packer(device).read(nth, push)
            if finite:
                check_finite(new, slots)
        coded.append(encode_changes(old, new, runs, packing.itemsizes(runs)))
    push.end_packing()
    return RankChanges(coded, time.monotonic() - began)


def _lying(push: RankPush, runs: Sequence[Run]) -> list[torch.Tensor] | None:
    """Return a bucket's elements where they lie, if all do as they travel; else None."""
    tensors = push.packing.manifest.tensors
    dtypes = torch_dtypes([tensors[run.tensor].meta for run in runs])
    found = resident(push.by_reference(runs), dtypes)
    if found is None or not all(each.is_cpu and each.is_contiguous() for each in found):
        return None
    return found


def delta_packing(whole: PackedLayout, base: bytes, sizes: Sequence[int]) -> PackedLayout:
    """Return the packing of a delta in the wire buckets of a push of all elements.

    Args:
        base: Content digest of the version that it changes.
        sizes: Payload bytes of each wire bucket, of all senders.
    """
    wires = [
        WireBucket(wire.sender, wire.bucket, size, wire.num_runs or _num_runs(whole, index))
        for index, (wire, size) in enumerate(zip(whole.plan.buckets, sizes, strict=True))
    ]
    return replace(whole, plan=make_send_plan(whole.plan.num_senders, wires, base))


def _num_runs(whole: PackedLayout, index: int) -> int:
    """Return the runs of a bucket that lists none: there is one sender."""
    assert whole.runs is not None
    return len(whole.runs[index])


class DeltaPush(RankPush):
    """Push of a delta by one rank, in place of one of all elements.

    Args:
        whole: Push of all elements; not sent.
        packing: Wire buckets of the delta.
        changes: Changes that this rank sends.
        copy: Copy that they were made from; None at a rank that sends none.
        share: Elements that have changed, as a share of all.
    """

    def __init__(
        self,
        whole: RankPush,
        packing: PackedLayout,
        changes: RankChanges,
        copy: CommittedCopy | None,
        share: float,
    ) -> None:
        self._whole, self.packing, self.compared, self._copy = whole, packing, changes, copy
        self.description, self.num_bytes = whole.description, whole.num_bytes
        self.remarks, self.senders, self.sender = whole.remarks, whole.senders, whole.sender
        self.is_prepared_together = whole.is_prepared_together
        self.changed_share = share
        self._totals = None if copy is None else changes.totals(copy)

    def assist(self, *, is_under_way: bool) -> None:
        self._whole.assist(is_under_way=is_under_way)

    def changes(self, nth: int) -> torch.Tensor:
        return self.compared.coded[nth].payload

    def end_packing(self) -> None:
        """See ``Reader``: what was read was looked at again when it was compared."""

    def add_up(self, totals: Sequence[int] | None = None) -> RankSum:
        """See ``RankPush``; what this rank adds is known from its copy."""
        return self._whole.add_up(self._totals)

    def wait_added_up(self, timeout_seconds: float) -> None:
        self._whole.wait_added_up(timeout_seconds)

    def end_sending(self) -> None:
        self._whole.end_sending()

    def release(self) -> None:
        self._whole.release()

    def committed(self, content_digest: bytes) -> None:
        """Bring the copy up to date: the pool has committed the delta."""
        if self._copy is not None and self._totals is not None:
            self._copy.apply(self.compared.coded, content_digest, self._totals)
