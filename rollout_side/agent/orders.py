"""Orders to an engine: carried out in turns, refused after a failure, or told only once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from rollout_side.engine import Engine, JoinOrder, SpillOrder
from weft_rl.contract.errors import LoadFailedError, NotReadyError, WeftError
from weft_rl.contract.names import BASE_POLICY, PolicyVersion, VersionVector

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Begun(NamedTuple):
    """Order that is being carried out."""

    what: str
    """Description of the order, for messages."""
    at: float
    """Time at which it began, by ``time.monotonic()``."""


class Turns:
    """Turns of orders to one engine: one order at a time, carried out to its end. An order cut
    off in the middle would leave mixed weights. One whose caller goes away while it waits is
    never begun."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        #: The order whose turn it is; any thread may look.
        self.begun: Begun | None = None

    @property
    def taken(self) -> bool:
        """True while an order is carried out."""
        return self._lock.locked()

    async def take(self, order: Coroutine[Any, Any, _T], what: str) -> _T:
        """Carry out an order when its turn has come; return its result.

        Args:
            what: Description of the order, for messages.
        """
        try:
            await self._lock.acquire()
        except asyncio.CancelledError:
            order.close()
            raise
        self.begun = Begun(what, time.monotonic())
        work = asyncio.ensure_future(order)
        work.add_done_callback(self._ended)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(_log_unheard)
            raise

    def _ended(self, _: object) -> None:
        self.begun = None
        self._lock.release()


def _log_unheard(work: asyncio.Future[Any]) -> None:
    """Log the failure of an order whose caller went away; heartbeats report the outcome."""
    if not work.cancelled() and (error := work.exception()) is not None:
        _log.warning("an order whose caller had gone away failed: %s", error)


_MAX_FAILED = 64


class FailedTransfers:
    """Transfers that failed last.

    The coordinator may have undone the commit of a transfer that failed. A repeated call (gRPC
    repeats calls when a connection breaks) must not switch to it after all.
    """

    def __init__(self) -> None:
        self._failed: deque[str] = deque(maxlen=_MAX_FAILED)

    def check(self, transfer_id: str, version: PolicyVersion, advice: str = "") -> None:
        """Refuse a transfer that has failed.

        Raises:
            NotReadyError: It has failed here.
        """
        if transfer_id in self._failed:
            raise NotReadyError(f"{version} failed to load here before{advice}")

    @contextmanager
    def noting_failure(self, transfer_id: str) -> Iterator[None]:
        """Record the transfer if a load fails inside the ``with``; nothing if its id is empty."""
        try:
            yield
        except LoadFailedError:
            if transfer_id:
                self._failed.append(transfer_id)
            raise

    @contextmanager
    def noting_refusal(self, transfer_id: str) -> Iterator[None]:
        """Record the transfer on any ``WeftError`` but ``TRANSFER_UNDER_WAY``. The coordinator
        counts on it that a transfer refused once is refused again."""
        try:
            yield
        except WeftError as error:
            if error.reason != "TRANSFER_UNDER_WAY" and transfer_id not in self._failed:
                self._failed.append(transfer_id)
            raise


class ProbeOrders:
    """Probes of an engine's workers: each is told once, and one at a time.

    The coordinator may repeat itself, and a call to workers that hang is not ended by its caller.

    Args:
        engine: Engine of the workers; used on its event loop.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._group_id = ""
        self._telling: asyncio.Task[None] | None = None

    async def tell(self, order: JoinOrder) -> None:
        """Tell the workers of a probe; return once they have taken it. They answer by themselves.

        Raises:
            WeftError: They did not take it.
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


class SpillOrders:
    """Orders to an engine to spill: the last one told, and removals that the next is to tell.

    Args:
        engine: Engine to tell; one without a spill directory is told nothing.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._told = SpillOrder()
        # Not yet told to the spill directory.
        self._retired: set[PolicyVersion] = set()

    def retire(self, version: PolicyVersion) -> None:
        """Have a version removed from the spill directory."""
        if self._engine.spills:
            self._retired.add(version)

    async def tell(
        self, vector: VersionVector, retained_bases: tuple[int, ...], *, serves_all: bool
    ) -> None:
        """Have the versions served now, and retained bases, written to disk in the background.
        For ``serves_all`` see ``SpillOrder``."""
        if not self._engine.spills:
            return
        adapters = [
            PolicyVersion(name, version)
            for name, entry in vector.adapters.items()
            for version in entry.versions
        ]
        adapters.sort(key=lambda v: (-v.version, v.policy))
        bases = [PolicyVersion(BASE_POLICY, number) for number in retained_bases]
        order = SpillOrder(
            keep=(*adapters, *bases),
            retired=tuple(sorted(self._retired)),
            served_base=vector.base,
            serves_all=serves_all,
        )
        if order != self._told:
            await self._engine.spill(order)
            self._told = order
            self._retired.difference_update(order.retired)
