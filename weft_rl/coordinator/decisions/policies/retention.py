"""Retention: which versions of an adapter are kept, how the others leave, and how a policy ends.

Operators give orders about all three. A version leaves the replicas first, then the catalog.

A policy that an operator forgets ends at once. All of its versions are retired, the one behind
its bare name included: nobody can request them. Replicas drop them from memory and from their
spill directories. A replica that was away meanwhile is told when it is back. The policy's numbers
are never used again: a trainer that pushes the name later begins above them.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft_rl.containers import replace
from weft_rl.contract.errors import (
    InvalidRequestError,
    NotReadyError,
    PolicyOwnedError,
    UnsupportedError,
)
from weft_rl.contract.names import BASE_POLICY, PolicyVersion
from weft_rl.coordinator.decisions.policies import leases
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.change import Change
from weft_rl.coordinator.decisions.state.effects import (
    CallRetire,
    EmptyAnswer,
    EventKind,
    RetentionAnswer,
    RetiredAnswer,
    SaveCommitted,
    SavePin,
    SavePolicy,
    SaveRetired,
)
from weft_rl.coordinator.decisions.state.pool import (
    Policy,
    PoolState,
    keepable_versions,
    kept_versions,
    known_policy,
    live_lease,
    num_retained,
    requestable_versions,
    rollback_versions,
    unknown_policy,
)
from weft_rl.coordinator.decisions.state.replica import Replica, holds
from weft_rl.coordinator.decisions.state.replica_state import (
    mistaken_adapters,
    undecided_versions,
    with_counted_versions,
)
from weft_rl.coordinator.decisions.state.transfer import Transfer
from weft_rl.coordinator.decisions.state.values import Failure, Phase, PolicyKind
from weft_rl.coordinator.decisions.transfers import abort

EVERY_SECONDS = 1.0
#: Most versions of one adapter that are kept by their number.
MAX_RETAINED = 1000


def serve(change: Change, policy: Policy, version: int) -> None:
    """Let a policy stand for ``version`` from now on, durably."""
    change.next_epoch()  # replicas hear it: an older copy of the catalog is known by that
    replaced = policy.served_version
    policy = replace(policy, served_version=version)
    if policy.kind is PolicyKind.BASE:
        policy = replace(policy, versions=(version,) if version else ())
        change.emit(SaveRetired(PolicyVersion(BASE_POLICY, replaced), durable=True))
        change.emit(SaveCommitted(PolicyVersion(BASE_POLICY, version)))
    change.put_policy(policy)
    change.touched_all = True
    change.emit(SavePolicy(policy))


# -- what an operator orders ----------------------------------------------------


def pin(change: Change, event: events.Pin) -> None:
    """Pin a version or let it go; doing so twice is no error."""
    version = event.version
    transfers = change.state.transfers.values()
    policy = known_policy(change.state, version, event.recorded)
    if event.pinned and policy.kind is PolicyKind.BASE:
        _check_base_pin(change.state, version)
    elif event.pinned and any(_may_vanish(t, version) for t in transfers):
        raise NotReadyError(
            f"replicas switch to {version}, which is withdrawn if none can: ask again when "
            "they have",
            reason="TRANSFER_UNDER_WAY",
        )
    elif event.pinned and version.version not in requestable_versions(change.state, policy):
        raise NotReadyError(f"{version} was retired, or is being retired", reason="NOT_RETAINED")
    elif event.pinned and version not in change.state.copies:
        raise NotReadyError(f"no replica in contact holds {version}", reason="NOT_RETAINED")
    if event.pinned != (version.version in policy.pinned):
        rest = {v for v in policy.pinned if v != version.version}
        pinned = tuple(sorted(rest | ({version.version} if event.pinned else set())))
        change.put_policy(replace(policy, pinned=pinned))
        change.emit(SavePin(version, event.pinned))
        kind = EventKind.VERSION_PINNED if event.pinned else EventKind.VERSION_UNPINNED
        change.announce(kind, str(version), "by an operator")
    change.reply(event.ticket, EmptyAnswer())


def _check_base_pin(state: PoolState, version: PolicyVersion) -> None:
    if any(t.policy == version.policy and t.targets for t in state.transfers.values()):
        raise NotReadyError(
            f"a base is being brought to replicas, which may drop {version} for it: ask again "
            "when it is there",
            reason="TRANSFER_UNDER_WAY",
        )
    if not any(_keeps_copy(state, replica, version) for replica in state.replicas.values()):
        raise NotReadyError(
            f"no replica in contact holds a copy of {version} that it could keep: replicas keep "
            "the newest, as many as their --base-copies says; those that load in place keep none",
            reason="NOT_RETAINED",
        )


def _keeps_copy(state: PoolState, replica: Replica, version: PolicyVersion) -> bool:
    """Return whether a replica has a copy of a base that outlasts the next push, if it is
    pinned."""
    if replica.lost or state.is_kept_out(replica.replica_id):
        return False
    keeps = holds(replica, version) and not replica.loads_in_place(PolicyKind.BASE)
    return keeps or version in replica.spilled


def _may_vanish(transfer: Transfer, version: PolicyVersion) -> bool:
    is_new = transfer.purpose.brings_version and transfer.policy_version == version
    return is_new and transfer.may_be_undone


def retire_version(change: Change, event: events.Retire) -> None:
    """Retire an adapter version at an operator's order; doing so twice is no error."""
    version = event.version
    policy = known_policy(change.state, version, event.recorded)
    if policy.kind is PolicyKind.BASE:
        raise UnsupportedError(
            "versions of the base are not retired: a push replaces the one that is served"
        )
    if version.version == policy.served_version:
        back = rollback_versions(change.state, policy)
        advice = f" or roll back to {back[-1]}" if back else ""
        raise NotReadyError(
            f"requests for {policy.name!r} get {version}: push a newer version{advice} first, "
            f"or end the policy: weft forget {policy.name}",
            reason="VERSION_IN_USE",
        )
    if version.version in policy.pinned:
        raise NotReadyError(f"{version} is pinned: unpin it first", reason="VERSION_IN_USE")
    if _may_return(change.state, version):
        raise NotReadyError(
            f"{version} is served again if no replica can switch to what replaces it: ask "
            "again when they have",
            reason="TRANSFER_UNDER_WAY",
        )
    if version.version in policy.versions:
        _retire_all(change, policy, [version.version], "by an operator")
        retire(change)
    change.reply(event.ticket, EmptyAnswer())


def _may_return(state: PoolState, version: PolicyVersion) -> bool:
    """Return whether a policy may go back to a version, for its successor is not served yet."""
    pending = [t for t in state.transfers.values() if t.may_be_undone]
    pending += [case.transfer for case in state.unserved.values()]
    return any(PolicyVersion(t.policy, t.served_before) == version for t in pending)


def set_retention(change: Change, event: events.SetRetention) -> None:
    """Keep more or fewer of an adapter's newest versions from now on."""
    policy = change.state.policies.get(event.policy)
    if policy is None:
        raise unknown_policy(change.state, event.policy)
    if policy.kind is PolicyKind.BASE:
        raise UnsupportedError(
            "each replica retains as many copies of the base as its --base-copies says"
        )
    if not 0 <= event.num_versions <= MAX_RETAINED:
        raise InvalidRequestError(
            f"keep between 1 and {MAX_RETAINED:,} versions, or 0 for the default"
        )
    # Versions that are being retired may be gone at some replicas: they do not come back.
    kept = keepable_versions(change.state, policy)
    policy = _retire_all(
        change, policy, [v for v in policy.versions if v not in kept], "superseded"
    )
    policy = replace(policy, retain=event.num_versions)
    change.put_policy(policy)
    change.emit(SavePolicy(policy))
    number = num_retained(policy, change.state.settings)
    change.announce(EventKind.RETENTION_SET, policy.name, f"{number} versions, by an operator")
    retire(change)
    change.reply(event.ticket, RetentionAnswer(number))


def _retire_all(change: Change, policy: Policy, versions: Sequence[int], why: str) -> Policy:
    """Retire versions: they cannot be requested from now on, and replicas drop them by and by."""
    left = tuple(version for version in policy.versions if version not in versions)
    policy = replace(policy, versions=left)
    change.put_policy(policy)
    for version in versions:
        retired = PolicyVersion(policy.name, version)
        change.emit(SaveRetired(retired, durable=True))
        change.announce(EventKind.VERSION_RETIRED, str(retired), why)
    return policy


# -- how the others leave ------------------------------------------------------


def retire(change: Change) -> None:
    """Ask replicas to drop versions they should not hold, and record those that none holds.

    O(replicas x adapters): at the end of a transfer, and once a second.
    """
    change.state = state = replace(change.state, retire_at=change.now + EVERY_SECONDS)
    # A commit that no replica can follow is undone: until then nothing leaves for it.
    unsettled = {t.policy for t in state.transfers.values() if t.may_be_undone}
    unsettled |= {version.policy for version in state.unserved} | state.uncertain_aliases.keys()
    kept = {
        policy.name: frozenset(policy.versions)
        if policy.name in unsettled
        else kept_versions(policy, state.settings)
        for policy in state.policies.values()
        if policy.kind is PolicyKind.ADAPTER
    }
    held: set[PolicyVersion] = set()
    for replica in list(state.replicas.values()):
        if replica.lost:
            continue
        # Nothing that the catalog does not know goes before it is decided about.
        undecided_here = {h.version for h in undecided_versions(state, replica)}
        ended = {name for name in replica.vector.adapters if name in state.forgotten}
        unwanted = [v for v in _unwanted(replica, kept, ended) if v not in undecided_here]
        held.update(unwanted)
        in_vain = _spilled_in_vain(state, replica, kept, held)
        unwanted += [v for v in in_vain if v not in undecided_here]
        mistaken = mistaken_adapters(replica)
        if (unwanted or mistaken) and change.now >= replica.retire_at and replica.in_contact:
            retry_at = change.now + state.settings.retire_retry_seconds
            change.put_replica(replace(replica, retire_at=retry_at))
            change.emit(
                CallRetire(
                    replica.replica_id,
                    replica.incarnation,
                    replica.address,
                    tuple(unwanted),
                    mistaken,
                    tuple(sorted(ended)),
                )
            )
    _record(change, kept, held)


def _unwanted(
    replica: Replica, kept: dict[str, frozenset[int]], ended: set[str]
) -> list[PolicyVersion]:
    """List the adapter versions that a replica serves beyond what is kept; that of the alias only
    where the policy has ended."""
    return [
        PolicyVersion(policy, version)
        for policy, entry in sorted(replica.vector.adapters.items())
        for version in entry.versions
        if version not in kept.get(policy, ()) and (version != entry.alias or policy in ended)
    ]


def _spilled_in_vain(
    state: PoolState, replica: Replica, kept: dict[str, frozenset[int]], held: set[PolicyVersion]
) -> list[PolicyVersion]:
    """List the spilled versions that are never brought back: this catalog assigned them, and keeps
    them no more."""

    def was_assigned(version: PolicyVersion) -> bool:
        name = version.policy
        policy = state.policies[name] if name in kept else state.forgotten.get(name)
        return policy is not None and version.version <= policy.last_version

    return sorted(
        version
        for version in replica.spilled
        if was_assigned(version)
        and version.version not in kept.get(version.policy, ())
        and version not in held
        and not replica.vector.holds(version)
    )


def _record(change: Change, kept: dict[str, frozenset[int]], held: set[PolicyVersion]) -> None:
    for name, keep in kept.items():
        policy = change.state.policies[name]
        gone = [
            version
            for version in policy.versions
            if version not in keep
            and PolicyVersion(name, version) not in held
            and not _is_alias_somewhere(change.state, name, version)
        ]
        if gone:
            left = tuple(version for version in policy.versions if version not in gone)
            change.put_policy(replace(policy, versions=left))
        for version in gone:
            retired = PolicyVersion(name, version)
            change.emit(SaveRetired(retired))
            change.announce(EventKind.VERSION_RETIRED, str(retired), "no replica holds it any more")


def _is_alias_somewhere(state: PoolState, policy: str, version: int) -> bool:
    return any(
        entry is not None and entry.alias == version
        for replica in state.replicas.values()
        if not replica.lost
        for entry in [replica.vector.adapters.get(policy)]
    )


def retire_answered(change: Change, event: events.RetireAnswered) -> None:
    """Note which versions a replica still holds."""
    replica = change.state.replicas.get(event.replica_id)
    if replica and replica.incarnation == event.incarnation:
        replica = replace(replica.with_vector(event.vector), retire_at=change.now)
        change.put_replica(with_counted_versions(change.state, replica))
        change.state = replace(change.state, retire_at=change.now)


# -- how a policy ends -----------------------------------------------------------


def forget(change: Change, event: events.ForgetPolicy) -> None:
    """Forget a policy; doing so twice is no error."""
    state, name = change.state, event.policy
    if name in state.forgotten:
        change.reply(event.ticket, RetiredAnswer(()))
        return
    policy = state.policies.get(name)
    if name == BASE_POLICY:
        raise UnsupportedError(
            "the base cannot be forgotten. Push another, or go back to what replicas were "
            "started with (weft rollback base --to 0). To let go of the base model, stop all "
            "replicas (weft base --rebind)"
        )
    if policy is None:
        raise unknown_policy(state, name)
    _check_free(state, policy, change.now, by_force=event.force)
    why = "an operator forgot the policy"
    if policy.lease is not None:
        leases.end(change, policy, why)
    _end_transfers(change, name, why)
    left = change.state.policies.get(name)  # None where nothing was pushed since it was forgotten
    versions = _end_policy(change, left) if left is not None else ()
    change.reply(event.ticket, RetiredAnswer(versions))


def _check_free(state: PoolState, policy: Policy, now: float, *, by_force: bool) -> None:
    lease = live_lease(policy, now)
    if lease is not None and not by_force:
        raise PolicyOwnedError(
            f"{leases.explain_owner(policy, lease, now)}. End the trainer first, or say --force, "
            "which ends its lease and its push. A trainer that goes on brings the policy back with "
            "its next push",
            metadata={"holder": lease.trainer_id},
        )
    for transfer in state.transfers.values():
        is_change = transfer.policy == policy.name and not transfer.replica_id
        if is_change and transfer.phase is Phase.COMMITTING:
            raise NotReadyError(
                f"replicas are switching to {transfer.policy_version}: ask again when they have",
                reason="TRANSFER_UNDER_WAY",
            )


def _end_transfers(change: Change, policy: str, why: str) -> None:
    """Abort the transfers that would change the policy; its repairs are not wanted any more."""
    failure = Failure("TRANSFER_ABORTED", f"it was given up: {why}")
    for transfer in list(change.state.transfers.values()):
        if transfer.policy == policy and transfer.uncommitted and not transfer.replica_id:
            abort.abort(change, transfer, failure)


def _end_policy(change: Change, policy: Policy) -> tuple[PolicyVersion, ...]:
    state, name = change.state, policy.name
    versions = tuple(PolicyVersion(name, number) for number in policy.versions)
    bare = Policy(name, policy.kind, policy.last_version, policy.fencing_token, forgotten=True)
    change.put_away(bare)
    change.next_epoch()
    change.emit(SavePolicy(bare))
    change.emit(*(SavePin(PolicyVersion(name, number), False) for number in policy.pinned))
    change.emit(*(SaveRetired(version, durable=True) for version in versions))
    change.state = replace(
        change.state,
        unserved={v: case for v, case in state.unserved.items() if v.policy != name},
        conflicts={v: found for v, found in state.conflicts.items() if v.policy != name},
        republish={k: wanted for k, wanted in state.republish.items() if k != name},
        uncertain_aliases={k: asked for k, asked in state.uncertain_aliases.items() if k != name},
        lost={k: number for k, number in state.lost.items() if k != name},
    )
    change.touched_all = True
    left = f"{len(versions)} versions were retired, numbers go on above {policy.last_version}"
    change.announce(EventKind.POLICY_FORGOTTEN, name, f"by an operator: {left}")
    retire(change)
    return versions
