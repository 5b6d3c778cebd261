"""Memory that other processes map: files, and blocks of a GPU with a double of CUDA's runtime; the
real one runs in ``tests/gpu/test_pushes.py``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.doubles.cudart import UUIDS, CudartDouble, as_tensor
from tests.waits import stays, until
from weft_rl.contract.errors import CapacityError, UnsupportedError
from weft_rl.transport.one_sided import members, memory
from weft_rl.transport.one_sided.members import OneSidedReceiver, OneSidedSender, OneSidedWork
from weft_rl.transport.one_sided.memory import (
    DeviceMapping,
    allocate_block,
    allocate_file,
    export_of,
)
from weft_rl.transport.one_sided.messages import ExportDevice, OneSidedError
from weft_rl.transport.one_sided.trial import TrialAnswerer, why_not_readable
from weft_rl.transport.wire.options import BucketOptions

CPU = torch.device("cpu")
SIZE = 2**20
Join = Callable[[int], tuple[OneSidedSender, list[OneSidedReceiver]]]
Wait = Callable[[Callable[[], object]], None]


@pytest.fixture(autouse=True)
def cudart(monkeypatch: pytest.MonkeyPatch) -> CudartDouble:
    """The double in place of the library, and of what torch says of GPUs."""
    double = CudartDouble()
    monkeypatch.setattr(memory, "cudart", lambda: double)
    monkeypatch.setattr(memory, "as_tensor", as_tensor)
    monkeypatch.setattr(memory, "uuid_of", lambda index: UUIDS[index].bytes)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return double


def empty() -> torch.Tensor:
    return torch.zeros(SIZE, dtype=torch.uint8)


def push(sender: OneSidedSender, receivers: list[OneSidedReceiver], buffer: torch.Tensor) -> None:
    deadline = time.monotonic() + 10.0
    sent = sender.broadcast(buffer, 10.0)
    for receiver in receivers:
        into = empty()
        work = receiver.broadcast(into, 10.0)
        assert work.wait_until(deadline)
        work.finish()
        assert torch.equal(into, buffer)
    assert sent.wait_until(deadline)
    sent.finish()


def test_receivers_map_a_block_once_and_copy_out_of_it(join: Join, cudart: CudartDouble) -> None:
    sender, receivers = join(3)
    buffer = allocate_block(SIZE, CPU)
    for value in (1, 2):
        push(sender, receivers, buffer.fill_(value))
    assert len(cudart.mapped) == 3
    assert len(cudart.allocated) == 1


def test_a_block_is_unmapped_before_it_is_freed(join: Join, cudart: CudartDouble) -> None:
    sender, receivers = join(2)
    for value in range(3):
        push(sender, receivers, allocate_block(SIZE, CPU).fill_(value))
    last = allocate_block(SIZE, CPU).fill_(9)
    push(sender, receivers, last)
    until(lambda: len(cudart.allocated) <= 2)
    del last
    sender.abort()
    until(lambda: not cudart.allocated)
    assert not cudart.mapped
    assert not cudart.freed_while_mapped


@pytest.mark.parametrize("first", ["sender", "receiver"])
def test_so_it_is_where_either_leaves_first(join: Join, cudart: CudartDouble, first: str) -> None:
    sender, receivers = join(1)
    buffer = allocate_block(SIZE, CPU)
    push(sender, receivers, buffer)
    (sender if first == "sender" else receivers[0]).abort()
    del buffer
    until(lambda: not cudart.allocated)
    assert not cudart.mapped
    assert not cudart.freed_while_mapped


def lend(sender: OneSidedSender, receiver: OneSidedReceiver) -> OneSidedWork:
    """A bucket that is read where it lies; the sender's buffer is gone by then, but for the
    group."""
    deadline = time.monotonic() + 10.0
    work = receiver.broadcast(empty(), 10.0, BucketOptions(borrows=True))
    sent = sender.broadcast(allocate_block(SIZE, CPU).fill_(1), 10.0)
    assert work.wait_until(deadline)
    assert work.arrived.lent is not None
    assert not sent.done
    return work


class _Near:
    """A mapping whose memory is lent to who receives on the CPU, as a GPU's is on that GPU."""

    def __new__(cls, export: ExportDevice, device: torch.device) -> Any:
        return DeviceMapping(export, device)


@pytest.fixture
def lent_by_double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceMapping, "lent", lambda mapping, first, num: empty()[:num])
    monkeypatch.setattr(members, "DeviceMapping", _Near)


@pytest.mark.usefixtures("lent_by_double")
@pytest.mark.parametrize("leaves", ["sender", "receiver"])
def test_what_is_read_for_longer_than_is_waited_for_is_not_freed_meanwhile(
    join: Join, cudart: CudartDouble, monkeypatch: pytest.MonkeyPatch, leaves: str
) -> None:
    monkeypatch.setattr(members, "_RETURN_SECONDS", 0.05)
    sender, (receiver,) = join(1)
    work = lend(sender, receiver)
    (sender if leaves == "sender" else receiver).abort()
    until(lambda: not receiver.thread.is_alive())
    until(lambda: sender.error)  # also where the receiver has left: it is told at once
    stays(lambda: (len(cudart.mapped), len(cudart.allocated)) == (1, 1), 0.05)
    with pytest.raises(OneSidedError, match="left while its memory was read"):
        work.give_back()
    until(lambda: not cudart.allocated)
    assert not cudart.mapped
    assert not cudart.freed_while_mapped
    assert not members.KEPT


@pytest.mark.usefixtures("lent_by_double")
def test_a_receiver_that_leaves_while_it_reads_is_an_error_at_once(
    join: Join, cudart: CudartDouble
) -> None:
    sender, (receiver,) = join(1)
    work = lend(sender, receiver)
    receiver.abort()
    until(lambda: sender.error)
    assert "rank 1 is gone: it has left the group" in sender.error
    assert cudart.allocated
    with pytest.raises(OneSidedError):
        work.give_back()


@pytest.mark.parametrize("when", ["withdrawn", "left"])
def test_what_cuda_does_not_unmap_is_not_freed(join: Join, cudart: CudartDouble, when: str) -> None:
    """The process's end closes the connection; here the test does."""
    sender, receivers = join(1)
    push(sender, receivers, allocate_block(SIZE, CPU).fill_(1))
    cudart.errors = {"cudaIpcCloseMemHandle": 400}
    if when == "withdrawn":
        sender.broadcast(allocate_block(SIZE, CPU).fill_(2), 10.0)
        until(lambda: sender.error)
        assert "rank 1 is gone" in sender.error
    else:
        receivers[0].abort()
    until(lambda: not receivers[0].thread.is_alive())
    until(lambda: sender.error)
    stays(sender.thread.is_alive, 0.05)
    assert len(cudart.mapped) == 1
    assert not cudart.freed_while_mapped
    assert set(cudart.mapped) <= set(cudart.allocated)
    (connection,) = members.KEPT
    members.KEPT.clear()
    connection.close()
    until(lambda: not sender.thread.is_alive())


def test_a_block_is_whole_pages_of_the_device(cudart: CudartDouble) -> None:
    """A handle names the beginning of what CUDA took from the device."""
    buffer = allocate_block(5, CPU)
    view, first_byte = found = export_of(buffer[2:4])
    assert (first_byte, view.block.num_bytes) == (2, 2 * 2**20)
    with pytest.raises(UnsupportedError, match=r"backends\.allocate"):
        export_of(torch.zeros(4, dtype=torch.uint8))
    del buffer, found, view
    assert not cudart.allocated


def test_a_gpu_that_is_not_visible_is_named(cudart: CudartDouble) -> None:
    export = ExportDevice(1, SIZE, (99).to_bytes(16, "big"), bytes(64))
    with pytest.raises(OneSidedError, match=r"000063 is not visible.*CUDA_VISIBLE_DEVICES"):
        DeviceMapping(export, CPU)


def test_what_cuda_refuses_is_an_error_of_ours(cudart: CudartDouble) -> None:
    cudart.errors = {"cudaIpcOpenMemHandle": 400}
    export = ExportDevice(1, SIZE, UUIDS[1].bytes, bytes(64))
    with pytest.raises(OneSidedError, match="cudaIpcOpenMemHandle failed with CUDA's error 400"):
        DeviceMapping(export, CPU)
    cudart.errors = {"cudaMalloc": 2}
    with pytest.raises(CapacityError, match="cudaMalloc failed with CUDA's error 2"):
        allocate_block(SIZE, CPU)
    cudart.errors = {"cudaIpcGetMemHandle": 1}
    with pytest.raises(OneSidedError):
        allocate_block(SIZE, CPU)
    assert not cudart.allocated


def test_no_more_is_read_than_there_is(cudart: CudartDouble) -> None:
    buffer = allocate_block(SIZE, CPU)
    mapping = DeviceMapping(export_of(buffer)[0].offer()[0], CPU)
    with pytest.raises(OneSidedError, match="bytes 1,048,577 to 2,097,153 of 2,097,152"):
        mapping.copy(SIZE + 1, empty(), lambda: None)
    mapping.close()
    mapping.close()
    assert not cudart.mapped


@pytest.mark.usefixtures("directory")
def test_a_trial_reads_from_the_device(
    cudart: CudartDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "weft_rl.transport.one_sided.trial.allocate", lambda size, device: allocate_block(size, CPU)
    )
    answerer = TrialAnswerer()
    try:
        assert why_not_readable([answerer.name, answerer.name]) == ""
        assert not cudart.mapped
        cudart.errors = {"cudaIpcOpenMemHandle": 400}
        assert "closed its socket" in why_not_readable([answerer.name])
        cudart.errors = {"cudaMalloc": 2}
        assert "no room" in why_not_readable([answerer.name])
    finally:
        answerer.close()
    assert not cudart.allocated


def test_a_torch_without_cuda_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    memory.cudart.cache_clear()
    if not torch.cuda.is_available():
        assert "libcudart" in memory.why_unavailable()


# -- on the host ------------------------------------------------------------------------------


def test_a_buffer_is_sealed_and_ends_with_its_last_view(directory: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    buffer = allocate_file(4096)
    view = buffer[256:512]
    file, at = export_of(view)
    fd = file.fd
    assert (at, int(buffer.sum())) == (256, 0)
    for change in (lambda: os.ftruncate(fd, 10), lambda: os.pwrite(fd, b"x", 0)):
        with pytest.raises(OSError, match="Operation not permitted"):
            change()
    view.fill_(3)
    assert os.pread(fd, 1, 256) == b"\3"
    del buffer, file
    assert len(os.listdir("/proc/self/fd")) > before
    del view
    assert len(os.listdir("/proc/self/fd")) == before
