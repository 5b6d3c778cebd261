"""Host memory for copies to a GPU: locked where the system can, plain where it cannot."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from weft_rl.transport import backends
from weft_rl.transport.group import CPU
from weft_rl.transport.host_memory import host_buffer

_EMPTY = torch.empty


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes that are locked: here there is no GPU, and what is made is plain memory."""
    sizes = list[int]()

    def empty(size: int, *, pin_memory: bool = False, **others: Any) -> torch.Tensor:
        if pin_memory:
            sizes.append(size)
        return _EMPTY(size, **others)

    monkeypatch.setattr(torch, "empty", empty)
    return sizes


def test_a_process_without_a_gpu_locks_nothing(locked: list[int]) -> None:
    assert backends.allocate("stream", 4096, CPU).numel() == 4096
    assert not locked


def test_one_that_uses_a_gpu_sends_from_locked_zeros(
    locked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not backends.allocate("gloo", 4096, CPU).any()
    assert locked == [4096]


def test_where_nothing_more_can_be_locked_it_is_plain_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def empty(size: int, *, pin_memory: bool = False, **others: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: no room, says this test\nand a page more")
        return _EMPTY(size, **others)

    monkeypatch.setattr(torch, "empty", empty)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert host_buffer(4096, locked=True).numel() == 4096
    (record,) = caplog.records
    assert record.getMessage().endswith("are slower: CUDA error: no room, says this test")
