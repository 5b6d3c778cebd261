"""Commits that no replica is known to serve: undone, or waited for.

A *definite* refusal of an order to switch says that nothing has changed and nothing will. The
replica does not serve the version, and holds nothing that it could still switch to by that
order. The refusal is signed with the incarnation of the process that was told. An error of gRPC
in its place (a timeout, a reset, an answer that was too large to read) proves nothing.

If every replica has refused definitely, nobody serves the version and nobody ever will. It
becomes FAILED at once, and its policy goes back to what it served. A replica that is dirty, silent
or was restarted may serve the version, or be about to. Then the version stays COMMITTED until
each of these has reported without it, and fails after that. A replica has reported without it when

- it has refused definitely, if late;
- it has answered DiscardTransfer: no order of that transfer is carried out any more, and the
  answer says what it serves;
- another process of it has registered, which refuses orders that are meant for the former.

A base that was loaded in place is never undone: what it replaced is gone, so its
owner is asked to publish again (republishing.py).

None of this is durable: after a restart of the coordinator the version stays COMMITTED.
"""

from __future__ import annotations

from weft_rl.containers import replace
from weft_rl.contract.names import BASE_POLICY, PolicyVersion
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.change import Change
from weft_rl.coordinator.decisions.state.effects import (
    EventKind,
    SaveCommitted,
    SavePolicy,
    SaveRetired,
    SaveVersion,
)
from weft_rl.coordinator.decisions.state.pool import PoolState, UnservedVersion
from weft_rl.coordinator.decisions.state.replica import Replica, can_switch
from weft_rl.coordinator.decisions.state.transfer import Transfer
from weft_rl.coordinator.decisions.state.values import Failure, Phase, PolicyKind, VersionState

_NOTHING_CHANGED = frozenset(
    {
        "LOAD_FAILED",
        "NOT_STAGED",
        "NOT_RETAINED",
        "INVALID_NAME",
        "INVALID_MANIFEST",
        "DIGEST_MISMATCH",
        "STAGING_FULL",
    }
)


def is_dirty(failure: Failure) -> bool:
    """Return whether a replica says that its weights may be mixed."""
    return failure.metadata.get("dirty") == "true"


def is_definite(failure: Failure, incarnation: str) -> bool:
    """Return whether the process ``incarnation`` has refused for good, with nothing changed."""
    signed = bool(incarnation) and failure.metadata.get("incarnation") == incarnation
    return signed and failure.reason in _NOTHING_CHANGED and not is_dirty(failure)


def all_definite(transfer: Transfer) -> bool:
    """Return whether all refusals of an order to switch are definite."""
    return all(
        is_definite(failure, transfer.incarnations.get(replica_id, ""))
        for replica_id, failure in transfer.refusals.items()
    )


# -- versions that are waited for ------------------------------------------------

#: Versions that are waited for; of the oldest ones nothing more is expected.
MAX_UNSERVED = 64


def wait_for_reports(change: Change, ended: Transfer) -> None:
    """Keep a commit that no replica is known to serve until all have reported."""
    silent = frozenset(
        replica_id
        for replica_id, failure in ended.refusals.items()
        if not is_definite(failure, ended.incarnations.get(replica_id, ""))
    )
    cases = {**change.state.unserved, ended.policy_version: UnservedVersion(ended, silent)}
    while len(cases) > MAX_UNSERVED:
        oldest = next(iter(cases))
        retire_replaced(change, cases.pop(oldest).transfer)
    change.state = replace(change.state, unserved=cases)


def commit_answered(change: Change, event: events.CommitAnswered) -> None:
    """Count a late answer to an order to switch, if it is a definite refusal."""
    if event.failure and is_definite(event.failure, event.incarnation):
        _has_reported(change, event.transfer_id, event.replica_id, event.incarnation)


def discard_answered(change: Change, event: events.DiscardAnswered) -> None:
    """Note that a replica carries out no order of a transfer any more.

    It counts if the replica does not serve the version.
    """
    for version, case in change.state.unserved.items():
        if case.transfer.transfer_id == event.transfer_id and not event.vector.holds(version):
            _has_reported(change, event.transfer_id, event.replica_id, event.incarnation)


def _has_reported(change: Change, transfer_id: str, replica_id: str, incarnation: str) -> None:
    for version, case in change.state.unserved.items():
        told = case.transfer.incarnations.get(replica_id)
        if case.transfer.transfer_id == transfer_id and told == incarnation:
            case = replace(case, silent=case.silent - {replica_id})
            change.state = replace(change.state, unserved={**change.state.unserved, version: case})
            return


def decide(change: Change) -> None:
    """Decide the cases that have become clear, newest first; cheap where every commit is served."""
    for version, case in sorted(change.state.unserved.items(), key=_version, reverse=True):
        state = change.state
        policy = state.policies[version.policy]
        if any(r.vector.holds(version) for r in state.replicas.values() if not r.lost):
            _stands(change, version, case)
        elif _may_return(state, version):
            continue
        elif version.version not in policy.versions:  # replaced, or retired by an order
            _stands(change, version, case)
        elif not _still_awaited(state, version, case):
            _fails(change, version, case)


def _version(item: tuple[PolicyVersion, UnservedVersion]) -> PolicyVersion:
    return item[0]


def _may_return(state: PoolState, version: PolicyVersion) -> bool:
    """Return whether a later change of the policy is undecided and may go back to this version."""
    return any(v.policy == version.policy and v > version for v in state.unserved) or any(
        t.policy == version.policy and t.may_be_undone for t in state.transfers.values()
    )


def _still_awaited(state: PoolState, version: PolicyVersion, case: UnservedVersion) -> bool:
    for replica_id in case.silent:
        replica = state.replicas.get(replica_id)
        if replica is None or replica.incarnation == case.transfer.incarnations[replica_id]:
            return True
    if any(_has_bytes(r, version) for r in state.replicas.values() if not r.lost):
        return True
    return any(t.policy_version == version for t in state.transfers.values())


def _has_bytes(replica: Replica, version: PolicyVersion) -> bool:
    return can_switch(replica, version) or version in replica.spilled


def _stands(change: Change, version: PolicyVersion, case: UnservedVersion) -> None:
    """Let the commit stand: a replica serves it after all, or it is not held any more."""
    _forget(change, version)
    served = change.state.policies[version.policy].served_version
    if served != case.transfer.served_before:
        retire_replaced(change, case.transfer)


def _fails(change: Change, version: PolicyVersion, case: UnservedVersion) -> None:
    _forget(change, version)
    if change.state.policies[version.policy].served_version != version.version:
        _mark_failed(change, case.transfer)
    elif _can_be_served(change.state, case.transfer):
        undo(change, case.transfer)
    else:
        retire_replaced(change, case.transfer)
        return
    history = change.state.history
    ended = history.get(case.transfer.transfer_id)
    if ended is not None:
        ended = replace(ended, phase=Phase.ABORTED)
        change.state = replace(change.state, history={**history, ended.transfer_id: ended})


def _can_be_served(state: PoolState, ended: Transfer) -> bool:
    """Return whether anybody serves, or could bring, what the policy would go back to."""
    if ended.kind is PolicyKind.ADAPTER:
        return True
    before = PolicyVersion(BASE_POLICY, ended.served_before)
    while before in state.unserved:  # which is waited for, too
        number = state.unserved[before].transfer.served_before
        before = PolicyVersion(BASE_POLICY, number)
    has_it = any(
        r.in_contact and (r.vector.holds(before) or can_switch(r, before))
        for r in state.replicas.values()
    )
    return has_it or before in state.copies


def _forget(change: Change, version: PolicyVersion) -> None:
    cases = {v: case for v, case in change.state.unserved.items() if v != version}
    change.state = replace(change.state, unserved=cases)


def undo(change: Change, ended: Transfer) -> None:
    """Fail the version, and let its policy stay with what it served before.

    Where that is nothing, the policy stays with the newest version that was adopted meanwhile
    (see adoption.py).
    """
    policy = change.state.policies[ended.policy]
    before = ended.served_before
    if not before and policy.kind is PolicyKind.ADAPTER:
        before = max((v for v in policy.versions if v != ended.version), default=0)
    change.put_policy(replace(policy, served_version=before))
    if before and policy.kind is PolicyKind.BASE:  # a rollback to it that failed has retired it
        change.emit(SaveCommitted(PolicyVersion(BASE_POLICY, before)))
    _mark_failed(change, ended)


def _mark_failed(change: Change, ended: Transfer) -> None:
    policy = change.state.policies[ended.policy]
    versions = tuple(v for v in policy.versions if v != ended.version)
    if policy.kind is PolicyKind.BASE:
        versions = (policy.served_version,) if policy.served_version else ()
    policy = replace(policy, versions=versions)
    change.put_policy(policy)
    change.touched_all = True
    change.emit(SaveVersion(ended.record(VersionState.FAILED)), SavePolicy(policy))
    assert ended.failure is not None
    now = f"{policy.name!r} stays at {policy.served_version}"
    if not policy.served_version:
        now = f"{policy.name!r} has no version" if policy.name != BASE_POLICY else "base@0 stays"
    change.announce(
        EventKind.VERSION_FAILED, str(ended.policy_version), f"{ended.failure.message}; {now}"
    )


def retire_replaced(change: Change, ended: Transfer) -> None:
    """Retire the base that ``ended`` replaced and nobody holds now: a base has one version."""
    if ended.kind is PolicyKind.BASE and ended.served_before:
        before = replace(ended, version=ended.served_before).policy_version
        change.emit(SaveRetired(before))
        change.announce(
            EventKind.VERSION_RETIRED, str(before), f"superseded by {ended.policy_version}"
        )
