"""Who is let in at the receiving rank, and what becomes of those who say what is no message."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from rollout_side.memory import handoff as rank_handoff
from rollout_side.memory.handoff import InPlaceLoad, RankHandoff, address_of, connect
from rollout_side.memory.messages import (
    MESSAGES,
    Arrived,
    Layout,
    Loaded,
    LoadRequest,
    Message,
    RankConnection,
    Working,
)
from tests.unit.rollout.memory.ranks.members import (
    BASE,
    MANIFEST,
    WAIT_SECONDS,
    Loader,
    Replica,
    nothing,
)
from tests.waits import in_thread, stays
from weft_rl.contract.errors import (
    LoadFailedError,
    NotReadyError,
    PeerUnavailableError,
)
from weft_rl.ipc.handshake import Handshake


class Bomb:
    """What a pickle would do where it is opened."""

    gone_off: ClassVar[list[int]] = []

    def __reduce__(self) -> Any:
        return (Bomb.gone_off.append, (1,))


def frame(number: int, body: bytes, num_bytes: int | None = None) -> bytes:
    """Return a frame as it travels, or with another length in its head."""
    size = len(body) if num_bytes is None else num_bytes
    return MESSAGES.pack_head(number) + struct.pack("<Q", size) + body


def packed(message: Message) -> bytes:
    return frame(*MESSAGES.encode(message))


def admitted(connected: socket.socket, secret: str) -> RankConnection:
    """A rank that has connected, as the receiving rank has it."""
    connection = RankConnection(connected, MESSAGES)
    handshake = Handshake(secret.encode())
    connection.poll(WAIT_SECONDS)
    handshake.hear(connection)
    handshake.answer(connection)
    return connection


@contextlib.contextmanager
def stranger(replica: Replica) -> Iterator[tuple[socket.socket, str]]:
    """A process that has found the socket in the kernel's list, and how that has it."""
    name = address_of(replica.secret)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as strange:
        strange.settimeout(WAIT_SECONDS)
        strange.connect(name)
        yield strange, name


def hears_nothing(strange: socket.socket) -> bool:
    """Whether the other side closes it without a word."""
    try:
        return strange.recv(1) == b""
    except ConnectionResetError:  # what was said to it was not read
        return True


def test_another_user_is_sent_away(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(PeerUnavailableError, match="this process of 4711"):
        _ = replica.rank().manifest


def test_one_that_says_nothing_is_let_go(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_handoff, "_HELLO_SECONDS", 0.05)
    connection = connect(replica.secret, 5.0)
    with pytest.raises(NotReadyError, match="said nothing"):
        connection.hear(Layout)
    connection.close()
    assert replica.queue.error is None


def test_who_does_not_know_the_secret_is_let_go_unheard(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it says: of that nothing is decoded."""
    heard: list[bytes] = []
    monkeypatch.setattr(MESSAGES, "decode", lambda number, body: heard.append(body))
    hello = packed(LoadRequest("t", 1))
    proof = frame(0, bytes(32))
    for said in (b"", b"x", bytes(32), hello, proof + hello, pickle.dumps(Bomb()) * 9):
        with stranger(replica) as (strange, _):
            strange.sendall(said)
            strange.shutdown(socket.SHUT_WR)
            assert hears_nothing(strange)
    with stranger(replica) as (strange, name):  # as the list of the kernel has it
        strange.sendall(name.removeprefix("\0weft-handoff-").encode() + hello)
        assert hears_nothing(strange)
    assert not heard
    assert not Bomb.gone_off
    assert replica.queue.error is None


def test_the_silent_keep_nobody_out_and_have_no_thread(replica: Replica) -> None:
    with contextlib.ExitStack() as silent:
        first, _ = silent.enter_context(stranger(replica))
        for _ in range(rank_handoff._MAX_STRANGERS):
            silent.enter_context(stranger(replica))
        assert hears_nothing(first)
        assert all(thread.name != "weft-rank" for thread in threading.enumerate())
        assert replica.rank().manifest.layout_digest == MANIFEST.layout_digest


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (b"nonsense" * 4, "no message of Weft's"),
        (packed(Working()), "Working out of turn"),
    ],
)
def test_a_rank_that_says_what_is_no_message_is_told_so(
    replica: Replica, said: bytes, found: str
) -> None:
    connection = connect(replica.secret, 5.0)
    connection.socket.sendall(said)
    with pytest.raises(PeerUnavailableError, match=found):
        connection.hear(Layout)
    connection.close()


@pytest.mark.parametrize("said", [packed(Loaded())[:5], packed(Arrived(0, (1, 2)))[:-1]])
def test_a_rank_that_goes_in_half_a_message_ends_the_load(replica: Replica, said: bytes) -> None:
    InPlaceLoad(replica.queue, Loader())
    connection = connect(replica.secret, 5.0)
    connection.say(LoadRequest("t", 1))
    connection.hear(Layout)
    replica.land(0)
    connection.socket.sendall(said)
    connection.close()
    with pytest.raises(LoadFailedError, match="a rank of the replica has ended"):
        replica.queue.wait_complete(nothing)


def test_an_impostor_at_the_name_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has taken the name after the receiving rank ended."""
    secret = secrets.token_hex(8)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as impostor:
        impostor.bind(address_of(secret))
        impostor.listen(1)
        reading = in_thread(lambda: RankHandoff(secret, 1, "t", BASE).manifest)
        with impostor.accept()[0] as accepted:
            shown = accepted.recv(4096)
            accepted.sendall(shown)  # what it was shown is not what it is asked for
            assert accepted.recv(4096) == b""
        with pytest.raises(PeerUnavailableError, match="does not know the secret"):
            reading.result(WAIT_SECONDS)
    assert len(shown) == Handshake(b"").hello_bytes


def test_a_receiving_rank_whose_backlog_is_full_is_waited_for() -> None:
    secret = secrets.token_hex(8)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as busy:
        busy.bind(address_of(secret))
        busy.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as first:
            first.connect(address_of(secret))
            waiting = in_thread(connect, secret, 5.0)
            stays(lambda: not waiting.done(), 0.05)
            busy.accept()[0].close()
            with busy.accept()[0] as accepted:
                connection = admitted(accepted, secret)
                waiting.result(WAIT_SECONDS).close()
                connection.close()


def test_a_bucket_in_a_buffer_that_was_never_told_is_refused() -> None:
    secret = secrets.token_hex(8)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address_of(secret))
        listener.listen(1)
        reading = in_thread(lambda: next(RankHandoff(secret, 1, "t", BASE).buckets()))
        connection = admitted(listener.accept()[0], secret)
        connection.hear(LoadRequest)
        connection.say(Layout(MANIFEST))
        connection.say(Arrived(0, (1,)))
        with pytest.raises(PeerUnavailableError, match="never told"):
            reading.result(WAIT_SECONDS)
        connection.close()
