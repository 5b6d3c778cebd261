"""What must be true of members that hang while their processes answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.lease_checks import fail
from weft.coordinator.state import State
from weft.coordinator.transfer import Transfer
from weft.coordinator.values import Errand, Phase

if TYPE_CHECKING:
    from tests.sim.trainer import Push
    from tests.sim.world import World

#: How late the coordinator may find out: words and orders on a slow network, a frozen
#: sender that sends nothing, a former member of the transfer that stalled before.
_SLACK_SECONDS = 10.0


class StallChecks:
    """Sees every tick, and every push that has ended."""

    def __init__(self, world: World) -> None:
        self._world = world

    def ticked(self, state: State) -> None:
        """Nobody who hangs holds a transfer."""
        for transfer in state.transfers.values():
            if transfer.phase in (Phase.FORMING, Phase.STAGING):
                self._check_members(transfer)
                self._check_trainer(state, transfer)

    def _check_members(self, transfer: Transfer) -> None:
        if transfer.loading:
            return  # they may have until the deadline
        longest = self._world.settings.stall_seconds + _SLACK_SECONDS
        for name in transfer.held:
            replica = self._world.replicas[name]
            if min(replica.worker.frozen_for(), self._age(transfer)) > longest:
                fail(f"{transfer.transfer_id} goes on with {name}, whose worker hangs")

    def _check_trainer(self, state: State, transfer: Transfer) -> None:
        trainer = self._world.trainers.get(transfer.trainer_id)
        if trainer is None or transfer.errand is not Errand.PUSH:
            return
        others_wait = [
            other.transfer_id
            for other in state.transfers.values()
            if other.phase is Phase.WAITING
            and other.errand is Errand.PUSH
            and self._world.clock.now - other.begin_at > _SLACK_SECONDS
        ]
        longest = self._world.settings.sender_stall_seconds + _SLACK_SECONDS
        if others_wait and min(trainer.worker.frozen_for(), self._age(transfer)) > longest:
            fail(f"{transfer.transfer_id} of a trainer that hangs is waited for by {others_wait}")

    def _age(self, transfer: Transfer) -> float:
        return self._world.coordinator.state.wall(self._world.clock.now) - transfer.create_time

    def push_ended(self, push: Push) -> None:
        """A push that has failed for a member says for which."""
        error = push.error
        if error is not None and error.reason == "STALLED" and not error.metadata.get("member"):
            fail(f"the push of {push.policy} stalled, and nobody is named: {error}")
