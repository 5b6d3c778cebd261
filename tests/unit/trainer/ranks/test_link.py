"""Ranks find each other by a store, let in nobody else, and wait for nobody who is not there."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from trainer_side.ranks import link
from trainer_side.ranks.link import LinkError, RankLink, TrafficKind, meet
from weft_rl.ipc.connection import Connection
from weft_rl.ipc.handshake import Handshake

_CALL = 7
_LARGE = bytes(range(256)) * 40_000  # more than connections hold


@pytest.fixture
def links() -> Iterator[list[RankLink]]:
    """Of three ranks."""
    ends: list[dict[tuple[TrafficKind, int], Connection[bytes]]] = [{}, {}, {}]
    for low, high in ((0, 1), (0, 2), (1, 2)):
        for traffic in TrafficKind if low == 0 else (TrafficKind.PAIRS,):
            ours, theirs = socket.socketpair()
            ends[low][traffic, high] = Connection(ours, link._FRAMES, f"rank {high}")
            ends[high][traffic, low] = Connection(theirs, link._FRAMES, f"rank {low}")
    links = [RankLink(each) for each in ends]
    yield links
    for each in links:
        each.close()


@pytest.fixture
def beside() -> Iterator[Callable[..., Future[dict[int, memoryview]]]]:
    """Call something on a thread."""
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def _soon() -> float:
    return time.monotonic() + 20


def test_messages_go_both_ways_at_once_whatever_their_size(links, beside):
    """Each would wait for the other if it sent all before it received."""
    own = [memoryview(_LARGE), memoryview(b""), memoryview(_LARGE[::-1])]

    def exchange(rank: int) -> dict[int, memoryview]:
        others = [each for each in range(3) if each != rank]
        outs = {each: memoryview(bytearray(len(own[each]))) for each in others}
        to_all = dict.fromkeys(others, own[rank])
        return links[rank].swap(TrafficKind.PAIRS, _CALL, to_all, outs, _soon())

    futures = [beside(exchange, rank) for rank in range(3)]
    for rank, future in enumerate(futures):
        assert future.result(20) == {each: own[each] for each in range(3) if each != rank}


@pytest.mark.parametrize("content", [b"", b"x", _LARGE])
def test_a_receiver_need_not_know_how_long_a_message_is(links, beside, content):
    sent = beside(
        links[0].swap,
        TrafficKind.STAR,
        _CALL,
        dict.fromkeys([1, 2], memoryview(content)),
        {},
        _soon(),
    )
    for rank in (1, 2):
        said = links[rank].swap(TrafficKind.STAR, _CALL, {}, {0: None}, _soon())
        assert bytes(said[0]) == content
    sent.result(20)


def test_channels_do_not_mix(links):
    for traffic in TrafficKind:
        content = memoryview(traffic.name.encode())
        links[0].swap(traffic, _CALL, {1: content}, {}, _soon())
    for traffic in reversed(TrafficKind):
        said = links[1].swap(traffic, _CALL, {}, {0: None}, _soon())
        assert bytes(said[0]) == traffic.name.encode()


@pytest.mark.parametrize(
    ("call", "content", "out"),
    [
        (_CALL + 1, b"four", memoryview(bytearray(4))),
        (_CALL, b"four", memoryview(bytearray(5))),
        (_CALL, b"four", memoryview(bytearray(3))),
        (_CALL, b"four", memoryview(bytearray(0))),
        (_CALL + 1, b"", None),
    ],
    ids=["another call", "too short", "too long", "nothing awaited", "of unknown length"],
)
def test_a_rank_that_does_something_else_is_told_from_one_that_takes_part(
    links, call, content, out
):
    links[1].swap(TrafficKind.STAR, call, {0: memoryview(content)}, {}, _soon())
    with pytest.raises(LinkError, match="rank 1 takes part in something else"):
        links[0].swap(TrafficKind.STAR, _CALL, {}, {1: out}, _soon())
    for rank in (1, 2):  # and the others are not left waiting
        with pytest.raises(LinkError, match="rank 0"):
            links[rank].swap(TrafficKind.STAR, _CALL, {}, {0: None}, _soon())


def test_who_is_silent_is_named_at_the_deadline(links):
    links[1].swap(TrafficKind.STAR, _CALL, {0: memoryview(b"here")}, {}, _soon())
    with pytest.raises(LinkError, match=r"rank 2 .*was silent until the deadline"):
        links[0].swap(TrafficKind.STAR, _CALL, {}, {1: None, 2: None}, time.monotonic() + 0.1)


def test_who_takes_nothing_is_named_at_the_deadline(links):
    with pytest.raises(LinkError, match=r"rank 1 .*read nothing, or too slowly, until the dead"):
        links[0].swap(TrafficKind.PAIRS, _CALL, {1: memoryview(_LARGE)}, {}, time.monotonic() + 0.1)


@pytest.mark.parametrize("waits_for", [0, 1], ids=["whoever left", "who waits for it"])
def test_leaving_ends_every_wait(links, beside, waits_for):
    """At the rank that leaves, and at those that wait for it, one by way of another."""
    waiting = [
        beside(links[2].swap, TrafficKind.PAIRS, _CALL, {}, {waits_for: None}, _soon()),
        beside(links[1].swap, TrafficKind.STAR, _CALL, {}, {0: None}, _soon()),
        beside(links[0].swap, TrafficKind.SUM, _CALL, {}, {1: None}, _soon()),
    ]
    time.sleep(0.1)
    links[0].close()
    reasons = [str(future.exception(5)) for future in waiting]
    assert reasons[2] == "this rank has left the push"
    assert all("closed its socket" in reason for reason in reasons[:2]), reasons
    for each in links:
        assert each.closed
        with pytest.raises(LinkError, match=r"has left|closed its socket"):
            each.swap(TrafficKind.PAIRS, _CALL, {}, {}, _soon())


def test_half_a_message_is_not_one(links, beside):
    """Whoever dies in it leaves nobody waiting for the rest."""
    waiting = beside(links[0].swap, TrafficKind.PAIRS, _CALL, {}, {1: None}, _soon())
    sending = beside(links[1].swap, TrafficKind.PAIRS, _CALL, {2: memoryview(_LARGE)}, {}, _soon())
    time.sleep(0.1)
    links[1]._connections[TrafficKind.PAIRS, 0].socket.send(b"WEFL\1\0\7\0")
    links[1].close()
    for future in (waiting, sending):
        assert isinstance(future.exception(5), LinkError)


def test_what_an_interruption_leaves_in_the_middle_is_never_used_again(links):
    class Interrupted(BaseException):
        pass

    class Interrupting(dict):
        def items(self):
            raise Interrupted

    with pytest.raises(Interrupted):
        links[0].swap(TrafficKind.STAR, _CALL, Interrupting(), {}, _soon())
    assert links[0].closed
    with pytest.raises(LinkError, match="was interrupted"):
        links[0].swap(TrafficKind.STAR, _CALL, {}, {}, _soon())


def test_whoever_is_gone_is_not_told_where_that_is_asked_for(links):
    links[2].close()
    content = memoryview(_LARGE)
    sent = threading.Thread(
        target=links[0].swap,
        args=(TrafficKind.STAR, _CALL, {1: content, 2: content}, {}, _soon()),
        kwargs={"whoever_is_there": True},
    )
    sent.start()
    said = links[1].swap(TrafficKind.STAR, _CALL, {}, {0: None}, _soon())
    sent.join(20)
    assert said[0] == content
    assert not links[0].closed
    with pytest.raises(LinkError, match="rank 2"):
        links[0].swap(TrafficKind.STAR, _CALL, {2: memoryview(b"x")}, {}, _soon())


def test_a_rank_that_went_after_it_spoke_is_found_out(links):
    for rank in (1, 2):
        links[rank].swap(TrafficKind.STAR, _CALL, {0: memoryview(b"here")}, {}, _soon())
    links[0].check(TrafficKind.STAR)  # bytes that nobody has read are nobody's absence
    links[2].close()
    links[0].swap(TrafficKind.STAR, _CALL, {}, {1: None, 2: None}, _soon())
    with pytest.raises(LinkError, match="rank 2 has left"):
        links[0].check(TrafficKind.STAR)
    assert links[0].closed


@pytest.mark.parametrize("waits_for", ["it", "another", "room"])
def test_whoever_leaves_says_why_to_all_whatever_they_wait_for(links, beside, waits_for):
    """Also to one that waits for a rank which is there, or that only sends."""

    def wait(rank: int) -> None:
        if rank == 0 and waits_for == "room":
            links[0].swap(TrafficKind.STAR, _CALL, {1: memoryview(_LARGE)}, {}, _soon())
        elif rank == 0 or waits_for == "it":
            links[rank].swap(TrafficKind.PAIRS, _CALL, {}, {1: None}, _soon())
        else:
            links[rank].swap(TrafficKind.STAR, _CALL, {}, {0: None}, _soon())

    waiting = [beside(wait, rank) for rank in (0, 2)]
    time.sleep(0.1)
    links[1].close(reason=b"out of memory")
    for error in [each.exception(5) for each in waiting]:
        assert isinstance(error, LinkError)
        assert (error.rank, error.reason) == (1, b"out of memory")
    with pytest.raises(LinkError) as caught:
        links[0].swap(TrafficKind.PAIRS, _CALL, {}, {2: None}, _soon())
    assert caught.value.reason == b"out of memory"


def test_why_a_rank_leaves_is_no_part_of_a_message_that_it_was_sending(links, beside):
    message = memoryview(bytearray(len(_LARGE)))
    sends = beside(links[1].swap, TrafficKind.PAIRS, _CALL, {0: memoryview(_LARGE)}, {}, _soon())
    time.sleep(0.1)
    links[1].close(reason=b"out of memory")
    with pytest.raises(LinkError) as caught:
        links[0].swap(TrafficKind.PAIRS, _CALL, {}, {1: message}, _soon())
    assert caught.value.reason == b"out of memory"  # of another channel
    assert isinstance(sends.exception(5), LinkError)
    assert b"out of memory" not in bytes(message)


# -- meeting ---------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def _close(links: list[RankLink]) -> None:
    for each in links:
        each.close()


@pytest.mark.parametrize("size", [2, 4])
def test_every_two_ranks_are_connected(pool, size):
    store = dist.HashStore()
    links = list(pool.map(lambda rank: meet(store, rank, size, _soon()), range(size)))
    for rank, each in enumerate(links):
        others = {other for other in range(size) if other != rank}
        assert {
            other for traffic, other in each._connections if traffic is TrafficKind.PAIRS
        } == others
        for traffic in (TrafficKind.STAR, TrafficKind.SUM):
            wanted = others if rank == 0 else {0}
            found = {other for kind, other in each._connections if kind is traffic}
            assert found == wanted
    for low in range(size):
        for high in range(low + 1, size):
            content = memoryview(f"{low} to {high}".encode())
            links[low].swap(TrafficKind.PAIRS, 1, {high: content}, {}, _soon())
            said = links[high].swap(TrafficKind.PAIRS, 1, {}, {low: None}, _soon())
            assert said[low] == content
    _close(links)


def test_ranks_meet_by_a_store_over_the_network(pool, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def meet_by_network(rank: int) -> RankLink:
        client = dist.TCPStore("localhost", server.port, is_master=False)
        return meet(dist.PrefixStore("a", dist.PrefixStore("b", client)), rank, 3, _soon())

    links = list(pool.map(meet_by_network, range(3)))
    for connection in links[0]._connections.values():
        assert connection.socket.getsockname()[0] in ("127.0.0.1", "::1")
    _close(links)


def test_a_rank_that_does_not_come_is_named(pool):
    store = dist.HashStore()
    deadline = time.monotonic() + 0.5
    others = [pool.submit(meet, store, rank, 3, deadline) for rank in (0, 2)]
    reasons = [str(future.exception(10)) for future in others]
    assert "rank 1" in reasons[0]
    assert reasons[1].startswith("rank 1 did not come in time")


def test_a_store_that_is_gone_is_told():
    class Gone:
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("Broken pipe")

    with pytest.raises(LinkError, match=r"the store of torch\.distributed fails: Broken pipe"):
        meet(Gone(), 0, 2, _soon())


@pytest.mark.parametrize(("key", "value"), [("secret", "00zz"), ("0", "{")])
def test_a_store_that_holds_what_no_rank_wrote_is_told(key, value):
    store = dist.HashStore()
    store.set("secret", "00" * 32)
    store.set(key, value)
    with pytest.raises(LinkError, match="cannot connect to the others"):
        meet(store, 1, 2, _soon())


def test_a_machine_that_takes_no_more_connections_is_told(monkeypatch):
    class Full(socket.socket):
        def accept(self) -> Any:
            raise OSError(24, "Too many open files")

    listener = Full()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    monkeypatch.setattr(link, "_listen", lambda store: listener)
    with (
        socket.create_connection(listener.getsockname()),
        pytest.raises(LinkError, match=r"cannot connect to the others: .*Too many open files"),
    ):
        meet(dist.HashStore(), 0, 2, _soon())


def test_a_rank_that_has_gone_again_is_named():
    store = dist.HashStore()
    store.set("secret", "00" * 32)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        store.set("0", json.dumps(closed.getsockname()))
    with pytest.raises(LinkError, match=r"rank 0 cannot be reached at .*refused"):
        meet(store, 1, 2, _soon())


def _say_hello(sock: socket.socket, secret: bytes, *identity: int) -> None:
    connection = Connection(sock.dup(), link._FRAMES)
    Handshake(secret, link._IDENTITY).begin(connection, *identity)
    connection.close()


def _hears_nothing(sock: socket.socket) -> bool:
    """Whether the other side closes it without a word."""
    sock.settimeout(10)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:  # what was said to it was not read
        return True


def test_strangers_are_turned_away_and_hold_nobody_up(pool, caplog):
    """Whoever says nothing, too little, or another secret, or comes in a rank's place twice."""
    store = dist.HashStore()
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        first = pool.submit(meet, store, 0, 2, _soon())
        store.wait(["0", "secret"])
        address = tuple(json.loads(store.get("0")))
        secret = bytes.fromhex(store.get("secret").decode())
        strangers = [socket.create_connection(address) for _ in range(6)]
        silent, short, wrong, third, no_traffic, gone = strangers
        short.sendall(secret)
        _say_hello(wrong, bytes(32), 1, TrafficKind.STAR)
        _say_hello(third, secret, 2, TrafficKind.STAR)
        _say_hello(no_traffic, secret, 1, 9)
        gone.close()
        for each in (wrong, third, no_traffic):
            assert _hears_nothing(each)
        links = [meet(store, 1, 2, _soon()), first.result(10)]
    assert time.monotonic() - began < 10
    for each in (silent, short):
        assert _hears_nothing(each)
    for each in strangers:
        each.close()
    assert "turned away a connection" in caplog.text
    assert secret.hex() not in caplog.text
    _close(links)


@pytest.mark.parametrize("gone", [TrafficKind.STAR, TrafficKind.SUM])
def test_a_rank_that_is_gone_after_its_hello_ends_the_meeting(monkeypatch, gone):
    """Else the link would lack a connection; those that have come behind it are closed, too."""
    before = len(os.listdir("/proc/self/fd"))
    secret = bytes(32)
    monkeypatch.setattr("trainer_side.ranks.link.secrets.token_hex", lambda size: secret.hex())
    listener = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setattr(link, "_listen", lambda store: listener)
    with contextlib.ExitStack() as coming:
        for traffic in TrafficKind:
            each = coming.enter_context(socket.create_connection(listener.getsockname()))
            _say_hello(each, secret, 1, traffic)
            if traffic is gone:  # as a process whose socket is closed by a reset
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.close()
        with pytest.raises(LinkError, match=r"cannot connect to the others: rank 1 (closed|is)"):
            meet(dist.HashStore(), 0, 2, _soon())
    assert len(os.listdir("/proc/self/fd")) == before


class _Routed:
    """A store that was reached by the network."""

    def __init__(self, host: str) -> None:
        self.host = host


class _Prefixed:
    def __init__(self, inner: object) -> None:
        self.underlying_store = inner


def test_ranks_listen_where_the_way_to_the_store_leads(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(link, "local_address_towards", lambda target: f"via {target}")
    assert next(iter(link._hosts(_Prefixed(_Prefixed(_Routed("head")))))) == "via head:1"
    assert next(iter(link._hosts(_Routed("fd00::1")))) == "via [fd00::1]:1"
    monkeypatch.setenv("MASTER_ADDR", "10.1.2.3")
    hosts = list(link._hosts(dist.HashStore()))
    assert hosts == ["via 10.1.2.3:1", socket.gethostname(), "via 192.0.2.1:9", "127.0.0.1"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0,lo")
    assert list(link._hosts(dist.HashStore()))[:2] == ["127.0.0.1", "via 10.1.2.3:1"]


def test_where_ranks_are_on_several_hosts_none_listens_at_loopback(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(link, "_hosts", lambda store: iter(["127.0.0.1", "localhost"]))
    with pytest.raises(LinkError, match="GLOO_SOCKET_IFNAME"):
        link._listen(dist.HashStore())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    with link._listen(dist.HashStore()) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_what_cannot_be_resolved_is_left_out(monkeypatch):
    hosts = ["no.such.host.invalid", "a" * 70, "192.0.2.7", "127.0.0.1"]
    monkeypatch.setattr(link, "_hosts", lambda store: iter(hosts))
    with link._listen(dist.HashStore()) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_nothing_stays_open_of_a_meeting_that_failed():
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(LinkError):
        meet(dist.HashStore(), 0, 3, time.monotonic() + 0.1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_silent_connections_are_bounded_and_dropped(pool, monkeypatch):
    """1,500 of them would take all descriptors of a process that may have 1,024."""
    monkeypatch.setattr(link, "_MAX_STRANGERS", 8)
    store, most = dist.HashStore(), 0
    first = pool.submit(meet, store, 0, 2, _soon())
    store.wait(["0"])
    address = tuple(json.loads(str(store.get("0"), "utf-8")))
    before = len(os.listdir("/proc/self/fd"))
    strangers = []
    for _ in range(60):
        strangers.append(socket.create_connection(address))
        # Either end of each is in this process.
        most = max(most, len(os.listdir("/proc/self/fd")) - before - len(strangers))
    assert most <= 8 + 8  # and the ranks' own, and what other threads open
    assert all(map(_hears_nothing, strangers[:-11]))
    assert not first.done()
    second = pool.submit(meet, store, 1, 2, _soon())
    _close([first.result(20), second.result(20)])
    for stranger in strangers:  # also the last ones, with the meeting
        assert _hears_nothing(stranger)
        stranger.close()
