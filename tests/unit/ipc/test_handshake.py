"""Two processes that know the same secret are let through, and nobody else."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from weft_rl.ipc.connection import Codec, Connection, PeerError, PeerGoneError, PeerTimeoutError
from weft_rl.ipc.handshake import Handshake, derive

CODEC = Codec[Any](b"TEST", 1)
SECRET = b"secret"
Ends = tuple[Connection[Any], Connection[Any]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Who connects, and who listens."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    connecting, listening = (Connection(each, CODEC) for each in pair)
    yield connecting, listening
    connecting.close()
    listening.close()


def test_each_proves_the_secret_and_one_says_who_it_is(ends: Ends) -> None:
    connecting, listening = ends
    handshake = Handshake(SECRET, "<IB")
    handshake.begin(connecting, 7, 2)
    said = listening.socket.recv(4096, socket.MSG_PEEK)
    assert len(said) == handshake.hello_bytes
    assert SECRET not in said
    assert handshake.hear(listening) == (7, 2)
    handshake.answer(listening)
    handshake.check_answer(connecting, time.monotonic() + 5)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda said: said[:-1] + bytes([said[-1] ^ 1]),
        lambda said: said[:-32] + derive(SECRET, "accepts"),
        lambda said: said[:-32] + SECRET.ljust(32, b"\0"),
        lambda said: b"\0" + said[1:],
        lambda said: said[:8] + b"\x21" + said[9:] + b"x",
    ],
    ids=["garbled", "the answer", "the secret itself", "another's", "too long"],
)
def test_whoever_proves_nothing_is_refused(ends: Ends, spoil: Callable[[bytes], bytes]) -> None:
    connecting, listening = ends
    handshake = Handshake(SECRET)
    handshake.begin(connecting)
    said = listening.socket.recv(4096)
    connecting.socket.sendall(spoil(said))
    with pytest.raises(PeerError):
        handshake.hear(listening)


def test_what_was_shown_is_no_answer(ends: Ends) -> None:
    connecting, listening = ends
    handshake = Handshake(SECRET)
    handshake.begin(connecting)
    listening.socket.sendall(listening.socket.recv(4096))
    with pytest.raises(PeerError, match="does not know the secret"):
        handshake.check_answer(connecting, time.monotonic() + 5)


def test_who_does_not_answer_is_waited_for_until_the_deadline(ends: Ends) -> None:
    connecting, listening = ends
    handshake = Handshake(os.urandom(8))
    handshake.begin(connecting)
    with pytest.raises(PeerTimeoutError, match="was silent"):
        handshake.check_answer(connecting, time.monotonic() + 0.05)
    listening.close()
    with pytest.raises(PeerGoneError, match="closed its socket"):
        handshake.check_answer(connecting, time.monotonic() + 5)


def test_half_a_hello_is_not_waited_for(ends: Ends) -> None:
    connecting, listening = ends
    handshake = Handshake(SECRET)
    handshake.begin(connecting)
    said = listening.socket.recv(4096)
    connecting.socket.sendall(said[:-1])
    with pytest.raises(PeerTimeoutError):
        handshake.hear(listening)
