"""Going on without a lost replica: a new group of the survivors, the same transfer.

The sender keeps every bucket until all have verified it, so the survivors go on
from the oldest bucket that one of them lacks and no source is rewound. Whether a
push may go on is the trainer's choice (``weft.v1.Requirement``), unless it is loaded in
place (see in_place.py).
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from weft.coordinator import abort, in_place
from weft.coordinator.change import Change
from weft.coordinator.effects import CallDiscard, CallJoin, OpenGroup, SaveEpoch, SendReform
from weft.coordinator.replica import Replica
from weft.coordinator.transfer import Group, Member, Transfer
from weft.coordinator.values import Errand, Failure, Phase


def lose_replica(change: Change, transfer: Transfer, replica_id: str, failure: Failure) -> None:
    """A replica of an uncommitted transfer is gone: go on without it, or give up.

    Args:
        failure: What the trainer is told if the push cannot go on.
    """
    if transfer.phase is Phase.WAITING:
        return
    if transfer.errand is not Errand.PUSH:
        abort.abort(change, transfer, failure)  # a clone is planned anew
        return
    group = change.state.groups[transfer.group_id]
    survivors = [m for m in group.members if m.replica_id != replica_id]
    if len(survivors) == len(group.members):
        return  # it was lost before
    replica = change.state.replicas.get(replica_id)
    if replica is not None:
        # Most often its process is dead: no push waits for it until it is heard again.
        change.put_replica(replace(replica, suspicion=failure.message))
    in_place.abandon(change, transfer, [replica_id], failure)
    is_required = transfer.require_all and replica_id in transfer.required
    may_go_on = transfer.loading or not is_required
    enough = 1 if transfer.loading else transfer.min_replicas
    if not may_go_on or len(survivors) < enough:
        abort.abort(change, transfer, failure)
    else:
        _reform(change, transfer, group, survivors, replica_id, failure)


def members_of(replicas: list[tuple[str, str, int]]) -> tuple[Member, ...]:
    """Places in a group: the sender is rank 0, receivers follow in the given order.

    Args:
        replicas: Replica id, incarnation and number of receivers of each.
    """
    members: list[Member] = []
    rank = 1
    for replica_id, incarnation, num_receivers in replicas:
        members.append(Member(replica_id, incarnation, rank, num_receivers))
        rank += num_receivers
    return tuple(members)


def _reform(
    change: Change,
    transfer: Transfer,
    group: Group,
    survivors: list[Member],
    lost: str,
    failure: Failure,
) -> None:
    epoch = change.state.epoch + 1
    change.state = replace(change.state, epoch=epoch)
    num_reforms = len(transfer.lost) + 1
    renewed = replace(
        group,
        group_id=f"{transfer.ids.group_id}.{num_reforms}",
        secret=derived_secret(transfer, num_reforms),
        epoch=epoch,
        members=members_of([(m.replica_id, m.incarnation, m.num_receivers) for m in survivors]),
        attending=frozenset(),
    )
    transfer = replace(
        transfer,
        phase=Phase.FORMING,
        group_id=renewed.group_id,
        epoch=epoch,
        targets=tuple(m.replica_id for m in survivors),
        lost=(*transfer.lost, lost),
        losses={**transfer.losses, lost: failure},
        prepare_sent=False,
        prepared={},
        staged={},
        accusations={},
        judge_at=0.0,
    )
    change.put_group(renewed)
    change.put_transfer(transfer)
    change.emit(SaveEpoch(epoch), OpenGroup(renewed))
    change.emit(SendReform(group.group_id, transfer.transfer_id, renewed, failure.message))
    abort.close_group(change, group.group_id, f"going on without {lost}: {failure.message}")
    for member in renewed.members:
        replica = change.state.replicas[member.replica_id]
        change.emit(
            CallJoin(
                transfer.transfer_id,
                member.replica_id,
                replica.address,
                renewed,
                member.first_rank,
            )
        )
    _discard_at(change, transfer, change.state.replicas.get(lost))
    change.announce(
        "transfer_reformed",
        transfer.transfer_id,
        f"{transfer.policy_version} goes on with {len(survivors)} replicas without {lost}, "
        f"epoch {epoch}: {failure.message}",
    )


def derived_secret(transfer: Transfer, nth: int) -> str:
    """The secret of a transfer's further group: as unguessable as its own, which no
    member of any group is ever told."""
    return hashlib.sha256(f"{transfer.ids.secret}.{nth}".encode()).hexdigest()


def _discard_at(change: Change, transfer: Transfer, replica: Replica | None) -> None:
    if replica and not replica.lost:
        change.emit(CallDiscard(transfer.transfer_id, replica.replica_id, replica.address))
