"""verl on a CPU: a platform of verl's own interface, chosen by ``VERL_PLATFORM=cpu``.

verl ships platforms of accelerators alone; its FSDP engine needs no more than this to train here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


class _Device:
    """What verl asks of ``torch.cuda`` and ``torch.cpu`` lacks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def memory_allocated(self, *args: Any) -> int:
        return 0

    max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated

    def mem_get_info(self, *args: Any) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def empty_cache(self) -> None:
        pass

    def get_device_name(self, *args: Any) -> str:
        return "CPU"


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = "cpu"
    vendor_name = "nobody"
    device_module = _Device()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: Any) -> None:
        pass

    def synchronize(self, device_index: Any = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"  # Ray is told that it has one

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


_init_process_group = torch.distributed.init_process_group


def _once(backend: str | None = None, **others: Any) -> None:
    """verl names a backend for the CPU and one for its device, which are one here."""
    _init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **others)


torch.distributed.init_process_group = _once
