"""What no replica holds any more: its owner is asked to publish it again.

A whole pool that was restarted without a spill directory lacks what it served. That
must last a while: of a pool that restarts, another replica may bring it yet.
"""

from __future__ import annotations

from weft.containers.frozen import replace
from weft.contract.names import PolicyVersion
from weft.coordinator.decisions.change import Change
from weft.coordinator.decisions.effects import EventKind
from weft.coordinator.decisions.replicas.replica_state import wants, who_publishes
from weft.coordinator.decisions.state.pool import PoolState, Republish
from weft.coordinator.decisions.state.replica import holds


def watch(change: Change) -> None:
    """Note what is lost, and what was brought back; with each tick.

    O(policies) while a replica holds everything.
    """
    state = change.state
    lost = _lost(state)
    if not lost and not state.republish:
        return
    republish = {}
    for policy, version in lost.items():
        wanted = state.republish.get(policy)
        if wanted is None or wanted.version != version:
            wanted = Republish(version, change.now)
        waited = change.now - wanted.since
        if not wanted.is_asked and waited >= state.settings.publish_again_after_seconds:
            wanted = replace(wanted, is_asked=True)
            change.announce(
                EventKind.PUBLISH_AGAIN_WANTED,
                str(PolicyVersion(policy, version)),
                f"no replica in contact holds it: {who_publishes(state, policy)}",
            )
        republish[policy] = wanted
    change.state = replace(state, republish=republish)


def _lost(state: PoolState) -> dict[str, int]:
    """Served versions that a replica lacks and nobody in contact can bring, by policy."""
    reachable = [r for r in state.replicas.values() if not r.lost]
    # From those that an operator quarantined nothing is brought, as ``copies`` has it.
    holders = [r for r in reachable if not state.is_quarantined(r.replica_id)]
    unheld = set()
    for policy in state.policies.values():
        version = PolicyVersion(policy.name, policy.served_version)
        if version.version and not any(
            holds(replica, version) or version in replica.spilled for replica in holders
        ):
            unheld.add(version)
    if not unheld:
        return {}
    return {
        version.policy: version.version
        for replica in reachable
        for version in wants(state, replica)
        if version in unheld
    }


def publish_again_version(state: PoolState, policy: str) -> int:
    """The version that a policy's owner is asked to replace; 0 for none."""
    wanted = state.republish.get(policy)
    lost = wanted.version if wanted and wanted.is_asked else 0
    return max((lost, *conflicts(state, policy)))


def conflicts(state: PoolState, policy: str) -> list[int]:
    """Versions that replicas held with other bytes each, until a newer one is served."""
    known = state.policies.get(policy)
    served = known.served_version if known else 0
    return sorted(
        version.version
        for version in state.conflicts
        if version.policy == policy and version.version > served
    )
