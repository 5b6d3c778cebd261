"""Re-forming: a transfer resumes without the replicas it lost, in a new group of survivors.

The sender keeps every bucket until all have verified it, so the survivors resume
from the oldest bucket that one of them lacks and no source is rewound. Whether a
push may continue is the trainer's choice (``weft.v1.Requirement``), unless it is loaded in
place (see in_place.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from weft.contract.frozen import replace
from weft.coordinator.decisions.change import Change
from weft.coordinator.decisions.effects import (
    CallDiscard,
    CallJoin,
    OpenGroup,
    SaveEpoch,
    SendReform,
)
from weft.coordinator.decisions.state.progress import Watch
from weft.coordinator.decisions.state.replica import Replica
from weft.coordinator.decisions.state.transfer import Group, Member, Transfer
from weft.coordinator.decisions.state.values import Failure, Phase, Purpose
from weft.coordinator.decisions.transfers import abort, in_place


def lose_replica(change: Change, transfer: Transfer, replica_id: str, failure: Failure) -> None:
    """A replica of an uncommitted transfer is gone: continue without it, or give up.

    Args:
        failure: What the trainer is told if the push cannot continue.
    """
    lose_replicas(change, transfer, {replica_id: failure})


def lose_replicas(change: Change, transfer: Transfer, lost: Mapping[str, Failure]) -> None:
    """Lose several replicas at once, which costs one new group; the trainer is told of the
    first."""
    if transfer.phase is Phase.WAITING:
        return
    failure = next(iter(lost.values()))
    if transfer.purpose is not Purpose.PUSH:
        abort.abort(change, transfer, failure)  # a clone is scheduled anew
        return
    group = change.state.groups[transfer.group_id]
    survivors = [m for m in group.members if m.replica_id not in lost]
    if len(survivors) == len(group.members):
        return  # they were lost before
    for replica_id, why in lost.items():
        replica = change.state.replicas.get(replica_id)
        if replica is not None and replica.suspect is None:
            # Most often its process is dead: no push waits for it until it is heard again.
            change.put_replica(replace(replica, suspicion=why.message))
        in_place.abandon(change, transfer, [replica_id], why)
    is_required = transfer.require_all and not transfer.required.isdisjoint(lost)
    may_go_on = transfer.loading or not is_required
    enough = 1 if transfer.loading else transfer.min_replicas
    if not may_go_on or len(survivors) < enough:
        abort.abort(change, transfer, failure)
    else:
        _reform(change, transfer, group, survivors, lost)


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
    lost: Mapping[str, Failure],
) -> None:
    why = next(iter(lost.values())).message
    who = ", ".join(lost)
    epoch = change.state.epoch + 1
    change.state = replace(change.state, epoch=epoch)
    num_reforms = len(transfer.lost) + len(lost)
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
        lost=(*transfer.lost, *lost),
        losses={**transfer.losses, **lost},
        prepare_sent=False,
        prepared={},
        staged={},
        watch=Watch(),
        pausing=frozenset(),
        accusations={},
        judge_at=0.0,
    )
    change.put_group(renewed)
    change.put_transfer(transfer)
    change.emit(SaveEpoch(epoch), OpenGroup(renewed))
    change.emit(SendReform(group.group_id, transfer.transfer_id, renewed, why))
    abort.close_group(change, group.group_id, f"going on without {who}: {why}")
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
    for replica_id in lost:
        _discard_at(change, transfer, change.state.replicas.get(replica_id))
    change.announce(
        "transfer_reformed",
        transfer.transfer_id,
        f"{transfer.policy_version} goes on with {len(survivors)} replicas without {who}, "
        f"epoch {epoch}: {why}",
    )


def derived_secret(transfer: Transfer, nth: int) -> str:
    """The secret of a transfer's further group: as unguessable as its own, which no
    member of any group is ever told."""
    return hashlib.sha256(f"{transfer.ids.secret}.{nth}".encode()).hexdigest()


def _discard_at(change: Change, transfer: Transfer, replica: Replica | None) -> None:
    if replica and not replica.lost:
        change.emit(CallDiscard(transfer.transfer_id, replica.replica_id, replica.address))
