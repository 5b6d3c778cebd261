"""Pushes as one rank of a trainer carries them out, by the kind of what is pushed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Protocol

import torch

from trainer_side.packing.packer import (
    AnnouncedRuns,
    PackedBucket,
    PackedLayout,
    announced_packing,
    whole_packing,
)
from trainer_side.params.params import copy_into
from trainer_side.ranks.ranks import SENDER, OwnSum, Ranks, RankSum
from trainer_side.sharding.plan import ShardPlan, ShardPlans
from trainer_side.sources.named_source import (
    DESCRIPTION,
    NamedSteps,
    OrderedSource,
    RunSource,
    TensorReader,
)
from trainer_side.sources.source import HeldTensors, Source, held_tensors, reading, torch_dtypes
from weft_rl.containers import LruMapping
from weft_rl.contract.backends import BACKENDS
from weft_rl.contract.errors import WeftError
from weft_rl.contract.group import MAX_SENDERS
from weft_rl.contract.manifest import (
    DEFAULT_BUCKET_BYTES,
    MAX_WIRE_BUCKETS,
    Manifest,
    Run,
    SendPlan,
    plan_buckets,
)
from weft_rl.contract.tensors import TensorMeta
from weft_rl.interrupts import Flag


class PackedCopy(Protocol):
    """Copy of the buckets that a rank packs."""

    def put(self, nth: int, payload: torch.Tensor, packed: PackedBucket) -> None:
        """Copy a bucket; see ``Reader.on_packed``."""


class RankPush:
    """Part of one rank in a push: what it reads, sends, and does for the ranks that send.

    A ``Reader`` at ranks that send. Methods are collective where they say so; what a kind of push
    has no use for does nothing.
    """

    description: str
    """Description of what is read, for messages."""
    num_bytes: int = 0
    """Payload bytes of the push; 0 where only rank 0 knows."""
    agreed: bytes = b""
    """Digest of what every rank must have planned alike; empty where rank 0 plans alone."""
    remarks: tuple[str, ...] = ()
    """Remarks that the push's success does not show."""
    senders: tuple[int, ...] = (SENDER,)
    """Ranks of the trainer that send, by their ranks in the side group."""
    sender: int | None = None
    """Place of this rank among them; None if it does not send."""
    packing: PackedLayout
    """Buckets that this rank packs; at rank 0 also if it sends none."""
    look_again: Callable[[], None] | None = None
    """See ``Content.check_unchanged``; None where nothing is read in place."""
    reads_once: bool = False
    """True if all ranks read what is pushed together, one tensor after the other, and perhaps not
    again; see ``read_once``."""
    copy: PackedCopy | None = None
    """Copy that is made of what is packed; None for none."""
    is_prepared_together: bool = False
    """True if all ranks come to the push, and ``prepare``, before any of them sends."""

    behind: RankPush | None = None
    """See ``Reader``."""

    @property
    def plan(self) -> SendPlan:
        """See ``Reader``."""
        return self.packing.plan

    @property
    def copied_as(self) -> PackedLayout:
        """Packing that a copy of what this rank sends has."""
        return self.packing

    def read_once(self, reader: TensorReader | None, device: torch.device) -> None:
        """Have each tensor of the push read, once, in any order, before it is sent; collective.

        Args:
            reader: Reader at rank 0; None at other ranks.
            device: Device on which they are wanted.

        Raises:
            BaseException: The error that ended the reading, at this rank or another.
        """
        raise NotImplementedError

    def prepare(self) -> None:
        """Bring together what cannot be sent as the ranks hold it. Collective, blocks."""

    def assist(self, *, is_under_way: bool) -> None:
        """Take part at a rank that does not send, until those that send have read all; blocks.

        Args:
            is_under_way: False for a retried call of a push that has ended.
        """

    def fill(self, runs: Sequence[Run], views: Sequence[torch.Tensor]) -> None:
        raise NotImplementedError

    def by_reference(self, runs: Sequence[Run]) -> Sequence[torch.Tensor | None]:
        return [None] * len(runs)

    def announce(self, payload: torch.Tensor, on_progress: Callable[[], None]) -> AnnouncedRuns:
        raise NotImplementedError

    def changes(self, nth: int) -> torch.Tensor:
        raise NotImplementedError

    def on_packed(self, nth: int, payload: torch.Tensor, packed: PackedBucket) -> None:
        if self.copy is not None:
            self.copy.put(nth, payload, packed)

    def note_totals(self, totals: Sequence[int]) -> None:
        """See ``Reader``."""

    def end_packing(self) -> None:
        if self.look_again is not None:
            self.look_again()

    def add_up(self, totals: Sequence[int] | None = None) -> RankSum:
        """See ``Reader``; without ``totals``, this rank has nothing to add."""
        return OwnSum(totals or ())

    def wait_added_up(self, timeout_seconds: float) -> None:
        """Block until ``add_up`` was called, on any thread; what follows over the ranks' link comes
        after it."""

    def end_sending(self) -> None:
        """End what the ranks that send have to end, however sending has ended."""

    def release(self) -> None:
        """Free what was kept for this push, once it has ended."""


class GatheredPush(RankPush):
    """Push of a source that rank 0 gathers from all ranks, bucket by bucket, in lockstep: before
    each bucket, all ranks learn whether all can continue.

    Args:
        source: Tensors of the push; collective.
        ranks: Ranks of the trainer.
        packing: Buckets of the push.
    """

    reads_once = True

    def __init__(self, source: Source, ranks: Ranks, packing: PackedLayout) -> None:
        self._source, self._ranks, self.packing = source, ranks, packing
        self.description = source.description
        self.num_bytes = packing.manifest.total_bytes
        self.agreed = packing.manifest.layout_digest
        self.sender = packing.sender if ranks.rank == SENDER else None

    def assist(self, *, is_under_way: bool) -> None:
        """See ``RankPush``; give the elements of this rank.

        Raises:
            WeftError: The error that ended the push, the same at every rank.
        """
        if not is_under_way:
            return
        first = 0
        try:
            for bucket in self.packing.manifest.buckets:
                self._read(first, bucket.num_tensors, None)
                first += bucket.num_tensors
            self.end_packing()
        finally:
            self._source.end_reading()

    def read_once(self, reader: TensorReader | None, device: torch.device) -> None:
        try:
            for index, meta in enumerate(self._source.metas):
                if reader is None:
                    self._read(index, 1, None)
                else:
                    out = _memory_for(meta, device)
                    self._read(index, 1, [out])
                    reader.take(index, out)
            self.end_packing()
        finally:
            self._source.end_reading()

    def end_packing(self) -> None:
        """See ``Reader``; collective, since every rank has read."""
        try:
            super().end_packing()
        except WeftError as error:
            self._ranks.agree(error)
        self._ranks.agree()

    def fill(self, runs: Sequence[Run], views: Sequence[torch.Tensor]) -> None:
        self._read(runs[0].tensor, len(runs), views)

    def end_sending(self) -> None:
        self._source.end_reading()

    def _read(self, first: int, count: int, views: Sequence[torch.Tensor] | None) -> None:
        self._ranks.agree()
        try:
            with reading(self.description):
                self._source.read(first, count, views)
        except BaseException as error:
            self._ranks.abandon(error)  # others may wait for us inside a gather
            raise


class NamedPush(RankPush):
    """Push of named tensors at rank 0, which announces what each bucket carries.

    Args:
        source: Tensors of the push, from their beginning.
        packing: Buckets of the push, if its order were known.
    """

    description = DESCRIPTION
    reads_once = True

    def __init__(self, source: RunSource, packing: PackedLayout) -> None:
        self._source, self._ordered = source, packing
        self.packing = announced_packing(packing.manifest)
        self.num_bytes = packing.manifest.total_bytes
        self.sender = packing.sender
        source.begin(packing.manifest)

    @property
    def copied_as(self) -> PackedLayout:
        return self._ordered

    def read_once(self, reader: TensorReader | None, device: torch.device) -> None:
        assert reader is not None, "it is rank 0's"
        self._source.read_once(reader)
        self.end_packing()

    def announce(self, payload: torch.Tensor, on_progress: Callable[[], None]) -> AnnouncedRuns:
        return AnnouncedRuns(*self._source.fill(payload, on_progress))


class FollowedPush(RankPush):
    """Push of named tensors at the other ranks, which iterate in step with rank 0.

    Args:
        steps: This rank's iteration.
    """

    description = DESCRIPTION
    reads_once = True

    def __init__(self, steps: NamedSteps) -> None:
        self._steps = steps

    def read_once(self, reader: TensorReader | None, device: torch.device) -> None:
        self._steps.follow()

    def assist(self, *, is_under_way: bool) -> None:
        """See ``RankPush``.

        Raises:
            WeftError: The error that ended the push, the same at every rank.
        """
        if is_under_way:
            self._steps.follow()


_SIGN = 2**63


class HeldPush(RankPush):
    """Push of what the ranks hold, each its own; a whole model is what rank 0 holds.

    Where several send, each has a part of each tensor's digest. All ranks add the parts up once,
    whatever becomes of the push.

    Args:
        source: Tensors of the push.
        tensors: Tensors as the ranks hold them.
        manifest: Layout of the version.
        plan: Division of the push among the ranks.
        ranks: Ranks of the trainer.
    """

    def __init__(
        self,
        source: Source,
        tensors: HeldTensors,
        manifest: Manifest,
        plan: ShardPlan,
        ranks: Ranks,
    ) -> None:
        self._source, self._tensors, self._ranks = source, tensors, ranks
        self.description, self.remarks = source.description, tensors.remarks
        self.num_bytes = manifest.total_bytes
        self.agreed = manifest.layout_digest + plan.digest
        self.senders = plan.senders
        self.sender = plan.senders.index(ranks.rank) if ranks.rank in plan.senders else None
        self.packing = plan.packings[self.sender or 0]
        self.is_prepared_together = source.is_collective
        self.reads_once = isinstance(source, OrderedSource)
        self._is_shared = plan.senders != (SENDER,)
        self._whole: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()
        self._begun = Flag()
        self._sum: RankSum | None = None

    def read_once(self, reader: TensorReader | None, device: torch.device) -> None:
        assert reader is not None, "there is one rank"
        for index, meta in enumerate(self._source.metas):
            out = _memory_for(meta, device)
            self._source.read(index, 1, [out])
            reader.take(index, out)
        self.end_packing()

    def prepare(self) -> None:
        """See ``RankPush``: gather tensors that cannot be sent as the ranks hold them. They are
        kept at rank 0, on the host."""
        gathered = self._tensors.gathered
        if gathered:
            # A rank that is gone since they planned would be waited for in the framework's
            # collectives. What LoRA's factors are brought by notices it itself.
            self._ranks.agree()
        try:
            with self._reading():
                self._source.prepare()
                for index in gathered:
                    self._gather(index)
        except BaseException as error:
            # Others may wait for us inside it: over our own link they are told, and raise the
            # same. Inside a collective of the framework's nobody can tell them: they learn of it
            # when that ends, by the framework's own timeout.
            self._ranks.abandon(error)
            raise
        finally:
            self._source.end_reading()

    def _gather(self, index: int) -> None:
        out = None
        if self._ranks.rank == SENDER:
            meta = self._source.metas[index]
            (dtype,) = torch_dtypes([meta])
            out = [torch.empty(meta.shape, dtype=dtype)]
            self._whole[index] = out[0]
        self._source.read(index, 1, out)

    def assist(self, *, is_under_way: bool) -> None:
        """See ``RankPush``: there is nothing to add to the sum."""
        self.add_up()

    def fill(self, runs: Sequence[Run], views: Sequence[torch.Tensor]) -> None:
        with self._reading():
            found = self._held(runs)
            held = [tensor for tensor in found if tensor is not None]
            if len(held) == len(views):
                copy_into(views, held)
                return
            if held:
                copy_into(
                    [view for view, t in zip(views, found, strict=True) if t is not None], held
                )
            numbers, to_read = self._tensors.numbers, list[int]()
            for place, (run, tensor) in enumerate(zip(runs, found, strict=True)):
                each = self._tensors.elements[run.tensor]
                if each is None and tensor is None:
                    to_read.append(place)
                elif each is not None and tensor is None:
                    each.fill(numbers[run] if numbers else 0, views[place].view(-1))
            # One after the other, since a source may read several at once.
            for _, neighbours in groupby(enumerate(to_read), lambda each: each[1] - each[0]):
                places = [place for _, place in neighbours]
                self._source.read(
                    runs[places[0]].tensor, len(places), [views[place] for place in places]
                )

    def by_reference(self, runs: Sequence[Run]) -> Sequence[torch.Tensor | None]:
        with self._reading():
            return [None if tensor is None else tensor.detach() for tensor in self._held(runs)]

    def _held(self, runs: Sequence[Run]) -> list[torch.Tensor | None]:
        """Return what lies here of runs, in the shape that it is packed in."""
        elements, numbers = self._tensors.elements, self._tensors.numbers
        is_flat, found = self.packing.plan.lists_runs, list[torch.Tensor | None]()
        for run in runs:
            each = elements[run.tensor]
            if each is None:
                tensor = self._whole.get(run.tensor)
            else:
                tensor = each.held(numbers[run] if numbers else 0)
            if tensor is not None and is_flat is not (tensor.dim() == 1):
                shape = (-1,) if is_flat else self._source.metas[run.tensor].shape
                tensor = tensor if tensor.shape == shape else tensor.detach().reshape(shape)
            found.append(tensor)
        return found

    def _reading(self) -> contextlib.AbstractContextManager[None]:
        is_users = isinstance(self._source, OrderedSource)  # whose iterator's errors are its own
        return contextlib.nullcontext() if is_users else reading(self.description)

    def add_up(self, totals: Sequence[int] | None = None) -> RankSum:
        """See ``Reader``.

        Raises:
            PeerUnavailableError: ``RANK_GONE``.
        """
        if not self._is_shared:
            return super().add_up(totals)
        with self._lock:
            if self._sum is None:
                values = torch.zeros(len(self._source.metas), dtype=torch.int64)
                if totals is not None:
                    values = torch.tensor([(t + _SIGN) % 2**64 - _SIGN for t in totals])
                try:
                    self._sum = self._ranks.add_up(values)
                finally:
                    self._begun.set()  # or it never will
            return self._sum

    def end_sending(self) -> None:
        """See ``RankPush``: the other ranks wait for the sum in any case."""
        self._source.end_reading()
        self.add_up()

    def release(self) -> None:
        self._whole.clear()
        self._source.release()

    def wait_added_up(self, timeout_seconds: float) -> None:
        self._begun.wait(timeout_seconds)


def _memory_for(meta: TensorMeta, device: torch.device) -> torch.Tensor:
    (dtype,) = torch_dtypes([meta])
    return torch.empty(meta.shape, dtype=dtype, device=device)


_MAX_KEPT = 32
#: Between two H200s a base of 16 GB was staged in 51 ms with buckets of 1 GiB and in 62 ms
#: with 512 MiB: a bucket must take longer than the release of the one before it.
DEVICE_BUCKET_BYTES = 2**30


def packs_on_device(backend: str) -> bool:
    """Return whether buckets for a backend are packed on an accelerator; the same on every rank."""
    return BACKENDS[backend].on_gpu and torch.cuda.is_available()


def bucket_capacity(backend: str, chosen: int | None) -> int:
    """Return the payload bytes of a bucket over a backend, or the user's choice. It is the same on
    every rank."""
    return chosen or (DEVICE_BUCKET_BYTES if packs_on_device(backend) else DEFAULT_BUCKET_BYTES)


class RankPushFactory:
    """Maker of the pushes of one rank.

    Args:
        ranks: Ranks of the trainer.
        bucket_bytes: Payload of a bucket; None is what suits the backend.
        max_senders: Most ranks that send. If more hold shards, rank 0 gathers whole tensors.
    """

    def __init__(
        self, ranks: Ranks, bucket_bytes: int | None, max_senders: int = MAX_SENDERS
    ) -> None:
        self.ranks = ranks
        self._bucket_bytes, self._max_senders = bucket_bytes, max_senders
        self._shard_plans = ShardPlans()
        self._kept: LruMapping[tuple[int, tuple[TensorMeta, ...]], PackedLayout] = LruMapping(
            _MAX_KEPT
        )
        self._last: tuple[int, tuple[TensorMeta, ...], PackedLayout] | None = None

    def weights_push(self, source: Source, backend: str) -> RankPush:
        """Make the push of a source that every rank has: of what the ranks hold, or gathered at
        rank 0."""
        tensors = held_tensors(source, self.ranks, self._max_senders)
        if isinstance(tensors, str):
            gathered = GatheredPush(source, self.ranks, self._packing(source.metas, backend))
            gathered.remarks = (f"rank 0 gathered all: {tensors}",) if tensors else ()
            return gathered
        packing = self._packing(source.metas, backend, tensors.num_holders)
        plan = ShardPlan((SENDER,), (packing,), b"")
        if tensors.held:
            plan = self._shard_plans.plan(packing.manifest, tensors.held)
        return HeldPush(source, tensors, packing.manifest, plan, self.ranks)

    def ordered_push(self, source: OrderedSource, backend: str) -> RankPush:
        """Make the push, at rank 0, of named tensors whose order is known beforehand."""
        push = self.weights_push(source, backend)
        push.agreed = b""  # the other ranks do not know the layout
        return push

    def announced_push(self, source: RunSource, backend: str) -> RankPush:
        """Make the push, at rank 0, of named tensors in the order that they come in."""
        return NamedPush(source, self._packing(source.metas, backend))

    def _packing(
        self, metas: tuple[TensorMeta, ...], backend: str, num_senders: int = 1
    ) -> PackedLayout:
        """Return the packing of whole tensors. Its buckets are larger than chosen where so many
        senders would cut them into more wire buckets than a transfer may have."""
        capacity = bucket_capacity(backend, self._bucket_bytes)
        packing = self._packing_by(capacity, metas)
        while len(packing.manifest.buckets) > max(1, MAX_WIRE_BUCKETS // num_senders):
            capacity *= 2
            packing = self._packing_by(capacity, metas)
        return packing

    def _packing_by(self, capacity: int, metas: tuple[TensorMeta, ...]) -> PackedLayout:
        last = self._last
        if last is not None and last[0] == capacity and last[1] is metas:
            return last[2]  # without a look at thousands of tensors
        packing = self._kept.get((capacity, metas))
        if packing is None:
            packing = whole_packing(plan_buckets(metas, capacity))
            self._kept.put((capacity, metas), packing)
        self._last = capacity, metas, packing
        return packing
