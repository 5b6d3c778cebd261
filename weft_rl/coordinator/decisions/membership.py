"""Membership of replicas: registration, heartbeats, loss, leaving; and their readiness."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import cast

from weft_rl.containers import replace
from weft_rl.contract.backends import BACKENDS
from weft_rl.contract.errors import (
    InvalidNameError,
    InvalidRequestError,
    NotReadyError,
    RequestConflictError,
)
from weft_rl.contract.names import BASE_POLICY, PolicyVersion, check_name, name_in_the_way
from weft_rl.contract.replica_report import AbsentPolicy, ReplicaReport
from weft_rl.coordinator.decisions.policies import numbering
from weft_rl.coordinator.decisions.recovery import catch_up
from weft_rl.coordinator.decisions.replicas import (
    base_binding,
    out_of_service,
    pool_identity,
    sleeps,
)
from weft_rl.coordinator.decisions.replicas.out_of_service import (
    adopt,
    with_enforced_order,
)
from weft_rl.coordinator.decisions.state import events, replica_state
from weft_rl.coordinator.decisions.state.change import Change
from weft_rl.coordinator.decisions.state.effects import (
    CloseChannel,
    EmptyAnswer,
    EventKind,
    HeartbeatAnswer,
    RegisterAnswer,
)
from weft_rl.coordinator.decisions.state.pool import PoolState, registered_replica
from weft_rl.coordinator.decisions.state.replica import Replica
from weft_rl.coordinator.decisions.state.replica_state import (
    eligible_targets,
    explain_base_mismatch,
    is_routable,
    missing_versions,
    shared_backends,
)
from weft_rl.coordinator.decisions.state.values import Failure, Phase
from weft_rl.coordinator.decisions.transfers import abort, preflight, regrouping, stalls
from weft_rl.coordinator.decisions.transfers.abort import tell_at_registration
from weft_rl.coordinator.decisions.transfers.lifecycle import note_commit_answer


def register(change: Change, event: events.Register) -> None:
    """Take a replica into the pool, or note its new process."""
    old = change.state.replicas.get(event.replica_id)
    _check_registration(change.state, event, old, change.now)
    pool_identity.check(change, f"replica {event.replica_id!r}", event.pool_id)
    numbering.check_registration(change.state, event)
    if old and old.incarnation != event.incarnation:
        _remove(change, old, "another process of it registered")
        old = None
    if old and old.address != event.address:
        change.emit(CloseChannel(old.address))
    base_binding.bind(change, event.capabilities)
    report = event.report
    replica = Replica(
        replica_id=event.replica_id,
        incarnation=event.incarnation,
        address=event.address,
        http_url=event.http_url,
        model_name=event.model_name,
        capabilities=event.capabilities,
        vector=report.version_vector,
        last_heard=change.now,
        report=report,
        dirty_reason=report.dirty_reason or (old.dirty_reason if old else ""),
        announced=old.announced if old else None,
        routed=old.routed if old else False,
        suspect=old.suspect if old else None,
        retained=report.retained_base_versions,
        undoable=report.undo_base_versions,
        spilled=report.spilled_versions,
        drain=out_of_service.updated_drain(old, report.drain, change.now),
        checkpoint=event.checkpoint,
        refusing=report.refusing,
        asleep=report.sleep or (old.asleep if old else None),
        sleep_call_until=old.sleep_call_until if old else float("-inf"),
        worked_at=_worked_at(change, old, report),
    )
    numbering.replica_registers(change, event)
    numbering.versions_heard(change, replica, event.held)
    replica = change.put_replica(
        replica_state.with_counted_versions(change.state, replica, event.held, complete=True)
    )
    base_binding.note_checkpoint(change, replica)
    if report.base_as_started:
        base_binding.note_as_started(change, replica)
    sleeps.adopt(change, event)
    adopt(change, event)
    answer = RegisterAnswer(
        change.state.settings.heartbeat_seconds,
        not preflight.are_described(change.state, [replica]),
        change.state.generation,
        change.state.coordinator_id,
        change.state.order_number,
        change.state.out_of_service.get(replica.replica_id),
        change.state.epoch_counter,
        change.state.pool_id,
    )
    change.reply(event.ticket, answer)
    tell_at_registration(change, replica)


def _check_registration(
    state: PoolState, event: events.Register, old: Replica | None, now: float
) -> None:
    check_name(event.replica_id, "replica")
    given = event.capabilities.base_fingerprint
    if not event.incarnation or not event.address or not given:
        raise InvalidRequestError("incarnation, address and base_fingerprint must not be empty")
    base_binding.check_base(state, event.replica_id, event.capabilities, now)
    check_free(state, event.replica_id, event.incarnation, now)
    _check_backends(state, event)
    _check_served_names(state, event)


def check_free(state: PoolState, replica_id: str, incarnation: str, now: float) -> None:
    """Refuse the name of a replica whose process lives.

    Raises:
        InvalidNameError: No replica can be named so.
        RequestConflictError: Another process of that name was heard just now.
    """
    check_name(replica_id, "replica")
    old = state.replicas.get(replica_id)
    if old is None or old.incarnation == incarnation or old.lost:
        return
    silence, needed = now - old.last_heard, 2 * state.settings.heartbeat_seconds
    if silence < needed:
        raise RequestConflictError(
            f"a live replica is named {replica_id!r}: it was heard {silence:.1f} s ago at "
            f"{old.address}. Give this one another name (--replica-id), or wait until the other "
            f"is silent for {needed:.0f} s",
            metadata={"silent_seconds": f"{needed:g}"},
        )


def _check_served_names(state: PoolState, event: events.Register) -> None:
    """Refuse a replica whose server has the name of an adapter of this pool.

    It could never serve that adapter: a typed refusal now, rather than a replica that is never
    ready.
    """
    pushed = {t.policy for t in state.transfers.values() if t.version and not t.replica_id}
    for policy in sorted(state.policies.values(), key=lambda policy: policy.name):
        if policy.name == BASE_POLICY or not (policy.served_version or policy.name in pushed):
            continue
        name = name_in_the_way(policy.name, event.capabilities.served_names)
        if name:
            raise InvalidNameError(
                f"replica {event.replica_id!r} has the name {name!r} for its base model or for an "
                f"adapter from a file. This pool serves the adapter {policy.name!r}: start the "
                "replica with another --served-model-name or --lora-modules",
                metadata={"policy": policy.name, "name": name},
            )


def _check_backends(state: PoolState, event: events.Register) -> None:
    """Refuse a replica without the backend that the pool's weights move over: pushes would
    fail, or silently take a slower way."""
    offered = event.capabilities.backends
    others = [r for r in eligible_targets(state) if r.replica_id != event.replica_id]
    shared = shared_backends(others)
    # A replica on another host takes the next backend, and so do all.
    used = [name for name in shared if not BACKENDS[name].within_host][:1] or shared[:1]
    if not offered or not set(used) <= set(offered):
        raise NotReadyError(
            f"replica {event.replica_id!r} offers the side-group backends "
            f"{', '.join(offered) or 'none'}, and this pool's weights move over "
            f"{used[0] if used else 'one that is named'}: give it an accelerator, or start all "
            "replicas with --backend stream",
            reason="BACKEND_MISMATCH",
        )


def heartbeat(change: Change, event: events.Heartbeat) -> None:
    """Note that a replica lives and what it serves."""
    replica = registered_replica(change.state, event.replica_id, event.incarnation)
    report = event.report
    numbering.check_report(change.state, event.replica_id, report, event.held)
    told = report.version_vector
    is_new = told != replica.vector
    if not is_new and told.revision == replica.vector.revision:
        # One copy: it is compared and listed more often than it changes.
        report = replace(report, version_vector=replica.vector)
    replica = replace(
        replica,
        last_heard=change.now,
        report=report,
        unheard_reason="",
        spilled=report.spilled_versions,
        drain=out_of_service.updated_drain(replica, report.drain, change.now),
        # One that was on its way while it fell asleep says that it is awake: that it woke, only
        # its answer tells.
        asleep=report.sleep or replica.asleep,
        worked_at=_worked_at(change, replica, report),
    )
    replica = with_enforced_order(change.state, replica, report.refusing, report.order_number)
    # While it loads in place its weights are mixed, as they must be.
    loading = abort.is_loading(change.state, replica.replica_id)
    # A heartbeat that was on its way during a commit tells what was served before.
    believed_from = replica.order_answered_at + change.state.settings.heartbeat_seconds / 2
    is_believed = change.now > believed_from
    if is_believed:
        replica = replace(
            replica.with_vector(report.version_vector),
            retained=report.retained_base_versions,
            undoable=report.undo_base_versions,
            dirty_reason=replica.dirty_reason if loading else report.dirty_reason,
        )
        if is_new or event.held:
            numbering.versions_heard(change, replica, event.held)
        complete = event.held_versions_complete
        replica = replica_state.with_counted_versions(
            change.state, replica, event.held, complete=complete
        )
    else:
        replica = replica_state.with_counted_versions(change.state, replica)
    change.put_replica(replica)
    if is_believed and report.base_as_started:
        base_binding.note_as_started(change, replica)
    catch_up.restore_or_discard(change, replica, event.staged)
    answer = _heartbeat_answer(change, replica)
    undecided_versions = replica_state.undecided_versions(change.state, replica)
    wanted = undecided_versions or replica.mistaken or (event.held and not is_believed)
    answer = replace(answer, held_versions_wanted=bool(wanted))
    # Mixed weights count at once, even where the rest of the report is not believed yet.
    whole = loading or not report.dirty_reason
    change.reply(event.ticket, replace(answer, ready=answer.ready and whole))


def _worked_at(change: Change, replica: Replica | None, report: ReplicaReport) -> float:
    """Return the time at which a replica's work last made progress. A gap in its heartbeats is
    not held against it: the whole process may have been stopped."""
    worked_at = replica.worked_at if replica else float("-inf")
    if report.work is None:
        return worked_at
    gap = change.now - replica.last_heard if replica else 0.0
    is_long = gap > 2 * change.state.settings.heartbeat_seconds
    silence = max(0.0, report.work.silence_seconds - gap * is_long)
    return max(worked_at, change.now - silence)


def _heartbeat_answer(change: Change, replica: Replica) -> HeartbeatAnswer:
    state, name = change.state, replica.replica_id
    ready = is_routable(state, replica)
    # A routable replica lacks nothing: ten thousand policies are not compared again.
    lacking = () if ready else missing_versions(state, replica)
    return HeartbeatAnswer(
        ready=ready,
        drain=replica.drain.note(change.now) if replica.drain else None,
        in_transfer=any(name in transfer.occupied for transfer in state.transfers.values()),
        pinned_base_versions=state.pinned_bases,
        order_number=state.order_number,
        coordinator_generation=state.generation,
        lacking=tuple(map(PolicyVersion.parse, lacking[:_MAX_LACKING])),
        lacking_more=len(lacking) > _MAX_LACKING,
        base_doubt="" if ready else explain_base_mismatch(state, replica),
        absent_policies=_absent(state),
        out_of_service=state.out_of_service.get(name),
        epoch=state.epoch_counter,
        pool_id=state.pool_id,
    )


# Versions that a replica lacks, and is told of.
_MAX_LACKING = 4096
#: Policies that are lost, and forgotten ones, that replicas are told of with each heartbeat.
MAX_ABSENT = 64


def _absent(state: PoolState) -> tuple[AbsentPolicy, ...]:
    """Return policies that the pool no longer serves: the newest lost and newest forgotten ones."""
    lost = [
        AbsentPolicy(
            name,
            state.lost[name],
            f"{name}@{state.lost[name]} is lost: no replica in contact holds it, and nobody owns "
            f"it; push it again, or end it (weft forget {name})",
        )
        for name in _newest(state.lost)
        if name != BASE_POLICY
    ]
    forgotten = [
        AbsentPolicy(name, state.forgotten[name].last_version, f"an operator forgot {name}")
        for name in _newest(state.forgotten)
    ]
    return (*lost, *forgotten)


def _newest(by_policy: Mapping[str, object]) -> Iterable[str]:
    # With each heartbeat: not all are looked at.
    return islice(reversed(cast("dict[str, object]", by_policy)), MAX_ABSENT)


def leave(change: Change, event: events.Leave) -> None:
    """Forget a replica that leaves; leaving twice is no error."""
    replica = change.state.replicas.get(event.replica_id)
    if replica and replica.incarnation == event.incarnation:
        _remove(change, replica, "it left the pool")
        sleeps.end(change, event.replica_id)
        is_drained = replica.drain is not None
        kind = EventKind.REPLICA_LEFT if is_drained else EventKind.REPLICA_LOST
        change.announce(kind, replica.replica_id, "it left the pool")
    change.reply(event.ticket, EmptyAnswer())


def forgive_own_sleep(change: Change, gap: float) -> None:
    """Grant replicas and owners of leases as much time as the coordinator's own ticks missed.

    Before any event is decided: the first after such a gap may be what the gap has kept waiting.

    Args:
        gap: Time that was missed, in seconds; see ``PoolState.missed_seconds``.
    """
    change.state = replace(change.state, tick_at=change.now)
    stalls.forgive(change, gap)
    for replica in list(change.state.replicas.values()):
        # A replica that reports its work keeps the silence that was seen before, or a coordinator
        # that stops again and again would never give it up.
        worked_at = replica.worked_at + gap if replica.work else change.now
        last_heard = replica.last_heard + gap
        change.put_replica(replace(replica, last_heard=last_heard, worked_at=worked_at))
    for policy in list(change.state.policies.values()):
        if policy.lease is not None:
            lease = replace(policy.lease, expires_at=policy.lease.expires_at + gap)
            change.put_policy(replace(policy, lease=lease))


def find_lost(change: Change) -> None:
    """Give up replicas that have been silent for too long."""
    settings = change.state.settings
    for replica in list(change.state.replicas.values()):
        silence = change.now - replica.last_heard
        if replica.lost and silence > settings.forget_after_seconds:
            change.drop_replica(replica.replica_id)
        elif not replica.lost and silence > settings.lost_after_seconds:
            change.put_replica(replace(replica, lost=True))
            change.emit(CloseChannel(replica.address))
            _end_its_transfers(change, replica, f"no heartbeat for {silence:.1f} s")


def _remove(change: Change, replica: Replica, why: str) -> None:
    change.drop_replica(replica.replica_id)
    change.emit(CloseChannel(replica.address))
    _end_its_transfers(change, replica, why)


def _end_its_transfers(change: Change, replica: Replica, why: str) -> None:
    """End a replica's part in its transfers; committed ones continue, others may be aborted."""
    failure = abort.peer_gone(replica.replica_id, why)
    for transfer in list(change.state.transfers.values()):
        concerned = {*transfer.targets, transfer.source, transfer.replica_id}
        if replica.replica_id not in concerned:
            continue
        if transfer.phase is Phase.COMMITTING:
            lost = Failure(failure.reason, failure.message, failure.metadata)
            note_commit_answer(change, transfer, replica.replica_id, lost)
        elif transfer.uncommitted:
            regrouping.lose_replica(change, transfer, replica.replica_id, failure)
