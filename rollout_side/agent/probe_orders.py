"""Orders to answer a probe, on their way to workers that may hang."""

from __future__ import annotations

import asyncio

from rollout_side.engine import Engine, JoinOrder


class ProbeOrders:
    """Tells an engine's workers of each probe once, and of one at a time, however often
    the coordinator repeats itself: a call to workers that hang is not ended by its caller.

    Args:
        engine: Whose workers; on its event loop.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._group_id = ""
        self._telling: asyncio.Task[None] | None = None

    async def tell(self, order: JoinOrder) -> None:
        """Returns once the workers have taken the order; they answer by themselves.

        Raises:
            WeftError: They did not.
        """
        group_id = order.ticket.group_id
        while self._telling is not None and self._group_id != group_id:
            if self._telling.done():
                break
            await asyncio.wait({self._telling})
        if self._telling is None or self._group_id != group_id or _has_failed(self._telling):
            self._group_id = group_id
            self._telling = asyncio.create_task(self._engine.join_group(order), name="probe")
        await asyncio.shield(self._telling)


def _has_failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
