"""Connections that say nothing keep out nobody who speaks."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft_rl.ipc.listener import Listener, NewConnections


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen(64)
        yield listening


def _connected(listener: socket.socket) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.connect(listener.getsockname())
    return connected


def test_who_speaks_is_returned_at_once_or_once_it_does(listener: socket.socket) -> None:
    arrivals = NewConnections(listener, 4)
    with _connected(listener) as first, _connected(listener) as second:
        first.sendall(b"1")
        (found,) = arrivals.take(5.0)
        assert found.recv(9) == b"1"
        assert arrivals.take() == []
        second.sendall(b"2")
        (late,) = arrivals.take(5.0)
        assert late.recv(9) == b"2"
        assert late.gettimeout() is None
        found.close()
        late.close()
    arrivals.close()


def test_the_oldest_silent_ones_make_room(listener: socket.socket) -> None:
    arrivals = NewConnections(listener, 4)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(_connected(listener)) for _ in range(20)]
        arrivals.take()
        assert [sock.recv(1) for sock in silent[:16]] == [b""] * 16
        silent[16].sendall(b"x")
        with _connected(listener) as late:
            late.sendall(b"y")
            found = [*arrivals.take(5.0), *arrivals.take()]
            assert sorted(each.recv(1) for each in found) == [b"x", b"y"]
            for each in found:
                each.close()
    arrivals.close()


def test_who_leaves_without_a_word_is_returned_too(listener: socket.socket) -> None:
    """Its reader finds that it has gone."""
    arrivals = NewConnections(listener, 4)
    _connected(listener).close()
    (gone,) = arrivals.take(5.0)
    assert gone.recv(1) == b""
    gone.close()
    arrivals.close()


def test_a_listener_that_was_shut_down_ends_the_wait(listener: socket.socket) -> None:
    arrivals = NewConnections(listener, 4)
    listener.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ConnectionAbortedError):
        arrivals.take(None)
    arrivals.close()


def test_part_of_a_hello_is_silence_and_wakes_nobody_again(listener: socket.socket) -> None:
    arrivals = NewConnections(listener, 4, hello_bytes=3)
    with _connected(listener) as slow, _connected(listener) as gone:
        for sock in (slow, gone):
            sock.sendall(b"1")
        assert arrivals.take(5.0) == []
        assert arrivals.take() == []  # told of that byte once, at most
        began = time.monotonic()
        assert arrivals.take(0.1) == []
        assert time.monotonic() - began >= 0.1
        slow.sendall(b"23")
        (found,) = arrivals.take(5.0)
        assert found.recv(9) == b"123"
        found.close()
        gone.shutdown(socket.SHUT_WR)  # it will never say the rest
        (left,) = arrivals.take(5.0)
        left.close()
    arrivals.close()


def test_a_connection_that_is_gone_before_it_is_accepted_keeps_nobody_out(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    born, failed = socket.socket.accept, list[bool]()

    def accept(listening: socket.socket) -> tuple[socket.socket, object]:
        if not failed:
            failed.append(True)
            raise ConnectionAbortedError
        return born(listening)

    monkeypatch.setattr(socket.socket, "accept", accept)
    arrivals = NewConnections(listener, 4)
    with _connected(listener) as late:
        late.sendall(b"x")
        (found,) = arrivals.take(5.0)
        found.close()
    arrivals.close()


@pytest.mark.parametrize("missing", ["select.epoll", "threading.Thread.start"])
def test_a_listener_that_cannot_begin_closes_its_socket(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before, own = len(os.listdir("/proc/self/fd")), listener.dup()
    with monkeypatch.context() as patch:
        patch.setattr(f"weft_rl.ipc.listener.{missing}", fails)
        with pytest.raises(OSError, match="Too many open files"):
            Listener(own, socket.socket.close, name="weft-test", max_silent=4)
    assert own.fileno() == -1
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_listener_serves_whoever_speaks_until_it_is_closed(listener: socket.socket) -> None:
    served: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
    serving = Listener(listener.dup(), served.put, name="weft-test", max_silent=4)
    with _connected(listener), _connected(listener) as speaking:
        speaking.sendall(b"x")
        with served.get(timeout=5.0) as found:
            assert found.recv(9) == b"x"
        serving.close()
        serving.close()
    assert not serving._thread.is_alive()
    assert served.empty()


def test_where_no_descriptor_is_free_the_oldest_that_is_silent_makes_room(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever speaks is heard; without a silent one the shortage is told."""
    born, arrivals = socket.socket.accept, NewConnections(listener, 4)

    def accept(listening: socket.socket) -> tuple[socket.socket, object]:
        if len(arrivals._silent) >= 2 or is_full:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return born(listening)

    is_full = False
    monkeypatch.setattr(socket.socket, "accept", accept)
    with _connected(listener), _connected(listener), _connected(listener) as late:
        late.sendall(b"x")
        deadline = time.monotonic() + 10
        found: list[socket.socket] = []
        while not found and time.monotonic() < deadline:
            found += [each for each in arrivals.take(1.0) if each.recv(1, socket.MSG_PEEK)]
        assert found
        for each in found:
            each.close()
        is_full = True
        while arrivals._silent:
            arrivals._drop_oldest()
        with _connected(listener), pytest.raises(OSError, match="Too many open files"):
            arrivals.take(5.0)
    arrivals.close()
