"""What every backend must do that a CPU has; NCCL's part of it is in test_backends.py."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.waits import until
from weft_rl.contract.errors import (
    TransferAbortedError,
    TransferTimeoutError,
)
from weft_rl.transport import backends
from weft_rl.transport.group import CPU, Operation, SideGroup
from weft_rl.transport.one_sided import members
from weft_rl.transport.one_sided.members import OneSidedReceiver, OneSidedWork
from weft_rl.transport.wire.buckets import BucketOptions
from weft_rl.transport.wire.lane_options import LaneOptions

SIZE = 3 * 2**20
BORROWS = BucketOptions(borrows=True)
Join = Callable[[int], list[SideGroup]]


@pytest.fixture(params=backends.available_backends(CPU))
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="weft-") as path:
        monkeypatch.setenv("WEFT_ONE_SIDED_DIR", path)
        yield str(request.param)


@pytest.fixture
def join(backend: str) -> Iterator[Join]:
    groups: list[SideGroup] = []

    def make(size: int) -> list[SideGroup]:
        store = dist.HashStore()
        store.set_timeout(timedelta(seconds=5))
        made = [
            SideGroup(store, rank, size, LaneOptions(host="127.0.0.1"), backend=backend)  # type: ignore[arg-type]
            for rank in range(size)
        ]
        groups.extend(made)
        return made

    yield make
    for group in groups:
        group.close()


def bucket(backend: str, seed: int) -> torch.Tensor:
    """Bytes to send."""
    content = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=seeded(seed))
    buffer = backends.allocate(backend, SIZE, CPU)
    return buffer.copy_(content)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def begin(groups: list[SideGroup], sent: torch.Tensor) -> list[tuple[Operation, torch.Tensor]]:
    """One broadcast by all of them, each from a thread of its own as in a process."""
    buffers = [sent] + [torch.zeros(SIZE, dtype=torch.uint8) for _ in groups[1:]]
    operations: list[Operation | None] = [None] * len(groups)

    def run(rank: int) -> None:
        operations[rank] = groups[rank].broadcast(buffers[rank], 20.0)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [(op, buffer) for op, buffer in zip(operations, buffers, strict=True) if op]


def soon() -> float:
    return time.monotonic() + 20.0


@pytest.mark.parametrize("num_receivers", [1, 3])
def test_all_receive_what_is_sent(backend: str, join: Join, num_receivers: int) -> None:
    groups = join(1 + num_receivers)
    sent = [bucket(backend, seed) for seed in (1, 2)]
    rounds = [begin(groups, buffer) for buffer in sent]  # two under way
    for buffer, operations in zip(sent, rounds, strict=True):
        for operation, received in operations:
            operation.wait(soon())
            assert operation.done
            assert torch.equal(received, buffer)
    sent[0].copy_(sent[1].flip(0))
    for operation, received in begin(groups, sent[0]):  # a buffer is used again
        operation.wait(soon())
        assert torch.equal(received, sent[0])


def test_part_of_a_buffer_is_sent(backend: str, join: Join) -> None:
    sender, receiver = join(2)
    buffer, into = bucket(backend, 1), torch.zeros(512, dtype=torch.uint8)
    first = sender.broadcast(buffer[:512], 20.0)
    receiver.broadcast(into, 20.0).wait(soon())
    first.wait(soon())
    assert torch.equal(into, buffer[:512])


def test_a_wait_ends_at_its_deadline(backend: str, join: Join) -> None:
    sender, receiver = join(2)
    for operation, _ in begin([sender, receiver], bucket(backend, 1)):
        operation.wait(soon())
    waiting = receiver.broadcast(torch.zeros(SIZE, dtype=torch.uint8), 20.0)
    with pytest.raises(TransferTimeoutError):
        waiting.wait(time.monotonic() + 0.05)


def test_an_abort_ends_waits_and_later_broadcasts(backend: str, join: Join) -> None:
    sender, receiver = join(2)
    waiting = receiver.broadcast(torch.zeros(SIZE, dtype=torch.uint8), 20.0)
    threading.Timer(0.02, receiver.abort, [TransferAbortedError("enough")]).start()
    with pytest.raises(TransferAbortedError, match="enough"):
        waiting.wait(soon())
    with pytest.raises(TransferAbortedError, match="enough"):
        receiver.broadcast(torch.zeros(SIZE, dtype=torch.uint8), 20.0)
    sender.abort(TransferAbortedError("so am I"))


def test_memory_is_safe_after_an_abort_that_frees_it(backend: str, join: Join) -> None:
    sender, receiver = join(2)
    for operation, _ in begin([sender, receiver], bucket(backend, 1)):
        operation.wait(soon())
    sender.broadcast(bucket(backend, 2), 2.0)  # nobody takes it
    receiver_waits = join(2)[1]
    receiver_waits.broadcast(torch.zeros(SIZE, dtype=torch.uint8), 2.0)
    frees = backend != "gloo"
    assert (sender.close(5.0), receiver_waits.close(5.0)) == (frees, frees)


def test_a_receive_that_an_abort_overtakes_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender's memory stayed mapped, and was never freed, where the abort came between the
    backend's receive and its note in the group."""
    with tempfile.TemporaryDirectory(prefix="weft-") as path:
        monkeypatch.setenv("WEFT_ONE_SIDED_DIR", path)
        store = dist.HashStore()
        sender, receiver = (
            SideGroup(store, rank, 2, LaneOptions(host="127.0.0.1"), backend="one-sided")  # type: ignore[arg-type]
            for rank in range(2)
        )
        sent = sender.broadcast(bucket("one-sided", 1), 20.0)
        backend = receiver._backend
        assert isinstance(backend, OneSidedReceiver)
        born = backend.broadcast

        def overtaken(*args: Any) -> OneSidedWork:
            work = born(*args)
            until(lambda: work.done)  # lent by the backend's thread
            receiver.abort(TransferAbortedError("stopped"))
            return work

        monkeypatch.setattr(backend, "broadcast", overtaken)
        with pytest.raises(TransferAbortedError, match="stopped"):
            receiver.broadcast(torch.zeros(SIZE, dtype=torch.uint8), 20.0, options=BORROWS)
        backend.thread.join(10.0)
        assert not backend.thread.is_alive()
        assert not members.KEPT
        assert sent.done
        sender.close()
