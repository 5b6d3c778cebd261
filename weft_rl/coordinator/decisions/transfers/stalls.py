"""Stalls: a member that lives, owes the next step, and says nothing.

A death shows as a broken stream or as silence of a whole process. A working thread that hangs
shows as neither: its process keeps beating and its stream stays open. So each rank's working
thread says what it does (``weft.v1.Progress``). A rank is stalled if it *owes* a step and says
nothing for ``PoolSettings.stall_seconds``. Its replica is then given up for the transfer, and is
suspect (see suspects.py). The table says who owes a step, and which message discharges it:

====================  ===================================  =======================
while                 who owes                             discharged by
====================  ===================================  =======================
the group forms       a rank that was told to join         Hello
receivers prepare     a receiver that was told             Prepared
bytes flow            a receiver that was sent more than   BucketVerified
                      it has reported
bytes flow            a receiver that has reported all     Staged
bytes flow            a sender, if all have reported       a further bucket, Staged
                      what it has sent
it loads in place     a replica that was told to pause     LoadTransfer's answer
it is committed       a replica that was told to switch    CommitTransfer's answer
====================  ===================================  =======================

The engine's thread does the last two. Its progress is told with heartbeats (``weft.v1.Work``).
The others are done by a rank's own thread, which reports itself. All other members wait and owe
nothing, a receiver behind another one that does not relay included. Any report of the rank starts
its time anew: a rank that works may be slow until the push's deadline.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping

from weft_rl.containers import replace
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.change import Change
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.decisions.state.replica import Replica
from weft_rl.coordinator.decisions.state.replica_state import base_targets
from weft_rl.coordinator.decisions.state.transfer import (
    FIRST_STEP,
    Activity,
    Group,
    GroupProgress,
    Transfer,
)
from weft_rl.coordinator.decisions.state.values import Failure, Phase
from weft_rl.coordinator.decisions.transfers import regrouping, slow_links, suspects
from weft_rl.coordinator.decisions.transfers.purpose import purpose_of
from weft_rl.units import shown_bytes

# Share of a push's time that others wait for one receiver before it may be left behind.
_SHARE_OF_ITS_TIME = 0.25
# A new group takes some tenths of a second: so much is to be gained by one.
_LEAST_GAIN_SECONDS = 1.0


def owed_steps(transfer: Transfer, group: Group) -> dict[int, str]:
    """Return the ranks that owe the next step, and that step in words for messages."""
    ranks = range(group.size)
    if transfer.phase is Phase.FORMING and not transfer.attempt.prepare_sent:
        return {rank: FIRST_STEP for rank in ranks if rank not in group.attending}
    if transfer.phase is Phase.FORMING:
        prepared = transfer.attempt.prepared
        return {rank: "get ready" for rank in group.receivers if rank not in prepared}
    if transfer.phase is not Phase.STAGING:
        return {}
    return _owed_while_bytes_flow(transfer, group)


def _owed_while_bytes_flow(transfer: Transfer, group: Group) -> dict[int, str]:
    num_buckets, attempt = transfer.layout.num_buckets, transfer.attempt
    reports = attempt.progress.reports
    first = min(attempt.prepared.values(), default=0)
    verified = {rank: attempt.progress.num_verified.get(rank, first) for rank in group.receivers}
    least, most = min(verified.values()), max(verified.values())
    # Each has handed over its own buckets below this.
    num_sent = {r: max(reports[r].bucket if r in reports else 0, most) for r in group.senders}
    num_sent.update((r, num_buckets) for r in group.senders if r in attempt.staged)
    steps = {}
    for rank, count in verified.items():
        if rank in attempt.staged or group.member_name(rank) in attempt.pausing:
            continue  # while its engine is told to pause generation, it can do nothing
        if count >= num_buckets:
            steps[rank] = "stage what it has"
        elif count < num_sent[transfer.sender_of(count)]:
            steps[rank] = f"verify bucket {count}"
    for rank in group.senders:
        if rank in attempt.staged:
            continue
        own = transfer.sent_by(rank)
        nth = bisect_left(own, num_sent[rank])
        if nth == len(own):
            if least >= num_buckets:
                steps[rank] = "end"
        elif nth == 0 or least > own[nth - 1]:
            steps[rank] = f"send bucket {own[nth]}"
    return steps


def stalled(transfer: Transfer, group: Group, now: float, seconds: float) -> list[int]:
    """List the ranks that have owed a step for ``seconds`` without a word, ascending."""
    progress = transfer.attempt.progress
    return [
        r
        for r in range(group.size)
        if r in progress.owed_steps and progress.silence(r, now) >= seconds
    ]


def heard(change: Change, event: events.RanksHeard) -> None:
    """Note what ranks have said that they do, and the buckets that they have verified."""
    for transfer in change.state.transfers.values():
        if transfer.group_id == event.group_id and transfer.uncommitted:
            ours = ("", transfer.transfer_id)
            reports = {
                r: report for r, report in event.reports.items() if report.transfer_id in ours
            }
            verified = event.num_verified if event.transfer_id == transfer.transfer_id else {}
            progress = transfer.attempt.progress.heard(reports, verified, change.now)
            group = change.state.groups[transfer.group_id]
            progress = progress.with_hops(slow_links.between_members(event.hops, group))
            _with_progress(change, transfer, progress)
            return


def watch(change: Change) -> None:
    """Give up the members that stall; with each tick."""
    for transfer in list(change.state.transfers.values()):
        if transfer.phase not in (Phase.FORMING, Phase.STAGING):
            continue
        group = change.state.groups[transfer.group_id]
        if not transfer.taken_up and _has_come(transfer, group):
            transfer = change.put_transfer(replace(transfer, taken_up=True))
        seen = transfer.attempt.progress.with_owed_steps(owed_steps(transfer, group), change.now)
        seen = seen.with_holder(_holder(seen, group), change.now)
        if seen is not transfer.attempt.progress:
            transfer = _with_progress(change, transfer, seen)
        if not transfer.attempt.accusations:  # else somebody is about to be found dead
            for look in (_give_up, _leave_behind, _leave_slow_link):
                if change.state.transfers.get(transfer.transfer_id) is transfer:
                    look(change, transfer, group)


def _has_come(transfer: Transfer, group: Group) -> bool:
    """Return whether a sender is at work; in a group of the former transfer it attends anyway."""
    is_own = group.group_id.startswith(transfer.ids.group_id)
    reports = transfer.attempt.progress.reports
    return any(
        (is_own and rank in group.attending)
        or (rank in reports and reports[rank].transfer_id == transfer.transfer_id)
        for rank in group.senders
    )


def _holder(progress: GroupProgress, group: Group) -> int | None:
    """Return the receiver that all others wait for, the first at work (it may relay to the next);
    None if a sender owes a step."""
    owing = [rank for rank in group.receivers if rank in progress.owed_steps]
    is_a_sender = any(rank in progress.owed_steps for rank in group.senders)
    if is_a_sender or not owing or len(owing) == group.num_receivers:
        return None
    reports = progress.reports
    at_work = [r for r in owing if r in reports and reports[r].activity != Activity.WAITING]
    return (at_work or owing)[0]


def _leave_behind(change: Change, transfer: Transfer, group: Group) -> None:
    """Lose a member that holds the others up, where only without it the transfer ends in time."""
    progress, seconds = transfer.attempt.progress, transfer.deadline - transfer.begin_at
    for rank, held_up in progress.held_up.items():
        name = group.member_name(rank)
        is_long = held_up >= seconds * _SHARE_OF_ITS_TIME and rank in progress.owed_steps
        if not is_long or not _would_be_late(transfer, group, change.now):
            continue
        is_free = not purpose_of(transfer).requires(name)
        if is_free and purpose_of(transfer).may_continue(transfer, group, {name}):
            why = (
                f"{name} cannot keep up: the others waited {held_up:.0f} s for it, and the push "
                f"would not end in its time; it was to {progress.owed_steps[rank].step}"
            )
            failure = Failure("TOO_SLOW", why, {"member": name})
            regrouping.lose_replica(change, transfer, name, failure)
            return


def _leave_slow_link(change: Change, transfer: Transfer, group: Group) -> None:
    """Lose a replica whose link all others wait for, where the push needs fewer and gains by it."""
    if transfer.phase is not Phase.STAGING:
        return
    progress, num_buckets = transfer.attempt.progress, transfer.layout.num_buckets
    slow = slow_links.slow_replica(progress.hops, transfer.targets)
    if slow is None:
        return
    name = slow.replica_id
    least = min(progress.num_verified.get(rank, 0) for rank in group.receivers)
    num_left = transfer.sent_bytes * (num_buckets - least) / num_buckets
    gain = num_left / slow.rate - num_left / slow.pace
    purpose = purpose_of(transfer)
    may_lose = not purpose.requires(name) and purpose.may_continue(transfer, group, {name})
    if gain >= _LEAST_GAIN_SECONDS and may_lose:
        why = (
            f"{name} cannot keep up: its link carries {shown_bytes(slow.rate)}/s, those of the "
            f"others {shown_bytes(slow.pace)}/s; it catches up afterwards"
        )
        failure = Failure("TOO_SLOW", why, {"member": name})
        regrouping.lose_replica(change, transfer, name, failure)


def _would_be_late(transfer: Transfer, group: Group, now: float) -> bool:
    """Return whether a transfer would end after its deadline at the pace so far."""
    if transfer.phase is not Phase.STAGING:
        return True
    num_verified = transfer.attempt.progress.num_verified
    least = min(num_verified.get(rank, 0) for rank in group.receivers)
    # The bucket that it is at is taken for done, and what follows the last one for another.
    share = (least + 1) / (transfer.layout.num_buckets + 1)
    return now - transfer.start_at > share * (transfer.deadline - transfer.start_at)


def forgive(change: Change, seconds: float) -> None:
    """Discount the seconds that the coordinator itself was stopped: silence says nothing then."""
    for transfer in list(change.state.transfers.values()):
        if transfer.attempt.progress != GroupProgress():
            _with_progress(change, transfer, transfer.attempt.progress.forgiven(seconds))


def _with_progress(change: Change, transfer: Transfer, progress: GroupProgress) -> Transfer:
    attempt = replace(transfer.attempt, progress=progress)
    return change.put_transfer(replace(transfer, attempt=attempt))


def order_not_taken(change: Change, transfer: Transfer, replica_id: str, why: str) -> None:
    """Lose a replica that did not take an order in time.

    Its process answers, so its worker hangs.
    """
    failure = _failure(replica_id, f"its workers did not take the order to join: {why}")
    _lose(change, transfer, {replica_id: failure})


def _give_up(change: Change, transfer: Transfer, group: Group) -> None:
    settings = change.state.settings
    ranks = stalled(transfer, group, change.now, settings.stall_seconds)
    sender = next((rank for rank in ranks if rank in group.senders), None)
    if sender is not None:
        what = _what(transfer, sender, change.now)
        who = transfer.source or group.rank_name(sender)
        failure = _failure(transfer.source or transfer.trainer_id, what, who)
        purpose_of(transfer).on_sender_stalled(change, transfer, failure)
        if transfer.transfer_id not in change.state.transfers:
            return
    lost = _that_do_not_pause(change, transfer) | {
        name: _failure(name, _what(transfer, rank, change.now))
        for rank in reversed(ranks)
        if rank in group.receivers
        for name in (group.member_name(rank),)
    }
    if lost := _spared(transfer, group, lost):
        _lose(change, transfer, lost)


def _that_do_not_pause(change: Change, transfer: Transfer) -> dict[str, Failure]:
    seconds, found = change.state.settings.stall_seconds, {}
    for name, since in transfer.attempt.pausing.items():
        replica = change.state.replicas[name]
        if replica.silence(since, change.now) >= seconds:
            found[name] = silent(change, replica, "pause generation", since)
    return found


def silent(change: Change, replica: Replica, step: str, since: float) -> Failure:
    """Return the failure of a replica that was told to do a step and makes no progress."""
    silence = replica.silence(since, change.now)
    said = f", and last said that it was at work ({replica.work})" if replica.work else ""
    what = f"it was to {step} and has been silent for {silence:.1f} s{said}"
    return _failure(replica.replica_id, what)


def _spared(transfer: Transfer, group: Group, lost: Mapping[str, Failure]) -> dict[str, Failure]:
    """Return the members that may be given up: not all, where they load in place, since their mixed
    weights may yet become whole."""
    is_anybody_left = any(member.replica_id not in lost for member in group.members)
    if is_anybody_left:
        return dict(lost)
    return {name: why for name, why in lost.items() if name not in transfer.loading}


def _lose(change: Change, transfer: Transfer, lost: Mapping[str, Failure]) -> None:
    for name, failure in lost.items():
        suspects.suspect(change, name, failure.message)
    regrouping.lose_replicas(change, transfer, lost)


def trainer_delays_others(change: Change, transfer: Transfer) -> bool:
    """Return whether a trainer that stalls is given up.

    It is once it has had its time, and another transfer waits for a replica that it occupies.
    """
    progress = transfer.attempt.progress
    silence = max(progress.silence(rank, change.now) for rank in range(transfer.num_senders))
    if silence < change.state.settings.sender_stall_seconds:
        return False
    occupied = set(transfer.occupied)
    return any(
        not occupied.isdisjoint(_awaited(change.state, other))
        for other in change.state.transfers.values()
        if other.phase is Phase.WAITING
    )


def _awaited(state: PoolState, waiting: Transfer) -> Iterable[str]:
    """Return the replicas that a transfer waits on for its turn."""
    if waiting.replica_id:
        return (waiting.replica_id, waiting.source)
    return (replica.replica_id for replica in base_targets(state))


def _what(transfer: Transfer, rank: int, now: float) -> str:
    progress = transfer.attempt.progress
    owed, report = progress.owed_steps[rank], progress.reports.get(rank)
    silence = progress.silence(rank, now)
    said = f", and last said that it was {report}" if report else ""
    return f"it was to {owed.step} and has been silent for {silence:.1f} s{said}"


def _failure(member: str, what: str, who: str = "") -> Failure:
    why = f"{who or member} makes no progress: {what}"
    return Failure("STALLED", why, {"member": member})
