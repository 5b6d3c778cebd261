"""Leases: one owner a policy, a fencing token that only grows, expiry.

Who owns a policy is durable, and so is the end of a lease: before it is told to anybody. A
coordinator that starts again grants each lease its whole time anew, by the same token. So an
owner that lives goes on, and one that died meanwhile is waited for once.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft_rl.containers import replace
from weft_rl.contract.errors import (
    CapacityError,
    InvalidNameError,
    InvalidRequestError,
    PolicyOwnedError,
)
from weft_rl.contract.names import BASE_POLICY, check_adapter_name, check_name
from weft_rl.coordinator.decisions.policies import numbering
from weft_rl.coordinator.decisions.policies.republishing import publish_again_version
from weft_rl.coordinator.decisions.replicas import pool_identity
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.change import Change
from weft_rl.coordinator.decisions.state.effects import (
    EmptyAnswer,
    EventKind,
    LeaseAnswer,
    SaveLeaseEnded,
    SavePolicy,
)
from weft_rl.coordinator.decisions.state.pool import (
    MAX_NUMBER,
    NOBODY_HOLDS_IT,
    Lease,
    Policy,
    PoolState,
    live_lease,
    require_lease,
)
from weft_rl.coordinator.decisions.state.values import Failure, PolicyKind
from weft_rl.coordinator.decisions.transfers import abort


def acquire(change: Change, event: events.AcquirePolicy) -> None:
    """Grant the lease of a free policy, or renew the caller's own and answer with it again."""
    _check_names(event)
    policy = change.state.policies.get(event.policy)
    policy = policy or numbering.new_policy(change.state, event.policy, event.kind)
    pool_identity.check(change, f"trainer {event.trainer_id!r}", event.pool_id)
    numbering.check_told(policy, event)
    lease = live_lease(policy, change.now)
    if lease and lease.is_outdated(event.last_fencing_token):
        lease = None
    elif lease and (lease.trainer_id, lease.session_id) != (event.trainer_id, event.session_id):
        if (lease.trainer_id, lease.fencing_token) != (event.trainer_id, event.displaced_token):
            raise _owned(policy, lease, change.now, event.trainer_id)
        lease = None
    if lease and lease.fencing_token < event.last_fencing_token <= MAX_NUMBER:
        # A lost catalog gave the session a larger token, of which its earlier call did not know
        # yet: a session's tokens only grow.
        lease = None
    if policy.owner != event.owner and (refusal := _too_many(change.state, event.owner)):
        raise refusal
    if lease is None:
        _expire(change, policy, event)
        policy = numbering.trainer_asks(change, policy, event)
        token = numbering.next_token(policy, event.last_fencing_token)
        lease = Lease(event.trainer_id, event.session_id, token, 0.0, event.process)
        policy = replace(policy, fencing_token=token, owner=event.owner)
        change.announce(
            EventKind.LEASE_ACQUIRED, event.policy, f"by trainer {event.trainer_id}, token {token}"
        )
    _answer(change, event.ticket, policy, lease)


def _too_many(state: PoolState, owner: str) -> CapacityError | None:
    limit = state.settings.max_policies_per_trainer
    if sum(policy.owner == owner for policy in state.policies.values()) < limit:
        return None
    return CapacityError(
        f"trainer {owner!r} has {limit} policies, as many as one may have. End some (weft forget "
        "POLICY), or start the coordinator with a larger --max-policies-per-trainer",
        reason="TOO_MANY_POLICIES",
        metadata={"limit": str(limit)},
    )


def _check_names(event: events.AcquirePolicy) -> None:
    check_name(event.trainer_id, "trainer")
    if not 1 <= len(event.session_id) <= 128:
        raise InvalidRequestError("session_id must have 1 to 128 characters")
    if event.policy != BASE_POLICY:
        check_adapter_name(event.policy)
    if (event.policy == BASE_POLICY) != (event.kind is PolicyKind.BASE):
        raise InvalidNameError(
            f"policy {event.policy!r} cannot be of kind {event.kind.name}: 'base', and only it, "
            "is the base model's weights"
        )


def explain_owner(policy: Policy, lease: Lease, now: float) -> str:
    """Explain who owns a policy, and until when, for messages."""
    return (
        f"policy {policy.name!r} is owned by trainer {lease.trainer_id!r} ({lease.process}); its "
        f"lease expires in {lease.expires_at - now:.1f} s unless renewed"
    )


def _owned(policy: Policy, lease: Lease, now: float, asking: str) -> PolicyOwnedError:
    left = lease.expires_at - now
    advice = "end that trainer, wait until its lease has expired, or push under another name"
    if asking == lease.trainer_id:  # its own former process, or another that was started as it
        advice = "wait for that, or take it over"
    return PolicyOwnedError(
        f"{explain_owner(policy, lease, now)}: {advice}",
        metadata={
            "holder": lease.trainer_id,
            "expires_in_seconds": f"{left:.3f}",
            "fencing_token": str(lease.fencing_token),
            "num_renewals": str(lease.num_renewals),
            "host": lease.process.host,
            "host_key": lease.process.host_key,
            "pid": str(lease.process.pid),
            "start_time": f"{lease.process.start_time:.3f}",
        },
    )


def renew(change: Change, event: events.RenewLease) -> None:
    """Extend a lease that is still live."""
    if event.pool_id:
        pool_identity.check(change, f"this trainer of {event.policy!r}", event.pool_id)
    policy, lease = require_lease(
        change.state, event.policy, event.fencing_token, change.now, event.session_id
    )
    _answer(change, event.ticket, policy, lease)


def _answer(change: Change, ticket: int, policy: Policy, lease: Lease) -> None:
    seconds, known = change.state.settings.lease_seconds, lease.time_to_live
    lease = replace(
        lease,
        expires_at=change.now + seconds,
        num_renewals=lease.num_renewals + 1,
        time_to_live=seconds,
    )
    policy = replace(policy, lease=lease)
    change.put_policy(policy)
    if seconds != known:  # it is new, or its owner was told another time by a former coordinator
        change.emit(SavePolicy(policy))
    lost = publish_again_version(change.state, policy.name)
    numbers = policy.last_version, lost
    change.reply(ticket, LeaseAnswer(policy.name, lease, *numbers, change.state.pool_id))


def release(change: Change, event: events.ReleasePolicy) -> None:
    """Give a lease back; one that is not live any more is no error."""
    policy = change.state.policies.get(event.policy)
    lease = live_lease(policy, change.now) if policy else None
    is_own = event.session_id in ("", lease.session_id) if lease else False
    if policy and lease and is_own and lease.fencing_token == event.fencing_token:
        _put_free(change, policy)
        change.announce(EventKind.LEASE_RELEASED, policy.name, f"by trainer {lease.trainer_id}")
        _abort_transfers(change, policy.name, "its trainer gave the lease back")
        _drop_unused(change, policy.name)
    change.reply(event.ticket, EmptyAnswer())


def end_overdue(change: Change, name: str) -> None:
    """End the lease of a policy that ``is_overdue``.

    Called before anybody is told that it ran out: a coordinator that started from the catalog
    meanwhile would take the token for valid again.
    """
    _expire(change, change.state.policies[name])


def expire_leases(change: Change) -> None:
    """Drop leases that ran out, and abort the pushes under them."""
    for policy in list(change.state.policies.values()):
        if policy.lease and policy.lease.expires_at <= change.now:
            _expire(change, policy)
        elif policy.lease is None and policy.last_version <= change.state.number_floor:
            _drop_unused(change, policy.name)  # of before a restart


def _expire(
    change: Change, policy: Policy, displaced_by: events.AcquirePolicy | None = None
) -> None:
    """End a lease that ran out, or that the next process of its trainer takes over."""
    lease = policy.lease
    if lease is None:
        return
    if displaced_by is not None and change.now < lease.expires_at:
        why = f"trainer {lease.trainer_id!r} took its lease over: {displaced_by.process}"
    else:
        why = f"the lease of trainer {lease.trainer_id!r} expired"
    is_taken = displaced_by is not None and displaced_by.session_id != lease.session_id
    holder = {"holder": displaced_by.trainer_id} if displaced_by else {}
    end(change, policy, why, holder if is_taken else NOBODY_HOLDS_IT)


def end(
    change: Change, policy: Policy, why: str, metadata: Mapping[str, str] | None = None
) -> None:
    """End a lease, and abort the pushes under it.

    Args:
        metadata: Metadata of their failure.
    """
    _put_free(change, policy)
    change.announce(EventKind.LEASE_RELEASED, policy.name, why)
    _abort_transfers(change, policy.name, why, metadata)
    _drop_unused(change, policy.name)


def _drop_unused(change: Change, name: str) -> None:
    """Forget a policy that never had a version: many such names would slow down everybody."""
    policy = change.state.policies.get(name)
    if policy is not None and numbering.is_unused(change.state, policy):
        change.drop_policy(policy)


def _put_free(change: Change, policy: Policy) -> None:
    """Free a policy of its owner; one that was forgotten, and got no version since, stays so."""
    free = replace(policy, lease=None)
    change.emit(SaveLeaseEnded(free.name))
    if free.forgotten:
        change.put_away(free)
    else:
        change.put_policy(free)


def _abort_transfers(
    change: Change, policy: str, why: str, metadata: Mapping[str, str] | None = None
) -> None:
    text = f"the push of {policy!r} was given up: {why}"
    failure = Failure("LEASE_FENCED", text, dict(metadata or {}))
    for transfer in list(change.state.transfers.values()):
        is_leased = transfer.purpose.fencing_token is not None and transfer.policy == policy
        if is_leased and transfer.uncommitted:
            abort.abort(change, transfer, failure)
