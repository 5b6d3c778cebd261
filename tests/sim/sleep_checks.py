"""What must be true of replicas that a trainer puts to sleep: they sleep while it owns the base."""

from __future__ import annotations

from collections.abc import Sequence

from tests.sim.lease_checks import fail
from weft_rl.contract.names import BASE_POLICY
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.pool import PoolState

#: Events that may end an order, or have another take its place.
_ENDING = (
    events.WakeRollouts,
    events.WakeReplica,
    events.SleepRollouts,
    events.SleepReplica,
    events.SleepAnswered,
    events.Leave,
)


class SleepChecks:
    """Knows which replicas a trainer was told to sleep, by the token of its lease."""

    def __init__(self) -> None:
        self._token: dict[str, int] = {}

    def catalog_lost(self) -> None:
        """Orders are known by what replicas say, who may have been restarted."""
        self._token.clear()

    def told(self, state: PoolState, answer: effects.SleepAnswer) -> None:
        """A trainer hears that replicas sleep, or anybody that they are awake."""
        for name in answer.replica_ids:
            order = state.sleeps.get(name)
            if order is not None and order.trainer_id and order.fencing_token:
                self._token[name] = order.fencing_token

    def stepped(
        self, event: events.Event, state: PoolState, emitted: Sequence[effects.Effect]
    ) -> None:
        """After every event: no order ends, and no replica is woken, under a living lease."""
        if isinstance(event, events.SleepRollouts | events.SleepReplica):  # asked for anew
            for name in [n for n, order in state.sleeps.items() if not order.confirmed]:
                self._token.pop(name, None)
        for effect in emitted:
            ends = isinstance(effect, effects.SaveSleep) and effect.order is None
            if not ends and not isinstance(effect, effects.CallWake):
                continue
            assert isinstance(effect, effects.SaveSleep | effects.CallWake)
            token = self._token.pop(effect.replica_id, None)
            base = state.policies.get(BASE_POLICY)
            lease = base.lease if base else None
            is_owned = lease is not None and lease.fencing_token == token
            if token is not None and is_owned and not isinstance(event, _ENDING):
                why = type(event).__name__
                fail(f"{effect.replica_id} is woken by {why} while its trainer owns the base")
