"""BeginTransfer: from a trainer's request to a push that waits, or the one it made before."""

from __future__ import annotations

from weft_rl.containers.frozen import replace
from weft_rl.contract.adapter_config import parse_config
from weft_rl.contract.errors import (
    CapacityError,
    InvalidAdapterError,
    InvalidRequestError,
    NotReadyError,
    RequestConflictError,
    WeftError,
)
from weft_rl.contract.layout.runs import check_layout
from weft_rl.contract.layout.send_plan import check_send_plan
from weft_rl.contract.names import BASE_POLICY
from weft_rl.coordinator.decisions import events
from weft_rl.coordinator.decisions.effects import BeginAnswer
from weft_rl.coordinator.decisions.effects.change import Change
from weft_rl.coordinator.decisions.purposes.push import Push, begin_answer
from weft_rl.coordinator.decisions.state.pool import Lease, Policy, PoolState, require_lease
from weft_rl.coordinator.decisions.state.transfer import Transfer
from weft_rl.coordinator.decisions.state.values import AdapterSpec, Phase, PolicyKind
from weft_rl.coordinator.decisions.transfers import preflight

#: Transfers of one policy that may be under way or wait.
MAX_TRANSFERS_PER_POLICY = 16


def begin(change: Change, event: events.BeginTransfer) -> None:
    """Accept a push, or answer the one that this request id already made."""
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
        if (known.trainer_id, known.purpose.request_id) == (lease.trainer_id, event.request_id):
            _check_same(event, known.policy, known.layout.digest)
            if known.uncommitted and known.send_plan != event.send_plan:
                raise RequestConflictError(
                    f"request id {event.request_id!r} was used for a push with another send plan: "
                    "a new push needs a new id"
                )
            if known.phase is Phase.WAITING:
                tickets = (*known.begin_tickets, event.ticket)
                change.put_transfer(replace(known, begin_tickets=tickets))
            else:
                is_open = known.phase < Phase.COMMITTED
                group = state.groups.get(known.group_id) if is_open else None
                change.reply(event.ticket, begin_answer(known, group))
            return True
    record = event.recorded
    if record is None or record.trainer_id != lease.trainer_id:
        return False
    _check_same(event, record.version.policy, record.layout_digest)
    change.reply(event.ticket, BeginAnswer(record.transfer_id, record.version, 0, (), None))
    return True


def _check_same(event: events.BeginTransfer, policy: str, layout_digest: bytes) -> None:
    if (policy, layout_digest) != (event.policy, event.layout_digest):
        raise RequestConflictError(
            f"request id {event.request_id!r} was used for a push of {policy!r} with "
            f"{'the same' if layout_digest == event.layout_digest else 'another'} layout: "
            "a new push needs a new id"
        )


def _check(state: PoolState, event: events.BeginTransfer, policy: Policy) -> None:
    if not 1 <= len(event.request_id) <= 128:
        raise InvalidRequestError("request_id must have 1 to 128 characters")
    if policy.kind is PolicyKind.ADAPTER and event.adapter is None:
        raise InvalidAdapterError(f"a push of the adapter {policy.name!r} needs an adapter spec")
    if policy.kind is PolicyKind.BASE and event.adapter is not None:
        raise InvalidAdapterError("a push of the base has no adapter spec")
    if event.carries_runs and event.adapter is not None:
        raise InvalidRequestError("carries_runs is of pushes of the base; this is an adapter")
    if event.adapter is not None:
        parse_config(event.adapter.config_json)
        _check_base(state, event.adapter)
    preflight.check_names(state, policy.name)
    preflight.check_takes_bases(state, policy.name)
    if event.layout is None:
        raise NotReadyError(
            f"no manifest of layout {event.layout_digest.hex()[:12] or '(empty)'} is known: "
            "call PutManifest first",
            reason="MANIFEST_UNKNOWN",
        )
    if event.carries_runs and event.send_plan is not None:
        raise InvalidRequestError("a push has a send plan, or carries_runs, or neither; not both")
    if event.layout.manifest is not None:
        if event.carries_runs or event.send_plan is not None:
            check_layout(event.layout.manifest)
        if event.send_plan is not None:
            check_send_plan(event.send_plan, event.layout.manifest)
    under_way = sum(
        t.policy == policy.name and t.purpose.fencing_token is not None
        for t in state.transfers.values()
    )
    if under_way >= MAX_TRANSFERS_PER_POLICY:
        raise CapacityError(
            f"{under_way} pushes of {policy.name!r} are under way or wait already",
            metadata={"num_transfers": str(under_way)},
        )


def _check_base(state: PoolState, adapter: AdapterSpec) -> None:
    """Refuse an adapter that names a version of the base that never was.

    Raises:
        InvalidAdapterError: No such number was assigned.
    """
    trained_on, base = adapter.trained_on_base_version, state.policies.get(BASE_POLICY)
    newest = base.last_version if base else 0
    if trained_on is not None and trained_on > newest:
        raise InvalidAdapterError(
            f"the adapter is said to be trained on {BASE_POLICY}@{trained_on}, which never was: "
            f"the newest number of the base is {newest}; give base= the one that it was trained "
            "on",
            metadata={"trained_on_base_version": str(trained_on)},
        )


def _new_transfer(
    now: float, event: events.BeginTransfer, policy: Policy, lease: Lease
) -> Transfer:
    layout, plan = event.layout, event.send_plan
    assert layout is not None
    if plan is not None:
        layout = replace(layout, num_buckets=len(plan.buckets))
    return Transfer(
        ids=event.ids,
        purpose=Push(
            request_id=event.request_id,
            session_id=lease.session_id,
            fencing_token=lease.fencing_token,
            min_replicas=max(1, event.min_replicas),
            require_all=event.min_replicas == 0,
            check_finite=event.check_finite,
            refuse_other_base=event.refuse_other_base,
            carries_runs=event.carries_runs,
            wanted_group_id=event.group_id,
            answer_by=min(event.deadline, event.answer_by),
        ),
        policy=policy.name,
        kind=policy.kind,
        trainer_id=lease.trainer_id,
        layout=layout,
        send_plan=plan,
        adapter=event.adapter,
        backend=event.backend,
        backend_reason=event.backend_reason,
        trial_names=event.trial_names,
        begin_at=now,
        deadline=event.deadline,
        begin_tickets=(event.ticket,),
    )
