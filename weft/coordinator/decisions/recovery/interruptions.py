"""Clones under way that end before their time: for a push, or with their replica's service.

A clone is for one replica, a push for all: a push ends the clones of the replicas it goes
to rather than wait for them. What was verified stays with the target under the same
transfer, which waits for its turn anew and resumes from there. So that replicas catch up
under continuous pushes, too, a clone that was ended often or is old goes before them, and
is not ended again.
"""

from __future__ import annotations

from weft.contract.frozen import replace
from weft.coordinator.decisions.change import Change
from weft.coordinator.decisions.recovery.needs import takes_clones, wants
from weft.coordinator.decisions.state.pool import PoolState
from weft.coordinator.decisions.state.progress import Watch
from weft.coordinator.decisions.state.transfer import Transfer
from weft.coordinator.decisions.state.values import Failure, Phase, Purpose
from weft.coordinator.decisions.transfers import abort, in_place


def goes_first(state: PoolState, transfer: Transfer, now: float) -> bool:
    """Whether a clone goes before pushes, and is not ended by one."""
    settings = state.settings
    return transfer.purpose is Purpose.CLONE and (
        transfer.num_interruptions >= settings.clone_interruptions
        or now - transfer.begin_at >= settings.clone_patience_seconds
    )


def is_interruptible(state: PoolState, transfer: Transfer, now: float) -> bool:
    """Whether a push or a rollback ends this transfer rather than wait for it."""
    under_way = transfer.phase is not Phase.WAITING and transfer.uncommitted
    is_clone = transfer.purpose is Purpose.CLONE
    return is_clone and under_way and not goes_first(state, transfer, now)


def interrupt_on(change: Change, replica_ids: set[str], by: Transfer) -> None:
    """End the clones that take any of these replicas, for ``by``, which takes them now."""
    for transfer in list(change.state.transfers.values()):
        if replica_ids.intersection(transfer.occupied) and is_interruptible(
            change.state, transfer, change.now
        ):
            _interrupt(change, transfer, by)


def _interrupt(change: Change, transfer: Transfer, by: Transfer) -> None:
    what = "rollback" if by.purpose is Purpose.ROLLBACK else "push"
    why = f"a {what} of {by.policy} goes first"
    abort.close_group(change, transfer.group_id, f"{why}; the clone goes on after it")
    failure = Failure("TRANSFER_ABORTED", why)
    in_place.abandon(change, transfer, transfer.targets, failure)
    change.put_transfer(
        replace(
            transfer,
            phase=Phase.WAITING,
            group_id="",
            epoch=0,
            targets=(),
            deadline=float("inf"),
            prepare_sent=False,
            prepared={},
            staged={},
            loading=frozenset(),
            pausing=frozenset(),
            watch=Watch(),
            accusations={},
            judge_at=0.0,
            start_at=0.0,
            num_interruptions=transfer.num_interruptions + 1,
        )
    )
    change.announce(
        "clone_interrupted",
        transfer.transfer_id,
        f"{transfer.policy_version} from {transfer.source} to {transfer.replica_id}: {why}",
    )


def end_unwanted(change: Change) -> None:
    """End clones under way to or from replicas taken out of service, and those of what the
    pool does not serve any more.

    Looks at those whose replicas a step has touched: O(transfers) otherwise.
    """
    for transfer in list(change.state.transfers.values()):
        if (
            transfer.purpose is Purpose.CLONE
            and transfer.uncommitted
            and transfer.phase is not Phase.WAITING
            and (change.touched_all or not change.touched.isdisjoint(transfer.occupied))
            and (why := _why_unwanted(change.state, transfer))
        ):
            abort.abort(change, transfer, Failure("TRANSFER_ABORTED", why))


def _why_unwanted(state: PoolState, transfer: Transfer) -> str:
    replica = state.replicas.get(transfer.replica_id)
    if state.is_quarantined(transfer.source):
        return f"{transfer.source} was quarantined"
    if replica is None:
        return ""  # its loss is told in other ways
    if not takes_clones(state, replica):
        return f"{transfer.replica_id} was taken out of service"
    # One that is being loaded in place goes on: only that makes its target's weights whole.
    if not transfer.loading and transfer.policy_version not in wants(state, replica):
        return f"the pool does not serve {transfer.policy_version} any more"
    return ""
