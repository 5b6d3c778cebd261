"""Order of a chain."""

from __future__ import annotations

from collections.abc import Mapping

from weft_rl.transport.stream.messages import Place, Station


def chain_of(places: Mapping[int, Place], first: int = 0) -> tuple[Station, ...]:
    """Return the members in the order in which they pass the bytes on: the sender, its own site,
    then one site after another, so that each link between sites carries them once.

    Args:
        places: By rank in the lane; the sender's is 0.
        first: Number by which the receivers of a site are rotated. Where several ranks send, each
            has a chain of its own, and begins at another receiver.
    """
    sender = places[0]
    sites: dict[str, list[int]] = {}
    for rank in sorted(places):
        if rank:
            sites.setdefault(places[rank].site, []).append(rank)
    order = [0]
    for site in sorted(sites, key=lambda site: (site != sender.site, site)):
        ranks = sites[site]
        begin = first % len(ranks)
        order += ranks[begin:] + ranks[:begin]
    return tuple(Station(rank, places[rank]) for rank in order)


def sources_of(chain: tuple[Station, ...], rank: int) -> list[Station]:
    """List the members that a receiver asks for the bytes, one after the other: the one before it,
    the one before that, and the sender, which has everything."""
    position = next(i for i, station in enumerate(chain) if station.rank == rank)
    return [chain[i] for i in sorted({position - 1, max(0, position - 2), 0}, reverse=True)]
