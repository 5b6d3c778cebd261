"""Checkpoints: whether base@0, which each replica brings from disk unseen, is one model.

The first replica that tells what its checkpoint holds binds what base@0 is in this pool,
for good. It matters only while the pool serves base@0, or is asked to go back to it: then
a replica is in service only if its checkpoint, as it serves it, is that one. A later
version is brought to all, whatever they were started with.
"""

from __future__ import annotations

from weft_rl.containers.frozen import replace
from weft_rl.contract.checkpoint import CheckpointState
from weft_rl.contract.errors import NotFoundError
from weft_rl.coordinator.decisions import events
from weft_rl.coordinator.decisions.effects import (
    Done,
    EventKind,
    RoutesChanged,
    SaveAsStarted,
    SaveCheckpoint,
)
from weft_rl.coordinator.decisions.effects.change import Change
from weft_rl.coordinator.decisions.state.replica import Replica
from weft_rl.coordinator.decisions.state.replica_state import difference
from weft_rl.coordinator.decisions.state.values import BoundCheckpoint

#: One content in so many layouts.
_MAX_AS_STARTED = 64


def report(change: Change, event: events.ReportCheckpoint) -> None:
    """Note the checkpoint that a replica has read, or refuse a replica that is not registered."""
    replica = change.state.replicas.get(event.replica_id)
    if replica is None or replica.lost or replica.incarnation != event.incarnation:
        error = NotFoundError(
            f"replica {event.replica_id[:80]!r} is not registered (any more): register again",
            reason="REPLICA_UNKNOWN",
        )
        change.refuse([event.ticket], error)
        return
    note(change, replace(replica, checkpoint=event.checkpoint))
    change.reply(event.ticket, Done())


def note(change: Change, replica: Replica) -> None:
    """Store what a replica told, and bind base@0 to its checkpoint if nothing is bound."""
    change.put_replica(replica)
    if change.state.checkpoint is None and replica.checkpoint.state is CheckpointState.DIGESTED:
        _bind(change, replica)


def note_as_started(change: Change, replica: Replica) -> None:
    """Note that the base that a replica serves is what it was started with, as it said.

    Only where its checkpoint is the pool's base@0.
    """
    state = change.state
    content = state.base_contents.get(replica.vector.base)
    if content is None or content in state.as_started or len(state.as_started) >= _MAX_AS_STARTED:
        return
    is_compared = replica.checkpoint.state is CheckpointState.DIGESTED
    if not is_compared or state.checkpoint is None or difference(state, replica):
        return
    change.state = replace(state, as_started=state.as_started | {content})
    # What is over another base is told with the routes.
    change.emit(SaveAsStarted(content), RoutesChanged((replica.replica_id,)))


def _bind(change: Change, replica: Replica) -> None:
    own, served = replica.checkpoint, replica.capabilities
    bound = BoundCheckpoint(
        digest=own.digest,
        base_dtype=served.base_dtype,
        quantization=served.quantization,
        replica_id=replica.replica_id,
        files=own.files,
    )
    change.state = replace(change.state, checkpoint=bound, checkpoint_unseen_since=None)
    change.touched_all = True
    change.emit(SaveCheckpoint(bound))
    change.announce(
        EventKind.CHECKPOINT_BOUND,
        own.digest.hex()[:12],
        f"base@0 is the checkpoint that {replica.replica_id} was started with",
    )


def watch(change: Change) -> None:
    """Bind base@0 anew where a wrong first model would stand for ever.

    That is so if nothing was ever pushed, and for as long as it takes to give a replica up no
    replica was there that has the bound checkpoint.

    With each tick; O(replicas) until something is pushed.
    """
    state, bound = change.state, change.state.checkpoint
    if bound is None or any(policy.last_version for policy in state.policies.values()):
        return
    others: list[Replica] = []
    for replica in state.replicas.values():
        own = replica.checkpoint
        if replica.lost or own.state is CheckpointState.NOT_COMPARED:
            continue
        if own.state is CheckpointState.READING or own.digest == bound.digest:
            others = []
            break
        if own.state is CheckpointState.DIGESTED:
            others.append(replica)
    if not others:
        if state.checkpoint_unseen_since is not None:
            change.state = replace(state, checkpoint_unseen_since=None)
    elif state.checkpoint_unseen_since is None:
        change.state = replace(state, checkpoint_unseen_since=change.now)
    elif change.now - state.checkpoint_unseen_since > state.settings.lost_after_seconds:
        _bind(change, min(others, key=lambda replica: replica.replica_id))
