"""The network of hosts keeps what it promises, and a pool works on it; ``make network`` has all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fault.strikes import VICTIM
from tests.network.cases import cut, disturbed, row
from tests.network.hosts import lacking, network
from tests.network.pool import BETWEEN_HOSTS, HostedPool, PoolPlan, hosted_pool

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


@pytest.fixture(scope="module", params=BETWEEN_HOSTS)
def pool(request: pytest.FixtureRequest) -> Iterator[HostedPool]:
    """A trainer of two ranks and three replicas, each on a host, at addresses of IPv6."""
    plan = PoolPlan(
        backend=request.param,
        family=6,
        num_ranks=2,
        num_replicas=3,
        mbit=100.0,
        bucket_bytes=2**18,
        lost_seconds=3.0,  # other tests run beside
    )
    with hosted_pool(plan) as made:
        yield made


def test_bytes_take_the_link_and_no_way_around_it(pool: HostedPool) -> None:
    made = row("", pool, pool.push(30))
    assert (made.backend, made.lost, made.wrong) == (pool.plan.backend, "", "")
    assert made.staged_seconds is not None
    assert made.floor_seconds is not None
    # The queues hold what is sent in the first 50 ms.
    assert made.staged_seconds > made.floor_seconds - 0.06


def test_a_host_that_is_cut_off_is_left_out_and_catches_up(pool: HostedPool) -> None:
    made = disturbed(pool, cut(VICTIM), "at a bucket", None)
    assert (made.error, made.lost, made.wrong) == ("", VICTIM, "")
    assert "replica-1 is gone" in " ".join(made.told)


def test_a_host_whose_link_is_slow_is_left_behind_and_catches_up() -> None:
    """The others do not wait: the push needs one replica."""
    plan = PoolPlan(num_replicas=3, mbit=100.0, megabytes=4.0, slow={VICTIM: 10.0})
    with hosted_pool(plan) as pool:
        push = pool.push(60.0)
        assert push.lost == (VICTIM,), push.answer
        [remark] = push.answer["remarks"]
        assert "TOO_SLOW" in remark
        assert "its link carries" in remark
        assert push.answer["staging"] < 8 * plan.megabytes / plan.slow[VICTIM], "its link's time"
        assert not push.wrong
        assert not pool.await_served(push.answer["version"])
