"""Choosing a backend, and how NCCL's is handled; with a double of torch's class.

The real one runs in tests/gpu.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar, get_args

import pytest
import torch
import torch.distributed as dist

from weft_rl.contract.backends import BACKENDS, BackendChoice
from weft_rl.contract.errors import (
    PeerUnavailableError,
    TransferAbortedError,
    TransferTimeoutError,
    UnsupportedError,
)
from weft_rl.transport import backends
from weft_rl.transport.group import CPU, SideGroup, num_parked_groups, window
from weft_rl.transport.wire.lane_options import LaneOptions


class FakeNccl:
    """``dist.ProcessGroupNCCL``: works end when told to, or by ``abort``."""

    made: ClassVar[list[FakeNccl]] = []

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=1)
            self._timeout = timedelta(0)

    def __init__(self, store: object, rank: int, size: int, options: Any) -> None:
        self.options = options
        self.environment = dict(os.environ)
        self.ended, self.can_abort = threading.Event(), threading.Event()
        self.can_abort.set()
        self.error: RuntimeError | None = None
        FakeNccl.made.append(self)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        return SimpleNamespace(is_completed=self.ended.is_set, wait=self._wait)

    def _wait(self) -> None:
        if self.error is not None:
            raise self.error

    def abort(self) -> None:
        self.can_abort.wait(10)
        self.ended.set()


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A side group over the double, and the double."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(backends, "why_unavailable", lambda *_: "")
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    group = SideGroup(object(), 1, 2, LaneOptions(host=""), backend="nccl", device=CPU)
    return group, FakeNccl.made[-1]


BUFFER = torch.zeros(256, dtype=torch.uint8)


def test_a_cpu_has_no_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backends.available_backends(CPU) == ("one-sided", "stream", "gloo")
    monkeypatch.setenv("WEFT_ONE_SIDED_DIR", "/nowhere/at/all")
    assert backends.available_backends(CPU) == ("stream", "gloo")
    with pytest.raises(
        UnsupportedError, match=r"'nccl' is not available for cpu: it .*; have stream, gloo"
    ):
        SideGroup(object(), 0, 2, LaneOptions(host="127.0.0.1"), backend="nccl")


def test_a_choice_is_auto_or_a_backend() -> None:
    assert {*get_args(BackendChoice)} == {"auto", *BACKENDS}


def test_an_accelerator_has_a_wider_window() -> None:
    cuda = torch.device("cuda", 1)
    assert (window(CPU, "gloo"), window(cuda, "nccl"), window(cuda, "one-sided")) == (2, 3, 4)


def test_the_watchdog_may_not_end_the_process(monkeypatch: pytest.MonkeyPatch, nccl: Any) -> None:
    _, made = nccl
    assert made.environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert made.environment["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert made.options._timeout > timedelta(days=1)
    assert made.options.config.blocking == 0
    assert "TORCH_NCCL_ENABLE_MONITORING" not in os.environ
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    SideGroup(object(), 1, 2, LaneOptions(host=""), backend="nccl", device=CPU)
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "1"  # the application's own, again


def test_a_broadcast_ends_when_the_device_has(nccl: Any) -> None:
    group, made = nccl
    operation = group.broadcast(BUFFER, 10)
    threading.Timer(0.02, made.ended.set).start()
    operation.wait(time.monotonic() + 10)
    assert operation.done


def test_a_wait_ends_at_its_deadline(nccl: Any) -> None:
    operation = nccl[0].broadcast(BUFFER, 10)
    with pytest.raises(TransferTimeoutError):
        operation.wait(time.monotonic() + 0.01)


def test_a_broken_connection_is_a_peer_that_is_gone(nccl: Any) -> None:
    group, made = nccl
    operation = group.broadcast(BUFFER, 10)
    made.error = RuntimeError("remote process exited")
    made.ended.set()
    with pytest.raises(PeerUnavailableError, match="remote process exited"):
        operation.wait(time.monotonic() + 10)


def test_abort_does_not_wait_for_the_library(nccl: Any) -> None:
    group, made = nccl
    made.can_abort.clear()
    operation = group.broadcast(BUFFER, 10)
    group.abort(TransferAbortedError("enough"))
    with pytest.raises(TransferAbortedError, match="enough"):
        operation.wait(time.monotonic() + 10)
    assert num_parked_groups() >= 1
    assert not group.close(0.01)  # the device may still write
    made.can_abort.set()


def test_memory_is_safe_once_the_library_has_aborted(nccl: Any) -> None:
    group, _ = nccl
    group.broadcast(BUFFER, 10)
    assert group.close(10)
    with pytest.raises(TransferAbortedError):
        group.broadcast(BUFFER, 10)
