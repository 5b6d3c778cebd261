"""Identity of the pool: a random id in its catalog, which replicas and trainers are told.

Who was told one stays with that pool as long as its process lives. So a coordinator that answers
at another's address, whose pool has other versions under the same names, takes nobody over.

A coordinator with a new catalog may be of a pool whose catalog was lost: it takes the id that the
first replica or trainer tells. Where the first were told none, it makes one up, and for a while
gives it up for one that it is told, unless something was pushed meanwhile.
"""

from __future__ import annotations

from weft_rl.containers import replace
from weft_rl.contract.errors import NotReadyError
from weft_rl.coordinator.decisions.state.change import Change
from weft_rl.coordinator.decisions.state.effects import SavePoolId
from weft_rl.coordinator.decisions.state.pool import PoolState

# Of ``PoolSettings.lost_after_seconds``: who was there before has come back then.
_PATIENCE = 6.0


def check(change: Change, who: str, given: str) -> None:
    """Refuse a replica or a trainer of another pool; decide the identity of a new catalog.

    Args:
        who: Caller, for messages.
        given: Pool that it was told of; empty where it was told of none.

    Raises:
        NotReadyError: ``POOL_MISMATCH``.
    """
    state = change.state
    if given == state.pool_id and given:
        return
    if not given:
        if not state.pool_id and state.fresh_pool_id:
            _take(change, state.fresh_pool_id)
    elif not state.pool_id or _gives_way(state, change.now):
        _take(change, given)
    elif given != state.fresh_pool_id:
        raise mismatch(who, given, state.pool_id)


def mismatch(who: str, given: str, pool_id: str) -> NotReadyError:
    """Return the error for a caller of another pool."""
    return NotReadyError(
        f"{who} belongs to pool {given[:80]}, and this is the coordinator of pool {pool_id}: an "
        "address leads to another coordinator than before. To move it to this pool, restart it",
        reason="POOL_MISMATCH",
        metadata={"pool_id": pool_id, "given": given[:80]},
    )


def _gives_way(state: PoolState, now: float) -> bool:
    """Return whether the identity was made up by this process, just now, and nothing is known by
    it."""
    is_new = now < state.started_at + _PATIENCE * state.settings.lost_after_seconds
    is_used = any(policy.versions or policy.served_version for policy in state.policies.values())
    is_used = is_used or any(not transfer.replica_id for transfer in state.transfers.values())
    return state.pool_id == state.fresh_pool_id and is_new and not is_used


def _take(change: Change, pool_id: str) -> None:
    change.state = replace(change.state, pool_id=pool_id)
    change.emit(SavePoolId(pool_id))
