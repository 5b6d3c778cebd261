"""What differs between the sleep modes of vLLM's versions, without vLLM."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_side.vllm_engine.compat import bridges


def _module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(**members))


def test_an_executor_that_knows_which_tags_sleep_sleeps_in_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Newer:
        @property
        def is_sleeping(self) -> bool:
            return False

    class Older:
        """0.26 sets a flag in ``__init__``."""

    for executor, expected in ((Newer, True), (Older, False)):
        _module(monkeypatch, "vllm.v1.executor.abstract", Executor=executor)
        assert bridges.can_sleep_in_part() is expected


def test_what_is_discarded_is_what_was_allocated_for_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def data(tag: str, num_bytes: int) -> Any:
        return SimpleNamespace(tag=tag, handle=(0, num_bytes, 0, 0))

    held = {1000: data("weights", 64), 2000: data("kv_cache", 32), 3000: data("weights", 8)}
    allocator = SimpleNamespace(pointer_to_data=held)
    _module(monkeypatch, "vllm.device_allocator", get_mem_allocator_instance=lambda: allocator)
    assert bridges.weights_memory() == [(1000, 64), (3000, 8)]
    held[4000] = data("default", 16)  # which wakes with whatever does
    assert bridges.waking_bytes() == 64 + 8 + 16
