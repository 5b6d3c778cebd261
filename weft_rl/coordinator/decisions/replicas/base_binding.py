"""Binding of the pool to a base model, and of base@0 to the checkpoint that it is.

The first replica binds the pool to its base model, until it is bound anew.

Each replica brings base@0 from disk, unseen. The first replica that tells what its checkpoint
holds binds what base@0 is in this pool, for good. It matters only while the pool serves base@0,
or is asked to go back to it. Then a replica is in service only if it serves that checkpoint. A
later version is brought to all, whatever they were started with.
"""

from __future__ import annotations

from weft_rl.containers import replace
from weft_rl.contract.capabilities import Capabilities
from weft_rl.contract.checkpoint import CheckpointState
from weft_rl.contract.errors import BaseMismatchError, NotReadyError
from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.state import events
from weft_rl.coordinator.decisions.state.change import Change
from weft_rl.coordinator.decisions.state.effects import (
    EmptyAnswer,
    EventKind,
    RetiredAnswer,
    RoutesChanged,
    SaveAsStarted,
    SaveCheckpoint,
    SavePin,
    SavePolicy,
    SavePool,
    SaveRetired,
)
from weft_rl.coordinator.decisions.state.pool import PoolState, registered_replica
from weft_rl.coordinator.decisions.state.replica import Replica
from weft_rl.coordinator.decisions.state.replica_state import explain_checkpoint_mismatch
from weft_rl.coordinator.decisions.state.values import BoundCheckpoint


def bind(change: Change, capabilities: Capabilities) -> None:
    """Bind the pool to the base model of a replica that was let in."""
    given = capabilities.base_fingerprint
    if change.state.fingerprint == given:
        return
    if change.state.fingerprint:
        why = f"{capabilities.architecture}, in place of {change.state.architecture}"
        change.announce(EventKind.BASE_BOUND, given[:12], f"{why}: nothing was ever pushed")
    for replica in list(change.state.replicas.values()):
        if replica.capabilities.base_fingerprint != given:
            change.drop_replica(replica.replica_id)
    _save(change, given, capabilities.architecture)


def check_base(state: PoolState, replica_id: str, capabilities: Capabilities, now: float) -> None:
    """Refuse a replica of another base model than the pool's.

    It is let in, and the pool bound anew, if nothing was ever pushed and no other replica is
    there. Then the first one was started with the wrong model.

    Raises:
        BaseMismatchError: Metadata has both fingerprints.
    """
    given = capabilities.base_fingerprint
    if not state.fingerprint or given == state.fingerprint:
        return
    others = [name for name in present(state) if name != replica_id]
    pushed = any(policy.last_version for policy in state.policies.values())
    if not others and not pushed and now >= state.restart_over_at:
        return
    raise BaseMismatchError(
        f"replica {replica_id!r} serves another base model ({given[:12]}, "
        f"{capabilities.architecture}) than this pool ({state.fingerprint[:12]}, "
        f"{state.architecture}). If the pool's is the wrong one, stop its replicas and bind it "
        "anew: weft base --rebind",
        metadata={"pool_fingerprint": state.fingerprint, "replica_fingerprint": given},
    )


def rebind(change: Change, event: events.RebindBase) -> None:
    """Let go of the base model at an operator's order; what was served is retired."""
    state = change.state
    if not state.fingerprint:
        change.reply(event.ticket, RetiredAnswer(()))
        return
    if error := _hindrance(state, event, change.now):
        raise error
    retired = []
    for policy in list(state.policies.values()):
        versions = [PolicyVersion(policy.name, version) for version in policy.versions]
        pins = [PolicyVersion(policy.name, version) for version in policy.pinned]
        bare = replace(policy, served_version=0, versions=(), pinned=())
        if bare == policy:
            continue
        change.put_policy(bare)
        change.emit(SavePolicy(bare), *(SavePin(pin, False) for pin in pins))
        change.emit(*(SaveRetired(version) for version in versions))
        retired += versions
    for replica_id in list(state.replicas):
        change.drop_replica(replica_id)
    change.touched_all = True
    _save(change, "", "")
    change.announce(
        EventKind.BASE_UNBOUND,
        state.fingerprint[:12],
        f"{state.architecture}, by an operator; {len(retired)} versions were retired, and the next "
        "replica's base model is the pool's",
    )
    change.reply(event.ticket, RetiredAnswer(tuple(sorted(retired))))


def _hindrance(state: PoolState, event: events.RebindBase, now: float) -> NotReadyError | None:
    if event.base_fingerprint != state.fingerprint:
        return BaseMismatchError(
            f"the pool is bound to {state.fingerprint[:12]} ({state.architecture}), not to "
            f"{event.base_fingerprint[:12] or '(none)'}: look again",
            metadata={"pool_fingerprint": state.fingerprint},
        )
    if state.transfers:
        return NotReadyError(
            f"{len(state.transfers)} transfers are under way or wait: let them end, or stop their "
            "trainers",
            reason="TRANSFER_UNDER_WAY",
        )
    if now < state.restart_over_at:
        return NotReadyError(
            f"the coordinator was just restarted, and replicas may not have registered yet: ask "
            f"again in {state.restart_over_at - now:.0f} s",
            reason="REPLICAS_IN_CONTACT",
        )
    if there := present(state):
        more = f" and {len(there) - 3} more" if len(there) > 3 else ""
        return NotReadyError(
            f"{', '.join(there[:3])}{more} would be left with a base model that is not the "
            "pool's: stop all replicas first (weft drain)",
            reason="REPLICAS_IN_CONTACT",
            metadata={"member": there[0]},
        )
    return None


def present(state: PoolState) -> list[str]:
    """List the replicas that are not given up, sorted."""
    return sorted(replica.replica_id for replica in state.replicas.values() if not replica.lost)


def _save(change: Change, fingerprint: str, architecture: str) -> None:
    change.state = replace(
        change.state,
        fingerprint=fingerprint,
        architecture=architecture,
        checkpoint=None,
        as_started=frozenset(),
        references_known=frozenset(),
        drafts_known=frozenset({""}),
    )
    change.emit(SavePool(fingerprint, architecture))


def note_reference(change: Change, event: events.ReferenceKnown) -> None:
    """Note that a description of the base, and of a draft, is known; forget those of replicas that
    are not here any more."""
    state = change.state
    if event.fingerprint != state.fingerprint:
        return
    here = [replica.capabilities for replica in state.replicas.values()]
    told = state.references_known & {one.reference_digest for one in here}
    drafts = state.drafts_known & {one.draft_fingerprint for one in here}
    change.state = replace(
        state,
        references_known=told | {event.reference_digest},
        drafts_known=drafts | {"", event.draft_fingerprint},
    )


# -- the checkpoint that base@0 is -----------------------------------------------

#: One content in so many layouts.
_MAX_AS_STARTED = 64


def report_checkpoint(change: Change, event: events.ReportCheckpoint) -> None:
    """Note the checkpoint that a replica has read, or refuse a replica that is not registered."""
    replica = registered_replica(change.state, event.replica_id, event.incarnation)
    note_checkpoint(change, replace(replica, checkpoint=event.checkpoint))
    change.reply(event.ticket, EmptyAnswer())


def note_checkpoint(change: Change, replica: Replica) -> None:
    """Store what a replica told, and bind base@0 to its checkpoint if nothing is bound."""
    change.put_replica(replica)
    if change.state.checkpoint is None and replica.checkpoint.state is CheckpointState.DIGESTED:
        _bind_checkpoint(change, replica)


def note_as_started(change: Change, replica: Replica) -> None:
    """Note that the base that a replica serves is what it was started with, as it said.

    Only where its checkpoint is the pool's base@0.
    """
    state = change.state
    content = state.base_contents.get(replica.vector.base)
    if content is None or content in state.as_started or len(state.as_started) >= _MAX_AS_STARTED:
        return
    is_compared = replica.checkpoint.state is CheckpointState.DIGESTED
    if not is_compared or state.checkpoint is None or explain_checkpoint_mismatch(state, replica):
        return
    change.state = replace(state, as_started=state.as_started | {content})
    # What is over another base is told with the routes.
    change.emit(SaveAsStarted(content), RoutesChanged((replica.replica_id,)))


def _bind_checkpoint(change: Change, replica: Replica) -> None:
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


def watch_checkpoint(change: Change) -> None:
    """Bind base@0 anew where a wrong first model would stand for ever.

    That is so if nothing was ever pushed, and no replica with the bound checkpoint was there for
    as long as it takes to give a replica up.

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
        _bind_checkpoint(change, min(others, key=lambda replica: replica.replica_id))
