"""Adoption: versions that replicas hold and the catalog does not know are recorded and served.

A catalog that was lost, or restored from an older copy, lacks versions that the pool serves.
When a replica reports such a version, the coordinator waits, since others may hold other bytes:
as long as before an owner is asked to publish again. Then it decides for each policy. A version
that all holders have in the same bytes is recorded as committed, if it would be kept. Other bytes
under one number are a *conflict*: neither version is served, and the owner is asked.

Of the recorded versions the pool serves the one that the replicas' bare names stand for; the
highest if they differ. Where no name stands for one (they are spilled), it is the highest. It
must be newer than the served version.

The served version in an older copy is *uncertain* for as long: an operator may have gone back
since. If no replica's name stands for it, the version that they stand for is served.

A record needs more than the digest. A holder tells the rest (``DescribeVersion``), so that it
need not travel with every registration.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final

from weft_rl.containers import replace
from weft_rl.contract.names import BASE_POLICY, PolicyVersion
from weft_rl.contract.replica_report import HeldVersion
from weft_rl.coordinator.decisions.policies.retention import serve
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.change import Change
from weft_rl.coordinator.decisions.state.effects import (
    DescribeVersion,
    EventKind,
    SavePolicy,
    SaveRetired,
    SaveVersion,
)
from weft_rl.coordinator.decisions.state.pool import (
    DescriptionRequest,
    Policy,
    PoolState,
    UncertainAlias,
    num_retained,
)
from weft_rl.coordinator.decisions.state.replica import Replica
from weft_rl.coordinator.decisions.state.replica_state import undecided_versions, without_mistaken
from weft_rl.coordinator.decisions.state.values import (
    PolicyKind,
    RecordedFacts,
    VersionRecord,
    VersionState,
)

#: Trainer of adopted versions in the catalog; no trainer can be named so.
ADOPTED: Final = "(replicas)"
#: Versions whose holders are asked at once.
MAX_DESCRIBING: Final = 16
#: Contents of one policy that are remembered as being in conflict.
MAX_CONFLICTS: Final = 16
# An answer comes within a minute, or fails.
_ANSWER_SECONDS: Final = 90.0
_RETRY_SECONDS: Final = 1.0

#: By version and digest, who holds it.
_Found = Mapping[int, Mapping[bytes, list[Replica]]]


def watch(change: Change) -> None:
    """Continue the adoption of versions that are not recorded yet; with each tick.

    O(replicas) while there is nothing.
    """
    for name, uncertain in list(change.state.uncertain_aliases.items()):
        waited = change.now - uncertain.since
        seconds = change.state.settings.publish_again_after_seconds
        if waited >= seconds and not change.state.is_changing(name):
            _settle(change, name, uncertain)
    found, before = _unrecorded(change.state), change.state.unrecorded_since
    if not found and not before:
        return
    since = {name: before.get(name, change.now) for name in found}
    description_requests = {
        version: request
        for version, request in change.state.description_requests.items()
        if version.version in found.get(version.policy, ())
    }
    change.state = replace(
        change.state, unrecorded_since=since, description_requests=description_requests
    )
    for name in sorted(found.keys() - before.keys()):
        held = ", ".join(f"{name}@{number}" for number in sorted(found[name])[-4:])
        seconds = change.state.settings.publish_again_after_seconds
        change.announce(
            EventKind.UNRECORDED_VERSIONS,
            name,
            f"replicas hold {held}, which the catalog does not know: recorded in "
            f"{seconds:g} s, unless others hold other bytes",
        )
    for name in sorted(found):
        waited = change.now - since[name]
        if waited >= change.state.settings.publish_again_after_seconds:
            _decide(change, change.state.policies[name], found[name])


def _unrecorded(state: PoolState) -> dict[str, dict[int, dict[bytes, list[Replica]]]]:
    """Return the holders of unrecorded versions that would be kept, by policy, number and digest;
    who is kept out of transfers says nothing."""
    found: dict[str, dict[int, dict[bytes, list[Replica]]]] = {}
    for replica in state.replicas.values():
        if not replica.unrecorded or replica.lost or state.is_kept_out(replica.replica_id):
            continue
        for held in undecided_versions(state, replica):
            version = held.version
            if version.policy in state.policies:
                numbers = found.setdefault(version.policy, {})
                holders = numbers.setdefault(version.version, {}).setdefault(
                    held.content_digest, []
                )
                if replica not in holders:
                    holders.append(replica)
    return found


def _decide(change: Change, policy: Policy, found: _Found) -> None:
    """Decide about the unrecorded versions of a policy, the highest first: what is below would be
    served until it is known."""
    agreed = {}
    for number, by_digest in sorted(found.items()):
        version = PolicyVersion(policy.name, number)
        if len(by_digest) > 1:
            _note_conflict(change, version, by_digest)
        else:
            ((digest, holders),) = by_digest.items()
            agreed[number] = digest, holders
    if not agreed or change.state.is_changing(policy.name):
        return
    first = _to_serve(change.state, policy, agreed)
    for number in reversed(_wanted(change.state, policy, sorted(agreed), first)):
        if first in (number, None):
            _ask(change, PolicyVersion(policy.name, number), *agreed[number])


def _to_serve(state: PoolState, policy: Policy, agreed: Collection[int]) -> int | None:
    """Return which of these versions the pool is to serve, once it is recorded; None for none."""
    stands = {n for n in _stands_for(state, policy) if n in agreed or n in _recorded(policy)}
    number = max(stands) if stands else max(agreed)
    is_new = not policy.served_version or number > max(_recorded(policy))
    return number if number in agreed and is_new else None


def _recorded(policy: Policy) -> tuple[int, ...]:
    return (policy.served_version, *policy.versions)


def _stands_for(state: PoolState, policy: Policy) -> set[int]:
    """Return the versions that replicas in contact take a bare name for. One that has only base@0
    was just started, and says nothing."""
    found = set()
    for replica in state.replicas.values():
        if replica.lost or state.is_kept_out(replica.replica_id):
            continue
        if policy.kind is PolicyKind.BASE:
            number = replica.vector.base
            if number > 0 or (number == 0 and any(replica.retained)):
                found.add(number)
        elif entry := replica.vector.adapters.get(policy.name):
            found.add(entry.alias)
    return found - ({0} if policy.kind is PolicyKind.ADAPTER else set())


def _settle(change: Change, name: str, uncertain: UncertainAlias) -> None:
    """Decide what a policy stands for, since its catalog is an older copy."""
    state = change.state
    left = {k: other for k, other in state.uncertain_aliases.items() if k != name}
    change.state = replace(state, uncertain_aliases=left)
    change.touched_all = True
    policy = state.policies.get(name)
    if policy is None or policy.served_version != uncertain.served:
        return  # it was pushed, rolled back or forgotten meanwhile
    unrecorded = {h.version.version for r in state.replicas.values() for h in r.unrecorded
                  if h.version.policy == name}  # fmt: skip
    stands = _stands_for(state, policy) - unrecorded
    # A replica that is to be repaired serves a number of which it holds nothing any more.
    is_adapter = policy.kind is PolicyKind.ADAPTER
    stands &= {*policy.versions} if is_adapter else {0, *state.base_contents}
    shown = " and ".join(f"{name}@{number}" for number in sorted(stands))
    if not stands or stands == {uncertain.served}:
        return
    if uncertain.served in stands:
        change.announce(
            EventKind.CATALOG_BEHIND,
            name,
            f"replicas stand for {shown}; the catalog, an older copy, says {name}@"
            f"{uncertain.served}, which is served: if it was rolled back since, do so again",
        )
        return
    number = max(stands)
    change.announce(
        EventKind.ROLLED_BACK,
        str(PolicyVersion(name, number)),
        f"from {uncertain.served}, as the catalog says, which is an older copy: replicas stand "
        f"for {shown}",
    )
    serve(change, policy, number)


def _wanted(state: PoolState, policy: Policy, agreed: list[int], served: int | None) -> list[int]:
    """List the versions to record, ascending: those that would be kept if all were recorded, and
    the one that is to be served."""
    if policy.kind is PolicyKind.BASE:
        return agreed
    kept = sorted({*policy.versions, *agreed})[-num_retained(policy, state.settings) :]
    return [number for number in agreed if number in kept or number == served]


def _ask(change: Change, version: PolicyVersion, digest: bytes, holders: list[Replica]) -> None:
    description_requests = change.state.description_requests
    last = description_requests.get(version)
    if last is not None and change.now < last.again_at:
        return
    if (
        sum(change.now < request.again_at for request in description_requests.values())
        >= MAX_DESCRIBING
    ):
        return
    in_memory = HeldVersion(version, digest)
    failed = last.replica_id if last else ""
    holder = min(
        holders,
        key=lambda r: (r.replica_id == failed, in_memory not in r.unrecorded, r.replica_id),
    )
    _note_asked(change, version, holder.replica_id, _ANSWER_SECONDS)
    change.emit(
        DescribeVersion(holder.replica_id, holder.incarnation, holder.address, version, digest)
    )


def _note_asked(change: Change, version: PolicyVersion, replica_id: str, seconds: float) -> None:
    request = DescriptionRequest(replica_id, change.now + seconds)
    change.state = replace(
        change.state, description_requests={**change.state.description_requests, version: request}
    )


def described(change: Change, event: events.VersionDescribed) -> None:
    """Adopt a version once a holder has said what the catalog is to record of it."""
    version, digest, facts = event.version, event.digest, event.facts
    _note_asked(change, version, event.replica_id, _RETRY_SECONDS)
    policy = change.state.policies.get(version.policy)
    by_digest = _unrecorded(change.state).get(version.policy, {}).get(version.version, {})
    if policy is None or set(by_digest) != {digest} or change.state.is_changing(policy.name):
        return  # it has changed meanwhile: decided anew with the next tick
    if event.failure is not None and event.failure.reason != "VERSION_UNKNOWN":
        return
    if facts is None or facts.content_digest.value != digest or _is_incomplete(version, facts):
        _disbelieve(change, event)
        return
    if event.recorded is not None and event.recorded.content_digest is not None:
        _resolve(change, version, event.recorded.content_digest.value)
        return
    _adopt(change, policy, version, facts, event.recorded)


def _is_incomplete(version: PolicyVersion, facts: RecordedFacts) -> bool:
    is_adapter = version.policy != BASE_POLICY
    return is_adapter is (facts.adapter is None) or len(facts.layout_digest) != 32


def _disbelieve(change: Change, event: events.VersionDescribed) -> None:
    """Forget the claim of a replica that does not hold what it said, or cannot say what it is."""
    replica = change.state.replicas.get(event.replica_id)
    if replica is not None and replica.incarnation == event.incarnation:
        left = frozenset(h for h in replica.unrecorded if h.version != event.version)
        change.put_replica(replace(replica, unrecorded=left))
        why = event.failure.message if event.failure else "it cannot say what it is"
        change.announce(
            EventKind.VERSION_NOT_ADOPTED, str(event.version), f"{event.replica_id}: {why}"
        )


def _adopt(
    change: Change,
    policy: Policy,
    version: PolicyVersion,
    facts: RecordedFacts,
    recorded: VersionRecord | None,
) -> None:
    number = version.version
    agreed = {
        n
        for n, by_digest in _unrecorded(change.state).get(policy.name, {}).items()
        if len(by_digest) == 1
    }
    is_newest = _to_serve(change.state, policy, agreed) == number
    is_base = policy.kind is PolicyKind.BASE
    before = policy.served_version
    policy = replace(policy, forgotten=False)
    if is_newest:
        policy = replace(policy, served_version=number)
    if not is_base:
        policy = replace(policy, versions=tuple(sorted({*policy.versions, number})))
        trained_on = facts.adapter.trained_on_base_version if facts.adapter else None
        if trained_on is not None:
            policy = replace(policy, trained_on={**policy.trained_on, number: trained_on})
    elif is_newest:
        policy = replace(policy, versions=(number,))
        if before:
            change.emit(SaveRetired(PolicyVersion(BASE_POLICY, before), durable=True))
    now = change.state.wall(change.now)
    record = recorded or VersionRecord(
        version=version,
        state=VersionState.COMMITTED,
        trainer_id=ADOPTED,
        request_id=str(version),
        transfer_id=f"adopted:{version}",
        layout_digest=facts.layout_digest,
        create_time=now,
    )
    record = replace(
        record,
        # A base has one version; what replicas retain they can go back to.
        state=VersionState.RETIRED if is_base and not is_newest else VersionState.COMMITTED,
        layout_digest=facts.layout_digest,
        commit_time=now,
        content_digest=facts.content_digest,
        adapter=facts.adapter,
        failure=None,
    )
    change.put_policy(policy)
    if is_base:
        change.state = change.state.with_base_content(
            number, facts.layout_digest, facts.content_digest
        )
    change.emit(SaveVersion(record), SavePolicy(policy))
    holders = ", ".join(_holders(change.state, version))
    change.announce(
        EventKind.VERSION_ADOPTED,
        str(version),
        f"held by {holders} and not known to the catalog: recorded with digest "
        f"{facts.content_digest.value.hex()}" + (", and served" if is_newest else ""),
    )
    _resolve(change, version, facts.content_digest.value)


def _holders(state: PoolState, version: PolicyVersion) -> Iterator[str]:
    for replica in sorted(state.replicas.values(), key=lambda r: r.replica_id):
        if not replica.lost and any(h.version == version for h in replica.unrecorded):
            yield replica.replica_id


def _resolve(change: Change, version: PolicyVersion, digest: bytes) -> None:
    """Note a version's bytes, now that they are known: who holds others is mistaken."""
    adopted = {**change.state.adopted, version: digest}
    change.state = replace(change.state, adopted=adopted)
    _judge(change, version, digest)


def _note_conflict(
    change: Change, version: PolicyVersion, by_digest: Mapping[bytes, list[Replica]]
) -> None:
    contents = {
        digest: tuple(sorted(replica.replica_id for replica in holders))
        for digest, holders in sorted(by_digest.items())
    }
    others = {v: c for v, c in change.state.conflicts.items() if v != version}
    of_policy = sorted(v for v in others if v.policy == version.policy)
    for old in of_policy[: max(0, len(of_policy) + 1 - MAX_CONFLICTS)]:
        del others[old]
    change.state = replace(change.state, conflicts={**others, version: contents})
    found = "; ".join(f"{d.hex()} at {', '.join(ids)}" for d, ids in contents.items())
    change.announce(
        EventKind.VERSION_CONFLICT,
        str(version),
        f"replicas hold other bytes under one number that the catalog does not know ({found}). "
        "None of them is served, and the owner is asked to publish again",
    )
    _judge(change, version, b"")


def _judge(change: Change, version: PolicyVersion, digest: bytes) -> None:
    for replica in list(change.state.replicas.values()):
        claims = {h for h in replica.unrecorded if h.version == version}
        if not claims:
            continue
        right = {h for h in claims if h.content_digest == digest}
        wrong = {h for h in claims - right if HeldVersion(version, digest, h.spilled) not in right}
        judged = replace(
            replica, unrecorded=replica.unrecorded - claims, mistaken=replica.mistaken | wrong
        )
        change.put_replica(without_mistaken(judged))
