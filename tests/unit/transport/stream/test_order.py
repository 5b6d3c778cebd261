"""Order of a chain, and how its buckets are cut into pieces."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from weft_rl.transport.stream.messages import CHAIN, Chain, Place, piece_bytes
from weft_rl.transport.stream.order import chain_of, sources_of


def place(site: str = "") -> Place:
    return Place(bytes(16), "host", 1, b"", site)


def ranks(places: dict[int, Place], first: int = 0) -> list[int]:
    return [station.rank for station in chain_of(places, first)]


def test_each_site_is_passed_once_and_the_senders_own_first() -> None:
    sites = {0: "b", 1: "a", 2: "b", 3: "c", 4: "a", 5: "b"}
    assert ranks({rank: place(site) for rank, site in sites.items()}) == [0, 2, 5, 1, 4, 3]


def test_chains_of_several_senders_begin_at_different_receivers() -> None:
    receivers = {rank: place() for rank in (1, 2, 3)}
    begins = [ranks({0: place(), **receivers}, sender) for sender in range(3)]
    assert begins == [[0, 1, 2, 3], [0, 2, 3, 1], [0, 3, 1, 2]]


def test_a_receiver_asks_those_before_it_and_the_sender_at_last() -> None:
    chain = chain_of({rank: place() for rank in range(6)})
    asked = {rank: [s.rank for s in sources_of(chain, rank)] for rank in (1, 2, 5)}
    assert asked == {1: [0], 2: [1, 0], 5: [4, 3, 0]}


@given(st.dictionaries(st.integers(1, 60), st.sampled_from(["", "a", "b"]), min_size=1))
def test_an_order_has_every_member_once(sites: dict[int, str]) -> None:
    places = {rank: place(site) for rank, site in sites.items()} | {0: place("a")}
    chain = chain_of(places)
    assert sorted(station.rank for station in chain) == sorted(places)
    ordered = [station.place.site for station in chain[1:]]
    changes = sum(a != b for a, b in itertools.pairwise(ordered))
    assert changes == len(set(ordered)) - 1
    assert CHAIN.unpack(CHAIN.pack(Chain(bytes(32), chain))).stations == chain


@given(st.integers(1, 2**33), st.integers(1, 4096))
def test_pieces_are_a_small_part_of_a_bucket_but_not_too_small(
    num_bytes: int, num_receivers: int
) -> None:
    size = piece_bytes(num_bytes, num_receivers)
    assert 16 * 2**10 <= size <= 256 * 2**10
    least = 0.75 * max(256, num_receivers)
    assert size == 16 * 2**10 or -(-num_bytes // size) >= least
