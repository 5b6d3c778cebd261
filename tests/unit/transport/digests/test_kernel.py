"""Whether the kernels for GPUs run; tests/kernels and tests/gpu have what they compute."""

from __future__ import annotations

import pytest
import torch

from weft_rl.transport.digests import kernel
from weft_rl.transport.digests.wsum64 import has_kernels


def test_the_host_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "works", lambda device: True)
    assert not has_kernels(torch.device("cpu"))
    assert has_kernels(torch.device("cuda"))


def test_without_triton_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "triton", None)
    assert not has_kernels(torch.device("cuda"))


def test_a_compiler_that_is_missing_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(kernel, "sums", failing)
    monkeypatch.setattr(kernel, "triton", object())
    kernel._is_right.cache_clear()
    try:
        assert [kernel.works(torch.device("cpu")) for _ in range(2)] == [False, False]
    finally:
        kernel._is_right.cache_clear()
    (record,) = caplog.records
    assert "copied to the host" in record.message
    assert "Failed to find C compiler" in record.message
