"""Memory for a version's bytes that several workers of one machine map as one copy.

On the host it is an anonymous memory file (``memfd``). It has no name that could leak or collide,
and needs no room in /dev/shm (64 MiB in a default container). It is gone when the last process that
maps it ends, however it ends. Another worker of the same user attaches it by the owner's pid and
descriptor. On an accelerator it is an allocation of torch's, which other processes map through
CUDA's IPC.

``Memory`` allocates them; free segments are kept for transfers of the same layouts.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any

import torch
from torch.multiprocessing import reductions

from rollout_side.config import Staging
from weft_rl.contract.backends import BACKENDS
from weft_rl.contract.errors import CapacityError, NotReadyError
from weft_rl.interrupts import report_while
from weft_rl.progress import OnProgress, ignore_progress
from weft_rl.transport.group import CPU

_GIB = 2**30
#: Memory is made and copied in slices of so much, which take a fraction of a second.
SLICE_BYTES = 256 * 2**20


# -- on the host -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostRef:
    """Reference to host memory, by its owner's pid and descriptor."""

    pid: int
    fd: int
    num_bytes: int

    def attach(self) -> Segment:
        """Map the segment into this process."""
        try:
            fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise NotReadyError(
                f"the worker (pid {self.pid}) that holds the staged copy has ended: {error}"
            ) from error
        return HostSegment(fd, self.num_bytes, os.getpid(), owned=False)


class HostSegment:
    """Segment in host memory: a mapped ``memfd``, which lives as long as this object or any tensor
    viewing ``data``.

    Args:
        pinned: Whether to page-lock it for the current CUDA device, so that copies to and from it
            run at the speed of the bus.
    """

    def __init__(
        self,
        fd: int,
        num_bytes: int,
        pid: int,
        *,
        owned: bool,
        pinned: bool = False,
        on_progress: OnProgress = ignore_progress,
    ) -> None:
        #: Whether this process allocated it, and so may reuse it.
        self.owned = owned
        self._fd = fd
        self._pid = pid
        self.num_bytes = num_bytes
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if owned else 0)
        self._map = mmap.mmap(fd, num_bytes, flags=flags)
        self._data = torch.frombuffer(self._map, dtype=torch.uint8)
        self._filled: torch.cuda.Event | None = None
        self._pinned_at = 0
        if pinned:
            # One call for all of it: a copy may not span two locked ranges.
            device = torch.cuda.current_device()
            self._pinned_at = report_while(
                lambda: _pin(self._data, device), lambda: on_progress(num_bytes, num_bytes)
            )

    @classmethod
    def allocate(
        cls, num_bytes: int, *, pinned: bool = False, on_progress: OnProgress = ignore_progress
    ) -> HostSegment:
        """Allocate new memory, already touched: page faults would halve a receive's speed.

        Args:
            on_progress: Called slice by slice, with the bytes made so far and the bytes to make.

        Raises:
            CapacityError: This machine has no room.
        """
        fd = os.memfd_create("weft", os.MFD_CLOEXEC)
        try:
            _fill(fd, num_bytes, on_progress)
            return cls(
                fd, num_bytes, os.getpid(), owned=True, pinned=pinned, on_progress=on_progress
            )
        except BaseException:
            os.close(fd)
            raise

    @property
    def data(self) -> torch.Tensor:
        """Bytes as a contiguous uint8 tensor of shape (num_bytes,); blocks until ``fill`` is
        done."""
        self._settle()
        return self._data

    @property
    def ref(self) -> SegmentRef:
        """Reference by which another process attaches it, while this object lives. Blocks as
        ``data``."""
        self._settle()
        return HostRef(self._pid, self._fd, self.num_bytes)

    def fill(self, source: torch.Tensor) -> None:
        """Copy bytes to the beginning. From an accelerator it does not block: the copy begins once
        the calling thread's current stream has made the bytes. They must not change meanwhile;
        their memory may be given back to torch."""
        target = self.data[: source.numel()]
        if not source.is_cuda:
            target.copy_(source)
            return
        stream = _aside(source.device)
        stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        source.record_stream(stream)
        filled = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        filled.record(stream)
        self._filled = filled

    def _settle(self) -> None:
        """Block until nothing is written here any more."""
        if (filled := self._filled) is not None:
            filled.synchronize()
            self._filled = None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the process ends, or __init__ has failed
            self._settle()
        if at := getattr(self, "_pinned_at", 0):
            with contextlib.suppress(Exception):  # the process ends
                _cudart().cudaHostUnregister(at)
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)  # the mapping itself ends with its last tensor


def _fill(fd: int, num_bytes: int, on_progress: OnProgress) -> None:
    """Give a memory file its pages, slice by slice; other threads run meanwhile."""
    os.ftruncate(fd, num_bytes)
    for start in range(0, num_bytes, SLICE_BYTES):
        end = min(num_bytes, start + SLICE_BYTES)
        try:
            os.posix_fallocate(fd, start, end - start)
        except OSError as error:
            raise CapacityError(
                f"this machine has no room to stage {num_bytes / _GIB:.1f} GiB: {error}"
            ) from error
        on_progress(end, num_bytes)


def _pin(data: torch.Tensor, device: int) -> int:
    """Page-lock memory and return its address. Returns 0 if the driver refuses: copies are then
    slower, but right."""
    with torch.cuda.device(device):
        status = _cudart().cudaHostRegister(data.data_ptr(), data.numel(), 0)
    return data.data_ptr() if int(status) == 0 else 0


@lru_cache(maxsize=16)
def _aside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


# -- on an accelerator --------------------------------------------------------------


#: torch's and CUDA's handles have some dozens of bytes.
_Handle = Annotated[bytes, 1_024]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRef:
    """Reference to a torch tensor on an accelerator, which others map through CUDA's IPC."""

    device: int
    num_bytes: int
    first_byte: int
    """Offset of the first byte in its storage."""
    storage_bytes: int
    storage_offset: int
    """Offset of the storage in the allocation that ``handle`` refers to."""
    handle: _Handle
    counter_handle: _Handle
    """Handle of the shared memory in which torch counts the processes that have it mapped."""
    counter_offset: int
    event_handle: _Handle
    """Handle of the event after which it may be read."""
    event_sync: bool

    @classmethod
    def of(cls, data: torch.Tensor) -> DeviceRef:
        """Make a reference to a uint8 tensor on an accelerator; torch counts one more mapping of
        it."""
        _, arguments = reductions.reduce_tensor(data)  # type: ignore[no-untyped-call]
        (
            _, _, _, first_byte, _, _, device, handle, storage_bytes, storage_offset, _,
            counter_handle, counter_offset, event_handle, event_sync,
        ) = arguments  # fmt: skip
        return cls(
            device=device,
            num_bytes=data.numel(),
            first_byte=first_byte,
            storage_bytes=storage_bytes,
            storage_offset=storage_offset,
            handle=handle,
            counter_handle=counter_handle,
            counter_offset=counter_offset,
            event_handle=event_handle,
            event_sync=event_sync,
        )

    def attach(self) -> Segment:
        """Map the segment into this process; raises as ``HostRef.attach``."""
        try:
            data = reductions.rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
                torch.Tensor, (self.num_bytes,), (1,), self.first_byte, torch.storage.TypedStorage,
                torch.uint8, self.device, self.handle, self.storage_bytes, self.storage_offset,
                False, self.counter_handle, self.counter_offset, self.event_handle,
                self.event_sync,
            )  # fmt: skip
        except RuntimeError as error:
            raise NotReadyError(f"the staged copy cannot be mapped: {error}") from error
        return DeviceSegment(data, owned=False)


#: Reference by which another process of this machine finds a segment.
SegmentRef = HostRef | DeviceRef


class DeviceSegment:
    """Segment in an accelerator's memory."""

    def __init__(self, data: torch.Tensor, *, owned: bool) -> None:
        self.data, self.owned, self.num_bytes = data, owned, data.numel()

    @classmethod
    def allocate(cls, num_bytes: int, device: torch.device) -> DeviceSegment:
        """Allocate new memory beside what the engine holds.

        Raises:
            CapacityError: There is no room.
        """
        try:
            return cls(torch.empty(num_bytes, dtype=torch.uint8, device=device), owned=True)
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(device)
            raise CapacityError(
                f"{device} has {free / _GIB:.1f} of {total / _GIB:.1f} GiB free: no room to stage "
                f"{num_bytes / _GIB:.1f} GiB; start the replica with --staging host, or with a "
                "smaller --gpu-memory-utilization"
            ) from error

    @property
    def ref(self) -> SegmentRef:
        return DeviceRef.of(self.data)

    def fill(self, source: torch.Tensor) -> None:
        """Copy bytes to the beginning, ordered on the calling thread's current stream."""
        self.data[: source.numel()].copy_(source)


#: Writable bytes.
Segment = HostSegment | DeviceSegment


#: Segments up to this size are kept twice, as adapters' are: where each push takes one and
#: retirement gives one back, it may come back just after the next push asked for memory.
_KEPT_TWICE_BYTES = 2**30


class SegmentPool:
    """Free segments of one worker, of two sizes at most: one of each, or two of a size up to
    ``_KEPT_TWICE_BYTES``. ``WorkerStore``'s lock guards them."""

    def __init__(self, keeps: Callable[[Segment], bool] = lambda segment: True) -> None:
        self._keeps = keeps
        self._free: list[Segment] = []
        # Number of senders of each segment, by its id.
        self._lent: Counter[int] = Counter()

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._free)

    @property
    def num_bytes(self) -> int:
        """Bytes of all free segments."""
        return sum(segment.num_bytes for segment in self._free)

    def find(self, num_bytes: int, device: torch.device) -> Segment | None:
        """Return a free segment of that size on that device, which stays free; None if there is
        none."""
        fitting = (s for s in self._free if s.num_bytes == num_bytes and s.data.device == device)
        return next(fitting, None)

    def take(self, num_bytes: int, device: torch.device) -> Segment | None:
        """Take a free segment of that size on that device. If there is none, return None and give
        segments of other layouts back to the system, before the caller takes more."""
        segment = self.find(num_bytes, device)
        self._free = [free for free in self._free if segment is not None and free is not segment]
        return segment

    def put(self, *segments: Segment | None) -> None:
        """Add segments that their owner needs no more, for reuse; lent ones are left alone."""
        for segment in segments:
            if segment is None or not segment.owned or self.is_lent(segment):
                continue
            if not self._keeps(segment):
                continue
            alike = [free for free in self._free if free.num_bytes == segment.num_bytes]
            if len(alike) > (segment.num_bytes <= _KEPT_TWICE_BYTES):
                continue
            others = [free for free in self._free if free.num_bytes != segment.num_bytes]
            latest = [free for free in others if free.num_bytes == others[-1].num_bytes]
            self._free = [*latest, *alike, segment]

    def drop_on_device(self) -> None:
        """Give the free memory of an accelerator back."""
        self._free = [free for free in self._free if free.data.device.type == "cpu"]

    def is_lent(self, segment: object) -> bool:
        """Return whether a segment is being sent."""
        return self._lent[id(segment)] > 0

    def lend(self, segment: object) -> None:
        """Note that a segment is being sent, until as many calls of ``take_back``."""
        self._lent[id(segment)] += 1

    def take_back(self, segment: object) -> None:
        """Note that one sender of a segment has ended."""
        self._lent -= Counter([id(segment)])


#: Memory left to the running engine, for activations and NCCL's buffers.
MARGIN_BYTES = 2 * 2**30
# Buffers left for the largest layer: its tensors, and the layer made of them.
_SPARE_BUFFERS = 2


@dataclass
class Memory:
    """Allocator of segments, one per worker.

    While the engine sleeps, Weft does not take the memory that it gave back: another process uses
    it, and the weights need it free to wake when a base is loaded.

    Args:
        device: Device of the engine, on which NCCL receives.
        base_on_device: Whether bases are staged there. Adapters never are: their store is host
            memory, from which the engine loads evicted adapters again.
        in_place: Whether bases from a side group are not staged, but loaded from the buffers that
            they are received in.
    """

    device: torch.device = CPU
    base_on_device: bool = False
    in_place: bool = False
    sleeping_bytes: int | None = field(default=None, init=False)
    """Accelerator bytes that the engine's sleeping weights need to wake: 0 once they are awake,
    None once the engine is."""

    @property
    def is_asleep(self) -> bool:
        """True while the engine has not got back all memory that it gave back."""
        return self.sleeping_bytes is not None

    def fall_asleep(self, weights_bytes: int) -> None:
        """Record that the engine is about to give its memory back, ``weights_bytes`` of it
        weights."""
        self.sleeping_bytes = weights_bytes

    def wake_weights(self) -> None:
        """Record that the weights are awake, but not the KV cache; does nothing if awake."""
        if self.is_asleep:
            self.sleeping_bytes = 0

    def wake_up(self) -> None:
        """Record that the engine has all of its memory again."""
        self.sleeping_bytes = None

    def keeps_free(self, segment: Segment) -> bool:
        """Return whether to keep a segment that nothing needs any more, for reuse."""
        return not self.is_asleep or segment.data.device.type == "cpu"

    def give_back(self) -> None:
        """Give torch's cached accelerator memory back to the system, if the engine sleeps."""
        if self.is_asleep and self.device.type == "cuda":
            torch.cuda.empty_cache()

    def place(self, *, adapter: bool) -> torch.device:
        """Return the device that a version's bytes are put on."""
        return self.device if self.base_on_device and not adapter else CPU

    def allocate(
        self, num_bytes: int, *, adapter: bool, on_progress: OnProgress = ignore_progress
    ) -> Segment:
        """Allocate memory that was never handed out. Blocks for its page faults on the host (about
        0.3 s a GiB).

        Args:
            on_progress: Called often meanwhile.

        Raises:
            CapacityError: The accelerator has no room, or none beside sleeping weights.
        """
        place = self.place(adapter=adapter)
        if place.type != "cpu":
            self._check_beside_sleeping(num_bytes, place)
            return DeviceSegment.allocate(num_bytes, place)
        return HostSegment.allocate(
            num_bytes, pinned=self.device.type == "cuda", on_progress=on_progress
        )

    def room_for(
        self, num_bytes: int, device: torch.device, bound_bytes: int, num_needed: int
    ) -> int:
        """Return how many buffers of that size fit beside those that a transfer needs; 0 on the
        host.

        Leaves free the memory that the running engine needs, and that of its largest layer while it
        is loaded. 0 while the engine sleeps: more buffers serve to pause generation later.

        Args:
            bound_bytes: Bound of all of a transfer's buffers, if it needs no more.
            num_needed: Buffers that the transfer needs anyhow.

        Raises:
            CapacityError: The needed buffers do not fit beside sleeping weights.
        """
        if device.type != "cuda":
            return 0
        self._check_beside_sleeping(num_needed * num_bytes, device)
        if self.is_asleep:
            return 0
        room = spare_bytes(device) // num_bytes - num_needed - _SPARE_BUFFERS
        return max(0, min(room, bound_bytes // num_bytes - num_needed))

    def _check_beside_sleeping(self, num_bytes: int, device: torch.device) -> None:
        """Refuse to take memory that the engine's weights need to wake: they would be lost."""
        if not self.sleeping_bytes:
            return
        self.give_back()  # vLLM's allocator cannot use torch's cached memory
        free_bytes, _ = torch.cuda.mem_get_info(device)
        if free_bytes < self.sleeping_bytes + num_bytes:
            raise CapacityError(
                f"{device} has {free_bytes / _GIB:.1f} GiB free: no room for the "
                f"{self.sleeping_bytes / _GIB:.1f} GiB of sleeping weights and "
                f"{num_bytes / _GIB:.1f} GiB to receive the push in; free memory (of the trainer "
                "on this GPU, for example), or wake the replica first"
            )

    def device_of(self, backend: str) -> torch.device:
        """Return the device on which a side group of this backend receives."""
        return self.device if BACKENDS[backend].on_gpu else CPU


def spare_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that are free beside what the running engine needs."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_bytes + own - MARGIN_BYTES


def stage_on_device(
    staging: Staging, device: torch.device, model_bytes: int, free_bytes: int
) -> bool:
    """Return whether bases are staged on the engine's device.

    Args:
        model_bytes: Bytes of one copy of the base.
        free_bytes: Bytes that the device has free once the engine has taken its part.
    """
    if device.type == "cpu" or staging in ("host", "in-place"):
        return False
    return staging == "device" or model_bytes + MARGIN_BYTES <= free_bytes
