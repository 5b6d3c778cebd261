"""Holdings: the bytes that a replica has under each version, and which of them count.

A version's number alone does not say which bytes a replica has: it may come from another
catalog, or from a newer copy of this one. So replicas name the digests, too. A version is
*mistaken* if the catalog has other bytes under its number: it does not count, and is dropped.
A version that the catalog does not know at all is *unrecorded* until ``adoption`` decides.
"""

from __future__ import annotations

from collections.abc import Iterable

from weft_rl.containers.frozen import replace
from weft_rl.contract.names import BASE_POLICY, PolicyVersion
from weft_rl.coordinator.decisions.state.pool import PoolState, num_retained
from weft_rl.coordinator.decisions.state.replica import Replica
from weft_rl.coordinator.decisions.state.values import (
    Heard,
    HeldVersion,
    PolicyKind,
    VersionRecord,
    VersionState,
)

#: The base of a replica that serves bytes which are no version's.
NO_VERSION = -1


def counted(
    state: PoolState,
    replica: Replica,
    heard: Iterable[Heard] = (),
    *,
    complete: bool = False,
) -> Replica:
    """Return a replica as it describes itself, without its mistaken versions.

    Args:
        replica: The replica, with its vector and copies as it names them.
        heard: Versions whose bytes it names now, with what the catalog says of each.
        complete: True if ``heard`` is all that it holds; else what it said before stands.
    """
    heard = list(heard)
    unrecorded = {h for h in replica.unrecorded if not complete and _lists(replica, h)}
    mistaken = {h for h in replica.mistaken if not complete and _lists(replica, h)}
    told_anew = {(h.held.version, h.held.spilled) for h in heard}
    unrecorded = {h for h in unrecorded if (h.version, h.spilled) not in told_anew}
    mistaken = {h for h in mistaken if (h.version, h.spilled) not in told_anew}
    right: set[PolicyVersion] = set()
    for one in heard:
        held, digest = one.held, _digest_of(state, one)
        if not _lists(replica, held):
            continue
        if digest is None:
            unrecorded.add(held)
        elif digest != held.digest:
            mistaken.add(held)
        elif held.spilled:
            right.add(held.version)
    # A directory may list another catalog's versions by the thousand, and for good.
    unrecorded = {h for h in unrecorded if not h.spilled or would_be_kept(state, h.version)}
    # A shared directory may have both: the digest says which is read.
    mistaken = {h for h in mistaken if not (h.spilled and h.version in right)}
    return without_mistaken(
        replace(replica, unrecorded=frozenset(unrecorded), mistaken=frozenset(mistaken))
    )


def _digest_of(state: PoolState, heard: Heard) -> bytes | None:
    """Return the digest that the catalog has under a number; None if it knows none.

    A push that was aborted without a digest counts as unknown. If the catalog is an older
    copy, the push may have been committed in what was lost; no other version has its number.
    """
    version, record = heard.held.version, heard.record
    if version in state.conflicts:
        return b""
    if version in state.adopted:
        return state.adopted[version]
    if record is None or _may_be_adopted(record):
        return None
    return record.content_digest.value if record.content_digest else b""


def undecided(state: PoolState, replica: Replica) -> frozenset[HeldVersion]:
    """Return the unrecorded versions of a replica that would be kept.

    The others are retired like any version, or kept after all if a newer one is withdrawn.
    """
    return frozenset(h for h in replica.unrecorded if would_be_kept(state, h.version))


def would_be_kept(state: PoolState, version: PolicyVersion) -> bool:
    """Return whether a version would be kept if it were recorded."""
    policy = state.policies.get(version.policy)
    if policy is None or policy.kind is PolicyKind.BASE:
        return policy is not None
    newer = sum(number > version.version for number in policy.versions)
    return newer < num_retained(policy, state.settings)


def _may_be_adopted(record: VersionRecord) -> bool:
    return record.state is VersionState.ABORTED and record.content_digest is None


def without_mistaken(replica: Replica) -> Replica:
    """Return a replica whose vector and copies omit its mistaken versions."""
    if not replica.mistaken:
        return replica
    vector, gone = replica.vector, {h.version for h in replica.mistaken if not h.spilled}
    for version in gone:
        if version.policy != BASE_POLICY:
            vector = vector.without_adapter(version)
        elif version.version == vector.base:
            vector = vector.with_base(NO_VERSION)
    spilled = {h.version for h in replica.mistaken if h.spilled}
    return replace(
        replica,
        vector=vector,
        retained=tuple(n for n in replica.retained if PolicyVersion(BASE_POLICY, n) not in gone),
        spilled=replica.spilled - spilled,
    )


def switched(replica: Replica, version: PolicyVersion) -> Replica:
    """Return a replica after its switch to a version, by an order that named the digest.

    The version in its memory is then neither unrecorded nor mistaken.
    """

    def others(held: frozenset[HeldVersion]) -> frozenset[HeldVersion]:
        return frozenset(h for h in held if h.spilled or h.version != version)

    return replace(
        replica, unrecorded=others(replica.unrecorded), mistaken=others(replica.mistaken)
    )


def mistaken_adapters(replica: Replica) -> tuple[HeldVersion, ...]:
    """List the mistaken adapters that a replica has in memory and is to drop; sorted.

    A mistaken base goes as another is loaded.
    """
    found = (h for h in replica.mistaken if not h.spilled and h.version.policy != BASE_POLICY)
    return tuple(sorted(found, key=lambda h: h.version))


def _lists(replica: Replica, held: HeldVersion) -> bool:
    """Return whether a replica names a version among what it serves, retains or has spilled."""
    version = held.version
    if held.spilled:
        return version in replica.spilled
    if replica.vector.holds(version):
        return True
    return version.policy == BASE_POLICY and version.version in replica.retained
