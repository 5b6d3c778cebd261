"""Problems of a pool: what is not as it should be now, in sentences for people.

The page and ``weft status`` show the same. A state that somebody ordered is a warning: it needs no
repair. Everything else that keeps a replica from being ready is an error, also while it is brought
what it lacks.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from weft_rl.contract.names import PolicyVersion, provenance
from weft_rl.coordinator.decisions.policies.republishing import conflicts
from weft_rl.coordinator.decisions.state.pool import Policy, PoolState
from weft_rl.coordinator.decisions.state.replica import Replica
from weft_rl.coordinator.decisions.state.replica_state import (
    explain_state,
    replica_state,
    version_differences,
    who_publishes,
)
from weft_rl.coordinator.decisions.state.values import ReplicaState

#: Problems that are explained; of more only the number is told.
MAX_PROBLEMS: Final = 50
# Adapters, and versions of a replica, that one sentence names.
_MAX_NAMED: Final = 3
# Longest reason and longest message: GetPool stays below its bound.
_MAX_REASON_CHARS: Final = 600
_MAX_CHARS: Final = 1200


class Severity(enum.IntEnum):
    """Severity of a problem; numbers are those of ``weft.v1.ProblemSeverity``."""

    WARNING = 1
    ERROR = 2


@dataclass(frozen=True)
class Problem:
    """Something that is not as it should be."""

    severity: Severity
    subject: str
    """Replica or policy that it concerns; empty for the pool."""
    message: str


@dataclass(frozen=True)
class _Finding:
    """Problem whose message is made only if it is shown."""

    severity: Severity
    subject: str
    explain: Callable[[], str]


def problems(
    state: PoolState, now: float, unused_files: Sequence[str] = ()
) -> tuple[list[Problem], int]:
    """Return the problems of a pool, errors first, and how many more there are.

    O(replicas + policies); the first ``MAX_PROBLEMS`` are explained.

    Args:
        unused_files: Files of the coordinator's that have changed and are not used, with reasons.
    """
    findings = [
        *_findings_of_pool(state, now, unused_files),
        *_findings_of_policies(state),
        *_findings_of_replicas(state),
    ]
    findings.sort(key=lambda one: -one.severity)
    shown = [
        Problem(one.severity, one.subject, one.explain()[:_MAX_CHARS])
        for one in findings[:MAX_PROBLEMS]
    ]
    return shown, len(findings) - len(shown)


# -- of the pool -------------------------------------------------------------


def _findings_of_pool(
    state: PoolState, now: float, unused_files: Sequence[str]
) -> Iterator[_Finding]:
    for line in unused_files:
        yield _error(
            "",
            "the coordinator does not use this file; its former content stays in force: " + line,
        )
    states = {_state(state, replica) for replica in state.replicas.values()}
    if not state.fingerprint or ReplicaState.READY in states or (states and states <= _ORDERED):
        return
    if states:
        yield _error("", "no replica is ready: nobody answers requests to the pool")
    elif now < state.restart_over_at:
        text = "the coordinator has restarted and waits for its replicas to register again"
        yield _Finding(Severity.WARNING, "", lambda: text)
    else:
        yield _error("", "no replica is in the pool: nobody answers requests to it. Start one")


def _error(subject: str, text: str) -> _Finding:
    return _Finding(Severity.ERROR, subject, lambda: text)


# -- of policies -------------------------------------------------------------


def _findings_of_policies(state: PoolState) -> Iterator[_Finding]:
    strangers = []
    for name, policy in state.policies.items():
        served = PolicyVersion(name, policy.served_version)
        wanted = state.republish.get(name)
        for number in conflicts(state, name) if state.conflicts else ():
            yield _error(name, _conflict(state, PolicyVersion(name, number)))
        if state.is_lost(policy):
            what = "is lost: no replica in contact holds it"
            yield _error(name, f"{served} {what}; {who_publishes(state, name)}")
        elif wanted is not None and wanted.is_asked:
            what = "is held by no replica in contact"
            version = PolicyVersion(name, wanted.version)
            yield _error(name, f"{version} {what}: {who_publishes(state, name)}")
        elif state.is_over_another_base(served):
            strangers.append(policy)
    if strangers:
        yield _error(strangers[0].name, _over_another_base(state, strangers))


def _conflict(state: PoolState, version: PolicyVersion) -> str:
    found = "; ".join(
        f"{digest.hex()} at {', '.join(replica_ids)}"
        for digest, replica_ids in state.conflicts[version].items()
    )
    return (
        f"{version} is not served, for replicas hold other bytes under that number: {found}. "
        f"Push {version.policy} again"
    )


def _over_another_base(state: PoolState, policies: Sequence[Policy]) -> str:
    """Explain that adapters are served over another base than they were trained on."""
    base = state.vector.base
    more = len(policies) - _MAX_NAMED
    named = "; ".join(
        f"{policy.name}@{policy.served_version} was "
        f"{provenance(policy.trained_on.get(policy.served_version), base)}"
        for policy in policies[:_MAX_NAMED]
    ) + (f"; and {more} more" if more > 0 else "")
    whose, what = ("its", "it") if len(policies) == 1 else ("their", "them")
    return f"{named}: {whose} answers are not those of what was trained. Push {what} again"


# -- of replicas -------------------------------------------------------------

#: States other than ready, in the order in which they are shown, with their words.
_WORDS: Final = {
    ReplicaState.QUARANTINED: "quarantined",
    ReplicaState.LOST: "lost",
    ReplicaState.SUSPECT: "suspect",
    ReplicaState.PENDING_WEIGHTS: "not ready",
    ReplicaState.CORDONED: "cordoned",
    ReplicaState.DRAINING: "draining",
    ReplicaState.ASLEEP: "asleep",
}
_ORDERED: Final = {ReplicaState.CORDONED, ReplicaState.DRAINING, ReplicaState.ASLEEP}
_REMEDIES: Final = {
    ReplicaState.LOST: "Look at its log; it comes back as soon as it registers again",
    ReplicaState.SUSPECT: "It takes part again once it answers; restart it if it does not",
}


def _findings_of_replicas(state: PoolState) -> Iterator[_Finding]:
    by_state = dict[ReplicaState, list[Replica]]()
    for replica in state.replicas.values():
        by_state.setdefault(_state(state, replica), []).append(replica)
    for where in _WORDS:
        for replica in sorted(by_state.get(where, ()), key=lambda one: one.replica_id):
            is_severe = where not in _ORDERED and not _is_quarantined(state, replica)
            yield _Finding(
                Severity.ERROR if is_severe else Severity.WARNING,
                replica.replica_id,
                partial(_explain, state, replica),
            )


def _is_quarantined(state: PoolState, replica: Replica) -> bool:
    """Return whether an operator's order alone keeps a replica out of service."""
    return replica.in_contact and state.is_quarantined(replica.replica_id)


def _state(state: PoolState, replica: Replica) -> ReplicaState:
    return replica.announced or replica_state(state, replica)


def _explain(state: PoolState, replica: Replica) -> str:
    where, why = explain_state(state, replica)
    sentences = [f"{replica.replica_id} is {_WORDS.get(where, 'ready')}{why and ': '}{why}"]
    if where is not ReplicaState.LOST and (stale := _staleness(state, replica)):
        sentences.append(f"It serves {stale}")
    if where in _REMEDIES:
        sentences.append(_REMEDIES[where])
    return ". ".join(sentence[:_MAX_REASON_CHARS] for sentence in sentences)


def _staleness(state: PoolState, replica: Replica) -> str:
    """Return the versions that a replica serves behind the pool's; empty if none is behind."""
    behind = [one for one in version_differences(state, replica) if one.num_behind]
    more = len(behind) - _MAX_NAMED
    named = [f"{one.policy}@{one.version}, {one.num_behind} behind" for one in behind[:_MAX_NAMED]]
    return "; ".join(named) + (f"; and {more} more that are behind" if more > 0 else "")
