"""Connections of others to the port of lanes: they delay nobody, and fill nothing."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Iterator

import pytest

from tests.doubles.wires import Wires
from tests.fuzz.lanes import push, send_frames
from tests.processes import holding
from tests.unit.transport.stream.chain import Group, host_of
from tests.waits import until
from weft_rl.ipc.connection import PeerError
from weft_rl.transport.stream.lane import HELLO_BYTES, Lane, prove_receiver
from weft_rl.transport.stream.messages import MESSAGES, Challenge, LaneHello, Place, Wants


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group(3)
    yield made
    made.close()


def connected(place: Place) -> socket.socket:
    return socket.create_connection((place.host, place.port), 10)


def hello_of(place: Place, rank: int = 1, nth: int = 0) -> LaneHello:
    return LaneHello(place.key, rank, os.urandom(16), nth, os.urandom(16))


def is_closed(sock: socket.socket) -> bool:
    """Return whether the other end closes a connection, at most in 10 s."""
    sock.settimeout(10)
    try:
        while sock.recv(1024):
            pass
    except ConnectionResetError:
        return True
    return True


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\n\r\n" * 8, bytes(4096), os.urandom(4096)],
    ids=["http", "0", "junk"],
)
def test_junk_is_closed(group: Group, said: bytes) -> None:
    with connected(group.place(0)) as stranger:
        stranger.sendall(said)
        assert is_closed(stranger)
    push(group, 1)


def test_the_silent_delay_nobody(group: Group) -> None:
    silent = [connected(group.place(rank)) for rank in range(3) for _ in range(100)]
    began = time.monotonic()
    push(group, 1)
    assert time.monotonic() - began < 10
    for sock in silent:
        sock.close()


def test_a_key_that_is_not_here_is_refused(group: Group) -> None:
    place = group.place(0)
    with connected(place) as stranger:
        lane = Lane(stranger, "the sender")
        lane.say(LaneHello(bytes(16), 1, bytes(16), 0, bytes(16)))
        assert is_closed(stranger)


def test_who_does_not_know_the_secret_gets_nothing(group: Group) -> None:
    """Nor does the answer of the sender prove anything to another."""
    push(group, 1)
    with connected(group.place(0)) as stranger:
        lane, hello = Lane(stranger, "the sender"), hello_of(group.place(0))
        lane.say(hello)
        with pytest.raises(PeerError, match="the sender does not know the group's secret"):
            prove_receiver(lane, bytes(32), hello)
    with connected(group.place(0)) as stranger:
        lane = Lane(stranger, "the sender")
        lane.say(hello_of(group.place(0)))
        challenge = lane.hear(Challenge)
        number, said = MESSAGES.encode(Challenge(challenge.nonce, challenge.proof))
        stranger.sendall(MESSAGES.pack_head(number) + len(said).to_bytes(8, "little") + said)
        lane.say(Wants(0, ()))
        assert is_closed(stranger)
    push(group, 2)


def test_a_flood_of_hellos_starts_few_threads(group: Group) -> None:
    push(group, 1)
    place, own, before = group.place(0), os.getpid(), 0

    def all_lanes_are_there() -> bool:
        nonlocal before
        last, before = before, holding(own).threads
        return last == before

    until(all_lanes_are_there, 20, every_seconds=0.2)  # a push needs not wait for each
    flood = []
    for _ in range(300):
        flood.append(connected(place))
        number, said = MESSAGES.encode(hello_of(place))
        flood[-1].sendall(MESSAGES.pack_head(number) + len(said).to_bytes(8, "little") + said)
    assert len(MESSAGES.encode(hello_of(place))[1]) + 16 == HELLO_BYTES
    assert holding(own).threads <= before + 70
    push(group, 2)
    for sock in flood:
        sock.close()
    until(lambda: holding(own).threads <= before, 20)


def test_frames_of_any_kind_do_no_harm(group: Group) -> None:
    """``python -m tests.fuzz.lanes`` sends more."""
    for rank in range(3):
        send_frames(group.place(rank), random.Random(rank), 100)
        push(group, rank)


def test_who_has_overheard_a_hop_cannot_end_it(wires: Wires, group: Group) -> None:
    push(group, 1)
    said = bytes(wires.cables[host_of(0)][0].from_near)
    with connected(group.place(0)) as stranger:
        stranger.sendall(said)
        Lane(stranger, "the sender").hear(Challenge)
        stranger.sendall(bytes(64))  # no proof
        assert is_closed(stranger)
    push(group, 2)
    assert not any(cable.is_cut for cable in wires.cables[host_of(0)][:5])
