"""GPU buffers of our own that other processes map by CUDA's IPC: ``memory_file`` on a GPU.

They are outside torch's caching allocator (its expandable segments have no handles) and vLLM's
sleep allocator. What travels is the GPU's UUID, CUDA's handle of 64 bytes and a size. An exporter
that dies harms no reader, be it that copies or that reads there by kernels of its own: its memory
lasts as long as a mapping of it (measured, 20 kills each).
"""

from __future__ import annotations

import ctypes
import uuid
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, Final

import torch

from weft_rl.contract.errors import CapacityError
from weft_rl.transport.one_sided.messages import ExportDevice, OneSidedError, next_export_id

# Smaller allocations may lie in a block with others, whose beginning is what a handle names.
_BLOCK_BYTES: Final = 2 * 2**20
_HANDLE_BYTES: Final = 64
# cudaIpcMemLazyEnablePeerAccess, cudaMemcpyDefault
_LAZY_PEER_ACCESS: Final = 1
_BY_ADDRESS: Final = 4


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
        self.num_bytes = -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
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
        self.block = block
        self.__cuda_array_interface__ = _interface(block.address, num_bytes)

    @property
    def export_id(self) -> int:
        """Export number of its block."""
        return self.block.export_id

    def offer(self) -> tuple[ExportDevice, None]:
        """Return the offer of its block; see ``DeviceBlock.offer``."""
        return self.block.offer()


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


def allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return a zeroed uint8 tensor in an allocation of its own.

    Raises:
        CapacityError: The GPU has no room.
    """
    view = DeviceView(DeviceBlock(num_bytes, device), num_bytes)
    tensor = as_tensor(view, device)
    _views[view.block.address] = view
    return tensor.zero_()


def view_of(tensor: torch.Tensor) -> tuple[DeviceView, int] | None:
    """Return the view that a tensor is part of, and where in it the tensor begins; None where it is
    other memory."""
    begin = tensor.untyped_storage().data_ptr()
    view = _views.get(begin)
    if view is None or not tensor.is_contiguous():
        return None
    return view, tensor.data_ptr() - begin


class _Lent:
    """Memory of a peer that is read in place."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = _interface(address, num_bytes)


class DeviceMapping:
    """A peer's block, mapped; see ``memory_file.Mapping``.

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
        """Copy bytes from ``first_byte`` on until ``target`` is full; blocks until that is done, on
        a stream of its own, without spinning.

        Args:
            target: uint8, contiguous.
            check: Called before.
            after: Event that must have happened on the device before.

        Raises:
            OneSidedError: There are not so many.
        """
        check()
        self._check_size(first_byte, target.numel())
        copy_to(target, self._address + first_byte, self._stream, after)

    def read(self, first_byte: int, num_bytes: int) -> bytes:
        """Return a few bytes, brought to the host; blocks.

        Raises:
            OneSidedError: There are not so many.
        """
        self._check_size(first_byte, num_bytes)
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
        self._check_size(first_byte, num_bytes)
        return torch.as_tensor(_Lent(self._address + first_byte, num_bytes), device=self._device)

    def _check_size(self, first_byte: int, num_bytes: int) -> None:
        end = first_byte + num_bytes
        if end > self._num_bytes:
            raise OneSidedError(f"bytes {first_byte:,} to {end:,} of {self._num_bytes:,}")

    def close(self) -> None:
        """Unmap the block; a second call does nothing.

        Raises:
            OneSidedError: It stays mapped.
        """
        if self._address:
            with _on(self._device):
                _call("cudaIpcCloseMemHandle", ctypes.c_void_p(self._address))
            self._address = 0


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
