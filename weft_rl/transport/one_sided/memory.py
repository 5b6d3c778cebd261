"""Memory that other processes map: a sender's buffers, and their mappings at receivers.

On the host it is a memory file, which has no name, and is gone with the last process that maps it.
It is sealed against shrinking before anybody else knows it, so that reading it can never end a
receiver by SIGBUS; and against being written by others, where the kernel can.

On a GPU it is an allocation of our own, mapped by CUDA's IPC. It is outside torch's caching
allocator (its expandable segments have no handles) and vLLM's sleep allocator. What travels is the
GPU's UUID, CUDA's handle of 64 bytes and a size. An exporter that dies harms no reader, be it that
copies or that reads there by kernels of its own: its memory lasts as long as a mapping of it
(measured, 20 kills each).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import uuid
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch

from weft_rl.contract.errors import CapacityError, UnsupportedError
from weft_rl.transport.one_sided.messages import (
    Export,
    ExportDevice,
    OneSidedError,
    next_export_id,
)

# Linux 5.1; Python names it since 3.13.
_F_SEAL_FUTURE_WRITE: Final = 0x0010
# Of stat, on every file system.
_FILE_BLOCK_BYTES: Final = 512
# Between two looks at whether the group was aborted: a millisecond's work.
_COPIED_BYTES: Final = 4 * 2**20
# Smaller allocations may lie in a block with others, whose beginning is what a handle names.
_DEVICE_BLOCK_BYTES: Final = 2 * 2**20
_HANDLE_BYTES: Final = 64
# cudaIpcMemLazyEnablePeerAccess, cudaMemcpyDefault
_LAZY_PEER_ACCESS: Final = 1
_BY_ADDRESS: Final = 4


def allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return a zeroed uint8 tensor in memory of its own that other processes can map.

    Raises:
        CapacityError: This machine, or the GPU, has no room.
    """
    if device.type == "cuda":
        return allocate_block(num_bytes, device)
    return allocate_file(num_bytes)


def export_of(tensor: torch.Tensor) -> tuple[MemoryFile | DeviceView, int]:
    """Return the memory that a tensor of ``allocate`` lies in, and where in it the tensor begins.

    Raises:
        UnsupportedError: It lies in other memory, which no other process can map. It is not copied
            to such memory here: that would cost what this backend saves.
    """
    begin = tensor.untyped_storage().data_ptr()
    memory = _views.get(begin) or (_files.get(begin) if tensor.device.type == "cpu" else None)
    if memory is None or not tensor.is_contiguous():
        raise UnsupportedError("what is sent one-sided must lie in a buffer of backends.allocate")
    return memory, tensor.data_ptr() - begin


def map_export(
    export: Export | ExportDevice, fd: int | None, device: torch.device
) -> FileMapping | DeviceMapping:
    """Map memory that a peer has offered, to be copied to ``device``.

    Args:
        fd: Descriptor that came with the offer of a memory file; not needed any longer.

    Raises:
        OneSidedError: It cannot be mapped.
    """
    if isinstance(export, ExportDevice):
        return DeviceMapping(export, device)
    assert fd is not None, "a message without it is refused"
    return FileMapping(fd, export.num_bytes)


def _check_within(first_byte: int, num_bytes: int, size: int) -> None:
    end = first_byte + num_bytes
    if not 0 <= first_byte <= end <= size:
        raise OneSidedError(f"bytes {first_byte:,} to {end:,} of {size:,}")


# -- on the host -------------------------------------------------------------------------


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


def allocate_file(num_bytes: int) -> torch.Tensor:
    """Return a tensor as ``allocate``, already touched, in a memory file of its own."""
    try:
        file = _make_file(num_bytes)
    except OSError as error:  # no memory is free, or no descriptor
        raise CapacityError(
            f"this machine has no room for a buffer of {num_bytes:,} bytes: {error}"
        ) from error
    tensor = torch.frombuffer(file, dtype=torch.uint8)
    _files[tensor.data_ptr()] = file
    return tensor


def _make_file(num_bytes: int) -> MemoryFile:
    fd = os.memfd_create("weft-buffer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
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
    return file


class FileMapping:
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
            held_bytes = status.st_blocks * _FILE_BLOCK_BYTES
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
        _check_within(first_byte, target.numel(), len(self.content))
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
        _check_within(first_byte, num_bytes, len(self.content))
        return self.content[first_byte : first_byte + num_bytes].tobytes()

    def lent(self, first_byte: int, num_bytes: int) -> torch.Tensor | None:
        """Return bytes where they lie, to be read only: they are the sender's.

        Raises:
            OneSidedError: There are not so many.
        """
        _check_within(first_byte, num_bytes, len(self.content))
        # As writable memory, though it is not: of what is not, torch makes no tensor.
        begin = self.content.ctypes.data + first_byte
        memory: Any = (ctypes.c_ubyte * num_bytes).from_address(begin)
        memory.mapped = self.content  # lives as long as the tensor
        return torch.frombuffer(memory, dtype=torch.uint8)

    def close(self) -> None:
        """Do nothing: the file is unmapped with its last reference."""


# -- on a GPU ----------------------------------------------------------------------------


class _Handle(ctypes.Structure):
    _fields_ = (("content", ctypes.c_char * _HANDLE_BYTES),)


@lru_cache(maxsize=1)
def cudart() -> Any:
    """Return CUDA's runtime library, the one that torch has loaded.

    Raises:
        OneSidedError: There is none.
    """
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split()[-1] for line in maps if "libcudart.so" in line}
    if not paths:
        raise OneSidedError("torch has loaded no libcudart: is it built for CUDA?")
    return ctypes.CDLL(min(paths))


def _call(name: str, *arguments: object) -> None:
    status = getattr(cudart(), name)(*arguments)
    if status:
        cudart().cudaGetLastError()  # or torch's next call would be told of it
        raise OneSidedError(f"{name} failed with CUDA's error {status}")


def why_unavailable() -> str:
    """Return why this process can export no memory of a GPU; empty if it can."""
    try:
        cudart()
    except (OneSidedError, OSError) as error:
        return str(error)
    return ""


def uuid_of(device_index: int) -> bytes:
    """Return the UUID of a GPU that this process sees."""
    text = str(torch.cuda.get_device_properties(device_index).uuid)
    return uuid.UUID(text.removeprefix("GPU-")).bytes


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def is_visible(gpu: bytes) -> bool:
    """Return whether this process sees the GPU of that UUID."""
    return any(uuid_of(index) == gpu for index in range(torch.cuda.device_count()))


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class DeviceBlock:
    """Allocation on a GPU, freed with its last reference. All other processes must have unmapped it
    before.

    Raises:
        CapacityError: The GPU has no room.
        OneSidedError: CUDA gives no handle for it.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.export_id, self.device = next_export_id(), device
        self.num_bytes = -(-num_bytes // _DEVICE_BLOCK_BYTES) * _DEVICE_BLOCK_BYTES
        pointer, handle = ctypes.c_void_p(), _Handle()
        with _on(device):
            try:
                _call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(self.num_bytes))
            except OneSidedError as error:
                raise CapacityError(
                    f"{device} has no room for a buffer of {self.num_bytes:,} bytes: {error}"
                ) from error
            self.address = int(pointer.value or 0)
            weakref.finalize(self, _free, self.address, device).atexit = False
            _call("cudaIpcGetMemHandle", ctypes.byref(handle), pointer)
        self._offer = ExportDevice(
            self.export_id, self.num_bytes, uuid_of(_index(device)), ctypes.string_at(
                ctypes.byref(handle), _HANDLE_BYTES
            )
        )  # fmt: skip

    def offer(self) -> tuple[ExportDevice, None]:
        """Return the message by which another process can map it, and no descriptor."""
        return self._offer, None


def _free(address: int, device: torch.device) -> None:
    with _on(device):
        _call("cudaFree", ctypes.c_void_p(address))


class DeviceView:
    """Owner that torch's tensors of a block refer to: gone when none of them is left."""

    def __init__(self, block: DeviceBlock, num_bytes: int) -> None:
        self.block, self.export_id, self.offer = block, block.export_id, block.offer
        self.__cuda_array_interface__ = _interface(block.address, num_bytes)


def _interface(address: int, num_bytes: int) -> dict[str, object]:
    """Describe bytes on a GPU as torch asks for it, by ``__cuda_array_interface__``."""
    return {
        "shape": (num_bytes,),
        "typestr": "|u1",
        "data": (address, False),
        "strides": None,
        "version": 3,
    }


# By the address that they begin at.
_views: weakref.WeakValueDictionary[int, DeviceView] = weakref.WeakValueDictionary()


def as_tensor(view: DeviceView, device: torch.device) -> torch.Tensor:
    """Return the tensor of a view, which it keeps."""
    return torch.as_tensor(view, device=device)


def allocate_block(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return a tensor as ``allocate``, in an allocation of its own on a GPU."""
    view = DeviceView(DeviceBlock(num_bytes, device), num_bytes)
    tensor = as_tensor(view, device)
    _views[view.block.address] = view
    return tensor.zero_()


class _LentMemory:
    """Memory of a peer that is read in place."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = _interface(address, num_bytes)


class DeviceMapping:
    """A peer's block, mapped; see ``FileMapping``.

    Args:
        export: Message of the peer.
        device: The GPU that is copied to.

    Raises:
        OneSidedError: This process cannot map it.
    """

    def __init__(self, export: ExportDevice, device: torch.device) -> None:
        if not is_visible(export.gpu):
            raise OneSidedError(
                f"the sender's GPU {uuid.UUID(bytes=export.gpu)} is not visible to this process: "
                "name it in CUDA_VISIBLE_DEVICES, after its own"
            )
        # Before it is mapped: what fails afterwards would leave it so.
        self._is_near = device.type == "cuda" and export.gpu == uuid_of(_index(device))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        pointer = ctypes.c_void_p()
        handle = _Handle.from_buffer_copy(export.handle)
        with _on(device):
            _call(
                "cudaIpcOpenMemHandle",
                ctypes.byref(pointer),
                handle,
                ctypes.c_uint(_LAZY_PEER_ACCESS),
            )
        self._address, self._device = int(pointer.value or 0), device
        self._num_bytes = export.num_bytes

    def copy(
        self,
        first_byte: int,
        target: torch.Tensor,
        check: Callable[[], None],
        after: torch.cuda.Event | None = None,
    ) -> None:
        """See ``FileMapping.copy``; copies on a stream of its own, without spinning, and calls
        ``check`` before."""
        check()
        _check_within(first_byte, target.numel(), self._num_bytes)
        copy_to(target, self._address + first_byte, self._stream, after)

    def read(self, first_byte: int, num_bytes: int) -> bytes:
        """See ``FileMapping.read``; brings the bytes to the host."""
        _check_within(first_byte, num_bytes, self._num_bytes)
        is_cuda = self._device.type == "cuda"
        target = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        with _on(self._device):
            copy_to(target, self._address + first_byte, self._stream, None)
        return target.numpy().tobytes()

    def lent(self, first_byte: int, num_bytes: int) -> torch.Tensor | None:
        """Return bytes where they lie, to be read by this GPU's kernels while the block is mapped.
        Return None if they lie on another GPU: a wait for a link must not occupy this one.

        Raises:
            OneSidedError: There are not so many.
        """
        if not self._is_near:
            return None
        _check_within(first_byte, num_bytes, self._num_bytes)
        return torch.as_tensor(
            _LentMemory(self._address + first_byte, num_bytes), device=self._device
        )

    def close(self) -> None:
        """Unmap the block; a second call does nothing.

        Raises:
            OneSidedError: It stays mapped.
        """
        if self._address:
            with _on(self._device):
                _call("cudaIpcCloseMemHandle", ctypes.c_void_p(self._address))
            self._address = 0


def synchronize(device: torch.device) -> None:
    """Block until a GPU has done what this thread's stream was given; return at once for a CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Record an event behind what this thread's stream was given for a GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def copy_to(
    target: torch.Tensor,
    address: int,
    stream: torch.cuda.Stream | None,
    after: torch.cuda.Event | None,
) -> None:
    """Copy from an address, of whatever memory, into ``target``, and wait until that is done."""
    with _on(target.device):
        if stream is not None and after is not None:
            stream.wait_event(after)
        _call(
            "cudaMemcpyAsync",
            ctypes.c_void_p(target.data_ptr()),
            ctypes.c_void_p(address),
            ctypes.c_size_t(target.numel()),
            ctypes.c_int(_BY_ADDRESS),
            ctypes.c_void_p(0 if stream is None else stream.cuda_stream),
        )
        if stream is not None:
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(stream)
            done.synchronize()
