"""Memory for a version's bytes that several workers of one machine map as one copy.

On the host it is an anonymous memory file (``memfd``): it has no name that could leak
or collide, needs no room in /dev/shm (64 MiB in a default container), and is gone
when the last process that maps it ends, however it ends. Another worker of the
same user attaches it by the owner's pid and descriptor. On an accelerator it is an
allocation of torch's, which other processes map through CUDA's IPC.

Segments that are free are kept for transfers of the same layouts.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch.multiprocessing import reductions

from weft_rl.contract.errors import CapacityError, NotReadyError
from weft_rl.transport.speaking import Speak, silent, speaking

_GIB = 2**30
#: Memory is made and copied in slices of so much, which take a fraction of a second.
SLICE_BYTES = 256 * 2**20


class Segment(Protocol):
    """Writable bytes; the memory lives as long as this object or any tensor viewing
    ``data``."""

    num_bytes: int
    owned: bool
    """Whether this process allocated it; others' memory is not ours to reuse."""

    @property
    def data(self) -> torch.Tensor:
        """uint8, shape (num_bytes,), contiguous; blocks until ``fill`` is done."""

    @property
    def ref(self) -> SegmentRef:
        """What another process attaches it by, while this object lives. Blocks as
        ``data``."""

    def fill(self, source: torch.Tensor) -> None:
        """Copy bytes to the beginning; from an accelerator without blocking, once the calling
        thread's current stream has made them. They must stay as they are meanwhile; their memory
        may be given back to torch."""


class SegmentRef(Protocol):
    """How another process of this machine finds a segment."""

    def attach(self) -> Segment:
        """Map it.

        Raises:
            NotReadyError: Its owner is gone.
        """


# -- on the host -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostRef:
    """See ``SegmentRef``."""

    pid: int
    fd: int
    num_bytes: int

    def attach(self) -> Segment:
        """See ``SegmentRef``."""
        try:
            fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise NotReadyError(
                f"the worker (pid {self.pid}) that holds the staged copy is gone: {error}"
            ) from error
        return HostSegment(fd, self.num_bytes, os.getpid(), owned=False)


class HostSegment:
    """A mapped ``memfd``.

    Args:
        pinned: Page-locked for the current CUDA device, so that copies to and from it
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
        speak: Speak = silent,
    ) -> None:
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
            # One call, however long it takes: a copy may not span two locked ranges.
            device = torch.cuda.current_device()
            self._pinned_at = speaking(
                lambda: _pin(self._data, device), lambda: speak(num_bytes, num_bytes)
            )

    @classmethod
    def allocate(
        cls, num_bytes: int, *, pinned: bool = False, speak: Speak = silent
    ) -> HostSegment:
        """New memory, already touched: page faults would halve a receive's speed.

        Args:
            speak: Called with the bytes that there are, and are to be, slice by slice.

        Raises:
            CapacityError: This machine has no room.
        """
        fd = os.memfd_create("weft", os.MFD_CLOEXEC)
        try:
            _fill(fd, num_bytes, speak)
            return cls(fd, num_bytes, os.getpid(), owned=True, pinned=pinned, speak=speak)
        except BaseException:
            os.close(fd)
            raise

    @property
    def data(self) -> torch.Tensor:
        """See ``Segment``."""
        self._settle()
        return self._data

    @property
    def ref(self) -> SegmentRef:
        """See ``Segment``."""
        self._settle()
        return HostRef(self._pid, self._fd, self.num_bytes)

    def fill(self, source: torch.Tensor) -> None:
        """See ``Segment``."""
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
        with contextlib.suppress(Exception):  # at the end of the process, or half made
            self._settle()
        if at := getattr(self, "_pinned_at", 0):
            with contextlib.suppress(Exception):  # at the end of the process
                _cudart().cudaHostUnregister(at)
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)  # the mapping itself ends with its last tensor


def _fill(fd: int, num_bytes: int, speak: Speak) -> None:
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
        speak(end, num_bytes)


def _pin(data: torch.Tensor, device: int) -> int:
    """Page-lock memory; returns where it begins, or 0 if the driver will not: copies are
    then slower, and right."""
    with torch.cuda.device(device):
        status = _cudart().cudaHostRegister(data.data_ptr(), data.numel(), 0)
    return data.data_ptr() if int(status) == 0 else 0


@lru_cache(maxsize=16)
def _aside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


# -- on an accelerator --------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRef:
    """See ``SegmentRef``: of a tensor of torch's, what CUDA's IPC has others map it by."""

    device: int
    num_bytes: int
    first_byte: int
    """In its storage."""
    storage_bytes: int
    storage_offset: int
    """Of the storage, in the allocation that ``handle`` is of."""
    handle: bytes
    counter_handle: bytes
    """Shared memory in which torch counts who has it mapped."""
    counter_offset: int
    event_handle: bytes
    """After which it may be read."""
    event_sync: bool

    @classmethod
    def of(cls, data: torch.Tensor) -> DeviceRef:
        """Of a uint8 tensor on an accelerator; torch counts one more that has it mapped."""
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
        """See ``SegmentRef``."""
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


class DeviceSegment:
    """An allocation on an accelerator."""

    def __init__(self, data: torch.Tensor, *, owned: bool) -> None:
        self.data, self.owned, self.num_bytes = data, owned, data.numel()

    @classmethod
    def allocate(cls, num_bytes: int, device: torch.device) -> DeviceSegment:
        """New memory beside what the engine holds.

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
        """See ``Segment``."""
        return DeviceRef.of(self.data)

    def fill(self, source: torch.Tensor) -> None:
        """See ``Segment``; ordered on the calling thread's current stream."""
        self.data[: source.numel()].copy_(source)


#: Segments up to this size are kept twice, as adapters' are: where each push takes one and
#: retirement gives one back, it may come back just after the next push asked for memory.
_KEPT_TWICE_BYTES = 2**30


class SegmentPool:
    """Free segments of one worker, of two sizes at most: one of each, or two of a size up to
    ``_KEPT_TWICE_BYTES``. ``WorkerStore``'s lock guards them.

    Args:
        keeps: Whether a segment that is free is to be kept now.
    """

    def __init__(self, keeps: Callable[[Segment], bool] = lambda segment: True) -> None:
        self._keeps = keeps
        self._free: list[Segment] = []
        # By id, while they are sent.
        self._lent: Counter[int] = Counter()

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._free)

    @property
    def num_bytes(self) -> int:
        """Memory of all free segments."""
        return sum(segment.num_bytes for segment in self._free)

    def find(self, num_bytes: int, device: torch.device) -> Segment | None:
        """A free segment of that size there, which stays free."""
        fitting = (s for s in self._free if s.num_bytes == num_bytes and s.data.device == device)
        return next(fitting, None)

    def take(self, num_bytes: int, device: torch.device) -> Segment | None:
        """What ``find`` tells, the caller's from now on. Where there is none, those of other
        layouts are given back to the system, before the caller takes more."""
        segment = self.find(num_bytes, device)
        self._free = [free for free in self._free if segment is not None and free is not segment]
        return segment

    def put(self, *segments: Segment | None) -> None:
        """Let segments be reused that their owner needs no more; lent ones are left alone."""
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
        """Whether a segment is being sent."""
        return self._lent[id(segment)] > 0

    def lend(self, segment: object) -> None:
        """Note that a segment is being sent, until as many calls of ``take_back``."""
        self._lent[id(segment)] += 1

    def take_back(self, segment: object) -> None:
        """Note that one of those who send a segment has ended."""
        self._lent -= Counter([id(segment)])
