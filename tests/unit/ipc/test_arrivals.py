"""Connections that say nothing keep out nobody who speaks."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft_rl.ipc.arrivals import Arrivals


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
    arrivals = Arrivals(listener, 4)
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
    arrivals = Arrivals(listener, 4)
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
    arrivals = Arrivals(listener, 4)
    _connected(listener).close()
    (gone,) = arrivals.take(5.0)
    assert gone.recv(1) == b""
    gone.close()
    arrivals.close()


def test_a_listener_that_was_shut_down_ends_the_wait(listener: socket.socket) -> None:
    arrivals = Arrivals(listener, 4)
    listener.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ConnectionAbortedError):
        arrivals.take(None)
    arrivals.close()
