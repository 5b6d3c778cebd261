"""Orders to an engine: carried out in turns, refused after a failure, or given only once."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from rollout_side.engine import Engine, JoinOrder, SleepOrder, SpillOrder
from weft_rl.contract.errors import LoadFailedError, NotReadyError, StaleEpochError, WeftError
from weft_rl.contract.names import BASE_POLICY, PolicyVersion, VersionVector
from weft_rl.contract.replica_report import Sleep

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class RunningOrder(NamedTuple):
    """Order that is being carried out."""

    what: str
    """Description of the order, for messages."""
    begun_at: float
    """Time at which it began, by ``time.monotonic()``."""


class OrderQueue:
    """Queue of orders to one engine, which runs one at a time and each to its end. An order cut off
    in the middle would leave mixed weights. An order whose caller goes away while it waits is
    never begun."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        #: The order that is carried out; any thread may read it.
        self.running: RunningOrder | None = None

    @property
    def is_busy(self) -> bool:
        """True while an order is carried out."""
        return self._lock.locked()

    async def run(self, order: Coroutine[Any, Any, _T], what: str) -> _T:
        """Carry out an order when its turn has come; return its result."""
        try:
            await self._lock.acquire()
        except asyncio.CancelledError:
            order.close()
            raise
        self.running = RunningOrder(what, time.monotonic())
        work = asyncio.ensure_future(order)
        work.add_done_callback(self._ended)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(_log_abandoned)
            raise

    def _ended(self, _: object) -> None:
        self.running = None
        self._lock.release()


def _log_abandoned(work: asyncio.Future[Any]) -> None:
    """Log the failure of an order whose caller went away; heartbeats report the outcome."""
    if not work.cancelled() and (error := work.exception()) is not None:
        _log.warning("an order failed after its caller had gone away: %s", error)


_MAX_FAILED = 64


class FailedTransfers:
    """Most recent transfers that failed.

    The coordinator may have undone the commit of a transfer that failed. A repeated call (gRPC
    repeats calls when a connection breaks) must not switch to it after all.
    """

    def __init__(self) -> None:
        self._failed: deque[str] = deque(maxlen=_MAX_FAILED)

    def check(self, transfer_id: str, version: PolicyVersion, advice: str = "") -> None:
        """Refuse a transfer that has failed."""
        if transfer_id in self._failed:
            raise NotReadyError(
                f"transfer {transfer_id} of {version} failed to load here before{advice}"
            )

    @contextmanager
    def noting_failure(self, transfer_id: str) -> Iterator[None]:
        """Record the transfer if a load fails inside the ``with``."""
        try:
            yield
        except LoadFailedError:
            self._failed.append(transfer_id)
            raise

    @contextmanager
    def noting_refusal(self, transfer_id: str) -> Iterator[None]:
        """Record the transfer on any ``WeftError`` but ``TRANSFER_UNDER_WAY``: a transfer that was
        refused once must be refused again, as the coordinator assumes."""
        try:
            yield
        except WeftError as error:
            if error.reason != "TRANSFER_UNDER_WAY" and transfer_id not in self._failed:
                self._failed.append(transfer_id)
            raise


class ProbeOrders:
    """Probes of an engine's workers, one at a time; each is passed on once.

    The coordinator may repeat an order, and a call to workers that hang is not ended by its caller.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._group_id = ""
        self._starting: asyncio.Task[None] | None = None

    async def start(self, order: JoinOrder) -> None:
        """Pass a probe to the workers; return once they have taken it, before they answer."""
        group_id = order.ticket.group_id
        while self._starting is not None and self._group_id != group_id:
            if self._starting.done():
                break
            await asyncio.wait({self._starting})
        if self._starting is None or self._group_id != group_id or _has_failed(self._starting):
            self._group_id = group_id
            self._starting = asyncio.create_task(self._engine.join_group(order), name="probe")
        await asyncio.shield(self._starting)


def _has_failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


class SpillOrders:
    """Orders to an engine to spill: the last one given, and removals that wait for the next."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._given = SpillOrder()
        # Not ordered yet.
        self._retired: set[PolicyVersion] = set()

    def retire(self, version: PolicyVersion) -> None:
        """Have a version removed from the spill directory."""
        if self._engine.spills:
            self._retired.add(version)

    async def update(
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
        if order != self._given:
            await self._engine.spill(order)
            self._given = order
            self._retired.difference_update(order.retired)


# Between two attempts: requests and readers of the weights take longer than that.
_RETRY_SECONDS = 0.02


@dataclass(frozen=True, eq=False)
class _PendingSleep:
    """Order to sleep, with a deadline."""

    order: SleepOrder
    deadline: float
    """Time until which it may wait, by ``time.monotonic()``."""

    def left(self) -> SleepOrder:
        """Return the order, with the seconds that are left until its deadline."""
        left = max(0.0, self.deadline - time.monotonic())
        return dataclasses.replace(self.order, timeout_seconds=left)


class SleepOrders:
    """Orders to one engine to sleep and to wake, of which the newest counts; used on the engine's
    event loop.

    Only sleeping and waking go through the queue. The wait for running requests, or for readers of
    the weights, does not: commits and orders to wake may come meanwhile.
    """

    def __init__(self, engine: Engine, orders: OrderQueue) -> None:
        self._engine, self._orders = engine, orders
        # The newest order to sleep, until it is carried out, has failed, or the engine is to wake.
        self._wanted: _PendingSleep | None = None
        self._work: asyncio.Task[None] | None = None

    @property
    def to_sleep(self) -> Sleep | None:
        """Sleep that was ordered and has not begun; None if there is none. Heartbeats report it, so
        that a coordinator which does not want it can wake the replica."""
        if (wanted := self._wanted) is None:
            return None
        return Sleep(wanted.order.trainer_id, level=wanted.order.level)

    async def fall_asleep(self, order: SleepOrder) -> None:
        """Put the engine to sleep, as ``Engine.fall_asleep`` does. Replaces the order given
        before, whose callers then wait for this one. Carried out to its end, even if its caller
        goes away."""
        self._wanted = _PendingSleep(order, time.monotonic() + order.timeout_seconds)
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._carry_out(), name="fall-asleep")
            self._work.add_done_callback(_log_failure)
        await asyncio.shield(self._work)

    async def wake_up(self) -> None:
        """Wake the engine when its turn has come, and cancel a sleep that has not begun."""
        self._wanted = None
        self._engine.take_requests()
        await self._orders.run(self._wake_up(), "waking")

    async def _wake_up(self) -> None:
        if self._wanted is not None:
            raise StaleEpochError("the replica was ordered to sleep before it was woken")
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
        raise StaleEpochError("the replica was ordered to wake before it slept")

    async def _attempt(self, wanted: _PendingSleep) -> bool:
        await self._engine.end_requests(wanted.left(), lambda: self._wanted is wanted)
        if self._wanted is not wanted:
            return False
        slept = await self._orders.run(self._sleep(wanted), "falling asleep")
        if not slept:
            await asyncio.sleep(_RETRY_SECONDS)
        return slept

    async def _sleep(self, wanted: _PendingSleep) -> bool:
        return self._wanted is wanted and await self._engine.fall_asleep(wanted.left())


def _log_failure(work: asyncio.Task[None]) -> None:
    """Log a failure to sleep, as its callers may be gone; heartbeats report the outcome."""
    if not work.cancelled() and (error := work.exception()) is not None:
        _log.info("the replica stays awake: %s", error)
