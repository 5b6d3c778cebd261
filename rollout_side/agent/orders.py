"""Orders to an engine: in which turns they are carried out, which are refused, and which of them
it is told but once."""

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
    """An order that is being carried out."""

    what: str
    """For people."""
    at: float
    """``time.monotonic()``."""


class Turns:
    """Carries out one order at a time, to its end: cut off in the middle it would leave mixed
    weights. One whose caller went away while it waited is not begun."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        #: The order whose turn it is; any thread may look.
        self.begun: Begun | None = None

    @property
    def taken(self) -> bool:
        """True while an order is being carried out."""
        return self._lock.locked()

    async def take(self, order: Coroutine[Any, Any, _T], what: str) -> _T:
        """Carry out an order when its turn has come; returns what it returns.

        Args:
            what: It is, for people.
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
    """Log the failure of an order that nobody waits for any more; the heartbeat reports it."""
    if not work.cancelled() and (error := work.exception()) is not None:
        _log.warning("an order whose caller had gone away failed: %s", error)


_MAX_FAILED = 64


class FailedTransfers:
    """The transfers that failed last.

    The coordinator may have undone the commit of what failed: a call that is repeated (gRPC
    does when a connection breaks) must not switch to it after all.
    """

    def __init__(self) -> None:
        self._failed: deque[str] = deque(maxlen=_MAX_FAILED)

    def check(self, transfer_id: str, version: PolicyVersion, advice: str = "") -> None:
        """Refuse what has failed.

        Raises:
            NotReadyError: It has.
        """
        if transfer_id in self._failed:
            raise NotReadyError(f"{version} failed to load here before{advice}")

    @contextmanager
    def noting_failure(self, transfer_id: str) -> Iterator[None]:
        """Note a load that fails inside the ``with``; none where the name is empty."""
        try:
            yield
        except LoadFailedError:
            if transfer_id:
                self._failed.append(transfer_id)
            raise

    @contextmanager
    def noting_refusal(self, transfer_id: str) -> Iterator[None]:
        """Note whatever fails: what was refused once is refused again, the coordinator counts
        on it."""
        try:
            yield
        except WeftError as error:
            if error.reason != "TRANSFER_UNDER_WAY" and transfer_id not in self._failed:
                self._failed.append(transfer_id)
            raise


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
        """Wait until the workers have taken the order; they answer by themselves.

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


class SpillOrders:
    """Orders to spill that an engine was given, and those that it must be given next.

    Args:
        engine: Nothing is told to one without a spill directory.
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
        """Have written to disk what is served now, beside all else; ``serves_all`` as in
        ``SpillOrder``."""
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
