"""Packer of a rank's wire buckets into reused buffers, and the interface of what it reads.

One file: a bucket's memory is lent, filled, checked and free again by one order of steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from trainer_side.ranks.ranks import RankSum
from weft_rl.contract.backends import GLOO
from weft_rl.contract.errors import NotFiniteError
from weft_rl.contract.manifest import (
    MAX_WIRE_BUCKETS,
    Manifest,
    Run,
    SendPlan,
    TensorSlot,
    announced_plan,
    whole_plan,
    whole_runs,
)
from weft_rl.contract.tensors import DataType, TensorMeta
from weft_rl.transport.backends import allocate
from weft_rl.transport.digests.copies import PIECE_BYTES, PlacedRange, pack_digesting, pack_tensors
from weft_rl.transport.digests.wsum64 import Digests, Part, start_digests
from weft_rl.transport.group import CPU, window
from weft_rl.transport.wire.buckets import (
    SealedBucket,
    changes_parts,
    run_parts,
    seal_bucket,
    whole_parts,
)

_log = logging.getLogger(__name__)

#: The smallest magnitude bits of what is no number; E4M3FN has one NaN and no infinity.
_FP8_LIMITS = {DataType.FLOAT8_E4M3FN: 0x7F, DataType.FLOAT8_E5M2: 0x7C}


def check_finite(buffer: torch.Tensor, slots: Sequence[TensorSlot]) -> None:
    """Refuse a packed bucket that holds NaN or infinity; blocks for one read of it.

    Neighbours of one element type are looked at together, so that a bucket costs one reduction and
    not one a tensor; single tensors are checked only where that finds something.

    Args:
        buffer: uint8, the bucket's payload, on any device; the padding between the
            tensors is zero.
        slots: The bucket's tensors, in their order.

    Raises:
        NotFiniteError: Names the first tensor that has one.
    """
    for first, last in _runs(slots):
        dtype = slots[first].meta.dtype
        end = slots[last].offset_bytes + slots[last].meta.num_bytes
        if _is_finite(buffer[slots[first].offset_bytes : end], dtype):
            continue
        for slot in slots[first : last + 1]:
            content = buffer[slot.offset_bytes : slot.offset_bytes + slot.meta.num_bytes]
            if not _is_finite(content, dtype):
                name = slot.meta.name
                raise NotFiniteError(
                    f"tensor {name!r} holds NaN or infinity as {dtype.torch_name}, which it is "
                    "sent as; the push was given up and nothing that is served has changed",
                    metadata={"parameter": name},
                )


def _runs(slots: Sequence[TensorSlot]) -> Iterable[tuple[int, int]]:
    """Yield first and last index of neighbouring tensors of one floating-point type."""
    first = 0
    for index in range(1, len(slots) + 1):
        dtype = slots[first].meta.dtype
        if index == len(slots) or slots[index].meta.dtype is not dtype:
            if dtype.is_float or dtype in _FP8_LIMITS:
                yield first, index - 1
            first = index


def _is_finite(content: torch.Tensor, dtype: DataType) -> bool:
    """Return whether all elements are finite numbers of their type; exact."""
    if not content.numel():
        return True
    limit = _FP8_LIMITS.get(dtype)
    if limit is not None:
        return bool((content & 0x7F).amax() < limit)
    # Both carry NaN through, which a sum would too, but finite numbers can overflow a sum.
    low, high = torch.aminmax(content.view(getattr(torch, dtype.torch_name)))
    return bool(torch.isfinite(low) & torch.isfinite(high))


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """Wire buckets of a push that one rank packs; kept across pushes that have the same."""

    manifest: Manifest
    """Layout of the version."""
    plan: SendPlan
    """Plan of the buckets of all senders."""
    sender: int
    """Number of this sender in the plan."""
    runs: tuple[tuple[Run, ...], ...] | None
    """Runs of each wire bucket of this sender, in order; None where the reader announces them."""

    def itemsizes(self, runs: Sequence[Run]) -> list[int]:
        """Return the bytes of an element of each of some runs."""
        tensors = self.manifest.tensors
        return [tensors[run.tensor].meta.dtype.itemsize_bytes for run in runs]


def whole_packing(manifest: Manifest) -> PackedLayout:
    """Return the packing of one rank that sends the buckets of a layout as they are."""
    return PackedLayout(manifest, whole_plan(manifest), 0, whole_runs(manifest))


def announced_packing(manifest: Manifest) -> PackedLayout:
    """Return the packing of one rank whose reader announces what comes next."""
    return PackedLayout(manifest, announced_plan(manifest), 0, None)


class AnnouncedRuns(NamedTuple):
    """Runs that a reader filled a bucket with, in the order that they lie in."""

    runs: Sequence[Run]
    digests: list[int]
    """Digest of each run."""


class Reader(Protocol):
    """Content of one push as one rank sends it, bucket by bucket in the order of its packing."""

    packing: PackedLayout

    @property
    def plan(self) -> SendPlan:
        """Plan of the push: of its packing, or a mixed one, whose first part that is."""

    @property
    def behind(self) -> Reader | None:
        """Content of the second part of a mixed plan; None for any other."""

    def fill(self, runs: Sequence[Run], views: Sequence[torch.Tensor]) -> None:
        """Copy or compute the elements of a bucket whose runs are known.

        Args:
            runs: Runs of ``packing``.
            views: Contiguous tensor for each, of the dtype that travels, on the device that buckets
                are packed on: of the tensor's shape where whole tensors travel, else 1-D.
                Overwritten.
        """

    def by_reference(self, runs: Sequence[Run]) -> Sequence[torch.Tensor | None]:
        """Return the elements of known runs where they lie, in their own dtypes and shaped as
        ``fill`` has it; None for those to be filled."""

    def announce(self, payload: torch.Tensor, on_progress: Callable[[], None]) -> AnnouncedRuns:
        """Fill a bucket's payload with what comes next, where runs are not known before.

        Args:
            payload: uint8, a multiple of 256 bytes, on any device; overwritten.
            on_progress: Called now and then.
        """

    def changes(self, nth: int) -> torch.Tensor:
        """Return the coded changes of this sender's bucket ``nth`` of a delta, uint8, 1-D, on any
        device."""

    def on_packed(self, nth: int, payload: torch.Tensor, packed: PackedBucket) -> None:
        """Take note of a bucket that was packed; its payload may be read until this returns, on
        the calling thread's current stream."""

    def note_totals(self, totals: Sequence[int]) -> None:
        """Take note of the digests of what this sender has sent of each tensor in the second part
        of a mixed plan."""

    def end_packing(self) -> None:
        """Look at what was read again, once the last bucket is packed and before it is sent.

        Raises:
            ModelChangedError: It changed meanwhile: nothing of the push may be served.
        """

    def add_up(self, totals: Sequence[int]) -> RankSum:
        """Begin to add up this sender's digests with the others'; further calls return the same.

        Args:
            totals: Sum of the digests of each tensor's runs that were sent here, modulo 2**64.
        """


@dataclass(frozen=True)
class _Views:
    """Places of a bucket's known runs in its buffer."""

    parts: list[Part]
    places: list[PlacedRange]
    views: list[torch.Tensor]
    edges: list[torch.Tensor]
    """Rest of the runs' first and last blocks."""
    slots: list[TensorSlot]
    """Runs as if each were a tensor of the payload, for messages."""


@dataclass(frozen=True)
class PackedBucket:
    """Bucket that is packed and sealed, and what it carries."""

    sealed: SealedBucket
    runs: Sequence[Run]
    digests: Sequence[int]
    """Digest of each run."""
    payload: torch.Tensor
    """Its payload where it was packed, until the next one is."""


def gpu_of(reader: Reader, runs: Sequence[Run]) -> torch.device | None:
    """Return the one GPU that all elements of known runs lie on, but for computed ones; None if
    there is no such GPU."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    devices = {tensor.device for tensor in reader.by_reference(runs) if tensor is not None}
    device = devices.pop() if len(devices) == 1 else CPU
    return device if device.type == "cuda" else None


class Packer:
    """Reused buffers (as many as ``group.window``), and the views into them of known runs.

    Views are made once a packing: making them anew costs more than copying into them for models of
    many small tensors.

    Where buffers lie on the host, and a bucket's elements on a GPU, the bucket is packed and
    digested there, in one buffer more, and copied to its own in one piece.

    Args:
        packing: Buckets to pack.
        buffers: Buffers of an earlier packer; those that are large enough are used again.
        device: Device of the buffers. On an accelerator all work is that of the calling thread's
            current stream.
        backend: Backend that they are sent over.
        most_buffers: Most buffers to make, where nothing is sent from them.
    """

    def __init__(
        self,
        packing: PackedLayout,
        buffers: Sequence[torch.Tensor] = (),
        device: torch.device = CPU,
        backend: str = GLOO,
        most_buffers: int = MAX_WIRE_BUCKETS,
    ) -> None:
        self.packing = packing
        self._device, self._backend, self._most_buffers = device, backend, most_buffers
        self._indices = packing.plan.sent_by(packing.sender)
        self._wires = [packing.plan.buckets[index] for index in self._indices]
        self.buffers = self._made_buffers(buffers)
        self._views = self._made_views()
        self._on_gpu: Packer | None = None
        self._has_room = True

    def pack(
        self,
        nth: int,
        reader: Reader,
        nonce: int,
        *,
        finite: bool = False,
        on_progress: Callable[[], None] = lambda: None,
    ) -> PackedBucket:
        """Fill this sender's bucket ``nth`` and seal it.

        Blocks for the copies and the digesting. The buffer is that of bucket
        ``nth - len(buffers)``, which must have been released. The bucket's bytes are ``wire(nth)``,
        but for its tail, until bucket ``nth + len(buffers)`` is packed.

        Args:
            reader: Content of the push; its packing is this one's.
            nonce: Nonce of the transfer.
            finite: Read the bucket once more, and refuse NaN and infinities.
            on_progress: Called now and then where runs are announced.

        Raises:
            NotFiniteError: Names the tensor.
            WeftError: The reader's own.
        """
        packing, wire = self.packing, self._wires[nth]
        payload = self.wire(nth)[: wire.payload_bytes]
        runs: Sequence[Run]
        if packing.plan.delta_from:
            return self._pack_changes(nth, reader, nonce, payload)
        if (on_gpu := self._gpu_packer(nth, reader)) is not None:
            return on_gpu.pack_for(payload, nth, reader, nonce, finite=finite)
        if packing.runs is None:
            runs, found = reader.announce(payload, on_progress)
            begun, slots = Digests(found), self._slots(wire.bucket, runs) if finite else []
        else:
            runs, slots = packing.runs[nth], self._views[nth].slots
            begun = _fill(payload, runs, self._views[nth], reader)
        if finite:
            check_finite(payload, slots)
        digests = begun.wait()
        listed = runs if packing.plan.lists_runs else None
        sealed = seal_bucket(wire.payload_bytes, nonce, self._indices[nth], digests, listed)
        return PackedBucket(sealed, runs, digests, payload)

    def pack_for(
        self, out: torch.Tensor, nth: int, reader: Reader, nonce: int, *, finite: bool
    ) -> PackedBucket:
        """Pack a bucket on this packer's GPU, and copy its payload to host memory; see ``pack``.
        Blocks until it is there."""
        # A thread of its own begins with the first GPU.
        with torch.cuda.device_of(self.buffers[0]):  # type: ignore[no-untyped-call]
            packed = self.pack(nth, reader, nonce, finite=finite)
            out.copy_(packed.payload)
        return packed

    def _gpu_packer(self, nth: int, reader: Reader) -> Packer | None:
        """Return the packer on the GPU that a bucket's elements lie on; None where the buffers lie
        there, or the elements do not, or it has no room."""
        runs = self.packing.runs
        if runs is None or self._device.type != "cpu" or not self._has_room:
            return None
        device = gpu_of(reader, runs[nth])
        if device is None:
            return None
        if self._on_gpu is None or self._on_gpu._device != device:
            self._on_gpu = None  # its memory, before the next is made
            try:
                self._on_gpu = Packer(self.packing, device=device, most_buffers=1)
            except torch.OutOfMemoryError as error:
                self._has_room = False
                _log.warning("weights are packed on the host, which is slower: %s", error)
        return self._on_gpu

    def _pack_changes(
        self, nth: int, reader: Reader, nonce: int, payload: torch.Tensor
    ) -> PackedBucket:
        """Seal a delta's bucket: what it changes was read, and is known, already."""
        assert self.packing.runs is not None, "a delta is of known runs"
        changes = reader.changes(nth)
        # On the host nothing waits for a copy but this thread.
        payload.copy_(changes, non_blocking=payload.is_cuda)
        content = payload if payload.device == changes.device else changes
        digests = start_digests(content, changes_parts(len(payload))).wait()
        runs = self.packing.runs[nth]
        sealed = seal_bucket(len(payload), nonce, self._indices[nth], digests, runs)
        return PackedBucket(sealed, (), (), payload)

    def read(self, nth: int, reader: Reader) -> tuple[torch.Tensor, Sequence[TensorSlot]]:
        """Fill this sender's bucket ``nth`` and seal nothing; see ``pack``.

        Returns:
            Its payload, and its runs as if each were a tensor of the payload.
        """
        assert self.packing.runs is not None, "of known runs"
        into = self._views[nth]
        if into.edges:
            torch._foreach_zero_(into.edges)
        reader.fill(self.packing.runs[nth], into.views)
        return self.wire(nth)[: self._wires[nth].payload_bytes], into.slots

    def wire(self, nth: int) -> torch.Tensor:
        """Return the uint8 bytes of a held bucket, with room for its tail, also of one whose turn
        has come; no copy."""
        return self._buffer(nth)[: self._wires[nth].wire_bytes]

    def move(self, held: range) -> None:
        """Put the held buckets into fresh buffers.

        For a transfer that continues after its group was abandoned: operations that nobody can stop
        may still read the old buffers.
        """
        old, self.buffers = self.buffers, self._made_buffers(())
        self._views = self._made_views()
        for nth in held:
            wire = self.wire(nth)
            wire.copy_(old[nth % len(old)][: wire.numel()])
        if self._device.type == "cuda":  # they are sent as whatever was digested: at once
            torch.cuda.current_stream(self._device).synchronize()

    def _made_buffers(self, kept: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return as many buffers as are in flight, each large enough for any bucket. Large enough
        ones of ``kept``, which are of the same backend, are used again."""
        need = max(wire.wire_bytes for wire in self._wires)
        count = min(window(self._device, self._backend), len(self._wires), self._most_buffers)
        buffers = [buffer for buffer in kept if buffer.numel() >= need][:count]
        fresh = range(count - len(buffers))
        return buffers + [allocate(self._backend, need, self._device) for _ in fresh]

    def _made_views(self) -> list[_Views]:
        if self.packing.plan.delta_from:
            return []
        return [self._views_of(nth, runs) for nth, runs in enumerate(self.packing.runs or ())]

    def _views_of(self, nth: int, runs: Sequence[Run]) -> _Views:
        manifest, is_whole = self.packing.manifest, not self.packing.plan.lists_runs
        buffer = self._buffer(nth)
        parts = self._parts(self._wires[nth].bucket, runs)
        found = _Views(parts, [], [], [], self._slots(self._wires[nth].bucket, runs))
        for run, part in zip(runs, parts, strict=True):
            meta = manifest.tensors[run.tensor].meta
            first = run.first * meta.dtype.itemsize_bytes
            begin = _begin(run, part, meta)
            end = begin + run.num_elements * meta.dtype.itemsize_bytes
            view = buffer[begin:end].view(getattr(torch, meta.dtype.torch_name))
            found.views.append(view.view(meta.shape) if is_whole else view)
            found.places.append(PlacedRange(begin - first, first, first + end - begin))
            edges = (buffer[part.at : begin], buffer[end : part.at + part.num_bytes])
            found.edges.extend([edge for edge in edges if edge.numel()])
        return found

    def _parts(self, bucket: int, runs: Iterable[Run]) -> list[Part]:
        manifest: Manifest = self.packing.manifest
        if self.packing.plan.lists_runs:
            return run_parts(manifest, runs)
        return whole_parts(manifest, bucket)

    def _slots(self, bucket: int, runs: Sequence[Run]) -> list[TensorSlot]:
        """Return runs as if each were a tensor of the payload."""
        if not self.packing.plan.lists_runs:
            return [self.packing.manifest.tensors[run.tensor] for run in runs]
        slots = []
        for run, part in zip(runs, self._parts(bucket, runs), strict=True):
            meta = self.packing.manifest.tensors[run.tensor].meta
            own = TensorMeta(meta.name, meta.dtype, (run.num_elements,))
            slots.append(TensorSlot(own, 0, _begin(run, part, meta)))
        return slots

    def _buffer(self, nth: int) -> torch.Tensor:
        return self.buffers[nth % len(self.buffers)]


# Layouts whose views are kept: a base, its merged form, some adapters.
_MAX_PACKERS = 4


class PackerCache:
    """Packers of a sender's last pushes, in the same buffers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._packers: list[Packer] = []

    def find(self, packing: PackedLayout, backend: str) -> Packer:
        """Return the packer of a packing; a new one uses the buffers of the former ones. Those of
        which it cannot use every buffer are dropped, and their memory with them."""
        for kept in self._packers:
            if kept.packing is packing:
                return kept
        largest = max((packer.buffers for packer in self._packers), key=len, default=[])
        made = Packer(packing, largest, self._device, backend)
        most = largest if _are_among(made.buffers, largest) else made.buffers
        former = [p for p in self._packers[1 - _MAX_PACKERS :] if _are_among(p.buffers, most)]
        self._packers = [*former, made]
        return made

    def keep_only(self, packer: Packer) -> None:
        """Drop the other packers, whose buffers are not safe to use."""
        self._packers = [packer]

    def clear(self) -> None:
        """Drop all packers."""
        self._packers = []


def _are_among(some: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> bool:
    return all(any(own is buffer for buffer in buffers) for own in some)


class PackedBuckets:
    """Buckets of one push, as a packer fills them; see ``weft_rl.transport.sender.HeldBuckets``.

    Args:
        packer: Packer of the reader's packing.
        reader: Content of the push.
        nonce: Nonce of the transfer.
        finite: Refuse NaN and infinities.
        packers: All packers of the sender.
    """

    def __init__(
        self, packer: Packer, reader: Reader, nonce: int, finite: bool, packers: PackerCache
    ) -> None:
        self._packer, self._packers, self._reader = packer, packers, reader
        self._nonce, self._finite = nonce, finite
        packing = packer.packing
        self.manifest, self.plan, self.sender = packing.manifest, packing.plan, packing.sender
        self.num_buffers = len(packer.buffers)
        #: Sum of the digests of each tensor's runs that were packed, modulo 2**64.
        self.totals = [0] * len(packing.manifest.tensors)
        #: Whether the reader has failed, or gave what must not be sent: no other group helps.
        self.spoiled = False

    def make(self, index: int, on_progress: Callable[[], None]) -> SealedBucket:
        """See ``Buckets``: read a bucket's elements, digest and seal it."""
        try:
            packed = self._packer.pack(
                index, self._reader, self._nonce, finite=self._finite, on_progress=on_progress
            )
            self._reader.on_packed(index, packed.payload, packed)
            if index + 1 == len(self.plan.sent_by(self.sender)):
                self._reader.end_packing()
        except BaseException:
            self.spoiled = True
            raise
        for run, digest in zip(packed.runs, packed.digests, strict=True):
            self.totals[run.tensor] = (self.totals[run.tensor] + digest) % 2**64
        return packed.sealed

    def are_summed(self) -> bool:
        """See ``Buckets``: return whether the senders have added up their parts."""
        return self._reader.add_up(self.totals).done

    def digests(self, made: list[int]) -> list[int]:
        return [total % 2**64 for total in self._reader.add_up(self.totals).result()]

    def wire(self, index: int) -> torch.Tensor:
        return self._packer.wire(index)

    def move(self, held: range) -> None:
        self._packer.move(held)
        self._packers.keep_only(self._packer)


class MixedBuckets:
    """Buckets of a mixed push: of a delta, and then of all elements, each part in buffers of its
    own. The digests are those of all elements as they were packed; see ``HeldBuckets``.

    Args:
        reader: Content of the push; the second part's is behind it.
        changes, whole: Buckets of the two parts.
    """

    def __init__(self, reader: Reader, changes: PackedBuckets, whole: PackedBuckets) -> None:
        self._reader, self._changes, self._whole = reader, changes, whole
        self.manifest, self.plan, self.sender = whole.manifest, reader.plan, whole.sender
        #: As few as a part has that uses a buffer twice: these have as many as a push may have.
        self.num_buffers = max(changes.num_buffers, whole.num_buffers)
        self._num_changes = len(changes.plan.sent_by(self.sender))

    @property
    def spoiled(self) -> bool:
        """See ``HeldBuckets``."""
        return self._changes.spoiled or self._whole.spoiled

    def make(self, index: int, on_progress: Callable[[], None]) -> SealedBucket:
        buckets, nth = self._place(index)
        made = buckets.make(nth, on_progress)
        if index + 1 == len(self.plan.sent_by(self.sender)):
            self._reader.note_totals(self._whole.totals)
        return made

    def are_summed(self) -> bool:
        return self._whole.are_summed()

    def digests(self, made: list[int]) -> list[int]:
        return self._whole.digests(made)

    def wire(self, index: int) -> torch.Tensor:
        buckets, nth = self._place(index)
        return buckets.wire(nth)

    def move(self, held: range) -> None:
        before = self._num_changes
        self._changes.move(range(min(held.start, before), min(held.stop, before)))
        self._whole.move(range(max(0, held.start - before), max(0, held.stop - before)))

    def _place(self, index: int) -> tuple[PackedBuckets, int]:
        """Return the part that a bucket is in, and its place there."""
        if index < self._num_changes:
            return self._changes, index
        return self._whole, index - self._num_changes


def _begin(run: Run, part: Part, meta: TensorMeta) -> int:
    """Return the first byte of a run's elements in its payload."""
    return part.at + run.first * meta.dtype.itemsize_bytes - part.first_byte


def _fill(payload: torch.Tensor, runs: Sequence[Run], into: _Views, reader: Reader) -> Digests:
    """Copy known runs to their places and begin to digest them. Both are one reading where all lie
    on the payload's device as they travel."""
    if into.edges:  # they are digested with the runs
        torch._foreach_zero_(into.edges)
    if is_worth_it(into.views) and not any(run.repeats > 1 for run in runs):
        held = reader.by_reference(runs)
        if found := resident(held, [view.dtype for view in into.views]):
            if payload.is_cuda:
                digests = pack_tensors(found, into.places, payload)
            else:
                digested = pack_digesting(found, into.views, payload, into.parts)
                digests = None if digested is None else Digests(digested)
            if digests is not None:
                return digests
    reader.fill(runs, into.views)
    return start_digests(payload, into.parts)


def is_worth_it(views: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors are copied and digested in one reading. True for tensors on an
    accelerator, and on the host where any is large."""
    return any(view.is_cuda or view.nbytes >= PIECE_BYTES for view in views)


def resident(
    held: Sequence[torch.Tensor | None], dtypes: Sequence[torch.dtype]
) -> list[torch.Tensor] | None:
    """Return the tensors if all are there, in the dtypes that they travel in; else None."""
    found = [t for t, dtype in zip(held, dtypes, strict=True) if t is not None and t.dtype == dtype]
    return found if len(found) == len(held) else None
