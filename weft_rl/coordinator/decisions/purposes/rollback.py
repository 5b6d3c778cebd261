"""Rollback: the pool serves a former version again, without a byte being sent.

The commit point is the same as a push's: one durable write, and only then are the
replicas told. It waits for its turn like a push, since it takes every replica.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from weft_rl.containers import replace
from weft_rl.contract.errors import (
    BaseMismatchError,
    NotReadyError,
    TransferTimeoutError,
    WeftError,
)
from weft_rl.contract.names import BASE_POLICY, PolicyVersion
from weft_rl.coordinator.decisions.policies.retention import serve
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.change import Change
from weft_rl.coordinator.decisions.state.effects import CallSwitch, EventKind, RollbackAnswer
from weft_rl.coordinator.decisions.state.pool import (
    Policy,
    PoolState,
    known_policy,
    requestable_versions,
    rollback_versions,
)
from weft_rl.coordinator.decisions.state.replica import Replica, can_switch, holds
from weft_rl.coordinator.decisions.state.replica_state import (
    base_targets,
    eligible_targets,
    explain_checkpoint_mismatch,
    is_ready,
    obeys_pins,
)
from weft_rl.coordinator.decisions.state.transfer import Transfer
from weft_rl.coordinator.decisions.state.values import Failure, Phase, PolicyKind
from weft_rl.coordinator.decisions.transfers.lifecycle import at_commit_point, take_over
from weft_rl.coordinator.decisions.transfers.purpose import AdmissionQueue, Purpose
from weft_rl.coordinator.decisions.transfers.withdrawals import all_definite

#: Sender of a rollback's transfer; no trainer can be named so.
OPERATOR = "(operator)"


@dataclass(frozen=True, kw_only=True)
class RollbackPurpose(Purpose):
    """Transfer in which the pool goes back to a version that replicas still have."""

    name: ClassVar[str] = "rollback"
    answer_by: float
    """Time by which it must have had its turn."""

    def admit(self, change: Change, transfer: Transfer, queue: AdmissionQueue) -> Iterable[str]:
        """Start the rollback at the replicas that are free, if its turn has come.

        As with a push, replicas that have still to catch up are not waited for, and clones are
        interrupted.
        """
        replicas = base_targets(change.state)
        everyone = [replica.replica_id for replica in replicas]
        try:
            if change.now >= self.answer_by:
                why = "the rollback's time was up while it waited for its turn"
                raise TransferTimeoutError(why)
            if queue.must_wait(replicas) or change.state.is_changing(transfer.policy):
                return everyone
            policy = change.state.policies[transfer.policy]
            targets = queue.free(_targets(change.state, policy, transfer.policy_version))
            if policy.kind is PolicyKind.BASE and not (
                targets and all(obeys_pins(change.state, r) for r in targets)
            ):
                return ()
        except WeftError as error:
            change.refuse(transfer.begin_tickets, error)
            change.drop_transfer(transfer.transfer_id)
            return ()
        take_over(change, targets, transfer)
        self._commit(change, transfer, policy, targets)
        return everyone

    def _commit(
        self, change: Change, transfer: Transfer, policy: Policy, targets: list[Replica]
    ) -> None:
        transfer = change.put_transfer(at_commit_point(change, transfer, targets))
        serve(change, policy, transfer.version)
        version = transfer.policy_version
        text = f"from {policy.served_version}; {len(targets)} replicas switch"
        change.announce(EventKind.ROLLED_BACK, str(version), text)
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
            self.on_answered(change, transfer)

    def on_answered(self, change: Change, transfer: Transfer) -> None:
        """End the rollback; it stands unless no replica could switch and nothing changed anywhere.

        In that case the pool stays with what it served.
        """
        failure: Failure | None = None
        version = transfer.policy_version
        if transfer.targets and not transfer.served_by:
            replica_id, first = min(transfer.refusals.items())
            why = f"no replica could go back to {version}; {replica_id}: {first.message}"
            failure = Failure("LOAD_FAILED", why, {"member": replica_id, "cause": first.reason})
            if all_definite(transfer):
                policy = change.state.policies[transfer.policy]
                serve(change, policy, transfer.served_before)
        phase = Phase.ABORTED if failure else Phase.COMMITTED
        answer = RollbackAnswer(
            version,
            transfer.served_before,
            tuple(sorted(transfer.served_by)),
            transfer.pause_seconds,
        )
        change.end_transfer(replace(transfer, phase=phase, failure=failure), answer)
        if failure:
            change.announce(EventKind.ROLLBACK_FAILED, str(version), failure.message)


def ask(change: Change, event: events.Rollback) -> None:
    """Accept a rollback, to wait for its turn; or refuse it at once."""
    version = PolicyVersion(event.policy, event.to_version)
    policy = known_policy(change.state, version, event.recorded)
    if policy.served_version == version.version:
        change.reply(event.ticket, RollbackAnswer(version, version.version, (), 0.0))
        return
    _targets(change.state, policy, version)
    change.put_transfer(
        Transfer(
            ids=event.ids,
            purpose=RollbackPurpose(answer_by=event.answer_by),
            policy=policy.name,
            kind=policy.kind,
            trainer_id=OPERATOR,
            begin_at=change.now,
            deadline=event.answer_by,
            version=version.version,
            begin_tickets=(event.ticket,),
        )
    )


def _targets(state: PoolState, policy: Policy, version: PolicyVersion) -> list[Replica]:
    if policy.kind is PolicyKind.ADAPTER:
        if version.version not in requestable_versions(state, policy):
            raise _not_retained(state, policy, f"{version} was retired, or is being retired")
        if version not in state.copies:
            raise _not_retained(state, policy, f"no replica in contact holds {version}")
        return [replica for replica in eligible_targets(state) if holds(replica, version)]
    replicas = base_targets(state)
    able = [r for r in replicas if can_switch(r, version) or _serves(r, version)]
    unable = [r for r in replicas if r not in able and is_ready(state, r)]
    if not version.version:
        _check_one_base(state, able)
    if unable or not able:
        who = _why_unable(unable[0]) if unable else "no replica in contact retains a copy of it"
        raise NotReadyError(
            f"the pool cannot go back to {version}: {who} ({_way_out(replicas)})",
            reason="NOT_RETAINED",
            metadata={"member": unable[0].replica_id} if unable else {},
        )
    return able


class RollbackWay(NamedTuple):
    """Version of the base that the pool can go back to, and how its replicas would."""

    version: int
    num_copies: int
    """Replicas that would load the copy that they retain, or serve it already."""
    num_undo: int
    """Replicas that would write the elements back that deltas have changed."""


def rollback_ways(state: PoolState) -> list[RollbackWay]:
    """List the versions that the base can go back to now, newest first."""
    policy, found = state.policies.get(BASE_POLICY), list[RollbackWay]()
    numbers = {n for r in base_targets(state) for n in (*r.retained, *r.undoable)}
    if policy is None:
        return found
    for number in sorted(numbers - {policy.served_version}, reverse=True):
        version = PolicyVersion(BASE_POLICY, number)
        try:
            targets = _targets(state, policy, version)
        except WeftError:
            continue
        num_undo = sum(not holds(r, version) and not _serves(r, version) for r in targets)
        found.append(RollbackWay(number, len(targets) - num_undo, num_undo))
    return found


def _why_unable(replica: Replica) -> str:
    """Explain why a replica cannot go back to a version of the base."""
    if not replica.undoable:
        return f"{replica.replica_id} retains no copy of it"
    reach = ", ".join(f"base@{number}" for number in replica.undoable)
    return f"{replica.replica_id} keeps what deltas have changed as far as {reach}"


def _serves(replica: Replica, version: PolicyVersion) -> bool:
    """Return whether a base is whole in a replica's engine, which need not switch then."""
    return replica.in_contact and replica.vector.holds(version)


def _not_retained(state: PoolState, policy: Policy, why: str) -> NotReadyError:
    left = ", ".join(map(str, rollback_versions(state, policy))) or "nothing"
    if state.is_lost(policy):
        left += f" (it is lost: push it again, or weft forget {policy.name})"
    return NotReadyError(
        f"{why}; {policy.name!r} can go back to {left}",
        reason="NOT_RETAINED",
    )


def _way_out(replicas: list[Replica]) -> str:
    """Explain what helps where a base is not retained; those that load in place retain none."""
    if replicas and all(r.capabilities.loads_in_place for r in replicas):
        return (
            "push the weights again: replicas that load in place go back by what deltas have "
            "changed alone, as far as it fits in --staging-memory-gib"
        )
    return "start replicas with --base-copies 2 or more, or push the weights again"


def _check_one_base(state: PoolState, replicas: list[Replica]) -> None:
    """Check that replicas which go back to what they were started with go back to one model."""
    for replica in replicas:
        if why := explain_checkpoint_mismatch(state, replica):
            raise BaseMismatchError(
                f"the pool cannot go back to base@0: {replica.replica_id}: {why}",
                metadata={"member": replica.replica_id},
            )
