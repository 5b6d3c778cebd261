"""Groups of a transfer: opened for its members, and again without those that it lost.

A sender keeps every bucket until all have verified it. So in a new group the survivors resume
from the oldest bucket that one of them lacks, and no source is rewound. Whether a
transfer continues without some of its members is its purpose's choice.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft_rl.containers import replace
from weft_rl.coordinator.decisions.state.change import Change
from weft_rl.coordinator.decisions.state.effects import (
    CallDiscard,
    CallJoin,
    EventKind,
    OpenGroup,
    SendReform,
)
from weft_rl.coordinator.decisions.state.replica import Replica
from weft_rl.coordinator.decisions.state.transfer import (
    FIRST_STEP,
    Attempt,
    Group,
    GroupProgress,
    Transfer,
    assign_ranks,
)
from weft_rl.coordinator.decisions.state.values import Failure, Phase
from weft_rl.coordinator.decisions.transfers import abort
from weft_rl.coordinator.decisions.transfers.purpose import purpose_of


def call_to_join(change: Change, transfer: Transfer, group: Group) -> None:
    """Tell every member of an opened group to join it."""
    for member in group.members:
        address = change.state.replicas[member.replica_id].address
        change.emit(
            CallJoin(transfer.transfer_id, member.replica_id, address, group, member.first_rank)
        )


def lose_replica(change: Change, transfer: Transfer, replica_id: str, failure: Failure) -> None:
    """Continue an uncommitted transfer without a replica that is gone, or give up.

    Args:
        failure: What the trainer is told if the push cannot continue.
    """
    lose_replicas(change, transfer, {replica_id: failure})


def lose_replicas(change: Change, transfer: Transfer, lost: Mapping[str, Failure]) -> None:
    """Lose several replicas at once, which costs one new group.

    The trainer is told of the first.
    """
    if transfer.phase is not Phase.WAITING:
        purpose_of(transfer).on_members_lost(change, transfer, lost)


def resume_without(change: Change, transfer: Transfer, lost: Mapping[str, Failure]) -> None:
    """Let the survivors, of which there are some, resume in a new group."""
    group = change.state.groups[transfer.group_id]
    survivors = [member for member in group.members if member.replica_id not in lost]
    why = next(iter(lost.values())).message
    who = ", ".join(lost)
    epoch = change.next_epoch()
    name, secret = transfer.ids.group(len(transfer.lost) + len(lost))
    renewed = replace(
        group,
        group_id=name,
        secret=secret,
        epoch=epoch,
        members=assign_ranks(
            ((m.replica_id, m.incarnation, m.num_receivers) for m in survivors), group.num_senders
        ),
        attending=frozenset(),
    )
    transfer = replace(
        transfer,
        phase=Phase.FORMING,
        group_id=renewed.group_id,
        epoch=epoch,
        targets=tuple(member.replica_id for member in survivors),
        lost=(*transfer.lost, *lost),
        losses={**transfer.losses, **lost},
        attempt=Attempt(progress=_carried(change, transfer, group, renewed)),
    )
    change.put_group(renewed)
    change.put_transfer(transfer)
    change.emit(OpenGroup(renewed))
    change.emit(SendReform(group.group_id, transfer.transfer_id, renewed, why))
    abort.close_group(change, group.group_id, f"continued without {who}: {why}")
    call_to_join(change, transfer, renewed)
    for replica_id in lost:
        _discard_at(change, transfer, change.state.replicas.get(replica_id))
    change.announce_transfer(
        EventKind.TRANSFER_REFORMED,
        transfer,
        f" continues with {len(survivors)} replicas without {who}, epoch {epoch}: {why}",
    )


def _carried(change: Change, transfer: Transfer, former: Group, renewed: Group) -> GroupProgress:
    """Return the progress of the new group with the silence of the survivors: it counts over the
    whole transfer."""
    first_ranks = {member.replica_id: member.first_rank for member in former.members}
    ranks = {rank: rank for rank in renewed.senders}
    for member in renewed.members:
        for index in range(member.num_receivers):
            ranks[member.first_rank + index] = first_ranks[member.replica_id] + index
    return transfer.attempt.progress.carried(ranks, FIRST_STEP, change.now)


def _discard_at(change: Change, transfer: Transfer, replica: Replica | None) -> None:
    if replica and not replica.lost:
        change.emit(CallDiscard(transfer.transfer_id, replica.replica_id, replica.address))
