"""Identity of the pool: a random id in its catalog, which replicas and trainers are told.

Who was told one stays with that pool as long as its process lives. So a coordinator that answers
at another's address, whose pool has other versions under the same names, takes nobody over.

A coordinator with an empty catalog is of a new pool. Only one that was started to recover may be
of a pool whose catalog was lost: it takes the id that the first replica or trainer tells, and lets
nobody in before who was told none, for as long as they need to come back.
"""

from __future__ import annotations

from weft_rl.containers import replace
from weft_rl.contract.errors import NotReadyError, PeerUnavailableError
from weft_rl.coordinator.decisions.state.change import Change
from weft_rl.coordinator.decisions.state.effects import SavePoolId
from weft_rl.coordinator.decisions.state.pool import PoolState

# Of ``PoolSettings.lost_after_seconds``: who was there before has come back then.
_PATIENCE = 3.0


def check(change: Change, who: str, given: str) -> None:
    """Refuse a replica or a trainer of another pool; decide the identity of a new catalog.

    Args:
        who: Caller, for messages.
        given: Pool that it was told of; empty where it was told of none.

    Raises:
        NotReadyError: ``POOL_MISMATCH``.
        PeerUnavailableError: ``POOL_RECOVERING``: nobody of the lost pool has come back yet.
    """
    state = change.state
    if state.pool_id:
        if given and given != state.pool_id:
            raise _mismatch(state, who, given)
    elif state.settings.recover and given:
        _take(change, given)
    elif state.settings.recover and change.now < state.started_at + _patience(state):
        raise PeerUnavailableError(
            f"this coordinator recovers a pool, and waits for a replica or a trainer that was of "
            f"it, up to {_patience(state):g} s after its start; {who} was not",
            reason="POOL_RECOVERING",
        )
    elif given:
        raise _mismatch(state, who, given)
    elif state.fresh_pool_id:
        _take(change, state.fresh_pool_id)


def _patience(state: PoolState) -> float:
    """Return the seconds for which those of a lost pool are waited for."""
    return _PATIENCE * state.settings.lost_after_seconds


def _mismatch(state: PoolState, who: str, given: str) -> NotReadyError:
    here = f"pool {state.pool_id}" if state.pool_id else "a new pool"
    return NotReadyError(
        f"{who} belongs to pool {given[:80]}, and this coordinator to {here}: its address leads to "
        "another one than before, or the pool's catalog was lost. If it was lost, start the "
        f"coordinator over an empty one with --recover; to move {who} to this pool, restart it",
        reason="POOL_MISMATCH",
        metadata={"pool_id": state.pool_id, "given": given[:80]},
    )


def _take(change: Change, pool_id: str) -> None:
    change.state = replace(change.state, pool_id=pool_id)
    change.emit(SavePoolId(pool_id))
