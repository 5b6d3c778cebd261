"""Members of one group, in this process, in a directory of the test's own."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.doubles.rendezvous import StoreDouble
from tests.waits import until
from weft_rl.transport.one_sided.directory import listen, unlink
from weft_rl.transport.one_sided.members import OneSidedReceiver, OneSidedSender

Join = Callable[..., "tuple[OneSidedSender, list[OneSidedReceiver]]"]


@contextmanager
def listening(backlog: int = 1) -> Iterator[tuple[socket.socket, str]]:
    """A socket of this process, removed at the end."""
    listener, name = listen(backlog)
    try:
        yield listener, name
    finally:
        unlink(name)
        listener.close()


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Not pytest's own: a socket's path is short."""
    with tempfile.TemporaryDirectory(prefix="weft-") as path:
        monkeypatch.setenv("WEFT_ONE_SIDED_DIR", path)
        yield Path(path)


@pytest.fixture
def store() -> StoreDouble:
    return StoreDouble()


@pytest.fixture
def join(directory: Path, store: StoreDouble) -> Iterator[Join]:
    """Makes a sender and so many receivers, whom others may join; all of them end with the test,
    and leave neither threads nor sockets nor descriptors."""
    num_fds = len(os.listdir("/proc/self/fd"))
    members: list[OneSidedSender | OneSidedReceiver] = []

    def make(
        num_receivers: int, num_others: int = 0
    ) -> tuple[OneSidedSender, list[OneSidedReceiver]]:
        sender = OneSidedSender(store, num_receivers + num_others + 1)
        receivers = [
            OneSidedReceiver(store, rank, torch.device("cpu"))
            for rank in range(1, num_receivers + 1)
        ]
        members.extend([sender, *receivers])
        return sender, receivers

    yield make
    store.close()
    for member in members:
        member.abort()
    until(lambda: all(thread.name != "weft-one-sided" for thread in threading.enumerate()))
    assert [*directory.iterdir()] == []
    members.clear()
    until(lambda: len(os.listdir("/proc/self/fd")) <= num_fds)


@pytest.fixture
def no_descriptors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """When listeners could not accept, for want of descriptors: for a third of a second."""
    failed: list[float] = []
    born = socket.socket.accept

    def accept(listener: socket.socket) -> tuple[socket.socket, object]:
        now = time.monotonic()
        if failed and now - failed[0] >= 0.35:
            return born(listener)
        failed.append(now)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket.socket, "accept", accept)
    yield failed
    assert 1 < len(failed) < 20, "it was tried again, and did not spin"
