"""vLLM's sleep mode, where its versions differ, and what it does with memory."""

from __future__ import annotations

import importlib
from typing import Any


async def fall_asleep(engine: Any, level: int) -> None:
    """Move the weights to host memory (1) or discard them (2), and free the accelerator's;
    resets the prefix cache."""
    await engine.sleep(level=level)


async def wake_up(engine: Any, tags: list[str]) -> None:
    """Take memory back: of the "weights", or of the "kv_cache". At level 2 the model's buffers
    are all that has its values again."""
    await engine.wake_up(tags)


def can_sleep_in_part() -> bool:
    """Whether an engine whose weights are awake, and whose KV cache is not, can be put to
    sleep; 0.26 takes it to sleep already."""
    executor = importlib.import_module("vllm.v1.executor.abstract").Executor
    return isinstance(getattr(executor, "is_sleeping", None), property)


def weights_memory() -> list[tuple[int, int]]:
    """In a worker: address and bytes of what is discarded with the weights by sleep level 2."""
    held = _held()
    return [(address, data.handle[1]) for address, data in held.items() if data.tag == "weights"]


def waking_bytes() -> int:
    """In a worker: what the engine takes of the accelerator as its weights wake, and all else
    with them but the KV cache."""
    return sum(data.handle[1] for data in _held().values() if data.tag != "kv_cache")


def _held() -> dict[int, Any]:
    """The allocations that sleep gives back, by address, also while they are given back."""
    device_allocator = importlib.import_module("vllm.device_allocator")
    held: dict[int, Any] = device_allocator.get_mem_allocator_instance().pointer_to_data
    return held
