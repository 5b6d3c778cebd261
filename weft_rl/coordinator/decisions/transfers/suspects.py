"""Suspects: replicas whose process lives while a working thread of it hangs.

The thread may be a receiver's, the engine's, or the one that takes orders. Heartbeats come from
another thread, so they do not clear a suspect. It takes no part in transfers until each of its
receivers has attended a *probe*: a group of its own, in which nothing is sent. A receiver attends
only once its threads that may be stuck have answered or ended (see
rollout_side/receive/receiver.py).

The order to attend passes through the thread that takes orders and through the engine. Until it
is taken, nobody is routed to the replica. The order is repeated with growing pauses until then,
and given anew when a stream of the probe broke. A stuck thread attends by itself once it is free.
A replica that reports no progress with its work stays suspect.
"""

from __future__ import annotations

import hashlib

from weft_rl.containers import replace
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.change import Change
from weft_rl.coordinator.decisions.state.effects import CallJoin, EventKind, OpenGroup
from weft_rl.coordinator.decisions.state.replica import Replica, Suspect
from weft_rl.coordinator.decisions.state.transfer import Group, Member
from weft_rl.coordinator.decisions.transfers import abort

#: Between two orders to attend a probe; doubled each time, from the first to the second.
FIRST_SECONDS = 1.0
LONGEST_SECONDS = 60.0


def suspect(change: Change, replica_id: str, why: str) -> None:
    """Exclude a replica from transfers until it has answered a probe.

    It is told to attend one at once.
    """
    replica = change.state.replicas.get(replica_id)
    if replica is None or replica.suspect is not None:
        return
    change.put_replica(replace(replica, suspect=Suspect(why, change.now)))


def watch(change: Change) -> None:
    """Suspect replicas that report no progress with what they carry out; with each tick."""
    for replica in list(change.state.replicas.values()):
        if not replica.lost and replica.suspect is None and _hangs(change, replica):
            silence = replica.silence(float("-inf"), change.now)
            suspect(
                change,
                replica.replica_id,
                f"{replica.replica_id} hangs in its work "
                f"({replica.work}) and has not got on for {silence:.1f} s",
            )


def _hangs(change: Change, replica: Replica) -> bool:
    """Return whether a replica is at work, by its last word, without progress for too long."""
    silence = replica.silence(float("-inf"), change.now)
    return bool(replica.work) and silence >= change.state.settings.stall_seconds


def probe(change: Change) -> None:
    """Ask suspects whether they answer, whenever it is time to; with each tick."""
    for group in list(change.state.groups.values()):
        if group.is_probe:
            replica = change.state.replicas.get(group.members[0].replica_id)
            if replica is None or not replica.suspect or replica.suspect.group_id != group.group_id:
                abort.end_group(change, group.group_id, "its replica is no longer suspect")
    for replica in list(change.state.replicas.values()):
        if replica.suspect is not None and not replica.lost:
            _probe(change, replica, replica.suspect)


def _probe(change: Change, replica: Replica, known: Suspect) -> None:
    group = change.state.groups.get(known.group_id)
    if group is not None and _clear(change, replica, group):
        return
    if change.now < known.probe_at or (group is not None and known.is_told):
        return
    delay = min(LONGEST_SECONDS, FIRST_SECONDS * 2.0 ** min(known.num_probes, 30))
    if group is None:
        group = _new_group(change, replica)
    known = replace(
        known,
        group_id=group.group_id,
        is_told=False,
        num_probes=known.num_probes + 1,
        probe_at=change.now + delay,
    )
    change.put_replica(replace(replica, suspect=known))
    change.emit(CallJoin(group.group_id, replica.replica_id, replica.address, group, 1))


def _new_group(change: Change, replica: Replica) -> Group:
    epoch, name = change.next_epoch(), replica.replica_id
    seed = f"{change.state.secret}.probe.{name}.{epoch}"
    group = Group(
        f"probe-{name}-{epoch}",
        hashlib.sha256(seed.encode()).hexdigest(),
        epoch,
        f"probe:{name}",
        "",
        next(iter(replica.capabilities.backends), ""),
        (Member(name, replica.incarnation, 1, replica.capabilities.num_receivers),),
        is_probe=True,
    )
    change.put_group(group)
    change.emit(OpenGroup(group))
    return group


def join_answered(change: Change, event: events.JoinAnswered) -> bool:
    """Note whether a suspect's receivers were told of a probe; False if the group is no probe."""
    group = change.state.groups.get(event.transfer_id)
    if group is None or not group.is_probe:
        return False
    replica = change.state.replicas.get(event.replica_id)
    if replica and replica.suspect and replica.suspect.group_id == group.group_id:
        told = replace(replica.suspect, is_told=event.failure is None)
        change.put_replica(replace(replica, suspect=told))
    return True


def rank_attends(change: Change, event: events.RankAttends) -> None:
    """Clear a suspect once every receiver has attended its probe."""
    group = change.state.groups.get(event.group_id)
    if group is None or not group.is_probe:
        return
    replica = change.state.replicas.get(group.members[0].replica_id)
    if replica is not None and replica.suspect and replica.suspect.group_id == group.group_id:
        _clear(change, replica, group)


def _clear(change: Change, replica: Replica, group: Group) -> bool:
    """Clear a suspect if every receiver attends its probe and its work makes progress."""
    assert replica.suspect is not None
    if len(group.attending - {0}) < group.size - 1 or _hangs(change, replica):
        return False
    change.put_replica(replace(replica, suspect=None))
    why = f"every receiver of it has answered; {replica.suspect.why}"
    change.announce(EventKind.REPLICA_ANSWERS, replica.replica_id, why)
    abort.end_group(change, group.group_id, "every receiver has answered")
    return True
