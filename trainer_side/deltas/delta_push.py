"""Push of what has changed since the version that the pool committed last."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import NamedTuple

import torch

from trainer_side.deltas.committed_copy import NUM_COMPARED, CommittedCopy
from trainer_side.deltas.copy_reader import copy_reader
from trainer_side.packing.packer import (
    PackedBucket,
    PackedLayout,
    Packer,
    check_finite,
    resident,
)
from trainer_side.params.params import copy_into
from trainer_side.pushes.rank_push import RankPush
from trainer_side.ranks.ranks import RankSum
from trainer_side.sources.source import torch_dtypes
from weft_rl.contract.errors import DigestMismatchError
from weft_rl.contract.manifest import Run, SendPlan, WireBucket, make_send_plan
from weft_rl.transport.wire.changes import (
    EncodedChanges,
    are_comparable,
    grouped,
    has_kernels,
    join_changes,
    joined_bytes,
    start_encoding,
    start_encoding_several,
)


@dataclass(frozen=True)
class RankChanges:
    """Changes of the elements that a rank sends, as they were compared with its copy."""

    coded: Sequence[EncodedChanges]
    """Changes of its wire buckets in a push of all elements, in order: of one or of several."""
    most_bytes: int
    """Most bytes that those of several are joined to."""
    seconds: float
    """Time that reading, comparing and coding took."""

    @cached_property
    def joined(self) -> Sequence[Sequence[EncodedChanges]]:
        """Changes that travel in one wire bucket: a bucket takes longer than a few bytes."""
        return grouped(self.coded, self.most_bytes)

    @property
    def sizes(self) -> list[int]:
        """For each wire bucket of a push of all elements, the payload of the one that begins with
        its changes; 0 where they are joined to those before."""
        sizes = list[int]()
        for each in self.joined:
            more = sum(part.num_buckets for part in each) - 1
            sizes += [joined_bytes(each), *[0] * more]
        return sizes

    @property
    def num_changes(self) -> int:
        """Number of elements that differ."""
        return sum(each.num_changes for each in self.coded)

    def totals(self, copy: CommittedCopy) -> list[int]:
        """Return, for each tensor, the sum of its runs' digests once they are changed."""
        totals, runs = list(copy.totals), copy.packing.runs
        assert runs is not None
        sums = (change for each in self.coded for change in each.sums)
        for run, change in zip(chain.from_iterable(runs), sums, strict=True):
            totals[run.tensor] = (totals[run.tensor] + change) % 2**64
        return totals


NO_CHANGES = RankChanges((), 0, 0.0)

#: Bytes, and buckets, that a GPU compares at once where they lie: each launch of kernels takes
#: about a millisecond to begin. What changes of them must fit in one bucket.
_TOGETHER_BYTES = 2**31
_MOST_TOGETHER = 8


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
    coded, begun = list[EncodedChanges](), deque[Callable[[], list[EncodedChanges]]]()
    lying = list[_LyingBucket]()

    def begin(start: Callable[[], Callable[[], list[EncodedChanges]]]) -> None:
        if len(begun) == NUM_COMPARED:
            coded.extend(begun.popleft()())
        begun.append(start())

    def begin_lying() -> None:
        if lying:
            begin(partial(_start_lying, [*lying]))
            lying.clear()

    for nth, runs in enumerate(packing.runs):
        going_on()
        sizes, held = packing.itemsizes(runs), copy.payload(nth)
        old = held.to(device, non_blocking=True)
        bucket = None if finite else _lying(push, old, runs, sizes)
        if bucket is not None:
            lying.append(bucket)
            # The first begins at once: a GPU does nothing before. What is brought there from a
            # copy on the host takes memory until it is compared.
            if not begun or old is not held or _are_enough(lying):
                begin_lying()
            continue
        begin_lying()
        begin(partial(_start_packed, copy.packer(device), nth, push, old, sizes, finite=finite))
    begin_lying()
    coded += [changes for end in begun for changes in end()]
    push.end_packing()
    most = max(wire.payload_bytes for wire in packing.plan.buckets)
    return RankChanges(coded, most, time.monotonic() - began)


def read_into(
    push: RankPush, copy: CommittedCopy, device: torch.device, *, finite: bool, compares: bool
) -> RankChanges:
    """Read what rank 0 sends into its copy, and compare it with what was there; collective, blocks
    for the reading.

    Args:
        push: Push that is read once.
        copy: Copy of whole tensors; of no version from here until it is committed.
        device: Device on which tensors are compared.
        finite: Refuse NaN and infinities.
        compares: False for a copy that holds nothing yet.

    Raises:
        NotFiniteError: Names the tensor.
        BaseException: The error that ended the reading.
    """
    began, reader = time.monotonic(), copy_reader(copy, device, finite=finite, compares=compares)
    copy.open()
    push.read_once(reader, device)
    coded = reader.changes()
    copy.close()
    if not compares:
        return NO_CHANGES
    most = max(wire.payload_bytes for wire in copy.packing.plan.buckets)
    return RankChanges(coded, most, time.monotonic() - began)


class _LyingBucket(NamedTuple):
    """Bucket whose elements can be compared where they lie."""

    old: torch.Tensor
    new: Sequence[torch.Tensor]
    runs: Sequence[Run]
    sizes: Sequence[int]


def _lying(
    push: RankPush, old: torch.Tensor, runs: Sequence[Run], sizes: Sequence[int]
) -> _LyingBucket | None:
    """Return a bucket whose elements can be compared where they lie; else None."""
    dtypes = torch_dtypes([push.packing.manifest.tensors[run.tensor].meta for run in runs])
    found = resident(push.by_reference(runs), dtypes)
    if found is None or not are_comparable(old, found, runs, sizes):
        return None
    return _LyingBucket(old, found, runs, sizes)


def _are_enough(lying: Sequence[_LyingBucket]) -> bool:
    """Return whether no more buckets are to be compared together: on the host none are."""
    num_bytes = sum(bucket.old.numel() for bucket in lying)
    is_large = num_bytes >= _TOGETHER_BYTES or len(lying) == _MOST_TOGETHER
    return is_large or not has_kernels(lying[0].old.device)


def _start_lying(buckets: Sequence[_LyingBucket]) -> Callable[[], list[EncodedChanges]]:
    """Begin to compare buckets where they lie; several at once, on a GPU."""
    if len(buckets) == 1:
        end_one = start_encoding(*buckets[0])
        return lambda: [end_one()]
    end_together = start_encoding_several(
        [bucket.old for bucket in buckets],
        [own for bucket in buckets for own in bucket.new],
        [run for bucket in buckets for run in bucket.runs],
        [size for bucket in buckets for size in bucket.sizes],
    )

    def end() -> list[EncodedChanges]:
        if (together := end_together()) is not None:
            return [together]
        return [start_encoding(*bucket)() for bucket in buckets]

    return end


def _start_packed(
    packer: Packer,
    nth: int,
    push: RankPush,
    old: torch.Tensor,
    sizes: Sequence[int],
    *,
    finite: bool,
) -> Callable[[], list[EncodedChanges]]:
    """Pack a bucket, and begin to compare it."""
    assert push.packing.runs is not None
    new, slots = packer.read(nth, push)
    if finite:
        check_finite(new, slots)
    end = start_encoding(old, new, push.packing.runs[nth], sizes)
    return lambda: [end()]


def delta_packing(whole: PackedLayout, base: bytes, sizes: Sequence[int]) -> PackedLayout:
    """Return the packing of a delta in place of a push of all elements.

    Args:
        base: Content digest of the version that it changes.
        sizes: For each wire bucket of all senders, payload bytes; see ``RankChanges.sizes``.
    """
    assert whole.runs is not None
    wires, runs = list[WireBucket](), list[list[Run]]()
    last: dict[int, int] = {}
    for index, (wire, size) in enumerate(zip(whole.plan.buckets, sizes, strict=True)):
        if size:
            last[wire.sender] = len(wires)
            wires.append(WireBucket(wire.sender, wire.bucket, size, 0))
        joined = wires[last[wire.sender]]
        num_runs = joined.num_runs + (wire.num_runs or _num_runs(whole, index))
        wires[last[wire.sender]] = replace(joined, num_runs=num_runs)
    for own, index in zip(whole.runs, whole.plan.sent_by(whole.sender), strict=True):
        if sizes[index]:
            runs.append([])
        runs[-1].extend(own)
    plan = make_send_plan(whole.plan.num_senders, wires, base)
    return replace(whole, plan=plan, runs=tuple(map(tuple, runs)))


def _num_runs(whole: PackedLayout, index: int) -> int:
    """Return the runs of a bucket that lists none: there is one sender."""
    assert whole.runs is not None
    return len(whole.runs[index])


class CopiedPush(RankPush):
    """Push by rank 0 of all elements that its copy holds: what is read once was read into it.

    Args:
        push: Push that was read.
        copy: The copy, which follows the commit.
    """

    def __init__(self, push: RankPush, copy: CommittedCopy) -> None:
        self.description, self.remarks = push.description, push.remarks
        self.packing, self.copy, self._copied = copy.packing, copy, copy
        self.num_bytes, self.sender = push.num_bytes, push.sender

    def by_reference(self, runs: Sequence[Run]) -> Sequence[torch.Tensor]:
        metas = [self.packing.manifest.tensors[run.tensor].meta for run in runs]
        return [
            self._copied.place(run.tensor)[: meta.num_bytes].view(dtype).view(meta.shape)
            for run, meta, dtype in zip(runs, metas, torch_dtypes(metas), strict=True)
        ]

    def fill(self, runs: Sequence[Run], views: Sequence[torch.Tensor]) -> None:
        copy_into(views, self.by_reference(runs))

    def on_packed(self, nth: int, payload: torch.Tensor, packed: PackedBucket) -> None:
        """See ``Reader``: note what the copy holds, should it have held something else before."""
        for run, digest in zip(packed.runs, packed.digests, strict=True):
            self._copied.wrote(run.tensor, digest)


class IdlePush(RankPush):
    """Part of a rank other than 0 in a push that all ranks have read already: none."""

    def __init__(self, push: RankPush) -> None:
        self.description = push.description


class DeltaPush(RankPush):
    """Push of a delta by one rank, in place of one of all elements.

    Args:
        whole: Push of all elements; not sent.
        packing: Wire buckets of the delta.
        changes: Changes that this rank sends.
        copy: Copy that they were made from; None at a rank that sends none.
        share: Elements that have changed, as a share of all.
        mixed: Plan of the delta and, behind it, of ``whole``, which is sent, too; None for the
            delta alone.
    """

    def __init__(
        self,
        whole: RankPush,
        packing: PackedLayout,
        changes: RankChanges,
        copy: CommittedCopy | None,
        share: float,
        mixed: SendPlan | None = None,
    ) -> None:
        self._whole, self.packing, self.compared, self._copy = whole, packing, changes, copy
        self.description, self.num_bytes = whole.description, whole.num_bytes
        self.remarks, self.senders, self.sender = whole.remarks, whole.senders, whole.sender
        self.is_prepared_together = whole.is_prepared_together
        self.changed_share = share
        #: Whether the copy holds the new elements already.
        self._is_copied = isinstance(whole, CopiedPush)
        self._totals = None
        if copy is not None:
            self._totals = list(copy.totals) if self._is_copied else changes.totals(copy)
        self._mixed, self._packed_totals = mixed, self._totals
        self.behind = None if mixed is None else whole

    @property
    def plan(self) -> SendPlan:
        return self._mixed or self.packing.plan

    def note_totals(self, totals: Sequence[int]) -> None:
        self._packed_totals = list(totals)

    def assist(self, *, is_under_way: bool) -> None:
        self._whole.assist(is_under_way=is_under_way)

    def changes(self, nth: int) -> torch.Tensor:
        return join_changes(self.compared.joined[nth])

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
        """Begin to bring the copy up to date: the pool has committed the delta.

        Raises:
            DigestMismatchError: The copy was wrong, for the delta makes other elements of it than
                were sent beside it.
        """
        if self._packed_totals != self._totals:
            raise DigestMismatchError("the copy of what the pool committed last was damaged")
        if self._copy is not None and self._totals is not None:
            if self._is_copied:
                self._copy.committed(content_digest)
            else:
                self._copy.apply(self.compared.coded, content_digest, self._totals)
