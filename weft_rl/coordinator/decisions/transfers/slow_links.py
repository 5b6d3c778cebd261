"""Slow links: a replica that all others wait for, though a push needs fewer.

Streams pass bytes on from member to member, and each member measures what its links carry. While
bytes move steadily every link carries the same, so one is known to be slow by two things: bytes
wait at its source, and the others could carry more. It has two ends, and either may be the cause.
A host's link is taken to be as fast in as out: so a source that has sent to, or received from,
somebody else at a higher rate is not the cause. Of a source that has nobody else (a trainer)
nothing is known; then the target is the cause if it sends as slowly as it receives.

A link between two sites is taken as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from weft_rl.coordinator.decisions.state.transfer import Group, Hop

# Less than this says nothing of a link.
_LEAST_SECONDS, _LEAST_BYTES = 0.1, 2**16
# A link is slow that carries this part of what the others could.
_SHARE = 1 / 3
# Bytes wait at a link that are more than it carries in this time.
_WAITING_SECONDS = 0.1
# A host sends as slowly as it receives, if not by more than this factor faster.
_ALIKE = 1.5


@dataclass(frozen=True)
class SlowReplica:
    """A replica whose link holds the others up."""

    replica_id: str
    rate: float
    """Bytes a second that its link carries."""
    pace: float
    """Bytes a second that the links of all others have carried at least."""


def between_members(
    hops: Mapping[tuple[int, int], Hop], group: Group
) -> dict[tuple[str, str], Hop]:
    """Return what members have sent to each other, by their names; what stays within a replica is
    left out."""
    named: dict[tuple[str, str], Hop] = {}
    for (source, target), hop in hops.items():
        between = group.rank_name(source), group.rank_name(target)
        if between[0] != between[1]:
            named[between] = named[between] + hop if between in named else hop
    return named


def slow_replica(
    hops: Mapping[tuple[str, str], Hop], replicas: Collection[str]
) -> SlowReplica | None:
    """Return the slowest of the replicas that hold the others up; None if none does."""
    rates = {
        between: hop.rate
        for between, hop in hops.items()
        if hop.busy_seconds >= _LEAST_SECONDS
        and hop.num_bytes >= _LEAST_BYTES
        and not hop.between_sites
    }
    found = []
    for (source, target), rate in rates.items():
        is_full = hops[source, target].num_waiting >= rate * _WAITING_SECONDS
        if target not in replicas or not is_full:
            continue
        others = {between: rate for between, rate in rates.items() if target not in between}
        paces = {name: _speed(name, others) for between in others for name in between}
        pace = min(paces.values(), default=0.0)
        out = [rate for (name, _), rate in rates.items() if name == target]
        is_slow_both_ways = bool(out) and max(out) <= rate * _ALIKE
        if rate <= pace * _SHARE and (source in paces or is_slow_both_ways):
            found.append(SlowReplica(target, rate, pace))
    return min(found, key=lambda slow: slow.rate, default=None)


def _speed(name: str, rates: Mapping[tuple[str, str], float]) -> float:
    """Return what a host's link carries at least, by what it has sent and received; what goes to
    several, or comes from several, adds up."""
    sent = sum(rate for (source, _), rate in rates.items() if source == name)
    return max(sent, sum(rate for (_, target), rate in rates.items() if target == name))
