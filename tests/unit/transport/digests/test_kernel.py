"""Whether the kernels for GPUs run; tests/kernels and tests/gpu have what they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from weft_rl.transport.digests import kernel
from weft_rl.transport.digests.wsum64 import has_kernels


def test_the_host_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "works", lambda device: True)
    assert not has_kernels(torch.device("cpu"))
    assert has_kernels(torch.device("cuda"))


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Devices are tried anew, now and after the test."""
    kernel.works.cache_clear()
    yield
    kernel.works.cache_clear()


def _failing(*_: object) -> torch.Tensor:
    raise RuntimeError("Failed to find C compiler")


def _wrong(*_: object) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64)


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize(
    ("triton", "sums", "why"),
    [
        (None, None, "Triton cannot be imported"),
        (object(), _failing, "Failed to find C compiler"),
        (object(), _wrong, "give wrong digests"),
    ],
    ids=["no Triton", "no compiler", "wrong sums"],
)
def test_a_device_without_kernels_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    triton: object,
    sums: Callable[..., torch.Tensor] | None,
    why: str,
) -> None:
    monkeypatch.setattr(kernel, "sums", sums)
    monkeypatch.setattr(kernel, "triton", triton)
    assert [kernel.works(torch.device("cpu")) for _ in range(2)] == [False, False]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "tensors on cpu are copied to the host to be digested" in record.message
    assert why in record.message
