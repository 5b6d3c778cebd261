"""A replica that is told to leave: a model of ``rollout_side.agent.agent``."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from weft_rl.contract.replica_report import DrainNote
from weft_rl.coordinator.decisions.state import effects

if TYPE_CHECKING:
    from tests.sim.replica import SimReplica

_ROUTES_SECONDS = 1.0
_POLL_SECONDS = 0.05


class SimDrain:
    """The drain of one process, with which it ends."""

    def __init__(self, replica: SimReplica) -> None:
        self._replica = replica
        self._deadline = 0.0
        self._in_transfer = True
        self.under_way = False

    def note(self) -> DrainNote | None:
        """What the coordinator is told of it."""
        if not self.under_way:
            return None
        return DrainNote(max(0.0, self._deadline - self._replica.clock.now), "drained")

    def hear(self, answer: effects.HeartbeatAnswer, *, is_noted: bool) -> None:
        """Take what the coordinator says; ``is_noted`` when it had been told of the drain."""
        if is_noted:
            self._in_transfer = answer.in_transfer
        if answer.drain is None:
            return
        ends = self._replica.clock.now + answer.drain.time_left_seconds
        if self.under_way:
            self._deadline = min(self._deadline, ends)
            return
        self._deadline, self.under_way = ends, True
        self._replica.world.trace(
            self._replica.name, f"drains for {answer.drain.time_left_seconds:.1f} s"
        )
        self._replica.spawn(self._over())

    def _over(self) -> Generator[Any, Any, None]:
        replica = self._replica
        yield _ROUTES_SECONDS
        while replica.clock.now < self._deadline:
            if replica.is_known and not self._in_transfer:
                break
            yield _POLL_SECONDS
        replica.world.faults.leave(replica)
