"""Slow links: a replica that all others wait for, though a push needs fewer.

Streams pass bytes on from member to member, and each member measures what its links carry. While
bytes move steadily every link carries the same, so one is known to be slow by two things: bytes
wait at its source, and the others could carry more. It has two ends, and either may be the cause.
A host's link is taken to be as fast in as out: so a source that has sent to, or received from,
somebody else at a higher rate is not the cause. Of a source that has nobody else (a trainer)
nothing is known; then the target is the cause if it sends as slowly as it receives, and the others
are faster by more: where bytes trickle, a link that lets bursts through looks some times as fast
as it is.

A link between two sites is taken as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from weft_rl.contract.group import LinkUsage
from weft_rl.coordinator.decisions.state.transfer import Group

# Less than this says nothing of a link.
_LEAST_SECONDS, _LEAST_BYTES = 0.1, 2**16
# A link is slow that carries this part of what the others could.
_SHARE, _SHARE_OF_UNKNOWN = 1 / 3, 1 / 6
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
    hops: Mapping[tuple[int, int], LinkUsage], group: Group
) -> dict[tuple[str, str], LinkUsage]:
    """Return what members have sent to each other, by their names; what stays within a replica is
    left out."""
    named: dict[tuple[str, str], LinkUsage] = {}
    for (source, target), hop in hops.items():
        between = group.rank_name(source), group.rank_name(target)
        if between[0] != between[1]:
            named[between] = named[between] + hop if between in named else hop
    return named


def slow_replica(
    hops: Mapping[tuple[str, str], LinkUsage], replicas: Collection[str]
) -> SlowReplica | None:
    """Return the slowest of the replicas that hold the others up; None if none does.

    O(n log n) for n hops: a chain of a thousand replicas is looked at with each tick.
    """
    rates = {
        between: hop.rate
        for between, hop in hops.items()
        if hop.busy_seconds >= _LEAST_SECONDS
        and hop.num_bytes >= _LEAST_BYTES
        and not hop.between_sites
    }
    speeds, found = _LinkTable(rates), []
    for (source, target), rate in rates.items():
        is_full = hops[source, target].num_waiting >= rate * _WAITING_SECONDS
        if target not in replicas or not is_full:
            continue
        pace = speeds.least_without(target)
        if speeds.without(source, target) > 0:
            is_slow = rate <= pace * _SHARE
        else:
            is_slow = rate <= pace * _SHARE_OF_UNKNOWN and speeds.is_slow_both_ways(target, rate)
        if is_slow:
            found.append(SlowReplica(target, rate, pace))
    return min(found, key=lambda slow: slow.rate, default=None)


class _LinkTable:
    """Table of what hosts' links carry at least, by what they have sent and received; what goes to
    several hosts, or comes from several, adds up."""

    def __init__(self, rates: Mapping[tuple[str, str], float]) -> None:
        self._sent: dict[str, dict[str, float]] = {}
        self._received: dict[str, dict[str, float]] = {}
        for (source, target), rate in rates.items():
            self._sent.setdefault(source, {})[target] = rate
            self._received.setdefault(target, {})[source] = rate
        names = self._sent.keys() | self._received.keys()
        self._ascending = sorted((self.without(name, ""), name) for name in names)

    def without(self, name: str, other: str) -> float:
        """Return what a host's link carries beside what it has to do with another host; 0 if
        nothing is known."""
        ways = self._sent.get(name, {}), self._received.get(name, {})
        return max(sum(rate for peer, rate in way.items() if peer != other) for way in ways)

    def least_without(self, name: str) -> float:
        """Return the least that is known of the others' links; 0 if nothing is."""
        peers = self._sent.get(name, {}).keys() | self._received.get(name, {}).keys()
        near = (self.without(peer, name) for peer in peers)
        far = (speed for speed, other in self._ascending if other != name and other not in peers)
        known = [speed for speed in near if speed > 0]
        if (slowest := next(far, None)) is not None:
            known.append(slowest)
        return min(known, default=0.0)

    def is_slow_both_ways(self, name: str, rate: float) -> bool:
        """Return whether a host sends as slowly as it receives."""
        sent = self._sent.get(name, {})
        return bool(sent) and max(sent.values()) <= rate * _ALIKE
