"""Catching up: bring replicas what they lack, without a trainer.

A replica that lacks a version which another holds gets a *clone*: the same version,
no new number, no lease, over a side group of the two. One that holds it itself (a
retained base, an adapter whose alias stands elsewhere, a version in its spill
directory) gets a *restore*: it is told to switch. Both are transfers that wait for
their turn with the pushes, so a replica does one thing at a time; generation goes on at
the source.

Schedule → look up (the catalog's record, the manifest) → turn → group → staged → the
replica switches. A failure changes nothing but the time of the next attempt.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from weft.contract.frozen import replace
from weft.contract.names import BASE_POLICY, PolicyVersion, replica_sender
from weft.coordinator.decisions import events
from weft.coordinator.decisions.change import Change
from weft.coordinator.decisions.effects import (
    CallCommit,
    CallJoin,
    CallSend,
    LookUp,
    OpenGroup,
    SaveEpoch,
)
from weft.coordinator.decisions.recovery import backoff
from weft.coordinator.decisions.recovery.needs import is_ready, obeys_pins, takes_clones, wants
from weft.coordinator.decisions.recovery.restores import alias_of, start_restore
from weft.coordinator.decisions.state.pool import PoolState
from weft.coordinator.decisions.state.replica import Replica, held_versions, holds
from weft.coordinator.decisions.state.transfer import Group, Member, Transfer
from weft.coordinator.decisions.state.values import (
    ContentDigest,
    Failure,
    Phase,
    PolicyKind,
    Purpose,
)
from weft.coordinator.decisions.transfers import abort, reform
from weft.coordinator.decisions.transfers.discard import discard
from weft.coordinator.decisions.transfers.turns import Turns

#: Between two schedules when one clone ends after another.
SCHEDULE_SECONDS = 0.02


def schedule(change: Change) -> None:
    """Look up what replicas lack and somebody holds who is free: one version a replica
    at a time, one replica a source.

    With each tick and after each transfer, before those that wait are admitted: so a
    source is seen free between two pushes, and the clone waits behind the second.
    O(replicas x versions), and nothing where nobody lacks anything.
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
        if replica.lost or ids in occupied or ids in served or ids in state.lookups:
            continue
        wanted = wants(state, replica)
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
    """By version, who could send it now."""
    found: dict[PolicyVersion, list[Replica]] = {}
    for replica in state.replicas.values():
        if replica.lost or replica.replica_id in taken or state.is_quarantined(replica.replica_id):
            continue
        if replica.suspect is not None:
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
    """The replica itself if it holds the version in memory; else the best source that
    is free: not the one that failed last if there is another, a ready one before
    others, and one that drains only where nobody else is free (it stays as long as it
    sends); else the replica itself if it has spilled the version: its disk is not
    waited with until a busy source is free.

    Every copy was verified when it came, and its digest is compared again: a source
    need not be ready.
    """
    if holds(replica, version):
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
    """What a clone needs is known: let it wait for its turn."""
    change.looked_up(event.replica_id)
    replica = change.state.replicas.get(event.replica_id)
    source = change.state.replicas.get(event.source_id)
    if replica is None or replica.incarnation != event.incarnation or source is None:
        return
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
        backoff.note(change, event.replica_id, event.version, event.source_id, failure)
        return
    assert record is not None
    assert layout is not None
    own = event.source_id == event.replica_id
    change.put_transfer(
        Transfer(
            ids=event.ids,
            request_id="",
            policy=event.version.policy,
            kind=PolicyKind.BASE if event.version.policy == BASE_POLICY else PolicyKind.ADAPTER,
            trainer_id=replica_sender(event.source_id),
            session_id="",
            fencing_token=-1,
            layout=layout,
            adapter=record.adapter,
            min_replicas=1,
            backend=_backend(source, replica) or "",
            wanted_group_id="",
            begin_at=change.now,
            deadline=float("inf"),
            answer_by=float("inf"),
            version=event.version.version,
            content_digest=record.content_digest,
            purpose=Purpose.RESTORE if own else Purpose.CLONE,
            source="" if own else event.source_id,
            replica_id=event.replica_id,
        )
    )


def _backend(source: Replica, replica: Replica) -> str | None:
    theirs = replica.capabilities.backends
    return next((b for b in source.capabilities.backends if b in theirs), None)


def admit(change: Change, transfer: Transfer, turns: Turns) -> set[str]:
    """Start a clone or a restore if it is its turn; drop it if it is not wanted any more.

    Returns:
        The replicas that those behind it must wait for.
    """
    state = change.state
    replica = state.replicas.get(transfer.replica_id)
    source = state.replicas.get(transfer.source or transfer.replica_id)
    version = transfer.policy_version
    if (
        replica is None
        or source is None
        or replica.lost
        or source.lost
        or source.suspect is not None
        or state.is_quarantined(source.replica_id)
        or version not in wants(state, replica)
        or (transfer.purpose is Purpose.CLONE and not takes_clones(state, replica))
        or not (
            transfer.staged_by
            or holds(source, version)
            or (source is replica and version in replica.spilled)
        )
    ):
        change.drop_transfer(transfer.transfer_id)
        if transfer.num_interruptions:  # what was verified is of no use any more
            discard(change, transfer.transfer_id, [transfer.replica_id])
        return set()
    if transfer.kind is PolicyKind.BASE and not obeys_pins(state, replica):
        return set()
    needed = {replica.replica_id, source.replica_id}
    if turns.taken & needed:
        return needed if turns.is_next(transfer, needed) else set()
    if transfer.purpose is Purpose.CLONE:
        _start_clone(change, transfer, source, replica)
    else:
        start_restore(change, transfer, replica)
    return needed


def _start_clone(change: Change, transfer: Transfer, source: Replica, replica: Replica) -> None:
    epoch = change.state.epoch + 1
    change.state = replace(change.state, epoch=epoch)
    change.emit(SaveEpoch(epoch))
    receivers = replica.capabilities.num_receivers
    member = Member(replica.replica_id, replica.incarnation, 1, receivers)
    nth = transfer.num_interruptions
    group = Group(
        f"{transfer.ids.group_id}.{nth}" if nth else transfer.ids.group_id,
        reform.derived_secret(transfer, nth) if nth else transfer.ids.group_secret,
        epoch,
        transfer.trainer_id,
        "",
        transfer.backend,
        (member,),
    )
    seconds = change.state.settings.clone_seconds
    transfer = replace(
        transfer,
        phase=Phase.FORMING,
        create_time=change.state.wall(change.now),
        group_id=group.group_id,
        epoch=epoch,
        targets=(replica.replica_id,),
        deadline=change.now + seconds,
    )
    change.put_group(group)
    change.put_transfer(transfer)
    change.announce(
        "clone_begun",
        transfer.transfer_id,
        f"{transfer.policy_version} from {source.replica_id} to {replica.replica_id}, "
        f"epoch {epoch}, {transfer.layout.total_bytes} bytes",
    )
    change.emit(OpenGroup(group))
    change.emit(
        CallSend(
            transfer.transfer_id,
            source.replica_id,
            source.address,
            group,
            transfer.policy_version,
            transfer.ids.nonce,
            seconds,
        )
    )
    change.emit(
        CallJoin(
            transfer.transfer_id, replica.replica_id, replica.address, group, member.first_rank
        )
    )


def commit_clone(change: Change, transfer: Transfer, digest: ContentDigest) -> None:
    """Both have the same digest over everything; it must be the catalog's, too."""
    expected = transfer.content_digest
    assert expected is not None
    if digest != expected:
        why = (
            f"{transfer.source} has {digest.value.hex()} for {transfer.policy_version}, the "
            f"catalog {expected.value.hex()}: its copy is not what was committed"
        )
        failure = Failure("DIGEST_MISMATCH", why, {"member": transfer.source})
        abort.abort(change, transfer, failure)
        return
    # Its source has done its part, however long the target takes to switch.
    abort.close_group(change, transfer.group_id, "its clone is staged")
    replica = change.state.replicas[transfer.replica_id]
    change.put_transfer(
        replace(
            transfer,
            phase=Phase.COMMITTING,
            commit_at=change.now,
            ordered_under=change.state.policies[transfer.policy].served_version,
            switching=frozenset({replica.replica_id}),
        )
    )
    change.emit(
        CallCommit(
            transfer.transfer_id,
            replica.replica_id,
            replica.incarnation,
            replica.address,
            transfer.policy_version,
            transfer.adapter,
            expected,
            alias_of(change.state, transfer),
            transfer.layout.digest,
        )
    )


def end(change: Change, transfer: Transfer) -> None:
    """The replica has answered: it serves the version, or it will be tried again."""
    failure = next(iter(transfer.refusals.values()), None)
    ended = replace(
        transfer,
        phase=Phase.ABORTED if failure else Phase.COMMITTED,
        failure=failure,
        end_at=change.now,
    )
    change.end_transfer(ended)
    version, replica_id = transfer.policy_version, transfer.replica_id
    what = "clone" if transfer.purpose is Purpose.CLONE else "restore"
    if failure:
        backoff.note(change, replica_id, version, transfer.source, failure)
        text = f"{version} at {replica_id}: {failure.message} [{failure.reason}]"
        change.announce(f"{what}_failed", transfer.transfer_id, text)
        return
    seconds = change.now - transfer.begin_at
    text = f"{version} served by {replica_id}, {transfer.layout.total_bytes} bytes"
    change.announce(f"{what}_ended", transfer.transfer_id, f"{text}, {seconds:.3f} seconds")
