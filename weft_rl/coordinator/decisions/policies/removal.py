"""Removal: a policy ends at an operator's order. Its numbers stay, so that none is used again.

What was committed of it is retired at once: nobody can request it, and replicas drop it, also what
its bare name stands for, from memory and from their spill directories. A replica that was away
meanwhile is told when it is back. A trainer that pushes the name later begins anew, above the
numbers that were used.
"""

from __future__ import annotations

from weft_rl.containers.frozen import replace
from weft_rl.contract.errors import (
    NotReadyError,
    PolicyOwnedError,
    UnsupportedError,
    WeftError,
)
from weft_rl.contract.names import BASE_POLICY, PolicyVersion
from weft_rl.coordinator.decisions import events
from weft_rl.coordinator.decisions.effects import (
    EventKind,
    ForgetAnswer,
    SavePin,
    SavePolicy,
    SaveRetired,
)
from weft_rl.coordinator.decisions.effects.change import Change
from weft_rl.coordinator.decisions.policies import leases, retention
from weft_rl.coordinator.decisions.state.kept import unknown_policy
from weft_rl.coordinator.decisions.state.pool import Policy, PoolState, live_lease
from weft_rl.coordinator.decisions.state.values import Failure, Phase
from weft_rl.coordinator.decisions.transfers import abort


def forget(change: Change, event: events.ForgetPolicy) -> None:
    """Forget a policy; doing so twice is no error."""
    state, name = change.state, event.policy
    if name in state.forgotten:
        change.reply(event.ticket, ForgetAnswer(()))
        return
    policy = state.policies.get(name)
    try:
        if name == BASE_POLICY:
            raise UnsupportedError(
                "the base cannot be forgotten: push another, go back to what replicas were started "
                "with (weft rollback base --to 0), or stop all replicas and let go of the base "
                "model (weft base --rebind)"
            )
        if policy is None:
            raise unknown_policy(state, name)
        _check_free(state, policy, change.now, by_force=event.force)
    except WeftError as error:
        change.refuse([event.ticket], error)
        return
    why = "an operator forgot the policy"
    if policy.lease is not None:
        leases.end(change, policy, why)
    _end_transfers(change, name, why)
    left = change.state.policies.get(name)  # None where nothing was pushed since it was forgotten
    versions = _retire(change, left) if left is not None else ()
    change.reply(event.ticket, ForgetAnswer(versions))


def _check_free(state: PoolState, policy: Policy, now: float, *, by_force: bool) -> None:
    """Refuse to forget a policy that somebody is about to change.

    Raises:
        PolicyOwnedError: A trainer owns it, and force was not said.
        NotReadyError: ``TRANSFER_UNDER_WAY``.
    """
    lease = live_lease(policy, now)
    if lease is not None and not by_force:
        raise PolicyOwnedError(
            f"policy {policy.name!r} is owned by trainer {lease.trainer_id!r} ({lease.process}): "
            "end it first, or say --force, which ends its lease and its push; a trainer that goes "
            "on brings the policy back with its next push",
            metadata={"holder": lease.trainer_id},
        )
    for transfer in state.transfers.values():
        is_change = transfer.policy == policy.name and not transfer.replica_id
        if is_change and transfer.phase is Phase.COMMITTING:
            raise NotReadyError(
                f"replicas are switching to {transfer.policy_version}: ask again when they have",
                reason="TRANSFER_UNDER_WAY",
            )


def _end_transfers(change: Change, policy: str, why: str) -> None:
    """Abort the transfers that would change the policy.

    Repairs of replicas are not wanted any more, and end by that.
    """
    failure = Failure("TRANSFER_ABORTED", f"it was given up: {why}")
    for transfer in list(change.state.transfers.values()):
        if transfer.policy == policy and transfer.uncommitted and not transfer.replica_id:
            abort.abort(change, transfer, failure)


def _retire(change: Change, policy: Policy) -> tuple[PolicyVersion, ...]:
    state, name = change.state, policy.name
    versions = tuple(PolicyVersion(name, number) for number in policy.versions)
    bare = Policy(name, policy.kind, policy.last_version, policy.fencing_token, forgotten=True)
    change.put_away(bare)
    change.next_epoch()
    change.emit(SavePolicy(bare))
    change.emit(*(SavePin(PolicyVersion(name, number), False) for number in policy.pinned))
    change.emit(*(SaveRetired(version, durable=True) for version in versions))
    change.state = replace(
        change.state,
        unserved={v: case for v, case in state.unserved.items() if v.policy != name},
        conflicts={v: found for v, found in state.conflicts.items() if v.policy != name},
        republish={k: wanted for k, wanted in state.republish.items() if k != name},
        in_question={k: asked for k, asked in state.in_question.items() if k != name},
        lost={k: number for k, number in state.lost.items() if k != name},
    )
    change.touched_all = True
    left = f"{len(versions)} versions were retired, numbers go on above {policy.last_version}"
    change.announce(EventKind.POLICY_FORGOTTEN, name, f"by an operator: {left}")
    retention.retire(change)
    return versions
