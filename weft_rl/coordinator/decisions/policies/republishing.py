"""Republishing: versions that no replica holds any more are asked of their owner, or lost.

A whole pool that was restarted without a spill directory lacks what it served. The lack must
last a while: while a pool restarts, another replica may bring the version yet.

A policy that nobody owns then is *lost*. Replicas are ready without it, except those whose bare
name stands for a former version of it; for the base that is each replica. A trainer that takes
its lease is asked to publish it. Three things end the loss: a push, a replica that comes back
with a copy, or an operator's order to forget the policy or to go back. Nothing of this is
durable.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft_rl.containers import replace
from weft_rl.contract.names import BASE_POLICY, PolicyVersion
from weft_rl.coordinator.decisions.state.change import Change
from weft_rl.coordinator.decisions.state.effects import EventKind
from weft_rl.coordinator.decisions.state.pool import PoolState, RepublishRequest, live_lease
from weft_rl.coordinator.decisions.state.replica import Replica, can_switch
from weft_rl.coordinator.decisions.state.replica_state import (
    lacked_adapters,
    versions_to_bring,
    who_publishes,
)


def watch(change: Change) -> None:
    """Note versions that nobody holds, and those that were brought back; with each tick.

    O(policies) while a replica holds everything.
    """
    state = change.state
    reachable = [r for r in state.replicas.values() if not r.lost]
    # From those that an operator keeps out nothing is brought, as ``copies`` has it.
    holders = [r for r in reachable if not state.is_kept_out(r.replica_id)]
    unheld = _unheld(state, holders)
    if not unheld and not state.republish and not state.lost:
        return
    lost = {
        name: number
        for name, number in state.lost.items()
        if PolicyVersion(name, number) in unheld and not _is_served(name, number, holders)
    }
    lacked = {
        version.policy: version.version
        for replica in reachable
        for version in (*versions_to_bring(state, replica), *_in_vain(change, replica))
        if version in unheld
    }
    republish = {}
    for policy, version in {**lost, **lacked}.items():
        republish[policy] = wanted = _asked(change, policy, version)
        is_asked = wanted.is_asked and change.now >= state.restart_over_at
        is_owned = live_lease(state.policies[policy], change.now) is not None
        if (
            is_asked
            and not is_owned
            and policy not in lost
            and not _is_served(policy, version, holders)
        ):
            lost[policy] = version
            why = f"no replica in contact holds it: {who_publishes(state, policy)}"
            change.announce(EventKind.POLICY_LOST, str(PolicyVersion(policy, version)), why)
    for policy in sorted(state.lost.keys() - lost.keys()):
        _announce_found(change, policy)
    if lost != state.lost:
        change.touched_all = True
    change.state = replace(change.state, republish=republish, lost=lost)


def _in_vain(change: Change, replica: Replica) -> list[PolicyVersion]:
    """List the adapters without an owner that a dirty replica lacks: they are lost, and nobody is
    asked for them, since a base must repair it first."""
    if not replica.dirty_reason:
        return []
    state = change.state
    return [
        version
        for version in lacked_adapters(state, replica)
        if live_lease(state.policies[version.policy], change.now) is None
    ]


def _unheld(state: PoolState, holders: Sequence[Replica]) -> set[PolicyVersion]:
    """Return the served versions that nobody in contact has a copy of."""
    served = (PolicyVersion(p.name, p.served_version) for p in state.policies.values())
    return {version for version in served if version.version and not _is_held(version, holders)}


def _is_held(version: PolicyVersion, holders: Sequence[Replica]) -> bool:
    return any(can_switch(replica, version) or version in replica.spilled for replica in holders)


def _asked(change: Change, policy: str, version: int) -> RepublishRequest:
    """Return the request to a policy's owner to publish again; announces it when it is made."""
    wanted = change.state.republish.get(policy)
    if wanted is None or wanted.version != version:
        wanted = RepublishRequest(version, change.now)
    waited = change.now - wanted.since
    if not wanted.is_asked and waited >= change.state.settings.publish_again_after_seconds:
        wanted = replace(wanted, is_asked=True)
        change.announce(
            EventKind.PUBLISH_AGAIN_WANTED,
            str(PolicyVersion(policy, version)),
            f"no replica in contact holds it: {who_publishes(change.state, policy)}",
        )
    return wanted


def _is_served(policy: str, version: int, holders: Sequence[Replica]) -> bool:
    """Return whether a replica in contact has a base whole in its engine, though no copy of it."""
    if policy != BASE_POLICY:
        return False
    return any(replica.in_contact and replica.vector.base == version for replica in holders)


def _announce_found(change: Change, name: str) -> None:
    """Announce that a policy is lost no more; that it was forgotten is announced elsewhere."""
    policy = change.state.policies.get(name)
    if policy is not None:
        version = str(PolicyVersion(name, policy.served_version))
        change.announce(EventKind.POLICY_FOUND, version, "it can be served again")


def publish_again_version(state: PoolState, policy: str) -> int:
    """Return the version that a policy's owner is asked to replace; 0 for none."""
    wanted = state.republish.get(policy)
    lost = wanted.version if wanted and wanted.is_asked else 0
    return max((lost, *conflicts(state, policy)))


def conflicts(state: PoolState, policy: str) -> list[int]:
    """List versions that replicas held with other bytes each, until a newer one is served."""
    known = state.policies.get(policy)
    served = known.served_version if known else 0
    return sorted(
        version.version
        for version in state.conflicts
        if version.policy == policy and version.version > served
    )
