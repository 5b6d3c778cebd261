"""Problems of a pool: what is not as it should be now, in sentences for people.

The page and ``weft status`` show the same. A state that somebody ordered is a warning: it needs no
repair; nor does a suspect replica that requests are still sent to. Everything else that keeps a
replica from being ready is an error, also while it is brought what it lacks. That nobody answers
requests is an error, whoever ordered it, unless replicas sleep, which wake by themselves.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from weft_rl.contract.names import PolicyVersion, provenance
from weft_rl.coordinator.decisions.policies.republishing import conflicts
from weft_rl.coordinator.decisions.state.pool import Policy, PoolState
from weft_rl.coordinator.decisions.state.replica import Replica
from weft_rl.coordinator.decisions.state.replica_state import (
    explain_orders,
    explain_state,
    replica_state,
    version_differences,
    versions_to_bring,
    who_publishes,
)
from weft_rl.coordinator.decisions.state.values import ReplicaState

#: Problems that are explained; of more only the number is told.
MAX_PROBLEMS: Final = 50
# Adapters, replicas, contents, and versions of a replica, that one sentence names.
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
    message: str
    replica_id: str = ""
    """Replica that it concerns; empty if it concerns none, or several."""
    policy: str = ""
    """Policy that it concerns, likewise."""


@dataclass(frozen=True)
class Problems:
    """Problems of a pool: the first, and how many there are."""

    shown: tuple[Problem, ...]
    """The first ``MAX_PROBLEMS``, errors first."""
    num_more: int
    num_errors: int
    """Number of errors, shown or not."""


@dataclass(frozen=True)
class _Finding:
    """Problem whose message is made only if it is shown."""

    severity: Severity
    explain: Callable[[], str]
    replica_id: str = ""
    policy: str = ""


def problems(
    state: PoolState, now: float, unused_files: Sequence[str] = (), unwritten_reason: str = ""
) -> Problems:
    """Return the problems of a pool.

    O(replicas + policies); the first ``MAX_PROBLEMS`` are explained.

    Args:
        unused_files: Files of the coordinator's that have changed and are not used, with reasons.
        unwritten_reason: Why events could not be written to the catalog; empty if they are there.
    """
    findings = [
        *_findings_of_coordinator(unused_files, unwritten_reason),
        *_findings_of_pool(state, now),
        *_findings_of_policies(state),
        *_findings_of_replicas(state),
        *_findings_of_absent(state),
    ]
    findings.sort(key=lambda one: -one.severity)
    shown = tuple(
        Problem(one.severity, _cut(one.explain(), _MAX_CHARS), one.replica_id, one.policy)
        for one in findings[:MAX_PROBLEMS]
    )
    num_errors = sum(one.severity is Severity.ERROR for one in findings)
    return Problems(shown, len(findings) - len(shown), num_errors)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _named(names: Sequence[str], separator: str = ", ") -> str:
    """Join the first names, and say how many more there are."""
    more = len(names) - _MAX_NAMED
    shown = separator.join(names[:_MAX_NAMED])
    return f"{shown} and {more} more" if more > 0 else shown


# -- of the coordinator and the pool -----------------------------------------


def explain_unused_file(line: str) -> str:
    """Explain that the coordinator does not use a file.

    Args:
        line: The file and the reason.
    """
    return "the coordinator does not use this file; its former content stays in force: " + line


def _findings_of_coordinator(
    unused_files: Sequence[str], unwritten_reason: str
) -> Iterator[_Finding]:
    if unwritten_reason:
        yield _error(
            f"events cannot be written to the catalog, and are tried again: {unwritten_reason}. "
            "Make room on its disk: the next push or order that cannot be written ends the "
            "coordinator"
        )
    for line in unused_files:
        yield _error(explain_unused_file(line))


def _findings_of_pool(state: PoolState, now: float) -> Iterator[_Finding]:
    replicas = state.replicas.values()
    if not state.fingerprint or any(replica.routed for replica in replicas):
        return
    if not replicas and now < state.restart_over_at:
        text = "the coordinator has restarted and waits for its replicas to register again"
        yield _Finding(Severity.WARNING, lambda: text)
    elif not replicas:
        yield _error("no replica is in the pool: nobody answers requests to it. Start one")
    elif not all(replica_state(state, replica) in _ORDERED for replica in replicas):
        yield _error("no replica takes requests: nobody answers requests to the pool")
    elif any(replica_state(state, replica) is ReplicaState.ASLEEP for replica in replicas):
        text = "nobody answers requests to the pool until a replica is awake"
        yield _Finding(Severity.WARNING, lambda: text)
    else:
        yield _error(
            "nobody answers requests to the pool: every replica is out of service by order. "
            "Start one, or put one back: weft uncordon"
        )


def _error(text: str, policy: str = "") -> _Finding:
    return _Finding(Severity.ERROR, lambda: text, policy=policy)


# -- of policies -------------------------------------------------------------


def _findings_of_policies(state: PoolState) -> Iterator[_Finding]:
    strangers = []
    for name, policy in state.policies.items():
        served = PolicyVersion(name, policy.served_version)
        wanted = state.republish.get(name)
        for number in conflicts(state, name) if state.conflicts else ():
            version = PolicyVersion(name, number)
            yield _error(explain_conflict(version, state.conflicts[version]), name)
        if state.is_lost(policy):
            what = "is lost: no replica in contact holds it"
            yield _error(f"{served} {what}; {who_publishes(state, name)}", name)
        elif wanted is not None and wanted.is_asked:
            what = "is held by no replica in contact"
            version = PolicyVersion(name, wanted.version)
            yield _error(f"{version} {what}: {who_publishes(state, name)}", name)
        elif state.is_over_another_base(served):
            strangers.append(policy)
    if strangers:
        only = strangers[0].name if len(strangers) == 1 else ""
        yield _error(_over_another_base(state, strangers), only)


def explain_conflict(version: PolicyVersion, contents: Mapping[bytes, Sequence[str]]) -> str:
    """Explain that replicas hold unlike bytes under one number.

    Args:
        contents: Holders by digest.
    """
    found = [f"{digest.hex()} at {_named(holders)}" for digest, holders in contents.items()]
    return (
        f"{version} is not served, for replicas hold other bytes under that number: "
        f"{_named(found, '; ')}. Push {version.policy} again"
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

#: States other than ready, in the order in which they are shown.
_SHOWN: Final = (
    ReplicaState.QUARANTINED,
    ReplicaState.LOST,
    ReplicaState.SUSPECT,
    ReplicaState.PENDING_WEIGHTS,
    ReplicaState.OUT_OF_SERVICE,
    ReplicaState.DRAINING,
    ReplicaState.ASLEEP,
)
_ORDERED: Final = {ReplicaState.OUT_OF_SERVICE, ReplicaState.DRAINING, ReplicaState.ASLEEP}
_REMEDIES: Final = {
    ReplicaState.LOST: "Look at its log; it comes back as soon as it registers again",
    ReplicaState.SUSPECT: "It takes part again once it answers; restart it if it does not",
}


def _findings_of_replicas(state: PoolState) -> Iterator[_Finding]:
    by_state = dict[ReplicaState, list[Replica]]()
    for replica in state.replicas.values():
        by_state.setdefault(replica_state(state, replica), []).append(replica)
    for where in _SHOWN:
        alike = dict[str, list[Replica]]()
        for replica in sorted(by_state.get(where, ()), key=lambda one: one.replica_id):
            if where in _ORDERED:
                alike.setdefault(explain_orders(state, replica), []).append(replica)
                continue
            answers = where is ReplicaState.SUSPECT and replica.routed
            severity = Severity.WARNING if answers else Severity.ERROR
            yield _Finding(severity, partial(_explain, state, replica), replica.replica_id)
        for order, replicas in alike.items():
            yield from _findings_of_order(state, where, order, replicas)


def _findings_of_order(
    state: PoolState, where: ReplicaState, order: str, replicas: Sequence[Replica]
) -> Iterator[_Finding]:
    """Yield a finding for each replica that an order concerns, or one for all if they are many."""
    if len(replicas) > _MAX_NAMED:
        yield _Finding(Severity.WARNING, partial(_explain_order, where, order, replicas))
        return
    for replica in replicas:
        explain = partial(_explain, state, replica)
        yield _Finding(Severity.WARNING, explain, replica.replica_id)


def _findings_of_absent(state: PoolState) -> Iterator[_Finding]:
    """Yield a finding for each order that keeps out replicas which are not in the pool."""
    alike = dict[str, list[str]]()
    for name, order in sorted(state.out_of_service.items()):
        if name not in state.replicas:
            alike.setdefault(f"{order}", []).append(name)
    for why, names in alike.items():
        are = "is" if len(names) == 1 else "are"
        text = f"{_named(names)} {are} not in the pool, and out of service {why}"
        only = names[0] if len(names) == 1 else ""
        yield _Finding(Severity.WARNING, partial(str, text), only)


def _explain_order(where: ReplicaState, order: str, replicas: Sequence[Replica]) -> str:
    names = _named([replica.replica_id for replica in replicas])
    why = _cut(f": {order}", _MAX_REASON_CHARS) if order else ""
    return f"{len(replicas)} replicas are {where.word}{why}. They are {names}"


def _explain(state: PoolState, replica: Replica) -> str:
    where, why = explain_state(state, replica)
    sentences = [f"{replica.replica_id} is {where.word}{why and ': '}{why}"]
    if where is ReplicaState.QUARANTINED:
        what = "is quarantined, for its weights may be mixed: "
        sentences = [f"{replica.replica_id} {what}{why}", _repair(state, replica)]
    elif where is not ReplicaState.LOST and (stale := _staleness(state, replica)):
        sentences.append(f"It serves {stale}")
    if where in _REMEDIES:
        sentences.append(_REMEDIES[where])
    return ". ".join(_cut(sentence, _MAX_REASON_CHARS) for sentence in sentences)


def _repair(state: PoolState, replica: Replica) -> str:
    """Explain what makes the weights of a replica whole again."""
    if state.is_kept_out(replica.replica_id):
        return (
            f"Restart it, or put it back, to be brought a base: weft uncordon {replica.replica_id}"
        )
    if replica.capabilities.base_refusal:
        return "Restart it: it loads no base while it runs"
    bases = versions_to_bring(state, replica)
    if not bases:
        return "It answers no request before it has loaded a base: restart it, or push a base"
    return f"It answers no request before it has loaded {bases[0]}: restart it if that fails"


def _staleness(state: PoolState, replica: Replica) -> str:
    """Return the versions that a replica serves behind the pool's; empty if none is behind."""
    behind = [one for one in version_differences(state, replica) if one.num_behind]
    more = len(behind) - _MAX_NAMED
    named = "; ".join(map(str, behind[:_MAX_NAMED]))
    return named + (f"; and {more} more that are behind" if more > 0 else "")
