"""State of a replica: the versions that it holds and lacks, its reasons, and what it may be sent.

Queries only; nothing is decided here. One file: each answer is made of the others (ready is
routable, up to date and settled), so none of them is read alone.

A version's number alone does not say which bytes a replica has: another catalog may have
assigned it, or a newer copy of this one. So replicas name the digests, too. A version is
*mistaken* if the catalog has other bytes under its number: it does not count, and is dropped.
A version that the catalog does not know at all is *unrecorded* until ``adoption`` decides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from weft_rl.containers import replace
from weft_rl.contract.checkpoint import CheckpointState, differing_files
from weft_rl.contract.names import BASE_POLICY, AdapterVersions, PolicyVersion, VersionVector
from weft_rl.contract.replica_report import HeldVersion
from weft_rl.coordinator.decisions.state.pool import (
    MAX_BASE_CONTENTS,
    PoolState,
    kept_versions,
    num_retained,
    rollback_versions,
)
from weft_rl.coordinator.decisions.state.replica import Replica, can_switch
from weft_rl.coordinator.decisions.state.transfer import Transfer
from weft_rl.coordinator.decisions.state.values import (
    BoundCheckpoint,
    HeldVersionRecord,
    PolicyKind,
    ReplicaState,
    StateReason,
    VersionRecord,
    VersionState,
)

#: The base of a replica that serves bytes which are no version's.
NO_VERSION = -1
# Versions that a replica lacks which are named and explained: a new one may lack thousands.
_MAX_NAMED: Final = 16


def with_counted_versions(
    state: PoolState,
    replica: Replica,
    heard: Iterable[HeldVersionRecord] = (),
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
        elif digest != held.content_digest:
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


def _digest_of(state: PoolState, heard: HeldVersionRecord) -> bytes | None:
    """Return the digest that the catalog has under a number; None if it knows none, or if the push
    was aborted without one: it may have been committed in what a lost catalog knew."""
    version, record = heard.held.version, heard.record
    if version in state.conflicts:
        return b""
    if version in state.adopted:
        return state.adopted[version]
    if record is None or _may_be_adopted(record):
        return None
    return record.content_digest.value if record.content_digest else b""


def undecided_versions(state: PoolState, replica: Replica) -> frozenset[HeldVersion]:
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
    bases = {version.version for version in gone if version.policy == BASE_POLICY}
    return replace(
        replica,
        vector=vector,
        retained=tuple(n for n in replica.retained if n not in bases),
        undoable=tuple(n for n in replica.undoable if n not in bases),
        spilled=replica.spilled - spilled,
    )


def after_switch(replica: Replica, version: PolicyVersion) -> Replica:
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
    return replica.vector.holds(version) or can_switch(replica, version)


# -- its state and the reasons for it --------------------------------------------


def state_reason(state: PoolState, replica: Replica) -> StateReason:
    """Return a replica's state with the first reason for it; looks at no other replica."""
    replica_id = replica.replica_id
    if replica.unheard_reason:
        return StateReason.LEFT_TRANSFER
    if replica.lost:
        return StateReason.SILENT
    if replica.dirty_reason:
        return StateReason.MIXED_WEIGHTS
    if replica.drain is not None:
        return StateReason.LEAVING
    if replica_id in state.out_of_service:
        return StateReason.OPERATOR
    if is_asleep(state, replica):
        return StateReason.SLEEP_ORDERED if replica_id in state.sleeps else StateReason.WAKING
    return StateReason.STALLED if replica.suspect is not None else _lack(state, replica)


def _lack(state: PoolState, replica: Replica) -> StateReason:
    """Return what an awake replica in contact lacks to be ready."""
    if missing_versions(state, replica):
        return StateReason.VERSIONS_MISSING
    if explain_base_mismatch(state, replica):
        return StateReason.OTHER_BASE
    return StateReason.READY if replica.is_open else StateReason.NOT_OPEN


def replica_state(state: PoolState, replica: Replica) -> ReplicaState:
    """Return the state of a replica that was announced last, or would be now; cheap."""
    return (replica.announced or state_reason(state, replica)).state


def is_routable(state: PoolState, replica: Replica) -> bool:
    """Return whether requests may be sent to a replica: it is open and serves the pool's versions.

    A suspect is routable, too, once its engine has taken the order to attend a probe.
    """
    known, suspect = state_reason(state, replica), replica.suspect
    if known is StateReason.STALLED and suspect and suspect.is_told and not replica.work:
        known = _lack(state, replica)
    return known is StateReason.READY


def explain_state(state: PoolState, replica: Replica) -> tuple[ReplicaState, str]:
    """Return a replica's state, and why it is not ready; looks at all replicas if it is not."""
    where = state_reason(state, replica).state
    if where is ReplicaState.LOST:
        return where, replica.unheard_reason or "no heartbeat"
    orders = explain_orders(state, replica)
    if where is ReplicaState.DRAINING:
        return where, orders
    if where is ReplicaState.QUARANTINED:
        needs = [f"it needs {v}{text}" for v in versions_to_bring(state, replica)
                 if (text := explain_outlook(state, replica, v))]  # fmt: skip
    else:
        needs = [_missing(state, replica), explain_base_mismatch(state, replica)]
    if where in (ReplicaState.PENDING_WEIGHTS, ReplicaState.SUSPECT):
        needs.append(_closed(replica))
    suspect = replica.suspect.why if replica.suspect else ""
    return where, _joined(orders, replica.dirty_reason, suspect, *needs)


def explain_orders(state: PoolState, replica: Replica) -> str:
    """Explain the orders that keep a replica out of service; empty if none does.

    Looks at no other replica.
    """
    if replica.drain is not None:
        return replica.drain.reason
    order = state.out_of_service.get(replica.replica_id)
    sleep = state.sleeps.get(replica.replica_id)
    said, found = replica.asleep, list[str]()
    if order is not None:
        found.append(str(order))
        if order.no_pushes and not replica.refusing:
            found.append("it has not said yet that it refuses requests")
    if sleep is not None:
        whose = f"for trainer {sleep.trainer_id}" if sleep.trainer_id else "by an operator"
        if said is not None and said.weights_awake:
            whose += ", its weights awake"
        elif said is None or not sleep.confirmed:
            whose += ", once its requests have ended"
        found.append(whose)
    elif is_unsettled(replica):
        found.append("it is being woken")
    return _joined(*found)


def _closed(replica: Replica) -> str:
    """Explain why a replica does not answer requests; empty if it is open."""
    if replica.is_open:
        return ""
    said = f", it said last: {replica.refusing}" if replica.refusing else ""
    return f"it has not said yet that it takes requests{said}"


def _joined(*parts: str) -> str:
    return "; ".join(filter(None, parts))


def _missing(state: PoolState, replica: Replica) -> str:
    """Explain what a replica lacks and what is done about it; empty if it lacks nothing."""
    lacking = missing_versions(state, replica)
    if not lacking:
        return ""
    groups: dict[str, list[str]] = {}
    for name in lacking[:_MAX_NAMED]:
        text = explain_outlook(state, replica, PolicyVersion.parse(name))
        groups.setdefault(text, []).append(name)
    reason = "; ".join(f"lacks {', '.join(names)}{text}" for text, names in groups.items())
    if more := len(lacking) - sum(map(len, groups.values())):
        reason += f"; and {more} more"
    if replica.commit_failure:
        reason += f" ({replica.commit_failure})"
    return reason


# -- who may be sent requests -----------------------------------------------


def routes(state: PoolState) -> list[Replica]:
    """List the replicas to route to, by id; O(replicas)."""
    return sorted(
        (replica for replica in state.replicas.values() if is_listed(replica)),
        key=lambda replica: replica.replica_id,
    )


def is_listed(replica: Replica) -> bool:
    """Return whether a replica is listed in the routes: requests may be sent to it."""
    return route_of(replica) is not None


def route_of(replica: Replica | None) -> tuple[str, str, str, VersionVector] | None:
    """Return what readers of the routes see of a replica; None if it is not listed."""
    if replica is None or not replica.routed or not replica.http_url:
        return None
    return replica.http_url, replica.address, replica.model_name, replica.vector


# -- who is brought weights --------------------------------------------------


def eligible_targets(state: PoolState) -> list[Replica]:
    """List the eligible targets of any push, by id."""
    return [r for r in base_targets(state) if not r.dirty_reason]


def base_targets(state: PoolState) -> list[Replica]:
    """List the eligible targets of a base, by id: also quarantined ones that it would repair."""
    return sorted(
        (
            r
            for r in state.replicas.values()
            if not r.lost and not r.unheard_reason and takes_weights(state, r)
        ),
        key=lambda r: r.replica_id,
    )


def shared_backends(replicas: Sequence[Replica]) -> list[str]:
    """List the side-group backends that all replicas offer, in the first one's order."""
    if not replicas:
        return []
    rest = [r.capabilities.backends for r in replicas[1:]]
    return [b for b in replicas[0].capabilities.backends if all(b in theirs for theirs in rest)]


def takes_weights(state: PoolState, replica: Replica) -> bool:
    """Return whether anything new is brought to a replica.

    It is not while the replica drains or is suspect, nor while an operator keeps it out.
    """
    is_free = replica.drain is None and replica.suspect is None
    return is_free and not state.is_kept_out(replica.replica_id)


def takes_clones(state: PoolState, replica: Replica) -> bool:
    """Return whether clones are brought to a replica.

    They are not while it takes no weights, is out of service or sleeps. Pushes go to such a
    replica all the same, and one that is out of service may switch to copies of its own.
    """
    is_free = takes_weights(state, replica) and not is_asleep(state, replica)
    return is_free and replica.replica_id not in state.out_of_service


def is_asleep(state: PoolState, replica: Replica) -> bool:
    """Return whether a replica sleeps, or is to.

    Nothing is routed to it, and only a push brings it what it lacks before it is awake.
    """
    return replica.replica_id in state.sleeps or is_unsettled(replica)


def is_unsettled(replica: Replica) -> bool:
    """Return whether a replica sleeps, or has not answered an order to sleep or wake.

    A heartbeat that was on its way meanwhile is not relied on.
    """
    return replica.asleep is not None or replica.sleep_call_until > float("-inf")


def is_ready(state: PoolState, replica: Replica) -> bool:
    """Return whether a replica in contact serves everything that the pool serves."""
    return replica.in_contact and _lack(state, replica) in (StateReason.READY, StateReason.NOT_OPEN)


def is_joining(state: PoolState, replica: Replica) -> bool:
    """Return whether a replica in contact has still to catch up.

    It takes part in a push if it is free, and no push waits for it.

    If the state announced last is READY, nothing is compared: to compare what a thousand
    replicas serve would take longer than to begin a push.
    """
    if replica.announced is StateReason.READY:
        return False
    return bool(replica.dirty_reason or missing_versions(state, replica))


def obeys_pins(state: PoolState, replica: Replica) -> bool:
    """Return whether a replica that is brought a base drops no pinned copy."""
    return replica.report.pinned_base_versions.issuperset(state.pinned_bases)


# -- what a replica lacks ----------------------------------------------------


def _serves_before(replica: Replica, transfer: Transfer) -> bool:
    """Return whether a replica serves the version that a transfer replaces, if it replaces one."""
    before = PolicyVersion(transfer.policy, transfer.served_before)
    is_first = transfer.kind is not PolicyKind.BASE and not before.version
    return is_first or replica.vector.holds(before)


def missing_versions(state: PoolState, replica: Replica) -> list[str]:
    """List the versions that a replica must still serve to be ready, as ``policy@version``.

    Between the commit point and its own switch a replica that serves the version before it does
    not lack the committed one. A late joiner does: it would answer a request with something
    older, or refuse it. An order to switch that was given before the pool was rolled back may
    still take it elsewhere. A clone that it loads in place mixes its weights, whatever it said
    that it serves. Adapters that it has under a number of other bytes it must drop first. Nor may
    a bare name stand for a former version of what is lost.
    """
    lacking = state.vector.missing_from(replica.vector)
    for name, number in state.lost.items():
        policy, entry = state.policies.get(name), replica.vector.adapters.get(name)
        stands_for = entry.alias if entry else 0
        if policy is not None and state.is_lost(policy) and stands_for not in (0, number):
            lacking.append(str(PolicyVersion(name, number)))
    lacking += [str(v) for h in mistaken_adapters(replica) if str(v := h.version) not in lacking]
    for transfer in state.transfers.values():
        if transfer.replica_id and replica.replica_id in transfer.loading:
            lacking = sorted({*lacking, str(transfer.policy_version)})
        elif replica.replica_id in transfer.switching:
            if not transfer.replica_id:  # what it brings is served as soon as it ends
                if _serves_before(replica, transfer):
                    lacking = [name for name in lacking if name != str(transfer.policy_version)]
            else:
                known = state.policies.get(transfer.policy)  # it may be forgotten meanwhile
                served = known.served_version if known else 0
                name = str(PolicyVersion(transfer.policy, served))
                if known and served != transfer.served_before and name not in lacking:
                    lacking = [*lacking, name]
    return lacking


@dataclass(frozen=True)
class VersionDifference:
    """Policy of which a replica serves another version than a ready replica."""

    policy: str
    version: int
    """Version that the replica serves; 0 for no version of an adapter."""
    pool_version: int
    num_behind: int = 0
    """Number of committed versions that it is behind; 0 where it serves none, or a later one."""
    num_behind_is_minimum: bool = False
    """True if it may be behind by more: retired versions are not counted."""

    def __str__(self) -> str:
        least = "at least " * self.num_behind_is_minimum
        return f"{self.policy}@{self.version}, {least}{self.num_behind} behind"


def version_differences(state: PoolState, replica: Replica) -> list[VersionDifference]:
    """List the policies that a replica serves otherwise than the pool; the base first.

    A replica that is still to switch to a version that was just committed is ready, and behind.
    Mixed weights are no version's.
    """
    pool, have = state.vector, replica.vector
    found = []
    base = NO_VERSION if replica.dirty_reason else have.base
    if base != pool.base:
        found.append(_difference(state, BASE_POLICY, base, pool.base))
    if have.aliases == pool.aliases:  # most often so, and quick to see of thousands
        return found
    return found + [
        _difference(state, policy, have.aliases.get(policy, 0), alias)
        for policy, alias in sorted(pool.aliases.items())
        if have.aliases.get(policy) != alias
    ]


def _difference(
    state: PoolState, policy: str, version: int, pool_version: int
) -> VersionDifference:
    is_base = policy == BASE_POLICY
    if version < 0 or version >= pool_version or (version == 0 and not is_base):
        return VersionDifference(policy, version, pool_version)
    if is_base:
        known: Collection[int] = state.base_contents
        oldest = min(known) if len(known) >= MAX_BASE_CONTENTS else 0
    else:
        its = state.policies[policy]
        known = its.versions
        # Pinned ones may be far below the others.
        oldest = min(known[-num_retained(its, state.settings) :], default=pool_version)
    between = range(version + 1, pool_version + 1)
    fewer, others = (between, known) if len(between) < len(known) else (known, between)
    behind = sum(number in others for number in fewer)
    is_minimum = version < oldest and behind < len(between)
    return VersionDifference(policy, version, pool_version, max(1, behind), is_minimum)


def versions_to_bring(state: PoolState, replica: Replica) -> list[PolicyVersion]:
    """List the versions to bring to a replica, in order, so that it is ready when it has them all.

    The base comes first, then each adapter's versions from the oldest on. A replica whose
    weights may be mixed gets a base before anything else; one that cannot load any base gets
    none.
    """
    pool = state.vector
    base = PolicyVersion(BASE_POLICY, pool.base)
    if not takes_weights(state, replica) or is_asleep(state, replica):
        return []
    takes_base = bool(pool.base) and not replica.capabilities.base_refusal
    if replica.dirty_reason:
        return [base] if takes_base else []
    takes_base &= BASE_POLICY not in state.uncertain_aliases
    found = [base] if takes_base and replica.vector.base != pool.base else []
    return found + lacked_adapters(state, replica)


def lacked_adapters(state: PoolState, replica: Replica) -> list[PolicyVersion]:
    """List the kept adapter versions that a replica lacks, whether it takes them now or not.

    Each policy's come from the oldest on.
    """
    pool, found = state.vector, list[PolicyVersion]()
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


def explain_outlook(state: PoolState, replica: Replica, version: PolicyVersion) -> str:
    """Explain what is done about a version that a replica lacks, for messages.

    Empty when it will be brought in a moment.
    """
    for transfer in state.transfers.values():
        if transfer.replica_id == replica.replica_id and transfer.policy_version == version:
            return f", which comes from {transfer.purpose.origin(replica, version)}"
        if replica.replica_id in transfer.switching and transfer.policy_version == version:
            return ", which it switches to now"
    if version.policy == BASE_POLICY and replica.capabilities.base_refusal:
        return f", which it cannot load while it runs: {replica.capabilities.base_refusal}"
    if is_asleep(state, replica):
        return ", which it is brought when it is awake"
    if version in state.copies and not takes_clones(state, replica):
        return ", which it is sent when it is put back into service"
    backoff = replica.backoffs.get(version)
    if backoff:
        return f", which could not be brought yet, it is tried again: {backoff.why}"
    if version in (held.version for held in mistaken_adapters(replica)):
        return ", for it has other bytes under that number, and drops them"
    if version.policy in state.unrecorded_since or version.policy in state.uncertain_aliases:
        return f", until it is clear which versions of {version.policy} replicas hold"
    if version not in state.copies and not can_switch(replica, version):
        return f", which no replica in contact holds: {who_publishes(state, version.policy)}"
    return ""


def who_publishes(state: PoolState, policy: str) -> str:
    """Explain who brings back a version that nobody holds any more, for messages."""
    known = state.policies.get(policy)
    if known is not None and known.lease is not None:
        return f"its owner {known.lease.trainer_id} is asked to publish it again"
    return f"nobody owns it now, push it again, or {_remedy(state, policy)}"


def _remedy(state: PoolState, policy: str) -> str:
    """Return the order by which a pool goes on without a version that nobody holds any more."""
    known = state.policies.get(policy)
    if policy == BASE_POLICY:
        return "go back to what replicas were started with: weft rollback base --to 0"
    if known is not None and (back := rollback_versions(state, known)):
        return f"go back: weft rollback {policy} --to {back[-1]}"
    return f"end it: weft forget {policy}"


# -- whether its base@0 is the pool's ----------------------------------------

_MAX_NAMED_FILES = 3
_CHECKPOINT_REMEDY = (
    "start it from the same files, or push a base. If the pool's is the wrong one, stop all "
    "replicas and bind it anew: weft base --rebind"
)


def explain_base_mismatch(state: PoolState, replica: Replica) -> str:
    """Explain why a replica may not answer as base@0, for messages; empty if it may.

    Also empty if the pool or the replica serves another base than base@0. Cheap if it is
    compared already.
    """
    if state.vector.base or replica.vector.base:
        return ""
    return explain_checkpoint_mismatch(state, replica)


def explain_checkpoint_mismatch(state: PoolState, replica: Replica) -> str:
    """Explain why a replica's base@0 is not known to be the pool's; empty if it is.

    Also empty if there is nothing to compare.
    """
    own, bound = replica.checkpoint, state.checkpoint
    match own.state:
        case CheckpointState.READING:
            return "its checkpoint is being read, to compare its base@0 with the pool's"
        case CheckpointState.DUMMY:
            return (
                "it was started with dummy weights, which are nobody's base@0: push a base, or "
                "start it without --load-format dummy"
            )
        case CheckpointState.NOT_COMPARED:
            return ""
    if bound is None:
        return ""
    if own.digest != bound.digest:
        return f"its base@0 is not the pool's: {_files(replica, bound)}; {_CHECKPOINT_REMEDY}"
    served = replica.capabilities
    if served.base_dtype is not bound.base_dtype:
        return (
            f"it serves base@0 in {served.base_dtype.torch_name}, {bound.replica_id} bound it in "
            f"{bound.base_dtype.torch_name}: start it with the same --dtype, or push a base"
        )
    if served.quantization != bound.quantization:
        return (
            f"it serves base@0 quantised by {served.quantization or 'nothing'}, "
            f"{bound.replica_id} bound it quantised by {bound.quantization or 'nothing'}: start it "
            "with the same --quantization, or push a base"
        )
    return ""


def _files(replica: Replica, bound: BoundCheckpoint) -> str:
    names = differing_files(replica.checkpoint, bound.files)
    shown = ", ".join(names[:_MAX_NAMED_FILES]) or "files beyond those that are told"
    more = len(names) - _MAX_NAMED_FILES
    if more > 0:
        shown += f" and {more} more"
    return f"{shown} differ from those of {bound.replica_id}, which bound it"
