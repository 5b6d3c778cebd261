"""Orders to sleep and to wake: the newest one counts."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from dataclasses import dataclass

from rollout_side.agent.orders import Turns
from rollout_side.engine import Asleep, Engine, SleepOrder
from weft_rl.contract.errors import StaleEpochError

_log = logging.getLogger(__name__)

# Between two attempts: requests, or whoever reads the weights, take longer than that.
_RETRY_SECONDS = 0.02


@dataclass(frozen=True, eq=False)
class _Wanted:
    """Order to sleep, with a deadline."""

    order: SleepOrder
    deadline: float
    """Time until which it may wait, by ``time.monotonic()``."""

    def left(self) -> SleepOrder:
        """Return the order, with the seconds that are left until its deadline."""
        left = max(0.0, self.deadline - time.monotonic())
        return dataclasses.replace(self.order, timeout_seconds=left)


class SleepOrders:
    """Orders to one engine to sleep and to wake; used on the engine's event loop.

    Only sleeping and waking take a turn. The wait for running requests, or for readers of the
    weights, takes none: commits and orders to wake may come meanwhile.

    Args:
        engine: Engine that sleeps.
        turns: Turns that the engine's orders to switch take, too.
    """

    def __init__(self, engine: Engine, turns: Turns) -> None:
        self._engine, self._turns = engine, turns
        # The newest order to sleep, until it is carried out, has failed, or the engine is to wake.
        self._wanted: _Wanted | None = None
        self._work: asyncio.Task[None] | None = None

    @property
    def to_sleep(self) -> Asleep | None:
        """Sleep that was ordered and has not begun; None if there is none. Heartbeats report it:
        a coordinator that does not want it, or no longer, has the replica wake."""
        if (wanted := self._wanted) is None:
            return None
        return Asleep(wanted.order.trainer_id, level=wanted.order.level)

    async def fall_asleep(self, order: SleepOrder) -> None:
        """Put the engine to sleep, as ``Engine.fall_asleep`` does. Replaces the order given
        before, whose callers then wait for this one. Carried out to its end, even if its caller
        goes away.

        Raises:
            StaleEpochError: The engine was told to wake meanwhile.
            WeftError: See ``Engine``.
        """
        self._wanted = _Wanted(order, time.monotonic() + order.timeout_seconds)
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._carry_out(), name="fall-asleep")
            self._work.add_done_callback(_log_failure)
        await asyncio.shield(self._work)

    async def wake_up(self) -> None:
        """Wake the engine when its turn has come, and cancel a sleep that has not begun.

        Raises:
            StaleEpochError: It was told to sleep meanwhile.
            WeftError: See ``Engine``.
        """
        self._wanted = None
        self._engine.take_requests()
        await self._turns.take(self._wake_up(), "waking")

    async def _wake_up(self) -> None:
        if self._wanted is not None:
            raise StaleEpochError("the replica was told to sleep before it was woken")
        await self._engine.wake_up()

    async def _carry_out(self) -> None:
        while (wanted := self._wanted) is not None:
            try:
                slept = await self._attempt(wanted)
            except Exception:  # whatever it is: a replica that waits to sleep takes no requests
                if self._wanted is wanted:
                    self._wanted = None
                    raise
                continue
            if slept and self._wanted is wanted:
                self._wanted = None
                return
        self._engine.take_requests()
        raise StaleEpochError("the replica was told to wake before it slept")

    async def _attempt(self, wanted: _Wanted) -> bool:
        await self._engine.end_requests(wanted.left(), lambda: self._wanted is wanted)
        if self._wanted is not wanted:
            return False
        slept = await self._turns.take(self._sleep(wanted), "falling asleep")
        if not slept:
            await asyncio.sleep(_RETRY_SECONDS)
        return slept

    async def _sleep(self, wanted: _Wanted) -> bool:
        return self._wanted is wanted and await self._engine.fall_asleep(wanted.left())


def _log_failure(work: asyncio.Task[None]) -> None:
    """Log a failure to sleep, as its callers may be gone; heartbeats report the outcome."""
    if not work.cancelled() and (error := work.exception()) is not None:
        _log.info("the replica does not sleep: %s", error)
