"""Choice of the replica that a prompt goes to, and of the next step after a failed request.

Decisions alone: no I/O, and no clock of its own.
"""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from trainer_side.rollouts.requests import WantedVersions
from weft_rl.contract.errors import (
    CapacityError,
    InvalidRequestError,
    NotAllowedError,
    NotFoundError,
    PeerUnavailableError,
    UnsupportedError,
    VersionChangedError,
    WeftError,
)
from weft_rl.contract.names import AdapterVersions, PolicyVersion, VersionVector

#: How long a replica that failed is left alone, at first and at most.
_FIRST_AWAY_SECONDS = 0.5
_MAX_AWAY_SECONDS = 15.0
#: Replicas that are asked for what none is said to serve.
_MAX_ASKED = 8

#: Errors that another replica would give, too.
_FINAL = (
    InvalidRequestError,
    NotAllowedError,
    UnsupportedError,
)

_T = TypeVar("_T")


@dataclass(eq=False)
class BusyReplica:
    """Replica, with this client's work on it."""

    replica_id: str
    address: str
    served: VersionVector
    is_listed: bool = True
    """True if requests may be sent to it."""
    num_requests: int = 0
    outstanding_tokens: int = 0
    away_until: float = 0.0
    """Time from which it may be tried again after a failure."""
    num_failures: int = 0
    """Number of failures in a row."""
    progress_at: float = 0.0
    """Time at which it last sent something, or had nothing to do."""

    def serves(self, wanted: WantedVersions) -> bool:
        """Return whether it would answer with a wanted version, as far as the routes tell."""
        if wanted.exact is not None:
            return self.served.holds(PolicyVersion(wanted.policy, wanted.exact))
        return self.newest(wanted) >= (wanted.at_least or (0 if wanted.is_base else 1))

    def may_serve_soon(self, wanted: WantedVersions) -> bool:
        """Return whether the wanted version is newer than those it is known to serve. Replicas
        switch together and are reported one by one: were it not asked, the first would get all
        requests."""
        return (wanted.exact or wanted.at_least or 1) > self.newest(wanted)

    def newest(self, wanted: WantedVersions) -> int:
        """Return the version that the policy's name stands for there; 0 if it has no such
        adapter."""
        if wanted.is_base:
            return self.served.base
        return self.served.adapters.get(wanted.policy, AdapterVersions()).alias

    def failed(self, now: float) -> None:
        """Avoid the replica for a while, twice as long after each failure in a row."""
        if now >= self.away_until:
            seconds = _FIRST_AWAY_SECONDS * 2 ** min(self.num_failures, 10)
            self.away_until = now + min(seconds, _MAX_AWAY_SECONDS)
            self.num_failures += 1

    def progressed(self, now: float, num_tokens: int) -> None:
        """Note that the replica has sent so many tokens."""
        self.progress_at, self.num_failures = now, 0
        self.outstanding_tokens = max(0, self.outstanding_tokens - num_tokens)

    def is_stalled(self, now: float, seconds: float) -> bool:
        """Return whether it has requests and has sent nothing for so many seconds."""
        return self.num_requests > 0 and now - self.progress_at > seconds


@dataclass(frozen=True)
class PromptRequirements:
    """Requirements of a waiting prompt on its replica."""

    wanted: WantedVersions
    avoid: frozenset[str] = frozenset()
    """Replicas that failed the prompt: others are taken where there are any."""
    refused: frozenset[str] = frozenset()
    """Replicas that said that they will never have the wanted version."""
    is_ahead: bool = False
    """True if a replica said that the version is still to come. No replica is asked again before
    the routes tell of it, or of a newer one."""


@dataclass
class _WaitingPrompt(Generic[_T]):
    number: int
    cost_tokens: int
    what: _T


@dataclass
class PromptDispatcher(Generic[_T]):
    """Waiting prompts, and the replicas that may take them.

    Prompts with the same requirements wait in order. Of those that could go now, the first to come
    goes, to the replica with the fewest outstanding tokens. While every replica has all the
    requests that it may have, prompts wait here: later requests are answered by newer versions.
    """

    max_requests: int
    """Most requests of each replica at a time."""
    targets: dict[str, BusyReplica] = field(default_factory=dict)
    _queues: dict[PromptRequirements, deque[_WaitingPrompt[_T]]] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def update(self, routes: Iterable[BusyReplica], now: float) -> None:
        """Replace the list of replicas that may be sent requests."""
        listed = {route.replica_id: route for route in routes}
        for name, target in [*self.targets.items()]:
            route = listed.get(name)
            if route is None:
                target.is_listed = False
                if not target.num_requests:
                    del self.targets[name]
            elif route.address == target.address:
                del listed[name]
                target.served = route.served
                if not target.is_listed:  # the pool trusts it again
                    target.is_listed, target.away_until, target.num_failures = True, 0.0, 0
        for route in listed.values():
            route.progress_at = now
            self.targets[route.replica_id] = route

    def number(self) -> int:
        """Return the next prompt's number, in the order that prompts go."""
        return next(self._numbers)

    def wait(self, place: PromptRequirements, number: int, cost_tokens: int, what: _T) -> None:
        """Queue a prompt for a replica."""
        queue = self._queues.setdefault(place, deque())
        at = len(queue)
        while at and queue[at - 1].number > number:  # one that comes back goes to its old place
            at -= 1
        queue.insert(at, _WaitingPrompt(number, cost_tokens, what))

    def forget(self, place: PromptRequirements, what: _T) -> None:
        """Drop a prompt that waits no more."""
        queue = self._queues.get(place, deque())
        for i, waiting in enumerate(queue):
            if waiting.what is what:
                del queue[i]
                break
        if not queue:
            self._queues.pop(place, None)

    def next(self, now: float) -> tuple[_T, BusyReplica, int] | None:
        """Return the prompt that goes now, its replica and its cost. The cost is counted at the
        replica until ``release``."""
        for place in sorted(self._queues, key=lambda place: self._queues[place][0].number):
            target = self._choose(place, now)
            if target is not None:
                queue = self._queues[place]
                waiting = queue.popleft()
                if not queue:
                    del self._queues[place]
                if not target.num_requests:
                    target.progress_at = now
                target.num_requests += 1
                target.outstanding_tokens += waiting.cost_tokens
                return waiting.what, target, waiting.cost_tokens
        return None

    def release(self, target: BusyReplica, left_tokens: int) -> None:
        """Take an ended request off a replica; ``left_tokens`` of its cost were not made."""
        target.num_requests -= 1
        target.outstanding_tokens = max(0, target.outstanding_tokens - left_tokens)
        if not target.num_requests:
            target.outstanding_tokens = 0
            if not target.is_listed and self.targets.get(target.replica_id) is target:
                del self.targets[target.replica_id]

    def next_time(self, now: float) -> float | None:
        """Return when the first avoided replica may be tried again; None if none is avoided."""
        times = [t.away_until for t in self.targets.values() if t.is_listed and t.away_until > now]
        return min(times, default=None)

    def _choose(self, place: PromptRequirements, now: float) -> BusyReplica | None:
        """Return the replica for a place in the queues, or None if none can take it now.

        Where no listed replica says that it serves the version, any may be asked: it may have it by
        now, and it knows whether the version is still to come or gone. Only a prompt whose
        ``at_least`` is newer than any served version waits, as the name alone would be answered.
        """
        wanted = place.wanted
        listed = [t for t in self.targets.values() if t.is_listed]
        is_there = self.is_served(place)
        able = [
            t
            for t in listed
            if t.replica_id not in place.refused
            and (t.serves(wanted) or (is_there and t.may_serve_soon(wanted)))
        ]
        if not able and wanted.at_least is None:
            able = [t for t in listed if t.replica_id not in place.refused] or listed
        if place.is_ahead:
            able = [t for t in listed if not t.may_serve_soon(wanted)]
        able = [t for t in able if t.replica_id not in place.avoid] or able
        return min(
            (t for t in able if now >= t.away_until and t.num_requests < self.max_requests),
            key=lambda t: (t.outstanding_tokens, t.num_requests, t.replica_id),
            default=None,
        )

    def is_served(self, place: PromptRequirements) -> bool:
        """Return whether a listed replica says that it serves the wanted version, and has not
        refused."""
        return any(
            t.is_listed and t.serves(place.wanted) and t.replica_id not in place.refused
            for t in self.targets.values()
        )

    def may_ask(self, place: PromptRequirements) -> bool:
        """Return whether a replica may have what others have refused. It is one that says so, or
        one of a few that were not asked, of which the routes may not tell yet."""
        listed = {t.replica_id for t in self.targets.values() if t.is_listed}
        is_bounded = len(place.refused) < _MAX_ASKED
        return self.is_served(place) or (is_bounded and not listed <= place.refused)

    def why_waiting(self, wanted: WantedVersions) -> str:
        """Return what a prompt still waits for, for messages."""
        listed = [t for t in self.targets.values() if t.is_listed]
        if not listed:
            return "no replica may be sent requests"
        if not any(t.serves(wanted) for t in listed):
            newest = max(t.newest(wanted) for t in listed)
            return (
                f"no replica of {len(listed)} serves {wanted}; the newest of {wanted.policy} "
                f"is {'none' if not newest and not wanted.is_base else f'@{newest}'}"
            )
        return "the replicas that may be asked are busy or failing"


class NextStep(enum.Enum):
    """Next step for a prompt whose request failed."""

    END = "end"
    """End of the prompt, as a failure."""
    ASK_OTHERS = "ask others"
    """Question to another replica, which may have the version; this one will never have it."""
    WAIT = "wait"
    """Another try a moment later, here or at another replica; the replica is well."""
    AGAIN = "again"
    """Restart of the prompt wherever there is room; the replica is well, and ended what ran."""
    LEAVE = "leave"
    """Restart of the prompt elsewhere; the replica is avoided for a while."""
    RESTART = "restart"
    """Restart as with ``LEAVE``, but counted: the prompt may have made the replica fail."""


def after(error: WeftError, *, strict: bool, has_begun: bool, was_failing: bool) -> NextStep:
    """Return the next step after a failed request.

    Args:
        strict: True if the request was to end when the base changes.
        has_begun: True if the replica had begun to answer.
        was_failing: True if the replica's last request had failed, too.
    """
    if isinstance(error, _FINAL):
        return NextStep.END
    if isinstance(error, VersionChangedError):
        return NextStep.END if strict else NextStep.AGAIN
    if isinstance(error, NotFoundError):
        return NextStep.ASK_OTHERS
    if error.reason == "VERSION_AHEAD":
        return NextStep.WAIT
    if error.reason == "REFUSING" or isinstance(error, CapacityError):
        return NextStep.LEAVE
    if isinstance(error, PeerUnavailableError) and was_failing and not has_begun:
        return NextStep.LEAVE  # nobody was there to fail over it
    return NextStep.RESTART
