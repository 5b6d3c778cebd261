"""Numbering: versions, tokens, epochs and generations continue above all that was heard.

The catalog counts them, but it may have been lost, or be an older copy. Replicas and trainers
report the highest number of each that they know. Where one is beyond the catalog's, the count
continues ``LEAP`` above it, since others may know still higher ones. A number that nobody can have
counted to is refused, with whoever tells it: followed, it would leave no room to count on; passed
over, numbers would go back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from weft_rl.containers import replace
from weft_rl.contract.errors import InvalidNameError
from weft_rl.contract.names import (
    BASE_POLICY,
    MAX_FOLLOWED,
    PolicyVersion,
    check_followed,
    check_name,
)
from weft_rl.contract.replica_report import ReplicaReport
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.change import Change
from weft_rl.coordinator.decisions.state.effects import (
    EventKind,
    SaveEpoch,
    SaveGeneration,
    SaveNumberFloor,
    SavePolicy,
)
from weft_rl.coordinator.decisions.state.pool import Policy, PoolState, UncertainAlias
from weft_rl.coordinator.decisions.state.replica import Replica
from weft_rl.coordinator.decisions.state.values import HeldVersionRecord, PolicyKind

#: Numbers, or tokens, that are left free above the highest one that was reported.
LEAP: Final = 1000


def new_policy(state: PoolState, name: str, kind: PolicyKind) -> Policy:
    """Return a policy that the catalog does not know, or knows as forgotten."""
    known = state.forgotten.get(name)
    if known is not None:
        return known
    token = max(state.number_floor, state.token_floor)
    return Policy(name, kind, last_version=state.number_floor, fencing_token=token)


def is_unused(state: PoolState, policy: Policy) -> bool:
    """Return whether nothing would be lost with a policy that nobody owns.

    No number of it was ever used, here or by what anybody has heard, and no operator has said
    anything of it.
    """
    return (
        policy.lease is None
        and policy.kind is PolicyKind.ADAPTER
        and policy.last_version <= state.number_floor
        and not (policy.versions or policy.served_version or policy.pinned or policy.retain)
        and not policy.forgotten
    )


def check_told(policy: Policy, event: events.AcquirePolicy) -> None:
    """Refuse a trainer that tells of numbers which nobody can have counted to.

    Raises:
        InvalidRequestError: Names the number.
    """
    who = f"trainer {event.trainer_id!r}"
    check_followed(who, f"version {policy.name}@", event.last_version, policy.last_version)
    check_followed(who, "fencing token", event.last_fencing_token, policy.fencing_token)


def check_registration(state: PoolState, event: events.Register) -> None:
    """Refuse a replica that tells of numbers which nobody can have counted to.

    Raises:
        InvalidRequestError: Names the number.
    """
    who = f"replica {event.replica_id!r}"
    check_followed(
        who, "coordinator generation", event.last_coordinator_generation, state.generation
    )
    check_followed(who, "epoch", event.last_epoch, state.epoch_counter)
    check_report(state, event.replica_id, event.report, event.held)


def check_report(
    state: PoolState,
    replica_id: str,
    report: ReplicaReport,
    held: Iterable[HeldVersionRecord] = (),
) -> None:
    """Refuse a report of versions which nobody can have counted to.

    Raises:
        InvalidRequestError: Names the version.
    """
    vector = report.version_vector
    bases = (vector.base, *report.retained_base_versions, *report.undo_base_versions)
    highest = [PolicyVersion(BASE_POLICY, max(bases))]
    for name, entry in report.version_vector.adapters.items():
        highest.append(PolicyVersion(name, max((*entry.versions, entry.alias))))
    for version in (*highest, *report.spilled_versions, *(one.held.version for one in held)):
        if version.version > MAX_FOLLOWED:
            name = version.policy
            policy = state.policies.get(name) or state.forgotten.get(name)
            known = policy.last_version if policy else 0
            check_followed(f"replica {replica_id!r}", f"version {name}@", version.version, known)


def replica_registers(change: Change, event: events.Register) -> None:
    """Continue above the generation and the epoch that a replica has heard of."""
    state = change.state
    generation, epoch = event.last_coordinator_generation, event.last_epoch
    # The same, and of another: that one's catalog does not know of us, or ours of it.
    is_ours = event.last_coordinator_id == state.coordinator_id
    is_behind = state.generation < generation + (not is_ours)
    is_older = not is_ours and state.epoch_counter < epoch
    if is_behind:
        change.state = replace(change.state, generation=generation + 1)
        change.emit(SaveGeneration(generation + 1))
    if is_behind or is_older:
        # An order of the former coordinator may be on its way to it yet.
        epoch += LEAP
        what, counted = f"generation {generation}", f"to {state.generation}"
        if not is_behind:
            what, counted = f"epoch {event.last_epoch}", f"to epoch {state.epoch_counter}"
        change.announce(
            EventKind.CATALOG_BEHIND,
            event.replica_id,
            f"it has served a coordinator of {what}, and this catalog has counted {counted}: the "
            f"catalog was lost, or is an older copy. Numbers leap by {LEAP:,}. Orders that "
            "replicas do not report (pins, retention, weft forget) may be lost: give them again",
        )
        _leap_all(change)
        question_all(change)
    if state.epoch_counter < epoch:
        change.state = replace(change.state, epoch_counter=epoch)
        change.emit(SaveEpoch(epoch))


def question_all(change: Change) -> None:
    """Put in question what policies stand for, so that replicas say it.

    Since this catalog was written, the pool may have gone back to other versions.
    """
    found = {
        policy.name: UncertainAlias(policy.served_version, change.now)
        for policy in change.state.policies.values()
        if policy.served_version
    }
    change.state = replace(
        change.state, uncertain_aliases={**found, **change.state.uncertain_aliases}
    )
    change.touched_all = True


def _leap_all(change: Change) -> None:
    """Leap in all policies, heard of or not: other replicas may hold later versions."""
    floor = max(change.state.number_floor, LEAP)
    if floor > change.state.number_floor:
        change.state = replace(change.state, number_floor=floor)
        change.emit(SaveNumberFloor(floor))
    for policy in [*change.state.policies.values(), *change.state.forgotten.values()]:
        _raise(change, policy, policy.last_version + LEAP)


def versions_heard(
    change: Change, replica: Replica, heard: Iterable[HeldVersionRecord] = ()
) -> None:
    """Continue above the versions that a replica serves, and those that it holds the bytes of."""
    vector = replica.vector
    bases = (vector.base, *replica.retained, *replica.undoable)
    versions = [PolicyVersion(BASE_POLICY, number) for number in bases]
    for name, entry in vector.adapters.items():
        versions.append(PolicyVersion(name, max((*entry.versions, entry.alias))))
    _go_above(change, (*versions, *(one.held.version for one in heard)))


def _go_above(change: Change, heard: Iterable[PolicyVersion]) -> None:
    for version in heard:
        state = change.state
        policy = state.policies.get(version.policy) or state.forgotten.get(version.policy)
        known = policy.last_version if policy else 0
        if version.version <= known:
            continue
        if policy is None:
            try:
                check_name(version.policy, "policy")
            except InvalidNameError:
                continue  # nobody could have pushed it
            kind = PolicyKind.BASE if version.policy == BASE_POLICY else PolicyKind.ADAPTER
            policy = new_policy(change.state, version.policy, kind)
        elif version.policy in state.forgotten:  # it was pushed again, which is lost
            change.put_policy(policy)
        else:
            question_all(change)
        _raise(change, policy, version.version + LEAP)


def _raise(change: Change, policy: Policy, last_version: int) -> None:
    """Raise a count, and leap with its tokens, above those of who assigned the lower numbers."""
    last_version = max(policy.last_version, last_version)
    policy = replace(policy, last_version=last_version, fencing_token=policy.fencing_token + LEAP)
    if policy.name in change.state.forgotten:
        change.put_away(policy)
    else:
        change.put_policy(policy)
    change.emit(SavePolicy(policy))


def trainer_asks(change: Change, policy: Policy, event: events.AcquirePolicy) -> Policy:
    """Return the policy, with its count above what a trainer was told of."""
    if policy.last_version < event.last_version:
        return replace(policy, last_version=event.last_version + LEAP)
    return policy


def next_token(policy: Policy, last_token: int) -> int:
    """Return a policy's next fencing token, above ``last_token`` that its trainer was given."""
    if policy.fencing_token < last_token:
        return last_token + LEAP
    return policy.fencing_token + 1
