"""The commit point and what follows it: every replica switches, or leaves service.

Once the version is COMMITTED in the catalog the pool rolls forward: a replica
that does not switch is no longer ready (or is quarantined, if its engine may
hold mixed weights), and the transfer counts as committed if at least one
replica serves the version.

If none does, the trainer is told LOAD_FAILED with the first reason, and the version fails
as soon as it is certain that nobody serves it (unserved.py): at once where every replica
has refused definitely. Until then it stays COMMITTED: some replica may hold it, and
going back could serve two truths.
"""

from __future__ import annotations

from weft.contract.frozen import replace
from weft.coordinator.decisions import events
from weft.coordinator.decisions.change import Change
from weft.coordinator.decisions.effects import CallCommit, SavePolicy, SaveVersion
from weft.coordinator.decisions.policies import rollback
from weft.coordinator.decisions.policies.leases import live_lease
from weft.coordinator.decisions.recovery import clones, restart
from weft.coordinator.decisions.replicas import holdings
from weft.coordinator.decisions.state.pool import Policy
from weft.coordinator.decisions.state.records import record_of
from weft.coordinator.decisions.state.transfer import Transfer
from weft.coordinator.decisions.state.values import (
    ContentDigest,
    Failure,
    Phase,
    PolicyKind,
    Purpose,
    VersionState,
)
from weft.coordinator.decisions.transfers import abort, unserved
from weft.coordinator.decisions.transfers.discard import discard
from weft.coordinator.decisions.transfers.preflight import other_base
from weft.coordinator.decisions.transfers.refusals import all_definite, is_dirty


def commit(change: Change, transfer: Transfer, digest: ContentDigest) -> None:
    """The commit point: one durable write, and only then are replicas told."""
    if transfer.purpose is Purpose.CLONE:
        clones.commit_clone(change, transfer, digest)
        return
    policy = change.state.policies[transfer.policy]
    lease = live_lease(policy, change.now)
    if lease is None or lease.fencing_token != transfer.fencing_token:
        failure = Failure("LEASE_FENCED", f"the lease of {policy.name!r} is no longer held")
        abort.abort(change, transfer, failure)
        return
    mismatch = other_base(change.state, transfer)
    if mismatch is not None:
        abort.abort(change, transfer, mismatch)
        return
    replaced = policy.served_version
    policy = replace(
        policy,
        served_version=transfer.version,
        versions=_with_version(policy, transfer.version),
        trained_on=_with_trained_on(policy, transfer),
    )
    transfer = replace(
        transfer,
        phase=Phase.COMMITTING,
        commit_at=change.now,
        content_digest=digest,
        replaced_version=replaced,
        switching=frozenset(transfer.targets),
        served_over=change.state.vector.base if transfer.adapter else None,
        incarnations={name: change.state.replicas[name].incarnation for name in transfer.targets},
    )
    change.put_policy(policy)
    change.put_transfer(transfer)
    commit_time = change.state.wall(change.now)
    change.emit(
        SaveVersion(record_of(transfer, VersionState.COMMITTED, commit_time)), SavePolicy(policy)
    )
    change.announce("transfer_staged", transfer.transfer_id, str(transfer.policy_version))
    for replica_id in transfer.targets:
        replica = change.state.replicas[replica_id]
        change.emit(
            CallCommit(
                transfer.transfer_id,
                replica_id,
                replica.incarnation,
                replica.address,
                transfer.policy_version,
                transfer.adapter,
                digest,
                layout_digest=transfer.layout.digest,
            )
        )


def _with_version(policy: Policy, version: int) -> tuple[int, ...]:
    """An adapter keeps its older versions; the base is replaced."""
    return (version,) if policy.kind is PolicyKind.BASE else (*policy.versions, version)


def _with_trained_on(policy: Policy, transfer: Transfer) -> dict[int, int]:
    """What is known of the versions that are kept, and of the one that comes."""
    known = {v: base for v, base in policy.trained_on.items() if v in policy.versions}
    base = transfer.adapter.trained_on_base_version if transfer.adapter else None
    return known if base is None else {**known, transfer.version: base}


def commit_answered(change: Change, event: events.CommitAnswered) -> None:
    """A replica has switched, or not; what it did not load it need not keep."""
    transfers = change.state.transfers
    restore = restart.restore_id(event.transfer_id, event.replica_id)
    transfer = transfers.get(event.transfer_id) or transfers.get(restore)
    replica = change.state.replicas.get(event.replica_id)
    if replica and replica.incarnation == event.incarnation:
        if event.vector is not None:
            loaded_base = transfer is not None and transfer.kind is PolicyKind.BASE
            if transfer is not None:
                replica = holdings.switched(replica, transfer.policy_version)
            replica = replace(
                replica,
                vector=event.vector,
                vector_set_at=change.now,
                commit_failure="",
                retained=event.retained if loaded_base else replica.retained,
                dirty_reason="" if loaded_base else replica.dirty_reason,
            )
            replica = holdings.counted(change.state, replica)
        elif event.failure and is_dirty(event.failure):
            replica = replace(replica, dirty_reason=event.failure.message, vector_set_at=change.now)
        elif event.failure:
            replica = replace(replica, commit_failure=event.failure.message)
        change.put_replica(replica)
    if transfer and transfer.phase is Phase.COMMITTING:
        pause = max(transfer.pause_seconds, event.pause_seconds)
        transfer = change.put_transfer(replace(transfer, pause_seconds=pause))
        note_commit_answer(change, transfer, event.replica_id, event.failure)
    unserved.commit_answered(change, event)


def note_commit_answer(
    change: Change, transfer: Transfer, replica_id: str, failure: Failure | None
) -> None:
    """Count a replica's outcome (``failure`` is None when it serves the version)."""
    if replica_id not in transfer.switching:
        return
    transfer = replace(transfer, switching=transfer.switching - {replica_id})
    if failure is None:
        transfer = replace(transfer, served_by=transfer.served_by | {replica_id})
    else:
        transfer = replace(transfer, refusals={**transfer.refusals, replica_id: failure})
    change.put_transfer(transfer)
    if not transfer.switching:
        _end(change, transfer)


def _end(change: Change, transfer: Transfer) -> None:
    if transfer.purpose is Purpose.ROLLBACK:
        rollback.end(change, transfer)
        return
    if transfer.purpose is not Purpose.PUSH:
        clones.end(change, transfer)
        return
    ended = replace(
        transfer, phase=Phase.COMMITTED, end_at=change.now, begin_tickets=(), await_tickets=()
    )
    if not transfer.served_by:
        is_undone = all_definite(transfer) and unserved.is_replaced_kept(transfer)
        ended = replace(ended, failure=_nobody_serves(transfer, is_undone))
        if is_undone:
            ended = replace(ended, phase=Phase.ABORTED)
            unserved.undo(change, ended)
        elif unserved.is_replaced_kept(transfer):
            unserved.wait_for_reports(change, ended)
    change.end_transfer(ended)
    discard(change, ended.transfer_id, ended.refusals)
    if ended.served_by or not unserved.is_replaced_kept(ended):
        unserved.retire_replaced(change, ended)
    if ended.failure:
        change.refuse(transfer.await_tickets, ended.failure.error())
    else:
        for ticket in transfer.await_tickets:
            change.reply(ticket, ended)
    seconds = change.now - transfer.begin_at
    served = f"{len(transfer.served_by)} of {len(transfer.targets)} replicas"
    change.announce(
        "transfer_committed" if ended.phase is Phase.COMMITTED else "transfer_aborted",
        transfer.transfer_id,
        f"{transfer.policy_version} served by {served}, epoch {transfer.epoch}, "
        f"{transfer.layout.total_bytes} bytes, {seconds:.3f} seconds"
        + (f"; {ended.failure.message}" if ended.failure else ""),
    )


def _nobody_serves(transfer: Transfer, is_undone: bool) -> Failure:
    replica_id, first = min(transfer.refusals.items())
    what = f"{first.message} [{first.reason}]"
    if is_undone:
        stays = f"{transfer.policy}@{transfer.replaced_version} stays"
        outcome = f"it is withdrawn, {stays}" if transfer.replaced_version else "it is withdrawn"
    else:
        outcome = "it is withdrawn once it is certain that none of them serves it"
        if not unserved.is_replaced_kept(transfer):
            outcome = "what it replaced is gone: push again"
    return Failure(
        "LOAD_FAILED",
        f"no replica could switch to {transfer.policy_version}; {replica_id}: {what}; {outcome}",
        {
            "member": replica_id,
            "cause": first.reason,
            "dirty": "true" if any(map(is_dirty, transfer.refusals.values())) else "false",
            "withdrawn": "true" if is_undone else "false",
        },
    )
