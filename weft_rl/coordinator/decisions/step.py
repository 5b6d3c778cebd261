"""The coordinator's decisions: ``step(state, event, now) -> (state, effects)``.

Pure: no clock, socket, thread or random number. ``now`` is in seconds of one
monotonic clock. A race is a list of events in some order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from weft_rl.containers import replace
from weft_rl.contract.errors import (
    LeaseFencedError,
    NotFoundError,
    NotReadyError,
    PeerUnavailableError,
    WeftError,
)
from weft_rl.contract.names import BASE_POLICY
from weft_rl.coordinator.decisions import membership
from weft_rl.coordinator.decisions.policies import leases, republishing, retention
from weft_rl.coordinator.decisions.purposes import push, rollback
from weft_rl.coordinator.decisions.recovery import adoption, catch_up
from weft_rl.coordinator.decisions.replicas import base_binding, out_of_service, sleeps
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.change import Change
from weft_rl.coordinator.decisions.state.effects import (
    BeginAnswer,
    Effect,
    EmptyAnswer,
    EventKind,
    HeartbeatAnswer,
    LeaseAnswer,
    RegisterAnswer,
    RetentionAnswer,
    RetiredAnswer,
    RollbackAnswer,
    RoutesChanged,
    SleepAnswer,
    UncordonAnswer,
)
from weft_rl.coordinator.decisions.state.pool import PoolState, is_overdue
from weft_rl.coordinator.decisions.state.replica_state import (
    base_targets,
    explain_state,
    is_routable,
    route_of,
    state_reason,
)
from weft_rl.coordinator.decisions.state.transfer import Transfer
from weft_rl.coordinator.decisions.state.values import CallAnswer, Failure, Phase
from weft_rl.coordinator.decisions.transfers import (
    abort,
    lifecycle,
    preflight,
    stalls,
    suspects,
    withdrawals,
)

_NO_REASON: Final = "no reason given"


def step(state: PoolState, event: events.Event, now: float) -> tuple[PoolState, list[Effect]]:
    """Decide what one event changes and what is to be done about it.

    Args:
        state: State before the event.
        event: Event that happened.
        now: Time in monotonic seconds; never less than in a former call.

    Returns:
        The state after the event, and the effects in order. Effects other than saves are
        to be carried out only once the durable saves among them (and among those
        of former steps) are on disk.
    """
    change = Change(state, now)
    if (gap := state.missed_seconds(now)) and not isinstance(event, events.Register):
        membership.forgive_own_sleep(change, gap)  # a silent process is judged by its own silence
    awake = change.state
    try:
        RULES[type(event)](change, event)
    except WeftError as error:
        change = Change(awake, now)  # a refused request changes nothing
        policy = getattr(event, "policy", BASE_POLICY)
        if isinstance(error, LeaseFencedError) and is_overdue(awake, policy, now):
            leases.end_overdue(change, policy)  # but that its lease is over is durable first
        change.refuse([_ticket_of(event)], error)
    if change.state.unserved:
        withdrawals.decide(change)
    if state.history is not change.state.history:
        _schedule_after(change, state)
    lifecycle.end_unwanted(change)
    lifecycle.admit(change)
    if isinstance(event, events.FitChecked):
        preflight.forget_unanswered(change, event)
    if change.touched_all or change.touched:
        _announce_states(change)
        _note_routes(state, change)
    _answer_describers(change)
    if change.state.sleep_waits:
        sleeps.settle(change)
    return change.state, change.effects


def _ticket_of(event: events.Event) -> int:
    ticket = getattr(event, "ticket", None)
    assert ticket is not None, f"{type(event).__name__} has no caller to refuse"
    return int(ticket)


def _tick(change: Change, _: events.Tick) -> None:
    change.state = replace(change.state, tick_at=change.now)
    membership.find_lost(change)
    leases.expire_leases(change)
    sleeps.watch(change)
    stalls.watch(change)
    lifecycle.watch_switching(change)
    lifecycle.watch_deadlines(change)
    suspects.watch(change)
    suspects.probe(change)
    abort.repeat_discards(change)
    if change.now >= change.state.retire_at:
        retention.retire(change)
    adoption.watch(change)
    catch_up.schedule(change)
    republishing.watch(change)
    base_binding.watch_checkpoint(change)


def _describe_target(change: Change, event: events.DescribeTarget) -> None:
    until = event.answer_by, min(event.answer_by, event.patience)
    tickets = {**change.state.target_tickets, event.ticket: until}
    change.state = replace(change.state, target_tickets=tickets)


def _rank_attends(change: Change, event: events.RankAttends) -> None:
    lifecycle.rank_attends(change, event)
    suspects.rank_attends(change, event)


def _join_answered(change: Change, event: events.JoinAnswered) -> None:
    if not suspects.join_answered(change, event):
        lifecycle.join_answered(change, event)


def _commit_answered(change: Change, event: events.CommitAnswered) -> None:
    lifecycle.commit_answered(change, event)
    if event.transfer_id in change.state.history:
        retention.retire(change)


def _discard_answered(change: Change, event: events.DiscardAnswered) -> None:
    abort.discard_answered(change, event)
    withdrawals.discard_answered(change, event)


def _schedule_after(change: Change, before: PoolState) -> None:
    """Schedule clones once a transfer has ended, before others take its replicas; not after each
    clone, of which there may be many."""
    ended = [t for name, t in change.state.history.items() if name not in before.history]
    if change.now >= change.state.schedule_at or any(not t.replica_id for t in ended):
        catch_up.schedule(change)


def _await_transfer(change: Change, event: events.AwaitTransfer) -> None:
    ended = change.state.history.get(event.transfer_id)
    under_way = change.state.transfers.get(event.transfer_id)
    if ended and ended.failure:
        raise ended.failure.error()
    if ended:
        change.reply(event.ticket, ended)
    elif under_way:
        tickets = (*under_way.await_tickets, event.ticket)
        change.put_transfer(replace(under_way, await_tickets=tickets))
    else:
        raise unknown_transfer(event.transfer_id)


def _abort_transfer(change: Change, event: events.AbortTransfer) -> None:
    transfer = _named(change.state, event)
    if transfer is None:
        raise unknown_transfer(event.transfer_id or event.request_id)
    if not _owns(transfer, event):
        raise not_its_owner(event.transfer_id, event.policy, event.fencing_token)
    _give_up(change, event, transfer, f"given up by its trainer: {event.message or _NO_REASON}")


def _cancel_transfer(change: Change, event: events.CancelTransfer) -> None:
    known = change.state
    transfer = known.transfers.get(event.transfer_id) or known.history.get(event.transfer_id)
    if transfer is None:
        raise unknown_transfer(event.transfer_id)
    _give_up(change, event, transfer, f"cancelled by an operator: {event.reason or _NO_REASON}")


def _give_up(change: Change, event: events.Call, transfer: Transfer, message: str) -> None:
    if transfer.phase in (Phase.COMMITTING, Phase.COMMITTED):
        raise already_committed(str(transfer.policy_version))
    if transfer.uncommitted:
        abort.abort(change, transfer, Failure("TRANSFER_ABORTED", message))
    change.reply(event.ticket, EmptyAnswer())


def _named(state: PoolState, event: events.AbortTransfer) -> Transfer | None:
    """Find the transfer that a trainer gives up: by name, or by request id among its own."""
    if event.transfer_id:
        return state.transfers.get(event.transfer_id) or state.history.get(event.transfer_id)
    for known in (*state.transfers.values(), *state.history.values()):
        if known.purpose.request_id == event.request_id and _owns(known, event):
            return known
    return None


def _owns(transfer: Transfer, event: events.AbortTransfer) -> bool:
    """Return whether a transfer is the event's: each policy counts its own tokens."""
    given = (event.policy, event.fencing_token)
    return given == (transfer.policy, transfer.purpose.fencing_token)


def not_its_owner(transfer_id: str, policy: str, token: int) -> LeaseFencedError:
    """Return the error for giving up a transfer of another owner."""
    return LeaseFencedError(
        f"token {token} of policy {policy[:80]!r} does not own transfer {transfer_id[:80]!r}"
    )


def unknown_transfer(transfer_id: str) -> NotFoundError:
    """Return the error for a call that names no known transfer."""
    return NotFoundError(f"no transfer {transfer_id[:80]!r} is known", reason="TRANSFER_UNKNOWN")


def already_committed(version: str) -> NotReadyError:
    """Return the error for an abort that comes too late."""
    return NotReadyError(
        f"{version} is committed and cannot be given up", reason="ALREADY_COMMITTED"
    )


def _forget_caller(change: Change, event: events.CallerGone) -> None:
    """Cancel a wait; a transfer that nobody waits to begin is not begun."""
    ticket = event.ticket
    if sleeps.forget_caller(change, ticket):
        return
    if ticket in change.state.target_tickets:
        tickets = {t: d for t, d in change.state.target_tickets.items() if t != ticket}
        change.state = replace(change.state, target_tickets=tickets)
        return
    for transfer in change.state.transfers.values():
        begins = tuple(t for t in transfer.begin_tickets if t != ticket)
        awaits = tuple(t for t in transfer.await_tickets if t != ticket)
        if transfer.phase is Phase.WAITING and transfer.begin_tickets and not begins:
            change.drop_transfer(transfer.transfer_id)
            return
        if (begins, awaits) != (transfer.begin_tickets, transfer.await_tickets):
            change.put_transfer(replace(transfer, begin_tickets=begins, await_tickets=awaits))
            return


def _announce_states(change: Change) -> None:
    """Notify watchers of the replicas whose state changed."""
    ids = list(change.state.replicas) if change.touched_all else sorted(change.touched)
    for replica_id in ids:
        replica = change.state.replicas.get(replica_id)
        if replica is None:
            continue
        was, known = replica.announced, state_reason(change.state, replica)
        routed = is_routable(change.state, replica)
        if routed is not replica.routed or known is not was:
            replica = change.put_replica(replace(replica, routed=routed, announced=known))
        if was is None or known.state is not was.state:
            where, why = explain_state(change.state, replica)
            change.announce(EventKind[f"REPLICA_{where.name}"], replica.replica_id, why)


def _note_routes(before: PoolState, change: Change) -> None:
    """Notify readers of the routes that a step changed; states must have been announced."""
    touched = before.replicas.keys() | change.state.replicas.keys()
    if not change.touched_all:
        touched = touched & change.touched
    changed = []
    for replica_id in touched:
        was, now_is = before.replicas.get(replica_id), change.state.replicas.get(replica_id)
        if was is not now_is and route_of(was) != route_of(now_is):
            changed.append(replica_id)
    if changed:
        change.emit(RoutesChanged(tuple(changed)))


def _answer_describers(change: Change) -> None:
    """Answer who waits for a description of the pool, once it is known."""
    waiting = change.state.target_tickets
    if not waiting:
        return
    targets = base_targets(change.state)
    missing = {replica_id for replica_id, _ in preflight.not_described(change.state, targets)}
    some_known = len(missing) < len(targets)
    left = {}
    for ticket, (deadline, patience) in waiting.items():
        if some_known and (not missing or change.now >= patience):
            change.reply(ticket, EmptyAnswer())
        elif change.now >= deadline:
            why = (
                "no replica is in contact that has described its base model: start one "
                "(weft rollout -- MODEL), or see weft status for why those that run are not"
            )
            change.refuse([ticket], PeerUnavailableError(why, reason="POOL_EMPTY"))
        else:
            left[ticket] = deadline, patience
    if len(left) < len(waiting):
        change.state = replace(change.state, target_tickets=left)


@dataclass(frozen=True)
class CallRow:
    """Call that ``step`` decides."""

    call: type[events.Call]
    """Value of the call, which has the name of its RPC."""
    rule: Callable[[Change, Any], None]
    """Function that decides it; the call is refused by the error that it raises."""
    answer: type[CallAnswer] = EmptyAnswer
    unread: tuple[str, ...] = ()
    """Fields of the call's message that its value does not have: they are read before."""


#: Calls of operators, trainers and replicas.
CALLS: Final = (
    CallRow(events.AcquirePolicy, leases.acquire, LeaseAnswer),
    CallRow(events.RenewLease, leases.renew, LeaseAnswer),
    CallRow(events.ReleasePolicy, leases.release),
    CallRow(events.DescribeTarget, _describe_target),
    CallRow(
        events.BeginTransfer, push.begin, BeginAnswer, ("require", "timeout", "protocol_revision")
    ),
    CallRow(events.AwaitTransfer, _await_transfer, Transfer),
    CallRow(events.AbortTransfer, _abort_transfer),
    CallRow(events.SleepRollouts, sleeps.sleep_rollouts, SleepAnswer, ("when_running",)),
    CallRow(events.WakeRollouts, sleeps.wake_rollouts, SleepAnswer),
    CallRow(
        events.Register,
        membership.register,
        RegisterAnswer,
        ("protocol_revision", "held_versions"),
    ),
    CallRow(events.ReportCheckpoint, base_binding.report_checkpoint),
    CallRow(
        events.Heartbeat,
        membership.heartbeat,
        HeartbeatAnswer,
        ("staged_transfer_ids", "held_versions"),
    ),
    CallRow(events.Leave, membership.leave),
    CallRow(events.Rollback, rollback.ask, RollbackAnswer),
    CallRow(events.Pin, retention.pin),
    CallRow(events.Retire, retention.retire_version),
    CallRow(events.SetRetention, retention.set_retention, RetentionAnswer),
    CallRow(events.ForgetPolicy, retention.forget, RetiredAnswer),
    CallRow(events.Cordon, out_of_service.take_out),
    CallRow(events.Uncordon, out_of_service.uncordon, UncordonAnswer),
    CallRow(events.Drain, out_of_service.drain),
    CallRow(events.CancelTransfer, _cancel_transfer),
    CallRow(events.SleepReplica, sleeps.sleep_replica, unread=("when_running",)),
    CallRow(events.WakeReplica, sleeps.wake_replica),
    CallRow(events.RebindBase, base_binding.rebind, RetiredAnswer),
)
#: Rules by the kind of event.
RULES: Final[dict[type[events.Event], Callable[[Change, Any], None]]] = {
    **{row.call: row.rule for row in CALLS},
    events.Tick: _tick,
    events.CallerGone: _forget_caller,
    events.ReferenceKnown: base_binding.note_reference,
    events.FitChecked: preflight.fit_checked,
    events.RankAttends: _rank_attends,
    events.RankGone: lifecycle.rank_gone,
    events.RanksHeard: stalls.heard,
    events.RankPrepared: lifecycle.rank_prepared,
    events.RankLoadDue: lifecycle.rank_load_due,
    events.RankStaged: lifecycle.rank_staged,
    events.RankFailed: lifecycle.rank_failed,
    events.JoinAnswered: _join_answered,
    events.LoadAnswered: lifecycle.load_answered,
    events.CommitAnswered: _commit_answered,
    events.RetireAnswered: retention.retire_answered,
    events.DiscardAnswered: _discard_answered,
    events.RefuseAnswered: out_of_service.order_answered,
    events.SleepAnswered: sleeps.sleep_answered,
    events.WakeAnswered: sleeps.wake_answered,
    events.LookedUp: catch_up.looked_up,
    events.VersionDescribed: adoption.described,
}
