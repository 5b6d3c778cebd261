"""A replica that is asked whether its worker still answers."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from tests.sim.clock import Future
from weft_rl.contract.errors import StaleEpochError
from weft_rl.coordinator.decisions.state.transfer import Group

if TYPE_CHECKING:
    from tests.sim.replica import SimReplica


class Probes:
    """The newest probe of one process of a replica."""

    def __init__(self, replica: SimReplica) -> None:
        self._replica = replica
        self._probe: Group | None = None

    def answer(self, group: Group) -> None:
        """Attend it with every rank, unless a newer one is attended."""
        if self._probe is None or group.epoch > self._probe.epoch:
            self._probe = group
            for rank in range(1, group.size):
                self._replica.worker.spawn(self._attend(group, rank))

    def _attend(self, group: Group, rank: int) -> Generator[Any, Any, None]:
        """Attend as often as it takes; the worker's threads answer only when they do not hang."""
        yield self._replica.world.network.delay()
        while self._probe is group:
            closed = Future()
            self._replica.world.attend(self._replica, group, rank, lambda message: None, closed.set)
            error = yield closed
            if isinstance(error, StaleEpochError):
                return
            yield 1.0
