"""The side group of a push: its trainer's former one while all is as it was, else a new one."""

from __future__ import annotations

from collections.abc import Sequence

from weft_rl.coordinator.decisions.effects.change import Change
from weft_rl.coordinator.decisions.state.group import Group, seats
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.decisions.state.replica import Replica
from weft_rl.coordinator.decisions.state.transfer import Transfer
from weft_rl.coordinator.decisions.transfers.abort import close_group


def kept_group(
    state: PoolState,
    transfer: Transfer,
    wanted_group_id: str,
    session_id: str,
    replicas: Sequence[Replica],
) -> Group | None:
    """Return the group of the trainer's former push, if all of it is there and suits this one.

    Args:
        wanted_group_id: The group that the trainer has.
        session_id: Session of the trainer's process.
        replicas: Replicas that take part.
    """
    group = state.groups.get(wanted_group_id)
    if (
        group is not None
        and (group.trainer_id, group.session_id) == (transfer.trainer_id, session_id)
        and group.backend == transfer.backend
        and group.complete
        and group.num_senders == transfer.num_senders
        and group.members == seats(replicas, transfer.num_senders)
    ):
        return group
    return None


def new_group(
    change: Change, transfer: Transfer, session_id: str, replicas: Sequence[Replica]
) -> Group:
    """Create a group in place of the trainer's old ones."""
    in_use = {t.group_id for t in change.state.transfers.values()}
    for old in list(change.state.groups.values()):
        if old.trainer_id == transfer.trainer_id and old.group_id not in in_use:
            close_group(change, old.group_id, "a new group of its trainer replaced it")
    name, secret = transfer.ids.group(0)
    group = Group(
        name,
        secret,
        change.next_epoch(),
        transfer.trainer_id,
        session_id,
        transfer.backend,
        seats(replicas, transfer.num_senders),
        num_senders=transfer.num_senders,
    )
    change.put_group(group)
    return group
