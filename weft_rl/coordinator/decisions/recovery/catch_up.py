"""Catching up: which versions replicas lack, and who can bring them.

A replica that lacks a version gets a clone from another that holds it. It gets a restore if it
holds the version itself: a retained base, an adapter whose alias stands elsewhere, a version in
its spill directory. Both are transfers that wait for their turn with the pushes, so a replica
does one thing at a time.

Schedule -> look up (the catalog's record, the manifest) -> turn.

After a restart of the coordinator a replica may hold staged bytes that belong to no transfer
under way. The catalog decides. If their version was committed before the coordinator died and is
still wanted, the replica switches to it (roll forward). Other bytes are discarded: the restart
has aborted their transfer, or the version is brought in other ways.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from weft_rl.containers import replace
from weft_rl.contract.backends import BACKENDS, best_first
from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.purposes.clone import Clone
from weft_rl.coordinator.decisions.purposes.repair import Repair, Restore, back_off, waiting_repair
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.change import Change
from weft_rl.coordinator.decisions.state.effects import CallDiscard, LookUp
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.decisions.state.replica import Replica, can_switch, held_versions
from weft_rl.coordinator.decisions.state.replica_state import (
    is_asleep,
    is_ready,
    takes_clones,
    versions_to_bring,
)
from weft_rl.coordinator.decisions.state.transfer import Transfer, TransferIds, switch_id
from weft_rl.coordinator.decisions.state.values import (
    Failure,
    VersionLayout,
    VersionRecord,
    VersionState,
)

#: Between two schedules when one clone ends after another.
SCHEDULE_SECONDS = 0.02


def schedule(change: Change) -> None:
    """Look up versions that replicas lack and that a free replica holds.

    One version a replica at a time, and one replica a source.

    Called with each tick and after each transfer, before those that wait are admitted. So a
    source is seen free between two pushes, and the clone waits behind the second. O(replicas x
    versions); cheap where nobody lacks anything.
    """
    change.state = replace(change.state, schedule_at=change.now + SCHEDULE_SECONDS)
    state = change.state
    occupied = {replica_id for t in state.transfers.values() for replica_id in t.occupied}
    served = {t.replica_id for t in state.transfers.values() if t.replica_id}
    sources = {t.source for t in state.transfers.values() if t.uncommitted}
    taken = occupied | served | sources | state.lookups
    free: dict[PolicyVersion, list[Replica]] | None = None
    for replica in list(state.replicas.values()):
        ids = replica.replica_id
        if replica.is_away or ids in occupied or ids in served or ids in state.lookups:
            continue
        wanted = versions_to_bring(state, replica)
        if replica.backoffs.keys() - set(wanted):
            left = {v: b for v, b in replica.backoffs.items() if v in wanted}
            replica = replace(replica, backoffs=left)
            change.put_replica(replica)
        for version in wanted:
            if version in replica.backoffs and change.now < replica.backoffs[version].retry_at:
                continue
            if free is None:
                free = _free_holders(state, taken)
            holders = free.get(version, ()) if takes_clones(state, replica) else ()
            source = _choose(state, replica, version, holders, taken)
            if source is not None:
                taken |= {ids, source.replica_id}
                change.look_up(ids)
                change.emit(
                    LookUp(ids, replica.incarnation, source.replica_id, source.address, version)
                )
                break


def _free_holders(state: PoolState, taken: Set[str]) -> dict[PolicyVersion, list[Replica]]:
    """Return the replicas that could send a version now, by version."""
    found: dict[PolicyVersion, list[Replica]] = {}
    for replica in state.replicas.values():
        if replica.is_away or replica.replica_id in taken or state.is_kept_out(replica.replica_id):
            continue
        if replica.suspect is not None or is_asleep(state, replica):
            continue
        for version in held_versions(replica):
            found.setdefault(version, []).append(replica)
    return found


def _choose(
    state: PoolState,
    replica: Replica,
    version: PolicyVersion,
    holders: Iterable[Replica],
    taken: Set[str],
) -> Replica | None:
    """Choose who brings a version to a replica: itself, if it holds the version in memory, or the
    best free source; None if nobody can.

    Rather than wait for a busy source, or for the one that failed last, it reads its own spilled
    copy. Of the sources ready ones go first, and those that drain last. A source need not be
    ready: its copy was verified when it came, and its digest is compared again.
    """
    if can_switch(replica, version):
        return replica
    backed_off = replica.backoffs.get(version)
    failed = backed_off.source if backed_off else ""
    best = min(
        (r for r in holders if r.replica_id not in taken),
        key=lambda r: (
            r.replica_id == failed,
            r.drain is not None,
            not is_ready(state, r),
            r.replica_id,
        ),
        default=None,
    )
    if version in replica.spilled and (best is None or best.replica_id == failed):
        return replica
    return best


def looked_up(change: Change, event: events.LookedUp) -> None:
    """Let a clone or a restore wait for its turn, now that what it needs is known."""
    change.looked_up(event.replica_id)
    replica = change.state.replicas.get(event.replica_id)
    source = change.state.replicas.get(event.source_id)
    if replica is None or replica.incarnation != event.incarnation or source is None:
        return
    if replica.is_away or source.is_away:
        return  # who is heard again is scheduled anew
    record, layout = event.record, event.layout
    failure = event.failure
    if failure is None and (record is None or record.content_digest is None or layout is None):
        failure = Failure(
            "VERSION_UNKNOWN", f"the catalog has no content digest of {event.version}"
        )
    if failure is None and _backend(source, replica) is None:
        why = f"{source.replica_id} and {replica.replica_id} have no side-group backend in common"
        failure = Failure("BACKEND_MISMATCH", why)
    if failure is not None:
        back_off(change, event.replica_id, event.version, event.source_id, failure)
        return
    assert record is not None
    assert layout is not None
    purpose: Repair = Restore(replica_id=event.replica_id)
    if event.source_id != event.replica_id:
        purpose = Clone(replica_id=event.replica_id, source=event.source_id)
    backend = _backend(source, replica) or ""
    change.put_transfer(waiting_repair(purpose, event.ids, record, layout, change.now, backend))


def _backend(source: Replica, replica: Replica) -> str | None:
    """Return the best backend that both have; one that works within a host comes last, since nobody
    has tried whether these two share one."""
    theirs, ours = replica.capabilities, source.capabilities
    names = best_first(ours.backends, {ours.nccl_network, theirs.nccl_network})
    names.sort(key=lambda name: BACKENDS[name].within_host)
    if not set(theirs.gpu_uuids).isdisjoint(ours.gpu_uuids):
        names = [name for name in names if not BACKENDS[name].one_per_gpu]
    return next((name for name in names if name in theirs.backends), None)


# -- staged bytes of a former coordinator ----------------------------------------


def restore_or_discard(
    change: Change, replica: Replica, staged: Mapping[str, VersionRecord | None]
) -> None:
    """Let a replica switch to what it has staged, as its turn comes, or discard it.

    Repeated with every heartbeat until it is gone; both orders are idempotent.
    """
    for transfer_id, record in sorted(staged.items()):
        name = switch_id(transfer_id, replica.replica_id)
        if transfer_id in change.state.transfers or name in change.state.transfers:
            continue
        # A version whose transfer ended under this coordinator was offered to the replica, which
        # refused or missed it; nor is one offered again that it refuses now.
        history = change.state.history
        is_ours = transfer_id in history or name in history or bool(replica.commit_failure)
        if record is not None and not is_ours and _is_wanted(change.state, replica, record):
            change.put_transfer(_restore(change.now, name, replica, record))
        else:
            change.emit(CallDiscard(transfer_id, replica.replica_id, replica.address))


def _restore(now: float, name: str, replica: Replica, record: VersionRecord) -> Transfer:
    digest = record.content_digest
    assert digest is not None
    size = digest.size_bytes
    return waiting_repair(
        Restore(replica_id=replica.replica_id, staged_by=record.transfer_id),
        TransferIds(name, 0, "", "", ""),
        record,
        VersionLayout(None, record.layout_digest, size, size, 0),
        now,
    )


def _is_wanted(state: PoolState, replica: Replica, record: VersionRecord) -> bool:
    if record.state is not VersionState.COMMITTED:
        return False
    return record.version in versions_to_bring(state, replica) and not replica.vector.holds(
        record.version
    )
