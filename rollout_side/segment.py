"""Host memory that several workers of one machine map as one copy.

A segment is an anonymous memory file (``memfd``): it has no name that could leak
or collide, needs no room in /dev/shm (64 MiB in a default container), and is gone
when the last process that maps it ends, however it ends. Another worker of the
same user attaches it by the owner's pid and descriptor.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import torch

from weft.contract.errors import NotReadyError


@dataclass(frozen=True, slots=True)
class SegmentRef:
    """How another process of this machine finds a segment; picklable."""

    pid: int
    fd: int
    num_bytes: int


class Segment:
    """Writable bytes; ``data`` is a uint8 tensor over them, shape (num_bytes,).

    The memory lives as long as this object or any tensor viewing ``data``.
    """

    def __init__(self, fd: int, num_bytes: int, pid: int, *, owned: bool) -> None:
        #: Whether this process allocated it; others' memory is not ours to reuse.
        self.owned = owned
        self._fd = fd
        self._pid = pid
        self.num_bytes = num_bytes
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if owned else 0)
        self._map = mmap.mmap(fd, num_bytes, flags=flags)
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)

    @classmethod
    def allocate(cls, num_bytes: int) -> Segment:
        """New memory, already touched: page faults would halve a receive's speed."""
        fd = os.memfd_create("weft", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, num_bytes)
            return cls(fd, num_bytes, os.getpid(), owned=True)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, ref: SegmentRef) -> Segment:
        """Map a segment of another worker.

        Raises:
            NotReadyError: Its owner is gone.
        """
        try:
            fd = os.open(f"/proc/{ref.pid}/fd/{ref.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise NotReadyError(
                f"the worker (pid {ref.pid}) that holds the staged copy is gone: {error}"
            ) from error
        return cls(fd, ref.num_bytes, os.getpid(), owned=False)

    @property
    def ref(self) -> SegmentRef:
        """For ``attach`` in another process while this object lives."""
        return SegmentRef(self._pid, self._fd, self.num_bytes)

    def __del__(self) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)  # the mapping itself ends with its last tensor
