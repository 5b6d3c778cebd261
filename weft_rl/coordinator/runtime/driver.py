"""Driver that carries out what ``step`` decides: one task, one order of events.

A batch is whatever has been posted. One writer thread writes its saves in one
transaction. Only once they are on disk is anything else done about the batch: nobody
ever learns of a decision that a crash could undo. Events alone may wait for a disk that is
full: nothing is decided by them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from weft_rl import __version__
from weft_rl.contract.errors import CapacityError, PeerUnavailableError, WeftError
from weft_rl.contract.names import PolicyVersion
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.effects import Announce, EventKind, SaveEvent
from weft_rl.coordinator.decisions.state.event_kinds import DETAILS, MAX_KEPT
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.decisions.state.replica import Replica
from weft_rl.coordinator.decisions.state.values import Failure, VersionRecord
from weft_rl.coordinator.decisions.step import step
from weft_rl.coordinator.decisions.transfers.preflight import check_fit
from weft_rl.coordinator.runtime.catalog.database import Catalog, CatalogError
from weft_rl.coordinator.runtime.live_groups import LiveGroups
from weft_rl.coordinator.runtime.manifests import (
    LayoutCache,
    ReferenceCache,
    describe_held,
    look_up,
)
from weft_rl.coordinator.runtime.replica_client import ReplicaCaller, ReplicaReader
from weft_rl.coordinator.runtime.watchers import Feed, RouteFeed
from weft_rl.rpc.security.credentials import NO_CREDENTIALS, Credentials
from weft_rl.tracing import untraced

_log = logging.getLogger(__name__)

_Read = TypeVar("_Read")

#: After which a write to the catalog is spoken of; it is waited for, however long it takes.
SLOW_SAVE_SECONDS: Final = 10.0
TICK_SECONDS: Final = 0.25
#: Between two attempts to write events alone, once one has failed.
RETRY_SECONDS: Final = 10.0
#: Events that wait for the next attempt; older ones are in the log alone.
MAX_UNWRITTEN: Final = 2 * MAX_KEPT
#: Between two looks at whether the catalog's file is still there.
LOOK_SECONDS: Final = 1.0
#: Calls that may wait to be decided; more are refused. (Events of streams and of
#: our own calls are bounded by the number of ranks and replicas.)
MAX_QUEUED: Final = 10_000
# A preflight of more tensors than this is done on another thread.
_INLINE_TENSORS: Final = 4_000
#: Told of each step once its saves are on disk: the event, what was known, what is known, and
#: the effects.
OnStep = Callable[[events.Event, PoolState, PoolState, Sequence[effects.Effect]], None]


class Driver:
    """Owner of the pool's state. All methods are called on the event loop."""

    def __init__(
        self,
        state: PoolState,
        catalog: Catalog,
        references: ReferenceCache,
        feed: Feed,
        *,
        manifests: LayoutCache | None = None,
        commit_seconds: float,
        credentials: Credentials = NO_CREDENTIALS,
        clock: Callable[[], float] = time.monotonic,
        on_step: Sequence[OnStep] = (),
        trace_context: Callable[[str], str] = untraced,
    ) -> None:
        self.state = state
        self.groups = LiveGroups(self.post, trace_context)
        self.routes = RouteFeed()
        self._catalog = catalog
        self._references = references
        self._manifests = manifests or LayoutCache()
        self.feed = feed
        self._clock = clock
        self._on_step = on_step
        #: Questions to replicas; orders, which are decided, go through ``_orders``.
        self.replicas = ReplicaReader(credentials)
        self._orders = ReplicaCaller(
            self.replicas,
            lambda: self.state.generation,
            self.post,
            commit_seconds,
            trace_context,
            state.settings.stall_seconds,
            lambda: self.state.pool_id,
        )
        self._writer = ThreadPoolExecutor(1, "weft-catalog")
        self._queue: deque[events.Event] = deque()
        self._wake = asyncio.Event()
        self._calls: dict[int, asyncio.Future[effects.CallAnswer]] = {}
        self._last_ticket = 0
        self._lazy: list[effects.Save] = []
        self._retry_at = float("-inf")
        self.unwritten_reason = ""
        """Cause for which the last events are not in the catalog; empty if they are."""
        self._aside: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._failure: Exception | None = None
        self._task: asyncio.Task[None] | None = None

    def now(self) -> float:
        """Return the monotonic seconds that ``step`` sees."""
        return self._clock()

    def post(self, event: events.Event) -> None:
        """Queue an event to be decided; returns at once."""
        self._queue.append(event)
        self._wake.set()

    async def call(
        self, make: Callable[[int], events.Event], *, until: float | None = None
    ) -> effects.CallAnswer:
        """Post a call's event and wait for its answer.

        Args:
            make: Builds the event from the ticket that names this call.
            until: Time at which the decision may change by the clock alone.

        Raises:
            WeftError: The call was refused.
        """
        if self._stopping:
            raise _away()
        if len(self._queue) >= MAX_QUEUED:
            raise CapacityError("the coordinator has too many calls to answer", reason="TOO_SLOW")
        loop = asyncio.get_running_loop()
        self._last_ticket += 1
        ticket = self._last_ticket
        future: asyncio.Future[effects.CallAnswer] = loop.create_future()
        self._calls[ticket] = future
        timer = None
        if until is not None:
            delay = max(0.0, until - self.now()) + 0.001
            timer = loop.call_later(delay, self.post, events.Tick())
        self.post(make(ticket))
        try:
            return await future
        finally:
            if timer is not None:
                timer.cancel()
            if self._calls.pop(ticket, None) is not None and not self._stopping:
                self.post(events.CallerGone(ticket))

    def start(self) -> asyncio.Task[None]:
        """Start the deciding task, which ends with ``stop``, or fails with the catalog."""
        generation = f"generation {self.state.generation}"
        started = Announce(EventKind.COORDINATOR_STARTED, generation, f"Weft {__version__}")
        self._lazy += self._to_keep([started], self.now())
        self._announce(started)
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self._task

    async def _run(self) -> None:
        """Decide events until stopped, or until the catalog cannot be written."""
        loop = asyncio.get_running_loop()
        aside = [loop.create_task(self._tick()), loop.create_task(self._watch_catalog())]
        try:
            while not self._stopping:
                await self._wake.wait()
                self._wake.clear()
                if self._failure:
                    raise self._failure
                await self._decide()
        finally:
            for task in aside:
                task.cancel()
            self._stopping = True
            for future in self._calls.values():
                if not future.done():
                    future.set_exception(_away())
                    future.exception()  # its caller may be gone: nobody is told of that then
            self._calls.clear()

    async def _tick(self) -> None:
        while True:
            try:
                for heard in self.groups.take_progress():
                    self.post(heard)
            except Exception:  # noqa: BLE001 (without ticks no deadline would be kept any more)
                _log.exception("the ranks' last reports of progress are lost")
            self.post(events.Tick())
            await asyncio.sleep(TICK_SECONDS)

    async def _watch_catalog(self) -> None:
        """Notice a removed catalog even while nothing is written."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await loop.run_in_executor(self._writer, self._catalog.check)
            except CatalogError as error:
                self._failure = error
                self._wake.set()
                return

    async def _decide(self) -> None:
        now = self.now()
        state, todo, flush = self.state, list[effects.Effect](), False
        steps = list[tuple[events.Event, PoolState, PoolState, list[effects.Effect]]]()
        for _ in range(len(self._queue)):
            event = self._queue.popleft()
            flush = flush or isinstance(event, events.Tick)
            before = state
            try:
                state, more = step(state, event, now)
            except Exception:  # noqa: BLE001 (one bad event must not end the pool's coordinator)
                _log.exception("deciding %s failed: the event is ignored", type(event).__name__)
                ticket = getattr(event, "ticket", None)
                if ticket is not None:
                    error = WeftError("the coordinator failed on this call; read its log")
                    todo.append(effects.Refuse(ticket, error))
                continue
            todo += more
            if self._on_step:
                steps.append((event, before, state, more))
        saves = [effect for effect in todo if isinstance(effect, effects.Save)]
        saves += self._to_keep(todo, now)
        self._lazy += saves
        if any(save.durable for save in saves) or (flush and self._is_due(now)):
            saves, self._lazy = self._lazy, []
            await self._save(saves)
        self.state = state
        for taken in steps:
            self._tell(*taken)
        for effect in todo:
            if not isinstance(effect, effects.Save):
                self._carry_out(effect)

    def _tell(
        self,
        event: events.Event,
        before: PoolState,
        after: PoolState,
        done: list[effects.Effect],
    ) -> None:
        for tell in self._on_step:
            try:
                tell(event, before, after, done)
            except Exception:  # noqa: BLE001 (what only counts must not end the coordinator)
                _log.exception("counting %s failed: it is in no metric", type(event).__name__)

    async def flush(self) -> None:
        """Write the deferred saves, so that a reader of the catalog sees them.

        Raises:
            PeerUnavailableError: They could not be written: the coordinator ends.
        """
        if not self._lazy or self._stopping:
            return
        saves, self._lazy = self._lazy, []
        try:
            await self._save(saves)
        except Exception as error:
            raise _away() from error

    async def read(self, look: Callable[[Catalog], _Read]) -> _Read:
        """Look into the catalog, on the writer's thread.

        Reads wait there for the writes before them, and for other programs that lock the file:
        the event loop waits for neither.

        Raises:
            PeerUnavailableError: The coordinator is stopping.
            WeftError: The catalog cannot be read.
        """
        if self._stopping:
            raise _away()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._writer, look, self._catalog)

    async def _find_version(self, version: PolicyVersion) -> VersionRecord | None:
        return await self.read(lambda catalog: catalog.find_version(version))

    def _is_due(self, now: float) -> bool:
        """Return whether a tick writes the deferred saves."""
        return bool(self._lazy) and (now >= self._retry_at or not _are_events(self._lazy))

    async def _save(self, saves: list[effects.Save]) -> None:
        """Write one transaction; a failure ends the coordinator. Events alone become deferred saves
        again, if the file is there."""
        loop = asyncio.get_running_loop()
        slow = loop.call_later(
            SLOW_SAVE_SECONDS,
            _log.error,
            "the catalog was not written in %g s: its disk does not answer, or another program "
            "reads it (fuser names it); nothing is decided or acknowledged until it is written",
            SLOW_SAVE_SECONDS,
        )
        try:
            await loop.run_in_executor(self._writer, self._apply, saves)
        except _EventsUnwrittenError as error:
            self._defer_events(saves, error)
        except Exception as error:
            self._failure = error
            self._wake.set()
            raise
        else:
            if self.unwritten_reason:
                _log.info("the catalog is written again, with the events that waited")
            self.unwritten_reason = ""
            self._retry_at = float("-inf")
        finally:
            slow.cancel()

    def _apply(self, saves: list[effects.Save]) -> None:
        """Write one transaction, on the writer's thread."""
        try:
            self._catalog.apply(saves)
        except Exception as error:
            if not _are_events(saves):
                raise
            self._catalog.check()
            why = error.why if isinstance(error, CatalogError) else ""
            raise _EventsUnwrittenError(why or str(error)) from error

    def _defer_events(self, saves: list[effects.Save], error: _EventsUnwrittenError) -> None:
        if not self.unwritten_reason:
            _log.error(
                "events are in this log and in no catalog, tried again every %g s: %s",
                RETRY_SECONDS,
                error,
            )
        self.unwritten_reason = str(error)
        self._retry_at = self.now() + RETRY_SECONDS
        self._lazy = [*saves[-MAX_UNWRITTEN:], *self._lazy]

    def _carry_out(self, effect: effects.Effect) -> None:
        groups = self.groups
        match effect:
            case effects.Reply():
                self._answer(effect.ticket, effect.answer)
            case effects.Refuse():
                self._answer(effect.ticket, effect.error)
            case effects.OpenGroup():
                groups.open_group(effect.group)
            case effects.DropGroup():
                groups.drop_group(effect.group_id, effect.why, is_failure=effect.is_failure)
            case effects.SendPrepare():
                self._prepare(effect)
            case effects.SendStart():
                groups.send_start(
                    effect.group_id,
                    effect.transfer_id,
                    effect.num_receivers,
                    effect.num_buckets,
                    effect.first_bucket,
                )
            case effects.SendReform():
                groups.send_reform(
                    effect.group_id, effect.transfer_id, effect.renewed, effect.message
                )
            case effects.SendAbort():
                groups.send_abort(effect.group_id, effect.transfer_id, effect.failure)
            case effects.CloseChannel():
                self._orders.close_channel(effect.address)
            case effects.CheckFit():
                self._check_fit(effect)
            case effects.LookUp():
                self._spawn(self._look_up(effect))
            case effects.DescribeVersion():
                self._spawn(self._describe_held(effect))
            case effects.RoutesChanged():
                self.routes.change(effect.replica_ids)
            case effects.Announce():
                self._announce(effect)
            case (
                effects.CallJoin()
                | effects.CallLoad()
                | effects.CallCommit()
                | effects.CallSend()
                | effects.CallSwitch()
                | effects.CallRestore()
                | effects.CallDiscard()
                | effects.CallRetire()
                | effects.CallRefuse()
                | effects.CallSleep()
                | effects.CallWake()
            ):
                self._orders.start(effect)

    def _prepare(self, effect: effects.SendPrepare) -> None:
        """Tell the receivers what comes, once no replica refuses this coordinator: it would be
        found at the commit, after all bytes were sent."""
        replicas = [self.state.replicas.get(name) for name in effect.transfer.targets]
        asked = [r for r in replicas if r and self.replicas.may_be_refused(r.address)]
        if asked:
            self._spawn(self._prepare_if_let_in(effect, asked))
        else:
            self.groups.send_prepare(effect.group_id, effect.transfer, effect.time_left)

    async def _prepare_if_let_in(self, effect: effects.SendPrepare, asked: list[Replica]) -> None:
        began = self.now()
        errors = await asyncio.gather(
            *(self.replicas.check_let_in(r.address, self.state.generation) for r in asked)
        )
        transfer_id, is_refused = effect.transfer.transfer_id, False
        for replica, error in zip(asked, errors, strict=True):
            if error is not None:
                is_refused = True
                why = f"{replica.replica_id} refuses this coordinator: {error.message}"
                failure = Failure(error.reason, why, {"member": replica.replica_id})
                self.post(events.JoinAnswered(transfer_id, replica.replica_id, failure))
        now = self.state.transfers.get(transfer_id)
        is_still_due = now is not None and now.group_id == effect.group_id
        if is_still_due and not is_refused:
            left = effect.time_left - (self.now() - began)
            self.groups.send_prepare(effect.group_id, effect.transfer, left)

    def _to_keep(self, todo: Sequence[effects.Effect], now: float) -> list[SaveEvent]:
        """Return the saves of the announced events that outlive the coordinator."""
        wall = self.state.wall(now)
        return [
            SaveEvent(wall, effect)
            for effect in todo
            if isinstance(effect, Announce) and effect.kind not in DETAILS
        ]

    def _announce(self, event: Announce) -> None:
        level = logging.DEBUG if event.kind in DETAILS else logging.INFO
        _log.log(level, "%s %s: %s", event.kind, event.subject, event.message)
        self.feed.publish(self.state.wall(self.now()), event)

    def _answer(self, ticket: int, answer: effects.CallAnswer | WeftError) -> None:
        future = self._calls.pop(ticket, None)
        if future is None or future.done():
            return
        if isinstance(answer, WeftError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _check_fit(self, effect: effects.CheckFit) -> None:
        if len(effect.manifest.tensors) <= _INLINE_TENSORS:
            self.post(events.FitChecked(effect.key, self._fit(effect)))
            return
        self._spawn(self._check_fit_aside(effect))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._aside.add(task)
        task.add_done_callback(self._done_aside)

    def _done_aside(self, task: asyncio.Task[None]) -> None:
        self._aside.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a look-up for a transfer failed unexpectedly", exc_info=error)

    async def _check_fit_aside(self, effect: effects.CheckFit) -> None:
        failure = await asyncio.to_thread(self._fit, effect)
        self.post(events.FitChecked(effect.key, failure))

    def _fit(self, effect: effects.CheckFit) -> Failure | None:
        served = effect.key.capabilities
        try:
            reference = self._references.get(
                served.base_fingerprint, served.draft_fingerprint, (served.reference_digest,)
            )
            if reference is None:
                return Failure("INTERNAL", "the base model's tensors are not known any more")
            return check_fit(effect.manifest, effect.adapter, reference, effect.key)
        except Exception:  # noqa: BLE001 (a preflight that fails must answer, not hang the push)
            _log.exception("preflight failed unexpectedly")
            return Failure("INTERNAL", "preflight failed; the coordinator's log says how")

    async def _look_up(self, effect: effects.LookUp) -> None:
        self.post(await look_up(effect, self._find_version, self._manifests, self.replicas))

    async def _describe_held(self, effect: effects.DescribeVersion) -> None:
        self.post(await describe_held(effect, self._find_version, self.replicas))

    async def stop(self) -> None:
        """Refuse waiting calls, end streams and calls to replicas, write the deferred saves."""
        self._stopping = True
        self._wake.set()
        if self._task is not None:
            await asyncio.wait([self._task])
        self.groups.close("the coordinator is stopping")
        self.feed.close()
        self.routes.close()
        for task in list(self._aside):
            task.cancel()
        await self._orders.close()
        await self.replicas.close()
        saves, self._lazy = self._lazy, []
        try:
            if saves and self._failure is None:
                await self._save(saves)
        finally:
            await asyncio.to_thread(self._writer.shutdown)


class _EventsUnwrittenError(Exception):
    """Failure to write a transaction that consists of events."""


def _are_events(saves: Sequence[effects.Save]) -> bool:
    return all(isinstance(save, SaveEvent) for save in saves)


def _away() -> PeerUnavailableError:
    return PeerUnavailableError("the coordinator is stopping", reason="COORDINATOR_AWAY")
