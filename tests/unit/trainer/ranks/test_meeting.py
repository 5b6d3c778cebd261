"""Ranks find each other by a store, and let in nobody else."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from trainer_side.ranks import meeting
from trainer_side.ranks.link import Channel, LinkError, RankLink
from trainer_side.ranks.meeting import meet


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def _close(links: list[RankLink]) -> None:
    for link in links:
        link.close()


def _soon() -> float:
    return time.monotonic() + 20


@pytest.mark.parametrize("size", [2, 4])
def test_every_two_ranks_are_connected(pool, size):
    store = dist.HashStore()
    links = list(pool.map(lambda rank: meet(store, rank, size, _soon()), range(size)))
    for rank, link in enumerate(links):
        others = {other for other in range(size) if other != rank}
        assert {other for channel, other in link._sockets if channel is Channel.PAIRS} == others
        for channel in (Channel.STAR, Channel.SUM):
            wanted = others if rank == 0 else {0}
            assert {other for each, other in link._sockets if each is channel} == wanted
    for low in range(size):
        for high in range(low + 1, size):
            content = memoryview(f"{low} to {high}".encode())
            links[low].swap(Channel.PAIRS, 1, {high: content}, {}, _soon())
            said = links[high].swap(Channel.PAIRS, 1, {}, {low: None}, _soon())
            assert said[low] == content
    _close(links)


def test_ranks_meet_by_a_store_over_the_network(pool, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def meet_by_network(rank: int) -> RankLink:
        client = dist.TCPStore("localhost", server.port, is_master=False)
        return meet(dist.PrefixStore("a", dist.PrefixStore("b", client)), rank, 3, _soon())

    links = list(pool.map(meet_by_network, range(3)))
    for sock in links[0]._sockets.values():
        assert sock.getsockname()[0] in ("127.0.0.1", "::1")
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


def test_a_machine_that_takes_no_more_connections_is_told(monkeypatch):
    class Full(socket.socket):
        def accept(self) -> Any:
            raise OSError(24, "Too many open files")

    listener = Full()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    monkeypatch.setattr(meeting, "_listen", lambda store: listener)
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
        silent, short, wrong, third, no_channel, gone = strangers
        short.sendall(secret)
        wrong.sendall(meeting._HELLO.pack(bytes(32), 1, Channel.STAR))
        third.sendall(meeting._HELLO.pack(secret, 2, Channel.STAR))
        no_channel.sendall(meeting._HELLO.pack(secret, 1, 9))
        gone.close()
        for each in (wrong, third, no_channel):
            each.settimeout(10)
            assert each.recv(1) == b""
        links = [meet(store, 1, 2, _soon()), first.result(10)]
    assert time.monotonic() - began < 10
    for each in (silent, short):
        each.settimeout(10)
        assert each.recv(1) == b""
    for each in strangers:
        each.close()
    assert "turned away a connection" in caplog.text
    assert secret.hex() not in caplog.text
    _close(links)


class _Routed:
    """A store that was reached by the network."""

    def __init__(self, host: str) -> None:
        self.host = host


class _Prefixed:
    def __init__(self, inner: object) -> None:
        self.underlying_store = inner


def test_ranks_listen_where_the_way_to_the_store_leads(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(meeting, "local_address_towards", lambda target: f"via {target}")
    assert next(iter(meeting._hosts(_Prefixed(_Prefixed(_Routed("head")))))) == "via head:1"
    assert next(iter(meeting._hosts(_Routed("fd00::1")))) == "via [fd00::1]:1"
    monkeypatch.setenv("MASTER_ADDR", "10.1.2.3")
    hosts = list(meeting._hosts(dist.HashStore()))
    assert hosts == ["via 10.1.2.3:1", socket.gethostname(), "via 192.0.2.1:9", "127.0.0.1"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0,lo")
    assert list(meeting._hosts(dist.HashStore()))[:2] == ["127.0.0.1", "via 10.1.2.3:1"]


def test_where_ranks_are_on_several_hosts_none_listens_at_loopback(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(meeting, "_hosts", lambda store: iter(["127.0.0.1", "localhost"]))
    with pytest.raises(LinkError, match="GLOO_SOCKET_IFNAME"):
        meeting._listen(dist.HashStore())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    with meeting._listen(dist.HashStore()) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_what_cannot_be_resolved_is_left_out(monkeypatch):
    hosts = ["no.such.host.invalid", "a" * 70, "192.0.2.7", "127.0.0.1"]
    monkeypatch.setattr(meeting, "_hosts", lambda store: iter(hosts))
    with meeting._listen(dist.HashStore()) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_nothing_stays_open_of_a_meeting_that_failed():
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(LinkError):
        meet(dist.HashStore(), 0, 3, time.monotonic() + 0.1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_silent_connections_are_bounded_and_dropped(pool, monkeypatch):
    """1,500 of them would take all descriptors of a process that may have 1,024."""
    monkeypatch.setattr(meeting, "_MAX_STRANGERS", 8)
    monkeypatch.setattr(meeting, "_HELLO_SECONDS", 0.3)
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
    assert most <= 8 + 4  # and the ranks' own
    for stranger in strangers:  # also the last ones, in time
        stranger.settimeout(5)
        assert stranger.recv(1) == b""
        stranger.close()
    assert not first.done()
    second = pool.submit(meet, store, 1, 2, _soon())
    _close([first.result(20), second.result(20)])
