"""Who lacks what, and who holds a copy of it. Questions only; nothing is decided here."""

from __future__ import annotations

from weft.contract.names import BASE_POLICY, AdapterVersions, PolicyVersion
from weft.coordinator.decisions.policies.retention import kept_versions
from weft.coordinator.decisions.replicas.checkpoints import doubt
from weft.coordinator.decisions.replicas.holdings import mistaken_adapters
from weft.coordinator.decisions.state.pool import PoolState
from weft.coordinator.decisions.state.replica import Replica
from weft.coordinator.decisions.state.values import Phase, ReplicaState


def lacks(state: PoolState, replica: Replica) -> list[str]:
    """What a replica must still serve to be ready, as ``policy@version``.

    Between the commit point and its own switch it serves what it should. An order to
    switch that was given before the pool was rolled back may still take it elsewhere,
    and a clone that it loads in place mixes its weights, whatever it said that it serves.
    What it has under a number of other bytes it is to drop first.
    """
    lacking = state.vector.missing_from(replica.vector)
    lacking += [str(v) for h in mistaken_adapters(replica) if str(v := h.version) not in lacking]
    for transfer in state.transfers.values():
        if transfer.replica_id and replica.replica_id in transfer.loading:
            lacking = sorted({*lacking, str(transfer.policy_version)})
        elif replica.replica_id in transfer.switching:
            if not transfer.replica_id:  # what it brings is served as soon as it ends
                lacking = [name for name in lacking if name != str(transfer.policy_version)]
            else:
                served = state.policies[transfer.policy].served_version
                name = str(PolicyVersion(transfer.policy, served))
                if served != transfer.served_before and name not in lacking:
                    lacking = [*lacking, name]
    return lacking


def is_changing(state: PoolState, policy: str) -> bool:
    """Whether a push or a rollback of a policy is under way, whichever replicas are
    concerned: the next one would decide without knowing how it ends."""
    return any(
        t.policy == policy and not t.replica_id and t.phase is not Phase.WAITING
        for t in state.transfers.values()
    )


def is_ready(state: PoolState, replica: Replica) -> bool:
    """Whether a replica serves everything that the pool serves."""
    return replica.in_contact and not lacks(state, replica) and not doubt(state, replica)


def takes_weights(state: PoolState, replica: Replica) -> bool:
    """Whether anything new is brought to a replica: not while it drains or is suspect, nor
    while an operator quarantines it."""
    is_free = replica.drain is None and replica.suspect is None
    return is_free and not state.is_quarantined(replica.replica_id)


def takes_clones(state: PoolState, replica: Replica) -> bool:
    """Whether clones are brought to a replica: not while it is cordoned, either. Pushes go
    to it all the same, and it may switch to copies of its own."""
    return takes_weights(state, replica) and replica.replica_id not in state.out_of_service


def is_joining(state: PoolState, replica: Replica) -> bool:
    """Whether a replica in contact has still to catch up: it takes part in a push if it is
    free, and no push waits for it.

    By what was announced last where that says so: to compare all that a thousand replicas
    serve would take longer than to begin a push.
    """
    if replica.announced is ReplicaState.READY:
        return False
    return bool(replica.dirty_reason or lacks(state, replica))


def obeys_pins(state: PoolState, replica: Replica) -> bool:
    """Whether a replica that is brought a base drops no copy that is pinned."""
    return replica.pins_obeyed.issuperset(state.pinned_bases)


def wants(state: PoolState, replica: Replica) -> list[PolicyVersion]:
    """What is to be brought to a replica, in order: the base, then each adapter's
    versions from the oldest on, so that it is ready when it has them all. One whose
    weights may be mixed gets a base before anything else.
    """
    pool = state.vector
    base = PolicyVersion(BASE_POLICY, pool.base)
    if not takes_weights(state, replica):
        return []
    if replica.dirty_reason:
        return [base] if pool.base else []
    found = [base] if pool.base and replica.vector.base != pool.base else []
    if replica.vector == pool or not replica.capabilities.lora_enabled:
        return found
    for name, entry in sorted(pool.adapters.items()):
        theirs = replica.vector.adapters.get(name, AdapterVersions())
        kept = kept_versions(state.policies[name], state.settings)
        missing = {v for v in entry.versions if v in kept and v not in theirs.versions}
        if theirs.alias != entry.alias:
            missing.add(entry.alias)
        found += [PolicyVersion(name, version) for version in sorted(missing)]
    return found


def outlook(state: PoolState, replica: Replica, version: PolicyVersion) -> str:
    """What is being done about a version that a replica lacks, for people; empty
    when it will be brought in a moment."""
    for transfer in state.transfers.values():
        if transfer.replica_id == replica.replica_id and transfer.policy_version == version:
            return f", which comes from {transfer.purpose.origin(replica, version)}"
    if version in state.copies and not takes_clones(state, replica):
        return ", which it is sent when it is put back into service"
    backoff = replica.backoffs.get(version)
    if backoff:
        return f", which could not be brought yet, it is tried again: {backoff.why}"
    if version in (held.version for held in mistaken_adapters(replica)):
        return ", for it has other bytes under that number, and drops them"
    if version.policy in state.unrecorded_since:
        return f", until it is clear which versions of {version.policy} replicas hold"
    if version not in state.copies:
        return f", which no replica in contact holds: {who_publishes(state, version.policy)}"
    return ""


def who_publishes(state: PoolState, policy: str) -> str:
    """Who brings back what nobody holds any more, for people."""
    known = state.policies.get(policy)
    if known is None or known.lease is None:
        return "nobody owns it now, push it again"
    return f"its owner {known.lease.trainer_id} is asked to publish it again"
