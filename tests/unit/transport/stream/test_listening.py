"""The port of a process's lanes."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from weft_rl.transport.backends import why_unavailable
from weft_rl.transport.group import CPU
from weft_rl.transport.stream.lane import Lane
from weft_rl.transport.stream.listening import open_lane, shut_lane
from weft_rl.transport.stream.messages import LaneHello, StreamError

#: Of documentation: no machine has it.
FOREIGN = "192.0.2.1"


def refuse(lane: Lane, hello: LaneHello) -> None:
    lane.close()


@contextmanager
def lane_at(host: str, key: bytes) -> Iterator[int]:
    port = open_lane(host, key, refuse)
    try:
        yield port
    finally:
        shut_lane(host, key)


def is_open(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


def test_all_lanes_of_an_address_have_one_port_until_the_last_is_shut() -> None:
    with lane_at("127.0.0.1", b"a" * 16) as first:
        with lane_at("127.0.0.1", b"b" * 16) as second, lane_at("127.0.0.2", b"c" * 16) as other:
            assert first == second
            assert is_open("127.0.0.2", other)
            assert not is_open("127.0.0.3", first), "it listens at its own address alone"
        assert is_open("127.0.0.1", first)
        assert not is_open("127.0.0.2", other)
    assert not is_open("127.0.0.1", first)


def test_the_first_free_port_from_the_given_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("WEFT_STREAM_PORT", str(port))
        with lane_at("127.0.0.1", b"a" * 16) as given:
            assert port < given < port + 64


@pytest.mark.parametrize("given", ["fifty", "-1", "70000", "65530", "\u0665"])
def test_what_is_no_port_is_said(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_STREAM_PORT", given)
    assert "WEFT_STREAM_PORT=" in why_unavailable("stream", CPU)
    with pytest.raises(StreamError, match=r"is no port from 1 to 65,471"):
        open_lane("127.0.0.1", b"a" * 16, refuse)


def test_an_address_that_a_router_translates_is_listened_for_everywhere() -> None:
    with lane_at(FOREIGN, b"a" * 16) as port:
        assert is_open("127.0.0.1", port)


def test_a_name_that_nobody_knows_is_refused() -> None:
    with pytest.raises(StreamError, match=r"no lane can be listened for at nobody\.invalid"):
        open_lane("nobody.invalid", b"a" * 16, refuse)


#: What Linux alone has, so that other systems' modules have not.
_ELSEWHERE = """
import socket, sys, torch
del socket.TCP_USER_TIMEOUT, socket.TCP_INFO, socket.SOCK_CLOEXEC, socket.SO_PEERCRED
sys.platform = "darwin"
from weft_rl.transport.backends import available_backends
import trainer_side
print(*available_backends(torch.device("cpu")))
"""


def test_a_trainer_on_another_system_has_gloo() -> None:
    words = [sys.executable, "-c", _ELSEWHERE]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "gloo" in ended.stdout.split()
    assert "stream" not in ended.stdout.split()
