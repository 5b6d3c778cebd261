"""The network of hosts keeps what it promises, and a pool works on it; ``make network`` has all."""

from __future__ import annotations

import pytest

from tests.network.cases import CASES
from tests.network.hosts import lacking, network
from tests.network.pool import BETWEEN_HOSTS

_LACKING = lacking()
pytestmark = [
    pytest.mark.skipif(bool(_LACKING), reason=f"this machine lacks {_LACKING}"),
    pytest.mark.timeout(120),
]
_ECHO = """
import socket
with socket.create_server(("", 0)) as server:
    print("port", server.getsockname()[1], flush=True)
    while True:
        server.accept()[0].close()
"""
_CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=0.5).close()
    print("reached")
except TimeoutError:
    print("silence")
"""


def test_a_host_is_cut_one_way_and_both_and_put_back() -> None:
    with network() as net:
        one, other = net.host("one"), net.host("other")
        port = other.start("echo", ("-c", _ECHO)).line_after("port ", 20)

        def reach() -> str:
            return one.run("python3", "-c", _CONNECT, "other", port).strip()

        assert reach() == "reached"
        for lose, find in (
            (other.cut, other.restore),
            (lambda: one.lose_towards(other), lambda: one.find(other)),
            (lambda: other.lose_towards(one), lambda: other.find(one)),
        ):
            lose()
            assert reach() == "silence"
            find()
            assert reach() == "reached"


def test_hosts_share_no_directory_and_no_name() -> None:
    with network() as net:
        one, other = net.host("one"), net.host("other")
        for host in (one, other):
            assert host.run("cat", "/proc/sys/kernel/hostname").strip() == host.name
            assert host.run("ls", "-A", "/dev/shm") == ""
        one.run("touch", "/dev/shm/seen")
        assert other.run("ls", "-A", "/dev/shm") == ""
        assert not set(one.env.values()) & set(other.env.values())


@pytest.mark.parametrize("backend", BETWEEN_HOSTS)
def test_a_pool_of_ranks_on_hosts_of_ipv6(backend: str) -> None:
    (row,) = CASES["ipv6"](backend)
    assert (row.backend, row.lost, row.wrong) == (backend, "", "")
