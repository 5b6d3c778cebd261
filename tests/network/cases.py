"""Cases on a network of hosts: each pushes, changes the network, and says what came of it.

A case raises for what must never be: wrong bytes, a push that does not end in time, a pool that
does not serve the next push once the network is whole again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.fault.strikes import POINTS, VICTIM
from tests.network.pool import HostedPool, PoolPlan, Push, hosted_pool

_PUSH_SECONDS = 60.0
#: A push that the network holds up ends by its deadline at the latest.
_HELD_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table."""

    case: str
    backend: str
    num_replicas: int
    megabytes: float
    mbit: float | None
    """Of the slowest link that carries the bytes once."""
    staged_seconds: float | None
    """None for a push that failed."""
    lost: str
    """Replicas that did not serve the version when the push ended."""
    wrong: str
    """Replicas that served other bytes."""
    note: str = ""

    @property
    def floor_seconds(self) -> float | None:
        """Time that one link takes for the bytes of one copy; None where none bounds it."""
        return self.megabytes * 8 / self.mbit if self.mbit else None


def row(case: str, pool: HostedPool, push: Push, note: str = "") -> Row:
    """Make the row of a push."""
    plan, answer = pool.plan, push.answer
    if "error" in answer:
        note = f"{answer['error']} after {answer['seconds']:.1f} s{'; ' * bool(note)}{note}"
    links = [*plan.slow.values(), plan.mbit]
    return Row(
        case=case,
        backend=answer.get("backend", plan.backend),
        num_replicas=plan.num_replicas,
        megabytes=answer.get("bytes", plan.megabytes * 1e6) / 1e6,
        mbit=min((each for each in links if each), default=None),
        staged_seconds=answer.get("staging"),
        lost=", ".join(push.lost),
        wrong=", ".join(push.wrong),
        note=note,
    )


def _check(pool: HostedPool, seed: int) -> float:
    """Check that the next push is served by every replica, as it was pushed; return its seconds."""
    began = time.monotonic()
    push = pool.push(seed, _PUSH_SECONDS)
    assert push.is_committed, push.answer
    wrong = pool.await_served(push.answer["version"])
    wrong += push.wrong
    assert not wrong, f"wrong bytes: {wrong}"
    return time.monotonic() - began


# -- links of all speeds --------------------------------------------------------------------


def links(backend: str) -> Iterator[Row]:
    """Links of three speeds, to one, two and four replicas."""
    for mbit, megabytes in ((10.0, 1.0), (100.0, 12.0), (1000.0, 95.0)):
        for num_replicas in (1, 2, 4):
            plan = PoolPlan(
                backend=backend, num_replicas=num_replicas, mbit=mbit, megabytes=megabytes
            )
            with hosted_pool(plan) as pool:
                pool.push(1, _PUSH_SECONDS)  # groups are formed, memory is touched
                pushes = [pool.push(seed, _PUSH_SECONDS) for seed in (2, 3, 4)]
                assert all(push.is_committed for push in pushes), pushes
                pushes.sort(key=lambda push: push.answer["staging"])
                yield row("links", pool, pushes[1], "median of 3")


def two_ranks(backend: str) -> Iterator[Row]:
    """A trainer of two ranks on two hosts, each of which sends what it holds."""
    plan = PoolPlan(backend=backend, num_ranks=2, mbit=100.0, megabytes=12.0)
    with hosted_pool(plan) as pool:
        pool.push(1, _PUSH_SECONDS)
        yield row("two ranks", pool, pool.push(2, _PUSH_SECONDS))


def slow_host(backend: str) -> Iterator[Row]:
    """One host of four whose link is a tenth as fast as the others'."""
    plan = PoolPlan(backend=backend, mbit=100.0, megabytes=4.0, slow={VICTIM: 10.0})
    with hosted_pool(plan) as pool:
        pool.push(1, _PUSH_SECONDS)
        yield row("slow host", pool, pool.push(2, _PUSH_SECONDS))


# -- cuts -----------------------------------------------------------------------------------


def _cut(name: str, host: str, point: str, backend: str) -> Row:
    """Cut a host off when a push has come to a point, put it back, and push again."""
    plan = PoolPlan(backend=backend, point=point, bucket_bytes=2**18, mbit=100.0)
    with hosted_pool(plan) as pool:
        assert pool.strike
        if point != "in rendezvous":  # there the group must be a new one
            pool.push(1, _PUSH_SECONDS)
        pool.strike.armed.touch()
        pool.begin_push(2, _HELD_SECONDS)
        pool.strike.await_struck(_HELD_SECONDS)
        pool.net[host].cut()
        pool.strike.cut.touch()
        push = pool.end_push(_HELD_SECONDS + 10)
        pool.net[host].restore()
        began = time.monotonic()
        _check(pool, 3)
        note = f"whole again {time.monotonic() - began:.1f} s after"
        return row(f"{name}, {point}", pool, push, note)


def _cuts(name: str, host: str) -> Callable[[str], Iterator[Row]]:
    def case(backend: str) -> Iterator[Row]:
        for point in POINTS:
            yield _cut(name, host, point, backend)

    case.__doc__ = f"The host {host}, cut off at each phase of a push and put back."
    return case


# -- addresses ------------------------------------------------------------------------------


def ipv6(backend: str) -> Iterator[Row]:
    """Processes that listen at addresses of IPv6 only."""
    plan = PoolPlan(backend=backend, family=6, num_ranks=2, num_replicas=2, mbit=100.0)
    with hosted_pool(plan) as pool:
        _check(pool, 1)
        yield row("IPv6", pool, pool.push(2, _PUSH_SECONDS))


CASES: dict[str, Callable[[str], Iterator[Row]]] = {
    "links": links,
    "two-ranks": two_ranks,
    "slow-host": slow_host,
    "cut-replica": _cuts("replica cut", VICTIM),
    "cut-trainer": _cuts("trainer cut", "trainer-0"),
    "cut-coordinator": _cuts("coordinator cut", "coordinator"),
    "ipv6": ipv6,
}
