"""CUDA's runtime library, with two GPUs that are memory of this process.

What a test sees of it: ``allocated``, ``mapped``, and ``errors`` to come.
"""

from __future__ import annotations

import ctypes
import uuid
from typing import Any

import torch

from weft_rl.transport.one_sided.memory import DeviceView

#: Of the GPUs, by their index.
UUIDS = (uuid.UUID(int=1), uuid.UUID(int=2))


class CudartDouble:
    """As ``ctypes`` calls it."""

    def __init__(self) -> None:
        self.allocated: dict[int, Any] = {}
        self.mapped: list[int] = []
        #: In the order of what was done to an address.
        self.freed_while_mapped: list[int] = []
        self.errors: dict[str, int] = {}

    def __getattribute__(self, name: str) -> Any:
        errors = object.__getattribute__(self, "errors") if name.startswith("cuda") else {}
        if errors.get(name):
            return lambda *arguments: errors[name]
        return object.__getattribute__(self, name)

    def cudaMalloc(self, pointer: Any, size: ctypes.c_size_t) -> int:  # noqa: N802
        memory = (ctypes.c_uint8 * size.value)()
        address = ctypes.addressof(memory)
        self.allocated[address] = memory
        pointer._obj.value = address
        return 0

    def cudaFree(self, pointer: ctypes.c_void_p) -> int:  # noqa: N802
        address = pointer.value or 0
        if address in self.mapped:
            self.freed_while_mapped.append(address)
        del self.allocated[address]
        return 0

    def cudaIpcGetMemHandle(self, handle: Any, pointer: ctypes.c_void_p) -> int:  # noqa: N802
        content = (pointer.value or 0).to_bytes(8, "little").ljust(64, b"\xff")
        ctypes.memmove(ctypes.addressof(handle._obj), content, 64)
        return 0

    def cudaIpcOpenMemHandle(self, pointer: Any, handle: Any, flags: Any) -> int:  # noqa: N802
        address = int.from_bytes(ctypes.string_at(ctypes.addressof(handle), 8), "little")
        if address not in self.allocated:
            return 1
        self.mapped.append(address)
        pointer._obj.value = address
        return 0

    def cudaIpcCloseMemHandle(self, pointer: ctypes.c_void_p) -> int:  # noqa: N802
        self.mapped.remove(pointer.value or 0)
        return 0

    def cudaMemcpyAsync(  # noqa: N802
        self, into: Any, source: Any, size: Any, kind: Any, stream: Any
    ) -> int:
        ctypes.memmove(into.value, source.value, size.value)
        return 0

    def cudaGetLastError(self) -> int:  # noqa: N802
        return 0


def as_tensor(view: DeviceView, device: torch.device) -> torch.Tensor:
    """A tensor over a view's bytes, which keeps the view as torch's does."""
    size = view.__cuda_array_interface__["shape"][0]
    kind = type("Bytes", (ctypes.c_uint8 * size,), {})
    memory = kind.from_address(view.block.address)
    memory.view = view
    return torch.frombuffer(memory, dtype=torch.uint8)
