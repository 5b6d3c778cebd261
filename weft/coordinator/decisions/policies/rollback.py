"""Rollback: the pool serves a former version again, without a byte being sent.

The commit point is the same as a push's: one durable write, and only then are the
replicas told. It waits for its turn like a push, since it takes every replica.
"""

from __future__ import annotations

from weft.contract.errors import (
    BaseMismatchError,
    NotReadyError,
    TransferTimeoutError,
    WeftError,
)
from weft.contract.frozen import replace
from weft.contract.names import BASE_POLICY, PolicyVersion
from weft.coordinator.decisions import events
from weft.coordinator.decisions.change import Change
from weft.coordinator.decisions.effects import (
    CallSwitch,
    RollbackAnswer,
    SaveCommitted,
    SavePolicy,
    SaveRetired,
)
from weft.coordinator.decisions.policies.retention import known_policy, requestable, ways_back
from weft.coordinator.decisions.recovery import interruptions
from weft.coordinator.decisions.recovery.needs import is_changing, is_ready, obeys_pins
from weft.coordinator.decisions.replicas.checkpoints import difference
from weft.coordinator.decisions.replicas.replica_state import base_targets, eligible_targets
from weft.coordinator.decisions.state.pool import Policy, PoolState
from weft.coordinator.decisions.state.replica import Replica, holds
from weft.coordinator.decisions.state.transfer import Transfer
from weft.coordinator.decisions.state.values import (
    Failure,
    Layout,
    Phase,
    PolicyKind,
    Purpose,
)
from weft.coordinator.decisions.transfers.refusals import all_definite
from weft.coordinator.decisions.transfers.turns import Turns

#: Who does it, as a transfer's sender; no trainer can be named so.
OPERATOR = "(operator)"
_NOTHING = Layout(None, b"", 0, 0, 0)


def ask(change: Change, event: events.Rollback) -> None:
    """Take a rollback in, to wait for its turn; or refuse it at once."""
    version = PolicyVersion(event.policy, event.to_version)
    try:
        policy = known_policy(change.state, version, event.recorded)
        if policy.served_version == version.version:
            change.reply(event.ticket, RollbackAnswer(version, version.version, (), 0.0))
            return
        _targets(change.state, policy, version)
    except WeftError as error:
        change.refuse([event.ticket], error)
        return
    change.put_transfer(
        Transfer(
            ids=event.ids,
            request_id="",
            policy=policy.name,
            kind=policy.kind,
            trainer_id=OPERATOR,
            session_id="",
            fencing_token=-1,
            layout=_NOTHING,
            adapter=None,
            min_replicas=0,
            backend="",
            wanted_group_id="",
            begin_at=change.now,
            deadline=event.answer_by,
            answer_by=event.answer_by,
            version=version.version,
            begin_tickets=(event.ticket,),
            purpose=Purpose.ROLLBACK,
        )
    )


def _targets(state: PoolState, policy: Policy, version: PolicyVersion) -> list[Replica]:
    """The replicas that are to switch.

    Raises:
        NotReadyError: ``NOT_RETAINED``.
        BaseMismatchError: Back to base@0, which is not one model.
    """
    if policy.kind is PolicyKind.ADAPTER:
        if version.version not in requestable(state, policy):
            raise _not_retained(state, policy, f"{version} was retired, or is being")
        if version not in state.copies:
            raise _not_retained(state, policy, f"no replica in contact holds {version}")
        return [replica for replica in eligible_targets(state) if holds(replica, version)]
    replicas = base_targets(state)
    without = [r for r in replicas if not holds(r, version) and is_ready(state, r)]
    holding = [r for r in replicas if holds(r, version)]
    if not version.version:
        _check_one_base(state, holding)
    if without or not holding:
        who = without[0].replica_id if without else "no replica in contact"
        retains = "retains no copy of it" if without else "retains a copy of it"
        raise NotReadyError(
            f"the pool cannot go back to {version}: {who} {retains} ({_way_out(replicas)})",
            reason="NOT_RETAINED",
            metadata={"member": who} if without else {},
        )
    return holding


def _not_retained(state: PoolState, policy: Policy, why: str) -> NotReadyError:
    left = ", ".join(map(str, ways_back(state, policy))) or "nothing"
    return NotReadyError(
        f"{why}; {policy.name!r} can go back to {left}",
        reason="NOT_RETAINED",
    )


def _way_out(replicas: list[Replica]) -> str:
    """What helps where a base is not retained; those that load in place retain none."""
    if replicas and all(r.capabilities.loads_in_place for r in replicas):
        return "push the weights again: replicas that load in place retain none but the served one"
    return "start replicas with --retain-base 2 or more, or push the weights again"


def _check_one_base(state: PoolState, replicas: list[Replica]) -> None:
    """Each would go back to what it was started with: that must be one model.

    Raises:
        BaseMismatchError: It is not, or that is not known yet.
    """
    for replica in replicas:
        if why := difference(state, replica):
            raise BaseMismatchError(
                f"the pool cannot go back to base@0: {replica.replica_id}: {why}",
                metadata={"member": replica.replica_id},
            )


def admit(change: Change, transfer: Transfer, turns: Turns) -> set[str]:
    """Carry a rollback out if it is its turn, at the replicas that are free; as with a
    push, those that have still to catch up are not waited for, and clones end.

    Returns:
        The replicas that those behind it must wait for.
    """
    replicas = base_targets(change.state)
    everyone = {replica.replica_id for replica in replicas}
    try:
        if change.now >= transfer.answer_by:
            raise TransferTimeoutError("the rollback's time was up while it waited for its turn")
        if turns.must_wait(replicas) or is_changing(change.state, transfer.policy):
            return everyone
        policy = change.state.policies[transfer.policy]
        targets = turns.free(_targets(change.state, policy, transfer.policy_version))
        if policy.kind is PolicyKind.BASE and not (
            targets and all(obeys_pins(change.state, r) for r in targets)
        ):
            return set()
    except WeftError as error:
        change.refuse(transfer.begin_tickets, error)
        change.drop_transfer(transfer.transfer_id)
        return set()
    interruptions.interrupt_on(change, {replica.replica_id for replica in targets}, transfer)
    _commit(change, transfer, policy, targets)
    return everyone


def _commit(change: Change, transfer: Transfer, policy: Policy, targets: list[Replica]) -> None:
    ids = tuple(replica.replica_id for replica in targets)
    transfer = replace(
        transfer,
        phase=Phase.COMMITTING,
        create_time=change.state.wall(change.now),
        commit_at=change.now,
        replaced_version=policy.served_version,
        targets=ids,
        switching=frozenset(ids),
        incarnations={replica.replica_id: replica.incarnation for replica in targets},
        begin_tickets=(),
        await_tickets=transfer.begin_tickets,
    )
    change.put_transfer(transfer)
    _serve(change, policy, transfer.version)
    version = transfer.policy_version
    change.announce(
        "rolled_back", str(version), f"from {policy.served_version}; {len(ids)} replicas switch"
    )
    for replica in targets:
        change.emit(
            CallSwitch(
                transfer.transfer_id,
                replica.replica_id,
                replica.incarnation,
                replica.address,
                version,
            )
        )
    if not targets:  # an adapter that is spilled only: it is read from there
        end(change, transfer)


def _serve(change: Change, policy: Policy, version: int) -> None:
    """The durable part: from now on the policy stands for ``version``."""
    replaced = policy.served_version
    policy = replace(policy, served_version=version)
    if policy.kind is PolicyKind.BASE:
        policy = replace(policy, versions=(version,) if version else ())
        change.emit(SaveRetired(PolicyVersion(BASE_POLICY, replaced), durable=True))
        change.emit(SaveCommitted(PolicyVersion(BASE_POLICY, version)))
    change.put_policy(policy)
    change.touched_all = True
    change.emit(SavePolicy(policy))


def end(change: Change, transfer: Transfer) -> None:
    """Every replica has answered. If none could switch and nothing changed anywhere,
    the pool goes on with what it served; otherwise it stands."""
    failure: Failure | None = None
    if transfer.targets and not transfer.served_by:
        replica_id, first = min(transfer.refusals.items())
        why = (
            f"no replica could go back to {transfer.policy_version}; {replica_id}: {first.message}"
        )
        failure = Failure("LOAD_FAILED", why, {"member": replica_id, "cause": first.reason})
        if all_definite(transfer):
            policy = change.state.policies[transfer.policy]
            _serve(change, policy, transfer.replaced_version)
    ended = replace(
        transfer,
        phase=Phase.ABORTED if failure else Phase.COMMITTED,
        failure=failure,
        end_at=change.now,
        await_tickets=(),
    )
    change.end_transfer(ended)
    if failure:
        change.refuse(transfer.await_tickets, failure.error())
        change.announce("rollback_failed", str(transfer.policy_version), failure.message)
        return
    answer = RollbackAnswer(
        transfer.policy_version,
        transfer.replaced_version,
        tuple(sorted(transfer.served_by)),
        transfer.pause_seconds,
    )
    for ticket in transfer.await_tickets:
        change.reply(ticket, answer)
