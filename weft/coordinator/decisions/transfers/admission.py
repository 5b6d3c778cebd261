"""Begin: from a trainer's request to a version, a membership and a group.

A begun transfer waits, in the order of begin, until there are enough replicas,
preflight has passed, and none of its replicas is occupied by another transfer: of those that
are ready. One that has still to catch up takes part if it is free, else it gets the version
afterwards; a clone that is not committed does not keep a replica from a push, which ends it
(see interruptions.py). A policy changes once at a time, even where the replicas concerned differ.
A transfer that waits for its turn holds back those behind it on the same replicas, so that
trainers alternate; one that waits for replicas, or for them to hear what is pinned, holds
back nobody.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.contract.adapter_config import parse_config
from weft.contract.errors import (
    CapacityError,
    InvalidAdapterError,
    InvalidRequestError,
    NotReadyError,
    PeerUnavailableError,
    RequestConflictError,
    TransferTimeoutError,
    WeftError,
)
from weft.contract.frozen import replace
from weft.coordinator.decisions import events
from weft.coordinator.decisions.change import Change
from weft.coordinator.decisions.effects import (
    BeginAnswer,
    CallJoin,
    OpenGroup,
    SaveEpoch,
    SavePolicy,
    SaveVersion,
)
from weft.coordinator.decisions.policies import rollback
from weft.coordinator.decisions.policies.leases import require_lease
from weft.coordinator.decisions.recovery import clones, interruptions
from weft.coordinator.decisions.recovery.needs import is_changing, is_joining, obeys_pins
from weft.coordinator.decisions.replicas.replica_state import base_targets, eligible_targets
from weft.coordinator.decisions.state.pool import Lease, Policy, PoolState
from weft.coordinator.decisions.state.records import record_of
from weft.coordinator.decisions.state.replica import Replica
from weft.coordinator.decisions.state.transfer import Group, Member, Transfer
from weft.coordinator.decisions.state.values import Phase, PolicyKind, Purpose, VersionState
from weft.coordinator.decisions.transfers import abort, preflight, reform, staging, stalls
from weft.coordinator.decisions.transfers.turns import Turns

#: Transfers of one policy that may be under way or wait.
MAX_TRANSFERS_PER_POLICY = 16
_FOR_REPLICAS = "replicas"
_FOR_JOINING = "replicas that are catching up"
_FOR_WHOM = (_FOR_REPLICAS, _FOR_JOINING)
_FOR_PINS = " to hear what is pinned"


def begin(change: Change, event: events.BeginTransfer) -> None:
    """Take a push in, or answer the one that this request id already made."""
    try:
        policy, lease = require_lease(
            change.state, event.policy, event.fencing_token, change.now, event.session_id
        )
        if not _answer_again(change, event, lease):
            _check(change.state, event, policy)
            change.put_transfer(_new_transfer(change.now, event, policy, lease))
    except WeftError as error:
        change.refuse([event.ticket], error)


def _answer_again(change: Change, event: events.BeginTransfer, lease: Lease) -> bool:
    state = change.state
    for known in (*state.transfers.values(), *state.history.values()):
        if (known.trainer_id, known.request_id) == (lease.trainer_id, event.request_id):
            _check_same(event, known.policy, known.layout.digest)
            if known.phase is Phase.WAITING:
                tickets = (*known.begin_tickets, event.ticket)
                change.put_transfer(replace(known, begin_tickets=tickets))
            else:
                group = state.groups.get(known.group_id) if _open(known) else None
                change.reply(event.ticket, _answer(known, group))
            return True
    record = event.recorded
    if record is None or record.trainer_id != lease.trainer_id:
        return False
    _check_same(event, record.version.policy, record.layout_digest)
    change.reply(event.ticket, BeginAnswer(record.transfer_id, record.version, 0, (), None))
    return True


def _open(transfer: Transfer) -> bool:
    return transfer.phase < Phase.COMMITTED


def _check_same(event: events.BeginTransfer, policy: str, layout_digest: bytes) -> None:
    if (policy, layout_digest) != (event.policy, event.layout_digest):
        raise RequestConflictError(
            f"request id {event.request_id!r} was used for a push of {policy!r} with "
            f"{'the same' if layout_digest == event.layout_digest else 'another'} layout: "
            "a new push needs a new id"
        )


def _answer(transfer: Transfer, group: Group | None) -> BeginAnswer:
    return BeginAnswer(
        transfer.transfer_id,
        transfer.policy_version,
        transfer.ids.nonce,
        transfer.targets,
        group,
    )


def _check(state: PoolState, event: events.BeginTransfer, policy: Policy) -> None:
    if not 1 <= len(event.request_id) <= 128:
        raise InvalidRequestError("request_id must have 1 to 128 characters")
    if policy.kind is PolicyKind.ADAPTER and event.adapter is None:
        raise InvalidAdapterError(f"a push of the adapter {policy.name!r} needs an adapter spec")
    if policy.kind is PolicyKind.BASE and event.adapter is not None:
        raise InvalidAdapterError("a push of the base has no adapter spec")
    if event.adapter is not None:
        parse_config(event.adapter.config_json)
    preflight.check_names(state, policy.name)
    if event.layout is None:
        raise NotReadyError(
            f"no manifest of layout {event.layout_digest.hex()[:12] or '(empty)'} is known: "
            "call PutManifest first",
            reason="MANIFEST_UNKNOWN",
        )
    under_way = sum(
        t.policy == policy.name and t.purpose is Purpose.PUSH for t in state.transfers.values()
    )
    if under_way >= MAX_TRANSFERS_PER_POLICY:
        raise CapacityError(
            f"{under_way} pushes of {policy.name!r} are under way or wait already",
            metadata={"num_transfers": str(under_way)},
        )


def _new_transfer(
    now: float, event: events.BeginTransfer, policy: Policy, lease: Lease
) -> Transfer:
    assert event.layout is not None
    return Transfer(
        ids=event.ids,
        request_id=event.request_id,
        policy=policy.name,
        kind=policy.kind,
        trainer_id=lease.trainer_id,
        session_id=lease.session_id,
        fencing_token=lease.fencing_token,
        layout=event.layout,
        adapter=event.adapter,
        min_replicas=max(1, event.min_replicas),
        require_all=event.min_replicas == 0,
        check_finite=event.check_finite,
        refuse_other_base=event.refuse_other_base,
        backend=event.backend,
        wanted_group_id=event.group_id,
        begin_at=now,
        deadline=event.deadline,
        answer_by=min(event.deadline, event.answer_by),
        begin_tickets=(event.ticket,),
    )


def admit(change: Change) -> None:
    """Give every waiting transfer whose time has come its version and group."""
    if all(t.phase is not Phase.WAITING for t in change.state.transfers.values()):
        return
    turns = Turns(change.state, change.now)
    # A base also goes to those that it would repair.
    takers = {
        PolicyKind.ADAPTER: eligible_targets(change.state),
        PolicyKind.BASE: base_targets(change.state),
    }
    for transfer in turns.waiting():
        if transfer.purpose is not Purpose.PUSH:
            take = rollback.admit if transfer.purpose is Purpose.ROLLBACK else clones.admit
            turns.take(take(change, transfer, turns))
            continue
        replicas = takers[transfer.kind]
        try:
            waits_for = _try(change, transfer, replicas, turns)
        except WeftError as error:
            change.refuse(transfer.begin_tickets, error)
            change.drop_transfer(transfer.transfer_id)
            continue
        if waits_for not in _FOR_WHOM and not waits_for.endswith(_FOR_PINS):
            turns.take(replica.replica_id for replica in replicas)
        if waits_for and waits_for != transfer.waits_for:
            change.put_transfer(replace(transfer, waits_for=waits_for))


def _try(change: Change, transfer: Transfer, replicas: Sequence[Replica], turns: Turns) -> str:
    """Start a transfer if it may; otherwise say what it waits for."""
    if change.now >= transfer.answer_by:
        raise _too_late(change.state, transfer, len(replicas))
    require_lease(change.state, transfer.policy, transfer.fencing_token, change.now)
    if len(replicas) < transfer.min_replicas or not change.state.reference_known:
        return _FOR_REPLICAS
    fits = preflight.fits(change, transfer, replicas)
    unheard = _unheard(change.state, transfer, replicas)
    waited_for = [r.replica_id for r in unheard if not is_joining(change.state, r)]
    if waited_for or len(unheard) == len(replicas):
        return ", ".join(waited_for or [r.replica_id for r in unheard]) + _FOR_PINS
    if turns.must_wait(replicas) or is_changing(change.state, transfer.policy):
        return "its turn"
    preflight.check_names(change.state, transfer.policy)  # some came while it waited
    left_out = {replica.replica_id for replica in unheard}
    free = [r for r in turns.free(replicas) if r.replica_id not in left_out]
    if len(free) < transfer.min_replicas:
        return _FOR_JOINING
    preflight.check_room(change.state, transfer, free)
    if not fits:
        return "preflight"
    interruptions.interrupt_on(change, {replica.replica_id for replica in free}, transfer)
    _start(change, transfer, free)
    return ""


def _unheard(state: PoolState, transfer: Transfer, replicas: Sequence[Replica]) -> list[Replica]:
    """Replicas that would drop what is pinned if they were brought this transfer now."""
    if transfer.kind is not PolicyKind.BASE or not state.pinned_bases:
        return []
    return [replica for replica in replicas if not obeys_pins(state, replica)]


def _too_late(state: PoolState, transfer: Transfer, num_replicas: int) -> WeftError:
    if transfer.waits_for == _FOR_REPLICAS or num_replicas < transfer.min_replicas:
        return PeerUnavailableError(
            f"{num_replicas} replicas are in contact and have described their base, the push "
            f"needs {transfer.min_replicas}; its time is up{_and_suspects(state)}",
            reason="POOL_EMPTY",
        )
    return TransferTimeoutError(f"the push's time was up while it waited for {transfer.waits_for}")


def _and_suspects(state: PoolState) -> str:
    """Who would be there, for people."""
    names = sorted(r.replica_id for r in state.replicas.values() if r.suspect and not r.lost)
    if not names:
        return ""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"; {names[0]} is suspect{more}: `weft status` says why"


def _start(change: Change, transfer: Transfer, replicas: Sequence[Replica]) -> None:
    tickets = transfer.begin_tickets
    policy = change.state.policies[transfer.policy]
    policy = replace(policy, last_version=policy.last_version + 1)
    change.put_policy(policy)
    group = _usable_group(change.state, transfer, replicas)
    is_new = group is None
    ready = [r.replica_id for r in replicas if not is_joining(change.state, r)]
    if group is None:
        group = _new_group(change, transfer, replicas)
    transfer = replace(
        transfer,
        phase=Phase.FORMING,
        version=policy.last_version,
        create_time=change.state.wall(change.now),
        group_id=group.group_id,
        epoch=group.epoch,
        targets=tuple(member.replica_id for member in group.members),
        required=frozenset(ready or [replica.replica_id for replica in replicas]),
        begin_tickets=(),
        admitted_at=change.now,
        deadline=min(transfer.deadline, change.now + change.state.settings.max_transfer_seconds),
    )
    change.put_transfer(transfer)
    change.emit(SavePolicy(policy), SaveVersion(record_of(transfer, VersionState.STAGING)))
    change.announce(
        "transfer_begun",
        transfer.transfer_id,
        f"{transfer.policy_version} by trainer {transfer.trainer_id} to "
        f"{len(transfer.targets)} replicas, epoch {group.epoch}, "
        f"{transfer.layout.total_bytes} bytes",
    )
    if is_new:
        _form(change, transfer, group)
    for ticket in tickets:
        change.reply(ticket, _answer(transfer, group))
    staging.prepare_if_complete(change, transfer)


def _members(replicas: Sequence[Replica]) -> tuple[Member, ...]:
    return reform.members_of(
        [(r.replica_id, r.incarnation, r.capabilities.num_receivers) for r in replicas]
    )


def _usable_group(
    state: PoolState, transfer: Transfer, replicas: Sequence[Replica]
) -> Group | None:
    """The group of the trainer's former push, if all of it is still there."""
    group = state.groups.get(transfer.wanted_group_id)
    if (
        group is not None
        and (group.trainer_id, group.session_id) == (transfer.trainer_id, transfer.session_id)
        and group.backend == transfer.backend
        and group.complete
        and group.members == _members(replicas)
    ):
        return group
    return None


def _new_group(change: Change, transfer: Transfer, replicas: Sequence[Replica]) -> Group:
    """A group in place of the trainer's old ones."""
    in_use = {t.group_id for t in change.state.transfers.values()}
    for old in list(change.state.groups.values()):
        if old.trainer_id == transfer.trainer_id and old.group_id not in in_use:
            abort.close_group(change, old.group_id, "a new group of its trainer replaced it")
    epoch = change.state.epoch + 1
    change.state = replace(change.state, epoch=epoch)
    change.emit(SaveEpoch(epoch))
    group = Group(
        transfer.ids.group_id,
        transfer.ids.group_secret,
        epoch,
        transfer.trainer_id,
        transfer.session_id,
        transfer.backend,
        _members(replicas),
    )
    change.put_group(group)
    return group


def _form(change: Change, transfer: Transfer, group: Group) -> None:
    change.emit(OpenGroup(group))
    for member in group.members:
        address = change.state.replicas[member.replica_id].address
        change.emit(
            CallJoin(transfer.transfer_id, member.replica_id, address, group, member.first_rank)
        )


def join_answered(change: Change, event: events.JoinAnswered) -> None:
    """A replica that cannot be told to join is gone."""
    transfer = change.state.transfers.get(event.transfer_id)
    if event.failure and transfer and transfer.phase is Phase.FORMING:
        if event.failure.reason == "DEADLINE":
            stalls.order_not_taken(change, transfer, event.replica_id, event.failure.message)
            return
        why = f"it could not be told to join: {event.failure.message}"
        failure = abort.peer_gone(event.replica_id, why)
        reform.lose_replica(change, transfer, event.replica_id, failure)
