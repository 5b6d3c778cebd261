"""Cases on a network of hosts: each pushes, changes the network, and says what came of it.

A case raises for what must never be: wrong bytes, a push that does not end in time, a pool that
does not serve the next push once the network is whole again.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tests.fault.strikes import POINTS, VICTIM
from tests.network.hosts import Network
from tests.network.pool import HostedPool, PoolPlan, Push, hosted_pool
from tests.waits import stays

#: Deadline of every push.
_PUSH_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table."""

    case: str
    backend: str
    num_replicas: int
    megabytes: float
    mbit: float | None
    """Rate of the slowest link that carries the bytes once."""
    staged_seconds: float | None
    """None for a push that failed."""
    lost: str
    """Replicas that did not serve the version when the push ended."""
    wrong: str
    """Replicas that served other bytes."""
    push_seconds: float
    """Time from the call until it returned or failed."""
    error: str
    """Reason of a push that failed."""
    told: tuple[str, ...]
    """Remarks that the trainer was told."""
    whole_seconds: float | None = None
    """Time from the end of damage and push until every replica served the next push."""

    @property
    def floor_seconds(self) -> float | None:
        """Time that one link takes for the bytes of one copy; None where none bounds it."""
        return self.megabytes * 8 / self.mbit if self.mbit else None


def row(case: str, pool: HostedPool, push: Push, whole_seconds: float | None = None) -> Row:
    """Make the row of a push."""
    plan, answer = pool.plan, push.answer
    left = {name: rate for name, rate in plan.slow.items() if name not in push.lost}
    links = [*left.values(), plan.mbit]
    return Row(
        case=case,
        backend=answer.get("backend", plan.backend),
        num_replicas=plan.num_replicas,
        megabytes=answer.get("bytes", plan.megabytes * 1e6) / 1e6,
        mbit=min((each for each in links if each), default=None),
        staged_seconds=answer.get("staging"),
        lost=", ".join(push.lost),
        wrong=", ".join(push.wrong),
        push_seconds=answer["seconds"],
        error=answer.get("error", ""),
        told=tuple(answer.get("remarks", (answer.get("message", ""),))),
        whole_seconds=whole_seconds,
    )


def _check(pool: HostedPool) -> float:
    """Check that the next push is served by every replica, as it was pushed; return its seconds."""
    began = time.monotonic()
    push = pool.push(_PUSH_SECONDS)
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
                pool.push(_PUSH_SECONDS)  # groups are formed, memory is touched
                pushes = [pool.push(_PUSH_SECONDS) for _ in range(3)]
                assert all(push.is_committed for push in pushes), pushes
                # The median of three.
                pushes.sort(key=lambda push: push.answer["staging"])
                yield row("links", pool, pushes[1])


def two_ranks(backend: str) -> Iterator[Row]:
    """A trainer of two ranks on two hosts, each of which sends what it holds."""
    plan = PoolPlan(backend=backend, num_ranks=2, mbit=100.0, megabytes=12.0)
    with hosted_pool(plan) as pool:
        pool.push(_PUSH_SECONDS)
        yield row("two ranks", pool, pool.push(_PUSH_SECONDS))


def slow_host(backend: str) -> Iterator[Row]:
    """One host of four whose link is a tenth as fast as the others'; and none."""
    alike = PoolPlan(backend=backend, mbit=100.0, megabytes=48.0)
    for name, plan in (
        ("no slow host", alike),
        ("slow host", dataclasses.replace(alike, slow={VICTIM: 10.0})),
    ):
        with hosted_pool(plan) as pool:
            pool.push(_PUSH_SECONDS)
            push = pool.push(_PUSH_SECONDS)
            began = time.monotonic()
            assert push.is_committed, push.answer
            assert not pool.await_served(push.answer["version"], _CLONE_SECONDS)
            yield row(name, pool, push, time.monotonic() - began)


#: A clone of 48 MB over 10 Mbit/s takes 39 s.
_CLONE_SECONDS = 120.0


def sites(backend: str) -> Iterator[Row]:
    """Two sites of two replicas, with a slow link between; how often the bytes cross it is told."""
    plan = PoolPlan(backend=backend, mbit=100.0, megabytes=4.0, far=("replica-0", "replica-2"))
    with hosted_pool(plan) as pool:
        pool.push(_PUSH_SECONDS)
        before = pool.sent_far()
        push = pool.push(_PUSH_SECONDS)
        made = row("two sites", pool, push)
        copies = (pool.sent_far() - before) / (made.megabytes * 1e6)
        crossed = f"{copies:.2f} copies crossed the link between the sites"
        yield dataclasses.replace(made, mbit=plan.between_mbit, told=(*made.told, crossed))


# -- damage that is mended ------------------------------------------------------------------

#: So short that nobody is given up; longer than the coordinator waits for a sign of life.
_BLINK_SECONDS, _LONG_SECONDS = 1.0, 4.0
_TO_A_BUCKET = ("at a bucket",)


@dataclass(frozen=True)
class Damage:
    """Something that happens to a network while a push is at a point, and ends again."""

    name: str
    do: Callable[[Network], None]
    undo: Callable[[Network], None]


def cut(host: str) -> Damage:
    """Return the loss of all that a host sends and is sent."""
    return Damage(f"{host} cut off", lambda net: net[host].cut(), lambda net: net[host].restore())


def _one_way(source: str, target: str) -> Damage:
    return Damage(
        f"{source} to {target} lost",
        lambda net: net[source].lose_towards(net[target]),
        lambda net: net[source].find(net[target]),
    )


def _both_ways(one: str, other: str) -> Damage:
    ways = _one_way(one, other), _one_way(other, one)

    def do(net: Network) -> None:
        for way in ways:
            way.do(net)

    def undo(net: Network) -> None:
        for way in ways:
            way.undo(net)

    return Damage(f"{one} and {other} parted", do, undo)


def disturbed(pool: HostedPool, damage: Damage, point: str, seconds: float | None) -> Row:
    """Damage the network from when a push has come to a point, for so long or until the push has
    ended; then push again."""
    lasting = "until the end" if seconds is None else f"{seconds:.0f} s"
    strike = None if point == "before begin" else pool.arm(point)
    if point != "in rendezvous":  # there the group must be a new one
        _check(pool)
    if strike:
        strike.armed.touch()
        pool.begin_push(_PUSH_SECONDS)
        strike.await_struck(_PUSH_SECONDS)
    damage.do(pool.net)
    try:
        if strike:
            strike.cut.touch()
        else:
            pool.begin_push(_PUSH_SECONDS)
        if seconds is None:
            push = pool.end_push(_PUSH_SECONDS)
        else:
            stays(lambda: pool.ended() == [], seconds)
    finally:
        damage.undo(pool.net)
    if seconds is not None:
        push = pool.end_push(_PUSH_SECONDS)
    return row(f"{damage.name} {lasting}, {point}", pool, push, _check(pool))


def _damages(
    *damages: Damage,
    points: Sequence[str] = POINTS,
    seconds: Sequence[float | None] = (_LONG_SECONDS,),
    num_ranks: int = 1,
) -> Callable[[str], Iterator[Row]]:
    def case(backend: str) -> Iterator[Row]:
        plan = PoolPlan(backend=backend, bucket_bytes=2**18, mbit=100.0, num_ranks=num_ranks)
        with hosted_pool(plan) as pool:
            for damage in damages:
                for point in points:
                    for each in seconds:
                        yield disturbed(pool, damage, point, each)

    return case


# -- addresses ------------------------------------------------------------------------------


def _addressed(name: str, plan: PoolPlan) -> Iterator[Row]:
    """Push twice in a pool whose addresses are odd."""
    with hosted_pool(plan) as pool:
        pool.push(_PUSH_SECONDS)
        yield row(name, pool, pool.push(_PUSH_SECONDS))


def ipv6(backend: str) -> Iterator[Row]:
    """Processes that listen at addresses of IPv6 only."""
    plan = PoolPlan(backend=backend, family=6, num_ranks=2, num_replicas=2, mbit=100.0)
    yield from _addressed("IPv6", plan)


def wrong_interface(backend: str) -> Iterator[Row]:
    """Hosts whose own names and default routes lead to interfaces from which nobody is reached."""
    anywhere = {f"replica-{n}": ("--listen", "0.0.0.0") for n in range(2)}
    plan = PoolPlan(backend=backend, num_replicas=2, mbit=100.0, dead_ends=True, options=anywhere)
    yield from _addressed("wrong interface first", plan)


def translated(backend: str) -> Iterator[Row]:
    """A replica that others reach at an address that none of its interfaces has."""
    for what, host in (("by number", "OUTSIDE"), ("by name", VICTIM)):
        plan = PoolPlan(
            backend=backend,
            num_replicas=2,
            mbit=100.0,
            translated=(VICTIM,),
            options={VICTIM: ("--listen", "INSIDE", "--advertise", host)},
        )
        yield from _addressed(f"translated address, {what}", plan)


def hidden(backend: str) -> Iterator[Row]:
    """A replica that the trainer reaches, and the coordinator does not, from the start."""
    plan = PoolPlan(
        backend=backend,
        num_replicas=2,
        mbit=100.0,
        hidden={VICTIM: "10.99.0.1"},
        options={VICTIM: ("--listen", "10.99.0.1")},
    )
    yield from _addressed("replica hidden from the coordinator", plan)


CASES: dict[str, Callable[[str], Iterator[Row]]] = {
    "links": links,
    "two-ranks": two_ranks,
    "slow-host": slow_host,
    "sites": sites,
    "cut-replica": _damages(cut(VICTIM)),
    "cut-trainer": _damages(cut("trainer-0")),
    "cut-rank": _damages(
        cut("trainer-1"), points=("in rendezvous", "at a bucket", "before commit"), num_ranks=2
    ),
    "cut-coordinator": _damages(cut("coordinator")),
    "blink": _damages(
        *map(cut, (VICTIM, "trainer-0", "coordinator")),
        points=("in rendezvous", "at a bucket", "inside commit"),
        seconds=(_BLINK_SECONDS,),
    ),
    "one-way": _damages(
        _one_way("trainer-0", VICTIM),
        _one_way(VICTIM, "trainer-0"),
        _one_way("coordinator", VICTIM),
        _one_way(VICTIM, "coordinator"),
        points=_TO_A_BUCKET,
    ),
    "parted": _damages(
        _both_ways("coordinator", VICTIM),
        _both_ways("coordinator", "trainer-0"),
        _both_ways("trainer-0", VICTIM),
        points=_TO_A_BUCKET,
    ),
    "parted-for-good": _damages(
        _both_ways("coordinator", VICTIM),
        _both_ways("trainer-0", VICTIM),
        _one_way("trainer-0", VICTIM),
        _one_way(VICTIM, "trainer-0"),
        points=("in rendezvous", "at a bucket"),
        seconds=(None,),
    ),
    "hidden": hidden,
    "wrong-interface": wrong_interface,
    "translated": translated,
    "ipv6": ipv6,
}
