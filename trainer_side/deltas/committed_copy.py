"""Copy of what a rank sent of the version that the pool committed last."""

from __future__ import annotations

import atexit
import logging
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from trainer_side.packing.packer import PackedBucket, PackedLayout, Packer
from weft_rl.contract.manifest import Run, align_up
from weft_rl.host_memory import why_no_room
from weft_rl.interrupts import OwnThread
from weft_rl.transport.group import CPU, on_device
from weft_rl.transport.wire.change_kernels import ALL_MEMORY
from weft_rl.transport.wire.changes import (
    EncodedChanges,
    RunPlace,
    grouped,
    has_kernels,
    join_changes,
    packed_places,
    start_applying,
    warm,
)

_log = logging.getLogger(__name__)

#: Buckets that are compared at a time: while a GPU does, the next one is begun.
NUM_COMPARED = 2
#: Bytes of changes that kernels apply at a time, which is waited for and takes some times as much
#: memory. Without kernels it is a bucket.
_APPLIED_BYTES = 2**25
#: Memory left to the training on an accelerator; else the copy lies in the host's.
_MARGIN_BYTES = 4 * 2**30


class CommittedCopy:
    """Copy of a rank's wire buckets as they were sent whole, with the digest of their version.

    It is of a version only from the commit on: while buckets are put, it is of none. The changes of
    a delta are applied to it on a thread of its own; what reads it waits for that.

    Args:
        packing: Buckets of the rank, of known runs.
        device: Device that they are packed on. Where an accelerator has no room, the copy lies in
            page-locked memory of the host.

    Raises:
        RuntimeError: There is no memory for it: torch's own.
        MemoryError: The host has not as much left.
    """

    def __init__(self, packing: PackedLayout, device: torch.device) -> None:
        assert packing.runs is not None, "a delta is of known runs"
        self.packing, self._device = packing, device
        self._digest = b""
        self._num_put = 0
        self._written: torch.cuda.Event | None = None
        self._packer: Packer | None = None
        self._small: torch.Tensor | None = None
        self._following: OwnThread[None] | None = None
        self._totals: list[int] = []
        wires = [packing.plan.buckets[i] for i in packing.plan.sent_by(packing.sender)]
        self.num_bytes = sum(wire.payload_bytes for wire in wires)
        is_aside = device.type == "cuda" and not _has_room(device, self.num_bytes)
        place = CPU if is_aside else device
        # Ranks may share a host: it must have room for what all of them copy.
        if place.type == "cpu" and (why := why_no_room(packing.manifest.total_bytes)):
            raise MemoryError(why)
        self._payloads = [
            torch.empty(wire.payload_bytes, dtype=torch.uint8, device=place, pin_memory=is_aside)
            for wire in wires
        ]
        for each in {device, place}:
            warm(each)

    @property
    def key(self) -> bytes:
        """Layout and content that it is of; empty where it is of no version."""
        return self.packing.manifest.layout_digest + self.content_digest if self.is_valid else b""

    @property
    def is_valid(self) -> bool:
        """True if it is of a version."""
        return bool(self.content_digest)

    @property
    def content_digest(self) -> bytes:
        """Content that it is of; empty where it is of no version."""
        self.settle()
        return self._digest

    @property
    def totals(self) -> list[int]:
        """For each tensor, the sum of its runs' digests here."""
        self.settle()
        return self._totals

    def packer(self, device: torch.device) -> Packer:
        """Return a packer, kept with the copy, for what must be packed to be compared with it."""
        if self._packer is None:
            self._packer = Packer(self.packing, device=device, most_buffers=NUM_COMPARED)
        return self._packer

    def group_memory(self, device: torch.device) -> Sequence[torch.Tensor]:
        """Return memory that neighbours are put together in, uint8, kept with the copy: as large as
        buckets, or where there is no room for that, as the largest tensor."""
        if self._small is None:
            try:
                return self.packer(device).buffers
            except torch.OutOfMemoryError as error:
                _log.warning("fewer tensors are compared at a time, which is slower: %s", error)
            largest = max(align_up(slot.meta.num_bytes) for slot in self.packing.manifest.tensors)
            self._small = torch.empty(largest, dtype=torch.uint8, device=device)
        return [self._small]

    @property
    def memory_bytes(self) -> int:
        """Bytes of the copy, and of what is kept with it to compare in."""
        kept = [] if self._packer is None else [*self._packer.buffers]
        kept += [] if self._small is None else [self._small]
        return self.num_bytes + sum(buffer.numel() for buffer in kept)

    def payload(self, nth: int) -> torch.Tensor:
        """Return the payload of a bucket of this rank, uint8: the copy itself, to be read on the
        calling thread's current stream."""
        self.settle()
        if self._written is not None:  # on the stream of another thread, perhaps
            torch.cuda.current_stream(self._device).wait_event(self._written)
        return self._payloads[nth]

    def put(self, nth: int, payload: torch.Tensor, packed: PackedBucket) -> None:
        """Copy a bucket that was packed, each in order. On an accelerator it is copied on the
        calling thread's current stream."""
        if nth == 0:
            self.settle()
            self._digest, self._num_put = b"", 0
            self._totals = [0] * len(self.packing.manifest.tensors)
        for run, digest in zip(packed.runs, packed.digests, strict=True):
            self._totals[run.tensor] = (self._totals[run.tensor] + digest) % 2**64
        # On the host nothing waits for a copy but this thread.
        self._payloads[nth].copy_(payload, non_blocking=payload.is_cuda)
        self._note_written()
        self._num_put += 1

    def open(self) -> None:
        """Begin to write whole tensors, one by one, to ``place``: it is of no version meanwhile."""
        self.settle()
        self._digest, self._num_put = b"", 0
        self._totals = self._totals or [0] * len(self.packing.manifest.tensors)

    def place(self, index: int) -> torch.Tensor:
        """Return the bytes of a whole tensor, uint8, with those that fill it up; as ``payload``."""
        slot = self.packing.manifest.tensors[index]
        end = slot.offset_bytes + align_up(slot.meta.num_bytes)
        return self.payload(slot.bucket)[slot.offset_bytes : end]

    def wrote(self, index: int, digest: int) -> None:
        """Take note of a tensor's digest once it is written to its place."""
        self._totals[index] = digest
        self._note_written()

    def close(self) -> None:
        """Take note that every tensor was written."""
        self._num_put = len(self._payloads)

    def committed(self, content_digest: bytes) -> None:
        """Record that the pool has committed what was put, or written, if that is all."""
        self._digest = content_digest if self._num_put == len(self._payloads) else b""

    def apply(
        self, coded: Sequence[EncodedChanges], content_digest: bytes, totals: Sequence[int]
    ) -> None:
        """Begin to bring the copy up to date by the changes of a delta that the pool has committed;
        returns at once. Where it fails, the copy is of no version, and the log says why."""
        self.settle()
        self._digest, self._written = b"", None
        is_coded = None
        if self._device.type == "cuda":
            is_coded = torch.cuda.current_stream(self._device).record_event()
        work = partial(self._apply, coded, content_digest, totals, is_coded)
        self._following = OwnThread(work).start()
        _FOLLOWING.add(self)

    def settle(self) -> None:
        """Block until ``apply`` has ended."""
        if self._following is None:
            return
        try:
            self._following.result()
        except Exception as error:  # noqa: BLE001 (whatever failed, the copy is of no version)
            _log.warning("the next push sends all elements, for a new copy of them: %s", error)
        self._following = None
        _FOLLOWING.discard(self)

    def _apply(
        self,
        coded: Sequence[EncodedChanges],
        content_digest: bytes,
        totals: Sequence[int],
        is_coded: torch.cuda.Event | None,
    ) -> None:
        begun, nth = deque[Callable[[], object]](), 0
        most_bytes = _APPLIED_BYTES if any(has_kernels(p.device) for p in self._payloads) else 0
        with on_device(self._device):
            if is_coded is not None:
                torch.cuda.current_stream(self._device).wait_event(is_coded)
            try:
                for group in grouped(coded, most_bytes):
                    end = nth + sum(part.num_buckets for part in group)
                    begun.append(self._start_applying(range(nth, end), group))
                    nth = end
                    if len(begun) == NUM_COMPARED:
                        begun.popleft()()
                for ended in begun:
                    ended()
            finally:  # nothing that was begun reads what is freed, or writes after what comes next
                if is_coded is not None:
                    torch.cuda.current_stream(self._device).synchronize()
        self._totals, self._digest = list(totals), content_digest

    def _start_applying(
        self, nths: Sequence[int], coded: Sequence[EncodedChanges]
    ) -> Callable[[], object]:
        """Begin to apply the changes of some buckets; see ``start_applying``."""
        assert self.packing.runs is not None
        runs, places = list[Run](), list[RunPlace]()
        first = min((self._payloads[nth] for nth in nths), key=lambda data: data.data_ptr())
        for nth in nths:
            own, begin = self.packing.runs[nth], self._payloads[nth].data_ptr() - first.data_ptr()
            for place in packed_places(own, self.packing.itemsizes(own)):
                places.append(place._replace(at=begin + place.at))
            runs += own
        payload, sizes = join_changes(coded).to(first.device), self.packing.itemsizes(runs)
        num_bytes = ALL_MEMORY if len(nths) > 1 else None
        return start_applying(payload, runs, sizes, first, places, num_bytes)

    def _note_written(self) -> None:
        if self._device.type == "cuda":
            self._written = torch.cuda.current_stream(self._device).record_event()


def _has_room(device: torch.device, num_bytes: int) -> bool:
    free_bytes, _ = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return num_bytes + _MARGIN_BYTES <= free_bytes + own


#: Copies that changes are being applied to.
_FOLLOWING = weakref.WeakSet[CommittedCopy]()


@atexit.register
def _settle_all() -> None:
    """Wait for threads that work in torch: ended there, they end the process by SIGABRT."""
    for copy in [*_FOLLOWING]:
        copy.settle()
