"""vLLM's sleep mode: differences between its versions, and the memory that it frees."""

from __future__ import annotations

import importlib
from typing import Any


async def fall_asleep(engine: Any, level: int) -> None:
    """Free the accelerator's memory; move the weights to the host (level 1) or discard them (2).

    Resets the prefix cache.
    """
    await engine.sleep(level=level)


async def wake_up(engine: Any, tags: list[str]) -> None:
    """Take back the memory of the "weights" or of the "kv_cache".

    After level 2 the model's buffers are all that has its values again.
    """
    await engine.wake_up(tags)


def can_sleep_in_part() -> bool:
    """Return whether an engine with awake weights and a sleeping KV cache can be put to sleep.

    0.26 takes such an engine to be asleep already.
    """
    executor = importlib.import_module("vllm.v1.executor.abstract").Executor
    return isinstance(getattr(executor, "is_sleeping", None), property)


def weights_memory() -> list[tuple[int, int]]:
    """Return address and bytes of what sleep level 2 discards with the weights, in a worker."""
    held = _held()
    return [(address, data.handle[1]) for address, data in held.items() if data.tag == "weights"]


def waking_bytes() -> int:
    """Return the bytes that an engine takes of the accelerator as its weights wake, in a worker.

    They are those of all that sleeps but the KV cache.
    """
    return sum(data.handle[1] for data in _held().values() if data.tag != "kv_cache")


def _held() -> dict[int, Any]:
    """Return the allocations that sleep gives back, by address, even while they are given back."""
    device_allocator = importlib.import_module("vllm.device_allocator")
    held: dict[int, Any] = device_allocator.get_mem_allocator_instance().pointer_to_data
    return held
