"""Life cycle that all transfers share: join, attend, prepare, start, staged; then the switch.

From the commit point on, every replica switches, or leaves service. A committed version rolls
forward: a replica that does not switch is no longer ready, or is quarantined if its engine may
hold mixed weights. Once all have answered, the transfer's purpose decides how it has ended.

When a peer dies, the others often see its broken connection before we see its broken stream. So
a rank that reports PEER_GONE accuses nobody by name, and is not itself to blame. Judgement waits
``JUDGE_AFTER_SECONDS`` for the stream that broke.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft_rl.containers import replace
from weft_rl.contract.manifest import WSUM64
from weft_rl.coordinator.decisions.replicas import base_binding
from weft_rl.coordinator.decisions.state import events, replica_state
from weft_rl.coordinator.decisions.state.change import Change
from weft_rl.coordinator.decisions.state.effects import CallCommit, SendPrepare, SendStart
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.decisions.state.replica import Replica
from weft_rl.coordinator.decisions.state.transfer import (
    MAX_PAUSES,
    Group,
    PauseReport,
    Transfer,
    switch_id,
)
from weft_rl.coordinator.decisions.state.values import ContentDigest, Failure, Phase, PolicyKind
from weft_rl.coordinator.decisions.transfers import abort, regrouping, stalls, suspects, withdrawals
from weft_rl.coordinator.decisions.transfers.purpose import AdmissionQueue, purpose_of
from weft_rl.coordinator.decisions.transfers.withdrawals import is_dirty

JUDGE_AFTER_SECONDS = 0.5
# A replica does not let this coordinator in: a push that is begun again would find the same.
_REFUSED = frozenset({"UNAUTHENTICATED", "ROLE_MISSING"})
# Failures of a receiver with a delta that a push of the whole version need not have: its own copy
# of the base is gone, is not what it was, or leaves no room; or the runs of the delta are wrong,
# which each receiver would fail with in its turn.
_HEALED_BY_WHOLE = frozenset(
    {"DELTA_REFUSED", "DIGEST_MISMATCH", "INVALID_MANIFEST", "STAGING_FULL", "NOT_RETAINED"}
)


def join_answered(change: Change, event: events.JoinAnswered) -> None:
    """Continue without a replica that could not be told to join, or give up."""
    transfer = change.state.transfers.get(event.transfer_id)
    if event.failure and transfer and transfer.phase is Phase.FORMING:
        if event.failure.reason == "DEADLINE":
            stalls.order_not_taken(change, transfer, event.replica_id, event.failure.message)
            return
        failure = event.failure
        if failure.reason not in _REFUSED:  # which passes
            why = f"it could not be told to join: {failure.message}"
            failure = abort.peer_gone(event.replica_id, why)
        regrouping.lose_replica(change, transfer, event.replica_id, failure)


def rank_attends(change: Change, event: events.RankAttends) -> None:
    """Note that a rank opened its stream; prepare the transfer once all ranks have."""
    group = change.state.groups.get(event.group_id)
    if group is None:
        return
    change.put_group(replace(group, attending=group.attending | {event.rank}))
    transfer = transfer_of(change.state, event.group_id)
    if transfer:
        prepare_if_complete(change, transfer)


def transfer_of(state: PoolState, group_id: str) -> Transfer | None:
    """Return the transfer that uses a group now; None if there is none."""
    return next((t for t in state.transfers.values() if t.group_id == group_id), None)


def _named(state: PoolState, group_id: str, transfer_id: str) -> tuple[Transfer, Group] | None:
    """Return an uncommitted transfer that a rank of its group spoke of, and the group."""
    transfer = state.transfers.get(transfer_id)
    group = state.groups.get(group_id)
    if transfer is None or group is None or transfer.group_id != group_id:
        return None
    return (transfer, group) if transfer.uncommitted else None


def prepare_if_complete(change: Change, transfer: Transfer) -> None:
    """Tell receivers what comes, once all ranks attend."""
    group = change.state.groups[transfer.group_id]
    attempt = transfer.attempt
    if transfer.phase is Phase.FORMING and not attempt.prepare_sent and group.complete:
        attempt = replace(attempt, prepare_sent=True)
        transfer = change.put_transfer(replace(transfer, attempt=attempt))
        change.emit(SendPrepare(group.group_id, transfer, transfer.deadline - change.now))


def rank_prepared(change: Change, event: events.RankPrepared) -> None:
    """Note that a receiver is ready; once all are, let the bytes flow."""
    found = _named(change.state, event.group_id, event.transfer_id)
    if found is None or not found[0].attempt.prepare_sent or event.rank in found[1].senders:
        return
    transfer, group = found
    prepared = {**transfer.attempt.prepared, event.rank: event.num_verified}
    transfer = replace(transfer, attempt=replace(transfer.attempt, prepared=prepared))
    if transfer.phase is Phase.FORMING and len(prepared) == group.num_receivers:
        start_at = transfer.start_at or change.now
        transfer = replace(transfer, phase=Phase.STAGING, start_at=start_at)
        change.emit(
            SendStart(
                group.group_id,
                transfer.transfer_id,
                group.num_receivers,
                transfer.layout.num_buckets,
                min(min(prepared.values()), transfer.layout.num_buckets),
            )
        )
    change.put_transfer(transfer)


def rank_load_due(change: Change, event: events.RankLoadDue) -> None:
    """Order a replica to load in place, since a receiver's memory is soon full."""
    found = _named(change.state, event.group_id, event.transfer_id)
    if found is None or found[0].phase is not Phase.STAGING:
        return
    transfer, group = found
    replica = change.state.replicas.get(group.member_name(event.rank))
    if replica is not None and replica.loads_in_place(transfer.kind):
        abort.order_load(change, transfer, replica)


def load_answered(change: Change, event: events.LoadAnswered) -> None:
    """Continue without a replica that cannot load in place, or cannot be told to."""
    transfer = change.state.transfers.get(event.transfer_id)
    if transfer and event.replica_id in transfer.attempt.pausing:
        pausing = transfer.attempt.pausing
        pausing = {name: since for name, since in pausing.items() if name != event.replica_id}
        attempt = replace(transfer.attempt, pausing=pausing)
        transfer = change.put_transfer(replace(transfer, attempt=attempt))
    if event.failure and transfer and transfer.uncommitted:
        why = f"{event.replica_id} does not load in place: {event.failure.message}"
        failure = Failure(event.failure.reason, why, {"member": event.replica_id})
        regrouping.lose_replica(change, transfer, event.replica_id, failure)


def rank_staged(change: Change, event: events.RankStaged) -> None:
    """Note a rank's digest; commit once every rank has the same digest over everything."""
    found = _named(change.state, event.group_id, event.transfer_id)
    if found is None or found[0].phase is not Phase.STAGING:
        return
    transfer, group = found
    staged = {**transfer.attempt.staged, event.rank: event.digest}
    attempt = replace(transfer.attempt, staged=staged)
    transfer = change.put_transfer(replace(transfer, attempt=attempt))
    if mismatches := _mismatches(transfer, group):
        _lose_ranks(change, transfer, group, mismatches)
    elif len(staged) == group.size:
        purpose_of(transfer).on_staged(change, transfer, event.digest)


def _mismatches(transfer: Transfer, group: Group) -> dict[int, Failure]:
    """Return the failures of ranks whose digest is not their senders'. Before a sender has told its
    own, nobody knows which of two receivers is wrong."""
    staged = transfer.attempt.staged
    sender = next((rank for rank in staged if rank in group.senders), None)
    found = {}
    for rank, digest in staged.items():
        wrong = _not_of_its_layout(transfer, digest)
        if not wrong and sender is not None and digest != staged[sender]:
            wrong = (
                f"the digest {digest.value.hex()}, {group.rank_name(sender)} "
                f"{staged[sender].value.hex()}"
            )
        if wrong:
            metadata = {"member": group.member_name(rank)}
            text = f"{group.rank_name(rank)} has {wrong}"
            found[rank] = Failure("DIGEST_MISMATCH", text, metadata)
    return found


def _not_of_its_layout(transfer: Transfer, digest: ContentDigest) -> str:
    """Explain what is wrong with a digest by itself, whoever else agrees; empty if it is right."""
    layout = transfer.layout
    if digest.size_bytes != layout.total_bytes:
        return f"{digest.size_bytes} bytes, the manifest has {layout.total_bytes}"
    if digest.algorithm != WSUM64:
        return f"a digest by algorithm {digest.algorithm}, which is not wsum64 ({WSUM64})"
    return ""


def _lose_ranks(
    change: Change, transfer: Transfer, group: Group, failures: Mapping[int, Failure]
) -> None:
    """Continue without the replicas of ranks that failed by themselves, or end the transfer, which
    needs each of its senders."""
    if refused := _refused_delta(transfer, group, failures):
        abort.abort(change, transfer, refused)
        return
    lost = {group.member_name(rank): why for rank, why in failures.items()}
    ends = [
        why
        for rank, why in failures.items()
        if rank in group.senders
        or not (transfer.loading or not purpose_of(transfer).requires(group.member_name(rank)))
    ]
    if ends:
        abort.abort(change, transfer, ends[0])
    else:
        regrouping.lose_replicas(change, transfer, lost)


def _refused_delta(
    transfer: Transfer, group: Group, failures: Mapping[int, Failure]
) -> Failure | None:
    """Return why a delta ends, so that its trainer pushes the whole version, where receivers could
    not apply it; nobody is lost for that.

    Where others are sent all elements beside it and one of them loads them in place already, its
    weights would stay mixed: then the transfer goes on without those that could not.
    """
    if not transfer.delta_from or any(rank in group.senders for rank in failures):
        return None
    if transfer.loading:
        return None
    for rank, why in failures.items():
        takes_delta = group.member_name(rank) not in transfer.whole_for
        if takes_delta and why.reason in _HEALED_BY_WHOLE:
            message = f"{why.message} [{why.reason}]: push the same weights whole"
            return Failure("DELTA_REFUSED", message, {**why.metadata, "cause": why.reason})
    return None


def rank_failed(change: Change, event: events.RankFailed) -> None:
    """Continue without the replica of a rank that cannot continue, or end the transfer.

    A rank that reports PEER_GONE only accuses: who is lost is judged later.
    """
    found = _named(change.state, event.group_id, event.transfer_id)
    if found is None:
        return
    transfer, group = found
    member = group.member_name(event.rank)
    why = f"{group.rank_name(event.rank)}: {event.message}"
    failure = Failure(event.reason or "INTERNAL", why, {"member": member})
    if failure.reason != "PEER_GONE":
        _lose_ranks(change, transfer, group, {event.rank: failure})
        return
    attempt = transfer.attempt
    attempt = replace(
        attempt,
        accusations={**attempt.accusations, event.rank: failure},
        judge_at=attempt.judge_at or change.now + JUDGE_AFTER_SECONDS,
    )
    change.put_transfer(replace(transfer, attempt=attempt))


def rank_gone(change: Change, event: events.RankGone) -> None:
    """Handle a broken stream: lose the replica, or end the transfer or the group that is kept."""
    group = change.state.groups.get(event.group_id)
    if group is None:
        return
    member = group.member_name(event.rank)
    transfer = transfer_of(change.state, event.group_id)
    if transfer is None or not transfer.uncommitted:
        who = group.rank_name(event.rank)
        abort.end_group(change, event.group_id, f"{who} left it: {event.why}")
        return
    change.put_group(replace(group, attending=group.attending - {event.rank}))
    if event.rank in transfer.attempt.accusations:
        return  # it gave up because of another; judge() will tell
    failure = abort.peer_gone(member, event.why, group.rank_name(event.rank))
    if event.rank in group.senders:  # without one of them no push continues
        abort.abort(change, transfer, failure)
    else:
        regrouping.lose_replica(change, transfer, member, failure)


def watch_deadlines(change: Change) -> None:
    """End transfers whose time is up, and judge accusations whose culprit did not show."""
    for transfer in list(change.state.transfers.values()):
        if transfer.phase not in (Phase.FORMING, Phase.STAGING):
            continue
        attempt = transfer.attempt
        if attempt.accusations and change.now >= attempt.judge_at:
            _judge(change, transfer)
        elif change.now >= transfer.deadline:
            abort.abort(change, transfer, _deadline(change.state, transfer))


def _judge(change: Change, transfer: Transfer) -> None:
    """Judge accusations once it is clear that nobody's stream broke: who says that a peer is gone
    cannot reach the others itself. If a sender says so, or all do, the transfer ends."""
    group, accusations = change.state.groups[transfer.group_id], transfer.attempt.accusations
    lost = {group.member_name(rank): why for rank, why in accusations.items()}
    if transfer.trainer_id in lost or len(lost) == len(group.members):
        abort.abort(change, transfer, next(iter(accusations.values())))
    else:
        _lose_ranks(change, transfer, group, accusations)


def watch_switching(change: Change) -> None:
    """Give up replicas that were told to switch and make no progress."""
    seconds = change.state.settings.stall_seconds
    for transfer in list(change.state.transfers.values()):
        for name in sorted(transfer.switching):
            replica = change.state.replicas.get(name)
            if replica is None or replica.silence(transfer.commit_at, change.now) < seconds:
                continue
            step = f"switch to {transfer.policy_version}"
            failure = stalls.silent(change, replica, step, transfer.commit_at)
            suspects.suspect(change, name, failure.message)
            note_commit_answer(change, change.state.transfers[transfer.transfer_id], name, failure)


def _deadline(state: PoolState, transfer: Transfer) -> Failure:
    group = state.groups[transfer.group_id]
    everyone = frozenset(range(group.size))
    if not transfer.attempt.prepare_sent:
        what, missing = "did not join the group", everyone - group.attending
    elif transfer.phase is Phase.FORMING:
        ready = frozenset(transfer.attempt.prepared)
        what, missing = "did not get ready", frozenset(group.receivers) - ready
    else:
        what, missing = "did not finish", everyone - frozenset(transfer.attempt.staged)
    names = list(dict.fromkeys(group.rank_name(rank) for rank in sorted(missing)))
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    why = purpose_of(transfer).time_is_up(state, transfer)
    return Failure("DEADLINE", f"{why}: {shown} {what}", {"member": shown})


# -- the commit point and what follows it ------------------------------------


def at_commit_point(change: Change, transfer: Transfer, replicas: Sequence[Replica]) -> Transfer:
    """Return the transfer at its commit point, where these replicas are to switch.

    It is a value only: nothing is put into the state yet.
    """
    ids = tuple(replica.replica_id for replica in replicas)
    return replace(
        transfer,
        phase=Phase.COMMITTING,
        create_time=transfer.create_time or change.state.wall(change.now),
        commit_at=change.now,
        served_before=change.state.policies[transfer.policy].served_version,
        targets=ids,
        switching=frozenset(ids),
        incarnations={replica.replica_id: replica.incarnation for replica in replicas},
    )


def call_to_commit(
    transfer: Transfer,
    replica: Replica,
    digest: ContentDigest,
    *,
    staged_by: str = "",
    alias: int = 0,
) -> CallCommit:
    """Return the order to switch to what a replica has staged.

    Args:
        staged_by: The transfer that staged it, if not this one.
        alias: See ``CallCommit.alias``.
    """
    return CallCommit(
        staged_by or transfer.transfer_id,
        replica.replica_id,
        replica.incarnation,
        replica.address,
        transfer.policy_version,
        transfer.adapter,
        digest,
        alias,
        transfer.layout.digest,
    )


def commit_answered(change: Change, event: events.CommitAnswered) -> None:
    """Note whether a replica has switched; it need not keep what it did not load."""
    transfers = change.state.transfers
    own = switch_id(event.transfer_id, event.replica_id)
    transfer = transfers.get(event.transfer_id) or transfers.get(own)
    replica = change.state.replicas.get(event.replica_id)
    if replica and replica.incarnation == event.incarnation:
        if event.vector is not None:
            loaded_base = transfer is not None and transfer.kind is PolicyKind.BASE
            if transfer is not None:
                replica = replica_state.after_switch(replica, transfer.policy_version)
            replica = replace(
                replica.with_vector(event.vector),
                order_answered_at=change.now,
                commit_failure="",
                retained=event.retained if loaded_base else replica.retained,
                undoable=event.undoable if loaded_base else replica.undoable,
                dirty_reason="" if loaded_base else replica.dirty_reason,
            )
            replica = replica_state.with_counted_versions(change.state, replica)
        elif event.failure and is_dirty(event.failure):
            replica = replace(
                replica, dirty_reason=event.failure.message, order_answered_at=change.now
            )
        elif event.failure:
            replica = replace(replica, commit_failure=event.failure.message)
        change.put_replica(replica)
        if event.vector is not None and event.base_as_started:
            base_binding.note_as_started(change, replica)
    if transfer and transfer.phase is Phase.COMMITTING:
        if event.pause_seconds:
            longest = max(transfer.pause_seconds, event.pause_seconds)
            transfer = change.put_transfer(replace(transfer, pause_seconds=longest))
            if len(transfer.targets) <= MAX_PAUSES:
                pause = PauseReport(change.now, event.pause_seconds)
                pauses = {**transfer.pauses, event.replica_id: pause}
                transfer = change.put_transfer(replace(transfer, pauses=pauses))
        is_same = replica is not None and replica.incarnation == event.incarnation
        if is_same and event.failure is not None and event.failure.reason == "DEADLINE":
            # Its process may answer heartbeats while its engine hangs.
            suspects.suspect(change, event.replica_id, event.failure.message)
        note_commit_answer(change, transfer, event.replica_id, event.failure)
    if change.state.unserved:
        withdrawals.commit_answered(change, event)


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
        purpose_of(transfer).on_answered(change, transfer)


def admit(change: Change) -> None:
    """Start every waiting transfer whose turn has come."""
    if all(t.phase is not Phase.WAITING for t in change.state.transfers.values()):
        return
    queue = AdmissionQueue(change.state, change.now)
    for transfer in queue.waiting():
        if transfer.transfer_id not in change.state.transfers:
            continue  # it has ended with the lease of one before it
        queue.take(purpose_of(transfer).admit(change, transfer, queue))


def take_over(change: Change, replicas: Sequence[Replica], by: Transfer) -> None:
    """Interrupt transfers that give way on these replicas, for ``by``, which takes them now."""
    names = {replica.replica_id for replica in replicas}
    for transfer in list(change.state.transfers.values()):
        purpose = purpose_of(transfer)
        if names.intersection(transfer.occupied) and purpose.gives_way(
            change.state, transfer, change.now
        ):
            purpose.on_interrupted(change, transfer, by)


def end_unwanted(change: Change) -> None:
    """Abort uncommitted transfers that are not wanted any more.

    Looks at those whose replicas a step has touched: O(transfers) otherwise.
    """
    for transfer in list(change.state.transfers.values()):
        if (
            transfer.uncommitted
            and transfer.phase is not Phase.WAITING
            and (change.touched_all or not change.touched.isdisjoint(transfer.occupied))
            and (why := purpose_of(transfer).why_unwanted(change.state, transfer))
        ):
            abort.abort(change, transfer, Failure("TRANSFER_ABORTED", why))
