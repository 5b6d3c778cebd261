"""Binding of the pool to a base model: the first replica's, until it is bound anew."""

from __future__ import annotations

from weft_rl.containers.frozen import replace
from weft_rl.contract.capabilities import Capabilities
from weft_rl.contract.errors import BaseMismatchError, NotReadyError
from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions import events
from weft_rl.coordinator.decisions.effects import (
    EventKind,
    RebindAnswer,
    SavePin,
    SavePolicy,
    SavePool,
    SaveRetired,
)
from weft_rl.coordinator.decisions.effects.change import Change
from weft_rl.coordinator.decisions.state.pool import PoolState


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

    It is let in, and the pool bound anew, where nothing was ever pushed and no other
    replica is there: then the first one was started with the wrong model.

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
        f"{state.architecture}); if the pool's is the wrong one, stop its replicas and bind it "
        "anew: weft base --rebind",
        metadata={"pool_fingerprint": state.fingerprint, "replica_fingerprint": given},
    )


def rebind(change: Change, event: events.RebindBase) -> None:
    """Let go of the base model at an operator's order; what was served is retired."""
    state = change.state
    if not state.fingerprint:
        change.reply(event.ticket, RebindAnswer(()))
        return
    if error := _hindrance(state, event, change.now):
        change.refuse([event.ticket], error)
        return
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
    change.reply(event.ticket, RebindAnswer(tuple(sorted(retired))))


def _hindrance(state: PoolState, event: events.RebindBase, now: float) -> NotReadyError | None:
    if event.fingerprint != state.fingerprint:
        return BaseMismatchError(
            f"the pool is bound to {state.fingerprint[:12]} ({state.architecture}), not to "
            f"{event.fingerprint[:12] or '(none)'}: look again",
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
        reference_known=False,
    )
    change.emit(SavePool(fingerprint, architecture))
