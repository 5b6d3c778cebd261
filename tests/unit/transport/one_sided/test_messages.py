"""Messages between members, byte for byte: trainers and replicas may be of different releases."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

import pytest

from weft_rl.ipc.connection import PeerError
from weft_rl.transport.one_sided.messages import (
    MAX_TAIL_BYTES,
    Export,
    ExportDevice,
    Hello,
    Kept,
    Left,
    MemberConnection,
    Message,
    Ready,
    Taken,
    Tried,
    Try,
    TryDevice,
    Welcome,
    Withdraw,
    Withdrawn,
)


@pytest.fixture
def ends() -> Iterator[tuple[MemberConnection, socket.socket]]:
    """A connection, and its peer's socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = MemberConnection(ours)
    theirs.settimeout(5.0)
    yield connection, theirs
    connection.close()
    theirs.close()


def _u64(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


@pytest.mark.parametrize(
    ("message", "kind", "body"),
    [
        (Hello(3, b"a" * 32), 1, b"\3\0\0\0" + b"a" * 32),
        (Welcome(b"b" * 32), 2, b"b" * 32),
        (Export(1, 2**40), 3, _u64(1, 2**40)),
        (Withdraw(7), 4, _u64(7)),
        (Ready(1, 2, 3, 4), 5, _u64(1, 2, 3, 4) + b"\0\0"),
        (Ready(1, 2, 3, 40_000, b"tail"), 5, _u64(1, 2, 3, 40_000) + b"\4\0tail"),
        (
            Ready(1, 2, 3, 40_000, b"t" * MAX_TAIL_BYTES),
            5,
            _u64(1, 2, 3, 40_000) + b"\0\x40" + b"t" * MAX_TAIL_BYTES,
        ),
        (Taken(2**63), 6, _u64(2**63)),
        (Try(32), 7, _u64(32)),
        (Tried(b"c" * 32), 8, b"c" * 32),
        (
            ExportDevice(1, 2**40, b"u" * 16, b"h" * 64),
            9,
            _u64(1, 2**40) + b"u" * 16 + b"h" * 64,
        ),
        (Withdrawn(7), 10, _u64(7)),
        (TryDevice(32, b"u" * 16, b"h" * 64), 11, _u64(32) + b"u" * 16 + b"h" * 64),
        (Left(), 12, b""),
        (Kept(9), 13, _u64(9)),
    ],
)
def test_a_message_travels_as_the_protocol_says(
    ends: tuple[MemberConnection, socket.socket], message: Message, kind: int, body: bytes
) -> None:
    connection, theirs = ends
    record = b"WEFT\1\0" + bytes([kind, 0]) + body
    fds = [0] if isinstance(message, Export | Try) else []
    connection.send(message, *fds)
    data, received, _, _ = socket.recv_fds(theirs, 2**16, 2)
    assert data == record
    assert len(received) == len(fds)
    for fd in received:
        os.close(fd)
    socket.send_fds(theirs, [record], fds)
    heard, fd = connection.receive(5.0)
    assert heard == message
    if fd is not None:
        os.close(fd)
    for odd in (record[:-1], record + b"x"):
        socket.send_fds(theirs, [odd], fds)
        with pytest.raises(PeerError):
            connection.receive(5.0)
