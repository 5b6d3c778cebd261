"""Retire: adapter versions beyond the retention leave, first replicas, then catalog."""

from __future__ import annotations

from weft.contract.frozen import replace
from weft.contract.names import PolicyVersion
from weft.coordinator.decisions import events
from weft.coordinator.decisions.change import Change
from weft.coordinator.decisions.effects import CallRetire, SaveRetired
from weft.coordinator.decisions.replicas.holdings import counted, mistaken_adapters
from weft.coordinator.decisions.state.pool import Policy, PoolState, Settings, num_retained
from weft.coordinator.decisions.state.replica import Replica
from weft.coordinator.decisions.state.transfer import Transfer
from weft.coordinator.decisions.state.values import Phase, PolicyKind, Purpose

EVERY_SECONDS = 1.0


def kept_versions(policy: Policy, settings: Settings) -> frozenset[int]:
    """The newest versions, those that are pinned, and always the one behind the alias."""
    newest = policy.versions[-num_retained(policy, settings) :]
    return frozenset((*newest, *policy.pinned, policy.served_version))


def may_be_kept(state: PoolState, policy: Policy) -> frozenset[int]:
    """Those versions, and what would be kept if the change under way were undone."""
    kept = kept_versions(policy, state.settings)
    for transfer in state.transfers.values():
        if transfer.policy == policy.name and may_be_undone(transfer):
            brought = {transfer.version} if transfer.purpose is Purpose.PUSH else set()
            versions = tuple(v for v in policy.versions if v not in brought)
            before = replace(policy, versions=versions, served_version=transfer.replaced_version)
            kept |= kept_versions(before, state.settings)
    for version, case in state.unserved.items():
        if version.policy == policy.name:
            others = tuple(v for v in policy.versions if v != version.version)
            replaced = case.transfer.replaced_version
            before = replace(policy, versions=others, served_version=replaced)
            kept |= kept_versions(before, state.settings)
    return kept


def may_be_undone(transfer: Transfer) -> bool:
    """Whether a policy goes back to what it served if no replica can follow."""
    return transfer.phase is Phase.COMMITTING and not transfer.replica_id


def retire(change: Change) -> None:
    """Ask replicas to drop what they should not hold, and record what none holds.

    O(replicas x adapters): at the end of a transfer, and once a second.
    """
    change.state = state = replace(change.state, retire_at=change.now + EVERY_SECONDS)
    # A commit that no replica can follow is undone: until then nothing leaves for it.
    undecided = {t.policy for t in state.transfers.values() if may_be_undone(t)}
    undecided |= {version.policy for version in state.unserved}
    kept = {
        policy.name: frozenset(policy.versions)
        if policy.name in undecided
        else kept_versions(policy, state.settings)
        for policy in state.policies.values()
        if policy.kind is PolicyKind.ADAPTER
    }
    held: set[PolicyVersion] = set()
    for replica in list(state.replicas.values()):
        if replica.lost:
            continue
        # Nothing that the catalog does not know goes before it is decided about.
        undecided_here = {h.version for h in replica.unrecorded}
        unwanted = [v for v in _unwanted(replica, kept) if v not in undecided_here]
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
                )
            )
    _record(change, kept, held)


def _unwanted(replica: Replica, kept: dict[str, frozenset[int]]) -> list[PolicyVersion]:
    """What a replica serves beyond what is kept; never what its alias stands for."""
    return [
        PolicyVersion(policy, version)
        for policy, entry in sorted(replica.vector.adapters.items())
        for version in entry.versions
        if version not in kept.get(policy, ()) and version != entry.alias
    ]


def _spilled_in_vain(
    state: PoolState, replica: Replica, kept: dict[str, frozenset[int]], held: set[PolicyVersion]
) -> list[PolicyVersion]:
    """What lies in a replica's spill directory and is never brought back: a version
    that this catalog assigned and keeps no more. Others may be another catalog's."""
    return sorted(
        version
        for version in replica.spilled
        if version.policy in kept
        and version.version not in kept[version.policy]
        and version.version <= state.policies[version.policy].last_version
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
            change.announce("version_retired", str(retired), "no replica holds it any more")


def _is_alias_somewhere(state: PoolState, policy: str, version: int) -> bool:
    return any(
        entry is not None and entry.alias == version
        for replica in state.replicas.values()
        if not replica.lost
        for entry in [replica.vector.adapters.get(policy)]
    )


def retire_answered(change: Change, event: events.RetireAnswered) -> None:
    """Note what a replica still holds."""
    replica = change.state.replicas.get(event.replica_id)
    if replica and replica.incarnation == event.incarnation:
        replica = replace(replica, vector=event.vector, retire_at=change.now)
        change.put_replica(counted(change.state, replica))
        change.state = replace(change.state, retire_at=change.now)
