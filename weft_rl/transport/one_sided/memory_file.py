"""Memory that another process can map: a sender's buffers, and their mappings at receivers.

A memory file has no name, and is gone with the last process that maps it. It is sealed against
shrinking before anybody else knows it, so that reading it can never end a receiver by SIGBUS; and
against being written by others, where the kernel can.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from weft_rl.contract.errors import CapacityError, UnsupportedError
from weft_rl.transport.one_sided.device_memory import copy_to
from weft_rl.transport.one_sided.messages import Export, OneSidedError, next_export_id

# Linux 5.1; Python names it since 3.13.
_F_SEAL_FUTURE_WRITE: Final = 0x0010
# Of stat, on every file system.
_BLOCK_BYTES: Final = 512
# Between two looks at whether the group was aborted: a millisecond's work.
_COPIED_BYTES: Final = 4 * 2**20


class MemoryFile(mmap.mmap):
    """A sealed memory file of this process, mapped to be written; lives as long as tensors
    that view it."""

    fd: int
    export_id: int
    """Number unlike any other export's of this process."""

    def offer(self) -> tuple[Export, int]:
        """Return the message by which another process can map it, and the descriptor that goes with
        it."""
        return Export(self.export_id, len(self)), self.fd


# By the address that they are mapped at.
_files: weakref.WeakValueDictionary[int, MemoryFile] = weakref.WeakValueDictionary()


def allocate(num_bytes: int) -> torch.Tensor:
    """Return a zeroed uint8 tensor, already touched, in a memory file of its own.

    Raises:
        CapacityError: This machine has no room.
    """
    fd = os.memfd_create("weft-buffer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        except OSError as error:
            raise CapacityError(
                f"this machine has no room for a buffer of {num_bytes:,} bytes: {error}"
            ) from error
        file = MemoryFile(fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        # What is mapped already stays writable: the pages here.
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    file.fd, file.export_id = fd, next_export_id()
    weakref.finalize(file, os.close, fd).atexit = False
    tensor = torch.frombuffer(file, dtype=torch.uint8)
    _files[tensor.data_ptr()] = file
    return tensor


def file_of(tensor: torch.Tensor) -> tuple[MemoryFile, int]:
    """Return the memory file that a tensor views, and where in it the tensor begins.

    Raises:
        UnsupportedError: It views other memory, which no other process can map. It is not copied
            to such memory here: that would cost what this backend saves.
    """
    begin = tensor.untyped_storage().data_ptr() if tensor.device.type == "cpu" else 0
    file = _files.get(begin)
    if file is None or not tensor.is_contiguous():
        raise UnsupportedError("what is sent one-sided must lie in a buffer of backends.allocate")
    return file, tensor.data_ptr() - begin


class Mapping:
    """A peer's memory file, mapped to be read.

    Args:
        fd: Descriptor of the file; not needed any longer.
        num_bytes: Number of bytes to map.

    Raises:
        OneSidedError: It is no memory file, is smaller, could be shrunk, or has holes: mapping
            it would fill them with this machine's memory.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        try:
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise OneSidedError("the peer's memory file is not sealed against shrinking")
            status = os.fstat(fd)
            if not 0 < num_bytes <= status.st_size:
                raise OneSidedError(
                    f"the peer's memory file has {status.st_size:,} of {num_bytes:,} bytes"
                )
            held_bytes = status.st_blocks * _BLOCK_BYTES
            if held_bytes < status.st_size:
                raise OneSidedError(
                    f"the peer's memory file has holes: {held_bytes:,} of {status.st_size:,} bytes "
                    "are there"
                )
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._map = mmap.mmap(fd, num_bytes, flags=flags, prot=mmap.PROT_READ)
        except OSError as error:  # also where it is no memory file
            raise OneSidedError(f"the peer's memory cannot be mapped: {error}") from error
        self.content = np.frombuffer(self._map, dtype=np.uint8)

    def copy(
        self,
        first_byte: int,
        target: torch.Tensor,
        check: Callable[[], None],
        after: torch.cuda.Event | None = None,
    ) -> None:
        """Copy bytes from ``first_byte`` on until ``target`` is full; blocks, without the
        interpreter's lock.

        Args:
            target: uint8, contiguous.
            check: Called often; what it raises ends the copying.
            after: Event that must have happened before, where ``target`` is on a GPU.

        Raises:
            OneSidedError: There are not so many.
        """
        self._check_within(first_byte, target.numel())
        if target.is_cuda:
            check()
            stream = torch.cuda.Stream(target.device)  # type: ignore[no-untyped-call]
            copy_to(target, self.content.ctypes.data + first_byte, stream, after)
            return
        into = target.numpy()
        for at in range(0, target.numel(), _COPIED_BYTES):
            check()
            piece = into[at : at + _COPIED_BYTES]
            begin = first_byte + at
            np.copyto(piece, self.content[begin : begin + len(piece)])

    def read(self, first_byte: int, num_bytes: int) -> bytes:
        """Return a few bytes.

        Raises:
            OneSidedError: There are not so many.
        """
        end = first_byte + num_bytes
        if end > len(self.content):
            raise OneSidedError(f"bytes {first_byte:,} to {end:,} of {len(self.content):,}")
        return self.content[first_byte:end].tobytes()

    def lent(self, first_byte: int, num_bytes: int) -> torch.Tensor | None:
        """Return bytes where they lie, to be read only: they are the sender's.

        Raises:
            OneSidedError: There are not so many.
        """
        self._check_within(first_byte, num_bytes)
        # As writable memory, though it is not: of what is not, torch makes no tensor.
        begin = self.content.ctypes.data + first_byte
        memory: Any = (ctypes.c_ubyte * num_bytes).from_address(begin)
        memory.mapped = self.content  # lives as long as the tensor
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _check_within(self, first_byte: int, num_bytes: int) -> None:
        end = first_byte + num_bytes
        if not 0 <= first_byte <= end <= len(self.content):
            raise OneSidedError(f"bytes {first_byte:,} to {end:,} of {len(self.content):,}")

    def close(self) -> None:
        """Do nothing: the file is unmapped with its last reference."""
