"""Which replica holds the others up, by what the links between members have carried."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import pytest

from tests.unit.coordinator.decisions.stalling import BUCKETS, push
from weft_rl.containers import replace
from weft_rl.contract.group import LinkUsage
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.transfer import Transfer
from weft_rl.coordinator.decisions.state.values import Phase
from weft_rl.coordinator.decisions.transfers.slow_links import between_members, slow_replica

FAST, SLOW = 100e6, 10e6
REPLICAS = ("a", "b", "c", "d")
CHAIN = ("trainer", *REPLICAS)
#: Bytes of a report, and such as are more than wait in a moment's lull.
REPORTED, MANY = 2**24, 2**26


def hop(rate: float, waiting: int = 0, **facts: bool) -> LinkUsage:
    return LinkUsage(REPORTED, REPORTED / rate, waiting, **facts)


def chain(
    slow: Mapping[str, float], chain: tuple[str, ...] = CHAIN
) -> dict[tuple[str, str], LinkUsage]:
    """Hops of hosts whose links are as fast in as out; bytes wait before a slower link."""
    hops, arriving = {}, FAST
    for source, target in pairwise(chain):
        rate = min(slow.get(source, FAST), slow.get(target, FAST))
        hops[source, target] = hop(rate, MANY if rate < arriving else 0)
        arriving = min(arriving, rate)
    return hops


@pytest.mark.parametrize("name", REPLICAS)
def test_one_whose_link_is_slow_is_found_wherever_it_is(name: str) -> None:
    slow = slow_replica(chain({name: SLOW}), REPLICAS)
    assert slow is not None
    assert (slow.replica_id, slow.rate, slow.pace) == (name, SLOW, FAST)


def test_where_all_are_alike_nobody_is_slow() -> None:
    assert slow_replica(chain({}), REPLICAS) is None
    assert slow_replica(chain(dict.fromkeys(CHAIN, SLOW)), REPLICAS) is None
    assert slow_replica(chain({"b": FAST / 2}), REPLICAS) is None, "twice is not much"


def test_the_trainer_s_link_is_nobody_else_s_fault() -> None:
    hops = chain({"trainer": SLOW})
    assert hops["trainer", "a"].num_waiting
    assert slow_replica(hops, REPLICAS) is None


def test_a_source_that_nothing_is_known_of_may_be_the_cause() -> None:
    hops = {("trainer", "a"): hop(SLOW, MANY)}
    assert slow_replica(hops, ("a",)) is None
    two = chain({"a": SLOW}, ("trainer", "a", "b"))
    assert slow_replica(two, ("a", "b")) is None, "no link beside it says what others could carry"


def test_who_trickles_is_not_waited_for() -> None:
    """Small pieces that come now and then look slow by their acknowledgements."""
    hops = chain({}) | {("c", "d"): hop(SLOW, waiting=2**14)}
    assert slow_replica(hops, REPLICAS) is None


def test_links_that_let_bursts_through_are_no_faster_for_it() -> None:
    """All are alike; those that everybody waits for show it, and the others more."""
    hops = {
        ("trainer", "a"): hop(6.0e6, MANY),
        ("a", "b"): hop(6.5e6, MANY),
        ("b", "c"): hop(20e6),
        ("c", "d"): hop(22e6),
    }
    assert slow_replica(hops, REPLICAS) is None


def test_a_link_between_sites_is_as_it_is() -> None:
    hops = chain({}) | {("b", "c"): hop(SLOW, MANY, between_sites=True)}
    assert slow_replica(hops, REPLICAS) is None


def test_of_two_that_are_slow_the_slower_goes_first() -> None:
    slow = slow_replica(chain({"b": SLOW, "d": SLOW / 10}), REPLICAS)
    assert slow is not None
    assert slow.replica_id == "d"


def test_little_was_measured_says_nothing() -> None:
    for few in (LinkUsage(2**10, 1.0, MANY), LinkUsage(2**20, 0.01, MANY), LinkUsage(0, 0.0, MANY)):
        assert slow_replica(chain({}) | {("b", "c"): few}, REPLICAS) is None


def test_what_several_send_adds_up() -> None:
    """A host that two senders' chains share has half of its link for each."""
    half = hop(FAST / 2)
    between = {(f"trainer (sender {lane})", "a"): half for lane in (0, 1)} | {
        ("a", "b"): half,
        ("b", "c"): hop(FAST / 8, MANY),
        ("c", "d"): hop(FAST / 8),
    }
    slow = slow_replica(between, REPLICAS)
    assert slow is not None
    assert slow.replica_id == "c"


# -- in a push ---------------------------------------------------------------------------------


def measure(slow: str, *, megabytes: int = 2_000, **changes: object) -> Transfer:
    """A push to r0, r1 and r2 whose members have measured their links."""
    layout = replace(BUCKETS, total_bytes=megabytes * 10**6)
    m, ticket, _ = push(Phase.STAGING, layout=layout, **changes)
    transfer = m.transfer(ticket)
    names = ("trainer", "r0", "r1", "r2")
    ranks = {name: rank for rank, name in enumerate(names)}
    hops = {(ranks[a], ranks[b]): hop for (a, b), hop in chain({slow: SLOW}, names).items()}
    m.do(events.RanksHeard(transfer.group_id, {}, hops=hops))
    m.pass_time(0.5)
    after: Transfer = m.transfer(ticket)
    return after


@pytest.mark.parametrize("name", ["r0", "r1", "r2"])
def test_it_leaves_a_push_that_needs_fewer(name: str) -> None:
    after = measure(name, min_replicas=1)
    assert after.lost == (name,)
    assert after.losses[name].reason == "TOO_SLOW"
    assert "its link carries 10.0 MB/s, those of the others 100 MB/s" in after.losses[name].message


@pytest.mark.parametrize("min_replicas", [0, 3])
def test_it_stays_where_it_is_required(min_replicas: int) -> None:
    assert not measure("r1", min_replicas=min_replicas).lost


def test_it_stays_where_a_new_group_would_take_as_long() -> None:
    assert not measure("r1", min_replicas=1, megabytes=5).lost


def test_ranks_of_one_replica_are_one_host() -> None:
    m, ticket, _ = push(Phase.STAGING)
    group = m.state.groups[m.transfer(ticket).group_id]
    told = {(0, 1): hop(FAST), (1, 1): hop(SLOW), (1, 2): hop(FAST)}
    trainer = group.member_name(0)
    assert between_members(told, group) == {
        (trainer, "r0"): hop(FAST), ("r0", "r1"): hop(FAST)
    }  # fmt: skip
