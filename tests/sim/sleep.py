"""A replica that is told to sleep and to wake: the newest order counts."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.sim.clock import Future
from weft_rl.contract.errors import (
    NotReadyError,
    StaleEpochError,
    TransferTimeoutError,
    WeftError,
)
from weft_rl.contract.replica_report import Sleep
from weft_rl.coordinator.decisions.state import effects

if TYPE_CHECKING:
    from tests.sim.replica import SimReplica

_LOOK_SECONDS = 0.1


@dataclass(frozen=True, eq=False)
class _Wanted:
    order: effects.CallSleep
    deadline: float


class SimSleep:
    """A model of ``SleepOrders``, and of what an engine does by them."""

    def __init__(self, replica: SimReplica) -> None:
        self._replica = replica
        self._wanted: _Wanted | None = None
        self._work: Future | None = None
        self._requests_until = 0.0
        #: Whether requests are refused because it is to sleep; some may still run.
        self.refuses = False

    @property
    def to_sleep(self) -> Sleep | None:
        """What it says of itself while it waits to sleep."""
        if self._wanted is None:
            return None
        return Sleep(self._wanted.order.trainer_id, level=self._wanted.order.level)

    def carry_out(self, order: effects.CallSleep | effects.CallWake) -> Generator[Any, Any, Any]:
        """Sleep or wake; returns what is answered."""
        replica = self._replica
        if isinstance(order, effects.CallWake):
            self._wanted = None
            self._take_requests()
            yield from replica.in_turn(self._wake())
            return replica.dirty_reason
        now, random = replica.clock.now, replica.world.random
        if not self.refuses:
            runs = random.uniform(0.0, 4.0) if random.random() < 0.4 else 0.0
            self._requests_until = now + runs
        if order.aborts:
            self._requests_until = now
        self.refuses = True
        self._wanted = _Wanted(order, now + order.timeout_seconds)
        if self._work is None or self._work.done:
            self._work = replica.spawn(self._fall_asleep())
        yield self._work
        return replica.asleep

    def _fall_asleep(self) -> Generator[Any, Any, None]:
        replica = self._replica
        while (wanted := self._wanted) is not None:
            try:
                slept = yield from self._attempt(wanted)
            except WeftError:
                if self._wanted is not wanted:
                    continue
                self._wanted = None
                self._take_requests()
                raise
            if slept and self._wanted is wanted:
                self._wanted = None
                return
        self._take_requests()
        replica.world.trace(replica.name, "sleeps not: it was woken before")
        raise StaleEpochError("it was told to wake")

    def _attempt(self, wanted: _Wanted) -> Generator[Any, Any, bool]:
        clock = self._replica.clock
        while clock.now < self._requests_until and self._wanted is wanted:
            if clock.now >= wanted.deadline:
                raise TransferTimeoutError("requests have not ended")
            yield _LOOK_SECONDS
        if self._wanted is not wanted:
            return False
        slept: list[bool] = []
        yield from self._replica.in_turn(self._sleep(wanted, slept))
        return bool(slept)

    def _sleep(self, wanted: _Wanted, slept: list[bool]) -> Generator[Any, Any, None]:
        replica = self._replica
        if self._wanted is not wanted:
            return
        if replica.in_place.loading:
            raise NotReadyError("it loads in place", reason="TRANSFER_UNDER_WAY")
        yield from replica.ask_engine("sleep", replica.world.random.uniform(0.01, 0.5))
        slept.append(True)
        former = replica.asleep
        sleeps_on = former is not None and not former.weights_awake
        # At level 2 without its weights, unless they sleep at level 1 already.
        level = former.level if former is not None and sleeps_on else wanted.order.level
        replica.asleep = Sleep(wanted.order.trainer_id, level=level)
        replica.undo.clear()
        if level == 2:
            replica.discard_weights()
        replica.world.trace(replica.name, f"sleeps: {replica.asleep}")

    def _wake(self) -> Generator[Any, Any, None]:
        replica = self._replica
        if self._wanted is not None:
            raise StaleEpochError("it was told to sleep")
        yield from replica.ask_engine("wake", replica.world.random.uniform(0.01, 0.5))
        replica.asleep = None
        if self._wanted is None:
            self.refuses = False
        if replica.base_discarded:
            replica.load_own_base()
        replica.world.trace(replica.name, "is awake")

    def _take_requests(self) -> None:
        if self._replica.asleep is None:
            self.refuses = False
