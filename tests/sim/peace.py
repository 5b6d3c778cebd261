"""What must be true once the faults have stopped and everything had its time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from weft_rl.contract.names import BASE_POLICY, AdapterVersions, PolicyVersion
from weft_rl.coordinator.decisions.state.pool import Policy
from weft_rl.coordinator.decisions.state.replica_state import explain_state
from weft_rl.coordinator.decisions.state.values import PolicyKind, ReplicaState, VersionState

if TYPE_CHECKING:
    from tests.sim.replica import SimReplica
    from tests.sim.world import World


def left_over(world: World) -> Iterator[str]:
    """What is under way still, or lies around; nothing must be in the end."""
    coordinator = world.coordinator
    state = coordinator.state
    yield from (f"the push of {t.name} goes on" for t in world.trainers.values() if t.pushing)
    if world.operator.busy:
        yield "the operator waits"
    if world.catalog.out_of_service:
        yield f"{sorted(world.catalog.out_of_service)} are out of service"
    left = {
        "transfers": [
            (t.transfer_id, t.purpose.name, t.phase.name) for t in state.transfers.values()
        ],
        "waiting calls": [
            ticket
            for ticket, since in coordinator.calls_since.items()
            if since < world.clock.now - 2
        ],
        "describers": list(state.target_tickets),
        "preflights": list(state.fits_under_way),
        "look-ups": list(state.lookups),
        "sleeping replicas": [
            name for name, r in world.replicas.items() if r.asleep or r.sleep.refuses
        ],
        "orders to sleep": [*state.sleeps, *state.sleep_waits],
        "calls to replicas": [None] * coordinator.num_calls_out,
        "staged bytes": [
            (name, ids) for name, r in world.replicas.items() if (ids := r.store.transfer_ids())
        ],
        "orders to discard": dict(state.discards),
        "commits that nobody serves": list(state.unserved),
    }
    for what, things in left.items():
        if things:
            yield f"{what} are left: {things}"
    yield from _groups_left(world)


def _groups_left(world: World) -> Iterator[str]:
    state, live = world.coordinator.state, world.coordinator.groups.live
    if set(live) != set(state.groups):
        yield f"groups {sorted(live)} are live, the state has {sorted(state.groups)}"
        return
    for group in state.groups.values():
        links = live[group.group_id].links
        if not group.complete or set(links) != set(group.attending):
            yield f"group {group.group_id} is kept with the ranks {sorted(links)}"
        if any(link.broken for link in links.values()):
            yield f"group {group.group_id} is kept with broken streams"


def behind(world: World) -> Iterator[str]:
    """What replicas lack though a replica has a copy of it, and who is not ready though
    he lacks nothing. By what they really hold, and what the catalog says is served."""
    state = world.coordinator.state
    policies = [policy for policy in world.catalog.policies.values() if not policy.forgotten]
    for name, replica in world.replicas.items():
        known = state.replicas.get(name)
        if not replica.alive or known is None or known.incarnation != replica.incarnation:
            yield f"{name} is not in the pool"
            continue
        if known.unheard_reason:
            yield f"{name} is taken for dead: {known.unheard_reason}"
        lacks = [version for policy in policies for version in _lacks(world, replica, policy)]
        for version in lacks:
            if replica.dirty_reason and version.policy != BASE_POLICY:
                continue  # its base comes first
            digest = world.checks.digest_of(version)
            holders = [
                r.name
                for r in world.replicas.values()
                if (copy := r.store.held(version)) and copy.digest == digest
            ]
            if holders:
                yield f"{name} lacks {version}, which {holders} hold"
        is_at, why = explain_state(state, known)
        should = not lacks and not replica.dirty_reason
        if should is not (is_at is ReplicaState.READY) or should is not replica.ready:
            yield f"{name} is {is_at.name} ({why}), told {replica.ready}, and lacks {lacks}"
        if replica.vector != known.vector and not known.mistaken:
            yield f"{name} serves {replica.vector} and is taken for {known.vector}"
    for policy in policies:
        if policy.served_version != world.checks.served_last(policy.name):
            yield f"{policy.name} does not stand for the last decision"
        if policy.served_version != state.policies[policy.name].served_version:
            yield f"{policy.name} stands for something else than the catalog says"


def _lacks(world: World, replica: SimReplica, policy: Policy) -> Iterator[PolicyVersion]:
    """What it must serve to be ready. Of what is lost that is nothing, unless its name stands
    for a former version."""
    served = PolicyVersion(policy.name, policy.served_version)
    if policy.kind is PolicyKind.BASE:
        if served.version != replica.vector.base or (served.version and replica.dirty_reason):
            yield served
    elif served.version:
        entry = replica.vector.adapters.get(policy.name, AdapterVersions())
        is_lost = world.coordinator.state.is_lost(policy)
        if entry.alias != served.version and not (is_lost and not entry.alias):
            yield served


def ended(world: World) -> Iterator[str]:
    """What is left of policies that were forgotten, and what is lost, or is not, wrongly."""
    state = world.coordinator.state
    for name, replica in world.replicas.items():
        # One with a broken engine drops nothing before it is repaired.
        held = () if replica.dirty_reason else (*replica.served, *replica.store.adapters)
        for version in held:
            policy = state.forgotten.get(version.policy)
            if policy is not None and version.version <= policy.last_version:
                yield f"{name} holds {version}, which is forgotten"
    for policy in state.policies.values():
        served = PolicyVersion(policy.name, policy.served_version)
        holders = [name for name, r in world.replicas.items() if r.store.held(served)]
        if state.is_lost(policy) and holders and served.version:
            yield f"{served} is lost, and {holders} hold it"
        lacking = [name for name, r in world.replicas.items() if not r.stands_for(served)]
        is_left = policy.lease is None and served.version and lacking and not holders
        if is_left and policy.kind is PolicyKind.ADAPTER and not state.is_lost(policy):
            yield f"{served} is held by nobody, owned by nobody, and not lost"


def kept(world: World) -> Iterator[str]:
    """Versions that should be everywhere and are not, and those that should be gone."""
    state = world.coordinator.state
    for policy in state.policies.values():
        if policy.kind is PolicyKind.BASE:
            committed = {
                version.version
                for version, record in world.catalog.versions.items()
                if version.policy == BASE_POLICY and record.state is VersionState.COMMITTED
            }
            if committed != {policy.served_version} - {0}:
                yield f"the base is {policy.served_version}, the catalog has {sorted(committed)}"
            continue
        asked = world.operator.retention.get(policy.name)
        if asked is not None and asked != policy.retain:
            yield f"{asked} of {policy.name} are to be kept, the coordinator has {policy.retain}"
        newest = policy.versions[-(policy.retain or state.settings.retain_versions) :]
        keep = {*newest, *policy.pinned, policy.served_version} - {0}
        pinned = {v.version for v in world.operator.pinned if v.policy == policy.name}
        if not pinned <= set(policy.pinned) or not pinned <= set(policy.versions):
            yield f"{sorted(pinned)} of {policy.name} are pinned, known are {policy.pinned}"
        held = {
            name: set(r.vector.adapters.get(policy.name, AdapterVersions()).versions)
            for name, r in world.replicas.items()
        }
        for name, versions in held.items():
            replica = world.replicas[name]
            alias = replica.vector.adapters.get(policy.name, AdapterVersions()).alias
            # What a name stands for is served until something else can be.
            if not versions <= keep | {alias} and not replica.dirty_reason:
                yield f"{name} keeps {sorted(versions)} of {policy.name}, wanted {sorted(keep)}"
            missing = (keep & set().union(*held.values())) - versions
            # What is lost is brought to nobody: requests for it get an error, whoever holds a part.
            if missing and not replica.dirty_reason and not state.is_lost(policy):
                yield f"{name} lacks {sorted(missing)} of {policy.name}, which others hold"


def disagreeing(world: World) -> Iterator[str]:
    """Every policy was just pushed: every replica serves all of it, to the byte."""
    state = world.coordinator.state
    for name, replica in world.replicas.items():
        known = state.replicas[name]
        is_at, why = explain_state(state, known)
        if is_at is not ReplicaState.READY or not replica.ready:
            yield f"{name} is {is_at.name} ({why}) after pushes of everything"
        lacking = state.vector.missing_from(replica.vector)
        if lacking:
            yield f"{name} is taken for ready and lacks {lacking}"
        for policy in state.policies.values():
            version = PolicyVersion(policy.name, policy.served_version)
            if replica.served.get(version) != world.checks.digest_of(version):
                yield f"{name} serves other bytes as {version} than were committed"
