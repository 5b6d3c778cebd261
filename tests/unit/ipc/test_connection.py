"""Connections between processes: whole messages, their bounds, and what is said of a peer's end."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_rl.ipc import connection as ipc
from weft_rl.ipc.connection import (
    Codec,
    Connection,
    IncomingFrame,
    OutgoingFrame,
    PeerError,
    PeerGoneError,
    PeerTimeoutError,
    finish,
    over_tls,
)

_LARGE = bytes(range(256)) * 20_000  # more than a connection holds


@dataclass(frozen=True)
class Text:
    content: Annotated[bytes, len(_LARGE)]


@dataclass(frozen=True)
class Number:
    number: int


@dataclass(frozen=True)
class File:
    """Comes with a descriptor."""


CODEC = Codec[Any](b"TEST", 3, {1: Text, 2: Number, 3: File}, with_descriptor=(File,))
STREAM, RECORDS = socket.SOCK_STREAM, socket.SOCK_SEQPACKET
Make = Callable[[socket.SocketKind], tuple[Connection[Any], socket.socket]]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes a connection, and its peer's socket; neither leaves a descriptor open."""
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as stack:

        def connected(kind: socket.SocketKind) -> tuple[Connection[Any], socket.socket]:
            ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
            theirs.settimeout(10.0)
            connection = Connection(ours, CODEC)
            stack.callback(connection.close)
            return connection, stack.enter_context(theirs)

        yield connected
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("kind", [STREAM, RECORDS])
def test_messages_arrive_as_they_were_sent(make: Make, kind: socket.SocketKind) -> None:
    ours, theirs = make(kind)
    peer = Connection(theirs, CODEC)
    for message in (Text(b""), Number(2**64 - 1), Text(b"x" * 5_000), Number(0)):
        ours.send(message)
        assert peer.receive(5.0) == (message, None)


def test_a_message_on_a_stream_may_be_of_any_length(make: Make) -> None:
    ours, theirs = make(STREAM)
    peer = Connection(theirs, CODEC)
    sending = threading.Thread(target=ours.send, args=(Text(_LARGE),))
    sending.start()
    assert peer.receive(5.0) == (Text(_LARGE), None)
    sending.join()


def test_a_descriptor_comes_with_what_needs_one_alone(make: Make) -> None:
    ours, theirs = make(RECORDS)
    peer = Connection(theirs, CODEC)
    read, write = os.pipe()
    ours.send(File(), write)
    message, fd = peer.receive(5.0)
    assert message == File()
    assert fd is not None
    os.write(fd, b"x")
    assert os.read(read, 1) == b"x"
    assert not os.get_inheritable(fd)
    for each in (read, write, fd):
        os.close(each)
    for message, odd in ((Number(1), 0), (File(), None)):
        ours.send(message, odd)
        found = r"the peer \(pid \d+\) says \w+ with a descriptor too many, or one too few"
        with pytest.raises(PeerError, match=found):
            peer.receive(5.0)


@pytest.mark.parametrize("num_fds", [2, 40])
def test_no_descriptor_stays_of_a_message_with_more_than_one(make: Make, num_fds: int) -> None:
    ours, theirs = make(RECORDS)
    socket.send_fds(theirs, [CODEC.pack_head(3)], [0] * num_fds)
    with pytest.raises(PeerError, match="more than a message holds"):
        ours.receive(5.0)


def test_a_record_longer_than_any_message_is_refused(make: Make) -> None:
    codec = Codec[Any](b"TEST", 3, {2: Number})
    ours, theirs = make(RECORDS)
    ours.codec = codec
    theirs.send(codec.pack_head(2) + bytes(9))
    with pytest.raises(PeerError, match="more than a message holds"):
        ours.receive(5.0)


def framed(number: int, num_bytes: int, body: bytes = b"") -> bytes:
    return CODEC.pack_head(number) + struct.pack("<Q", num_bytes) + body


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (b"nonsense" * 4, "no message of Weft's"),
        (b"TEST\4\0" + bytes(20), "version 4, this process 3"),
        (framed(9, 0), "a message of kind 9, which there is not"),
        (framed(2, 9), "Number of 9 bytes"),
        (framed(1, 2**63), "Text of 9,223,372,036,854,775,808 bytes"),
        (framed(2, 7, b"1234567"), "Number, garbled"),
    ],
)
def test_what_is_no_message_is_refused_by_its_head(make: Make, said: bytes, found: str) -> None:
    ours, theirs = make(STREAM)
    theirs.sendall(said)
    with pytest.raises(PeerError, match=rf"^the peer \(pid \d+\) \w+ .*{found}") as caught:
        ours.receive(5.0)
    assert not isinstance(caught.value, PeerGoneError)


@given(said=st.binary(max_size=64))
def test_made_up_records_are_a_message_or_an_error(said: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, RECORDS)
    connection = Connection(ours, CODEC)
    theirs.send(CODEC.pack_head(2)[: len(said) % 9] + said)
    theirs.close()
    with contextlib.suppress(PeerError):
        connection.receive(5.0)
    connection.close()


def test_memory_is_taken_for_what_has_come(make: Make) -> None:
    ours, theirs = make(STREAM)
    theirs.sendall(framed(1, len(_LARGE), b"x" * 100))
    incoming = IncomingFrame(ours)
    assert not incoming.advance()
    assert len(incoming.content) == 100


# -- the end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [STREAM, RECORDS])
@pytest.mark.parametrize("num_unread", [0, 1])
def test_a_peer_that_leaves_has_closed_its_socket_whatever_it_has_not_read(
    make: Make, kind: socket.SocketKind, num_unread: int
) -> None:
    ours, theirs = make(kind)
    assert not ours.is_ended
    for number in range(num_unread):  # of which the kernel makes a reset
        ours.send(Number(number))
    theirs.close()
    assert ours.is_ended
    with pytest.raises(PeerGoneError, match="closed its socket"):
        ours.receive(5.0)
    with pytest.raises(PeerGoneError, match="gone"):
        ours.send(Number(1))


def test_half_a_message_is_none(make: Make) -> None:
    ours, theirs = make(STREAM)
    theirs.sendall(framed(1, 5, b"1234"))
    theirs.close()
    with pytest.raises(PeerGoneError, match="closed its socket"):
        ours.receive(5.0)


@pytest.mark.parametrize("kind", [STREAM, RECORDS])
def test_a_silent_peer_is_waited_for_until_the_deadline(
    make: Make, kind: socket.SocketKind
) -> None:
    ours, _ = make(kind)
    began = time.monotonic()
    with pytest.raises(PeerTimeoutError, match="was silent until the deadline"):
        ours.receive(0.05)
    assert 0.05 <= time.monotonic() - began < 5.0


def test_a_peer_that_stops_in_a_message_is_not_waited_for(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc, "_FRAME_SECONDS", 0.05)
    ours, theirs = make(STREAM)
    theirs.sendall(framed(1, 5, b"1234"))
    with pytest.raises(PeerTimeoutError, match="was silent until the deadline"):
        ours.receive()


def test_a_peer_that_reads_nothing_is_not_waited_for(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer has half of a message, so nothing can follow it."""
    monkeypatch.setattr(ipc, "_FRAME_SECONDS", 0.05)
    ours, _ = make(STREAM)
    reads_nothing = r"^the peer \(pid \d+\) read nothing, or too slowly, until the deadline$"
    with pytest.raises(PeerTimeoutError, match=reads_nothing):
        ours.send(Text(_LARGE))
    with pytest.raises(PeerGoneError):
        ours.send(Number(1))


def test_who_reads_nothing_is_told_from_who_says_nothing(make: Make) -> None:
    ends = [make(STREAM)[0] for _ in range(3)]
    for rank, each in enumerate(ends):
        each.name_peer(f"rank {rank}")
    large = memoryview(_LARGE)
    outgoing = [OutgoingFrame(each, 1, large) for each in ends[:2]]
    incoming = [IncomingFrame(each) for each in ends[1:]]
    with pytest.raises(PeerTimeoutError) as caught:
        finish([*outgoing, *incoming], time.monotonic() + 0.05)
    own = f"(pid {os.getpid()})"
    assert str(caught.value) == (
        f"rank 0 {own}, rank 1 {own} read nothing, or too slowly, until the deadline; "
        f"rank 1 {own}, rank 2 {own} was silent until the deadline"
    )


def test_whoever_waits_is_woken_by_shutting(make: Make) -> None:
    ours, theirs = make(STREAM)
    later = threading.Timer(0.05, ours.shut)
    later.start()
    with pytest.raises(PeerGoneError, match="closed its socket"):
        ours.receive()
    later.join()
    assert theirs.recv(1) == b""


def test_a_peer_hears_all_that_was_said_before_the_end(make: Make) -> None:
    ours, theirs = make(RECORDS)
    peer = Connection(theirs, CODEC)
    ours.send(Number(1))
    ours.end()
    assert peer.is_ended
    assert peer.receive(5.0) == (Number(1), None)
    peer.send(Number(2))
    assert ours.receive(5.0) == (Number(2), None)
    with pytest.raises(PeerGoneError):
        peer.receive(5.0)


def test_frames_go_both_ways_at_once_and_the_silent_are_named(make: Make) -> None:
    ours, theirs = make(STREAM)
    peer = Connection(theirs, CODEC)

    def swap(connection: Connection[Any], content: bytes) -> bytes:
        incoming = IncomingFrame(connection)
        outgoing = OutgoingFrame(connection, 1, memoryview(content))
        finish([outgoing, incoming], time.monotonic() + 10)
        return bytes(incoming.content)

    found: list[bytes] = []
    other = threading.Thread(target=lambda: found.append(swap(peer, _LARGE[::-1])))
    other.start()
    assert swap(ours, _LARGE) == _LARGE[::-1]
    other.join()
    assert found == [_LARGE]
    with pytest.raises(PeerTimeoutError, match=r"the peer \(pid \d+\) was silent"):
        finish([IncomingFrame(ours)], time.monotonic())


def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, STREAM)
    uid = os.geteuid()
    with theirs, monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: uid + 1)
        with pytest.raises(PeerError, match=f"of uid {uid}, this process of {uid + 1}"):
            Connection(ours, CODEC)
    assert ours.fileno() == -1


_FORK = """
import os, signal, socket, time
from weft_rl.ipc.connection import Codec, Connection

ours, theirs = socket.socketpair()
connection = Connection(ours, Codec(b"TEST", 1))
child = os.fork()
if not child:
    time.sleep(60)
    os._exit(0)
connection.close()
theirs.settimeout(30)
print(theirs.recv(1))
os.kill(child, signal.SIGKILL)
"""


def test_a_forked_child_has_nothing_of_it() -> None:
    """Else a peer would not notice this process's end while a child of it lives on."""
    command = [sys.executable, "-c", _FORK]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"b''\n"


def test_a_socket_that_was_reset_before_its_handshake_stays_its_owners() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        connected = socket.create_connection(listening.getsockname())
        accepted, _ = listening.accept()
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    accepted.close()  # a reset, not an end
    with connected:
        select.select([connected], [], [], 5)
        with pytest.raises(OSError, match="not connected"):
            over_tls(ssl.create_default_context(), connected, server_hostname="peer")
        assert connected.fileno() >= 0
