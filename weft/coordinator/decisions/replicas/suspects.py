"""Suspects: replicas whose process lives, and of which a working thread has stalled.

Heartbeats do not clear them, since those come from another thread. A suspect takes no
part in transfers until each of its receivers has attended a *probe*: a group of its own in
which nothing is sent, and which a receiver attends only once the threads that may be stuck
have answered or ended (see rollout_side/receive/probe.py). The order to attend is repeated with
growing pauses until the replica has taken it, and given anew when a stream of the probe
broke; a thread that is stuck attends by itself once it is free.
"""

from __future__ import annotations

import hashlib

from weft.containers.frozen import replace
from weft.coordinator.decisions import events
from weft.coordinator.decisions.change import Change
from weft.coordinator.decisions.effects import CallJoin, EventKind, OpenGroup
from weft.coordinator.decisions.state.group import Group, Member
from weft.coordinator.decisions.state.replica import Replica, Suspicion
from weft.coordinator.decisions.state.transfer import Transfer
from weft.coordinator.decisions.transfers import abort

#: Between two orders to attend a probe; doubled each time, from the first to the second.
FIRST_SECONDS = 1.0
LONGEST_SECONDS = 60.0


def suspect(change: Change, transfer: Transfer, replica_id: str, why: str) -> None:
    """Let a replica take no part in transfers until it has answered a probe.

    Args:
        transfer: The one that it stalled.
    """
    replica = change.state.replicas.get(replica_id)
    if replica is None or replica.suspect is not None:
        return
    secret = f"{transfer.ids.secret}.{transfer.epoch}"
    probe_at = change.now + FIRST_SECONDS
    change.put_replica(replace(replica, suspect=Suspicion(why, secret, probe_at)))


def probe(change: Change) -> None:
    """Ask suspects whether they answer, as often as it is time to; with each tick."""
    for group in list(change.state.groups.values()):
        if group.is_probe:
            replica = change.state.replicas.get(group.members[0].replica_id)
            if replica is None or not replica.suspect or replica.suspect.group_id != group.group_id:
                abort.close_group(change, group.group_id, "its replica is no longer suspect")
    for replica in list(change.state.replicas.values()):
        if replica.suspect is not None and not replica.lost:
            _probe(change, replica, replica.suspect)


def _probe(change: Change, replica: Replica, suspicion: Suspicion) -> None:
    group = change.state.groups.get(suspicion.group_id)
    if change.now < suspicion.probe_at or (group is not None and suspicion.is_told):
        return
    delay = min(LONGEST_SECONDS, FIRST_SECONDS * 2.0 ** min(suspicion.num_probes, 30))
    if group is None:
        group = _new_group(change, replica, suspicion)
    suspicion = replace(
        suspicion,
        group_id=group.group_id,
        is_told=False,
        num_probes=suspicion.num_probes + 1,
        probe_at=change.now + delay,
    )
    change.put_replica(replace(replica, suspect=suspicion))
    change.emit(CallJoin(group.group_id, replica.replica_id, replica.address, group, 1))


def _new_group(change: Change, replica: Replica, suspicion: Suspicion) -> Group:
    epoch = change.next_epoch()
    name, count = replica.replica_id, suspicion.num_probes
    seed = f"{suspicion.secret}.probe.{name}.{count}"
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
    """Note whether a suspect's receivers were told of a probe; False if it is of none."""
    group = change.state.groups.get(event.transfer_id)
    if group is None or not group.is_probe:
        return False
    replica = change.state.replicas.get(event.replica_id)
    if replica and replica.suspect and replica.suspect.group_id == group.group_id:
        told = replace(replica.suspect, is_told=event.failure is None)
        change.put_replica(replace(replica, suspect=told))
    return True


def rank_attends(change: Change, event: events.RankAttends) -> None:
    """Once every receiver has attended its probe, the replica is one as any other."""
    group = change.state.groups.get(event.group_id)
    if group is None or not group.is_probe or len(group.attending - {0}) < group.size - 1:
        return
    replica = change.state.replicas.get(group.members[0].replica_id)
    if replica is not None and replica.suspect and replica.suspect.group_id == group.group_id:
        change.put_replica(replace(replica, suspect=None))
        why = f"every receiver of it has answered; {replica.suspect.why}"
        change.announce(EventKind.REPLICA_ANSWERS, replica.replica_id, why)
    abort.close_group(change, group.group_id, "every receiver has answered")
