"""Versions that a replica serves, holds and drops.

Carries out the orders that change them, one switch at a time. Knows the engine and
nothing of the pool; the agent reports to the pool. One file: versions change only by an order,
whose turn, failure and repetition are decided with them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from rollout_side.engine import (
    Engine,
    JoinOrder,
    MemoryUsage,
    SleepOrder,
    SpillOrder,
    SwitchTimes,
    VersionFacts,
)
from weft_rl.containers import LruMapping
from weft_rl.contract.errors import (
    DigestMismatchError,
    LoadFailedError,
    NotFoundError,
    NotReadyError,
    StaleEpochError,
    WeftError,
)
from weft_rl.contract.names import BASE_POLICY, AdapterVersions, PolicyVersion, VersionVector
from weft_rl.contract.replica_report import HeldVersion, Sleep

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class VersionCopy:
    """Copy of a version to serve, staged by a transfer or in the spill directory."""

    transfer_id: str
    """Transfer that staged it, or that is to stage it from the spill directory."""
    version: PolicyVersion
    content_digest: bytes
    config_json: str = ""
    """PEFT's config of an adapter."""
    alias: int = 0
    """Version that an adapter's alias is to stand for, if it is served; else this one."""
    layout_digest: bytes = b""
    facts: VersionFacts | None = None
    """Facts to record of it once it is served."""


class ServedVersions:
    """Versions that one engine serves, and the orders that change them. All methods run on the
    event loop that ``engine`` belongs to."""

    def __init__(self, engine: Engine, on_changed: Callable[[], None] = lambda: None) -> None:
        self._vector, self._on_changed = VersionVector(), on_changed
        #: Versions that can no longer be requested but still answer old requests.
        self.retiring: set[PolicyVersion] = set()
        # As of the last refresh: heartbeats are made on another thread.
        self.memory = MemoryUsage(adapter_bytes=0, staging_bytes=0)
        #: Versions of the base whose copies the engine keeps.
        self.pins: tuple[int, ...] = ()
        self.known = KnownVersions()
        self._as_started, self._compared = 0, (0, b"")
        self._engine = engine
        #: Through which orders to switch, and to sleep, go.
        self.orders = OrderQueue()
        self._failed = FailedTransfers()
        self._spills = SpillOrders(engine)

    @property
    def vector(self) -> VersionVector:
        """Versions that are served now."""
        return self._vector

    @vector.setter
    def vector(self, vector: VersionVector) -> None:
        self._vector = dataclasses.replace(vector, revision=self._vector.revision + 1)
        self._on_changed()

    def is_as_started(self, base: int) -> bool:
        """Return whether a pushed base that is served equals the one that the engine was started
        with, byte for byte; False while that is not known."""
        return base > 0 and self._as_started == base

    @property
    def dirty_reason(self) -> str:
        """Reason why the engine may hold mixed weights. Empty if it does not, or while it is
        meant to: see ``mixed_reason``."""
        return self._engine.dirty_reason

    @property
    def mixed_reason(self) -> str:
        """Reason not to rely on the weights: ``dirty_reason``, or a base being loaded in place.
        Empty if neither applies. The coordinator that ordered the load still relies on them."""
        if self.dirty_reason or not self._engine.loading:
            return self.dirty_reason
        return "a base is being loaded in place"

    @property
    def is_switching(self) -> bool:
        """True while an order to switch is carried out, or a base is loaded in place."""
        return self.orders.is_busy or bool(self._engine.loading)

    # -- orders to switch -----------------------------------------------------

    async def commit(self, copy: VersionCopy) -> SwitchTimes:
        """Switch to a staged version; one switch at a time.

        Raises:
            NotReadyError, DigestMismatchError: Nothing changed.
            LoadFailedError: See ``Engine``.
        """
        return await self.orders.run(self._commit(copy), f"switching to {copy.version}")

    async def _commit(self, copy: VersionCopy) -> SwitchTimes:
        transfer_id, version = copy.transfer_id, copy.version
        is_loading = self._engine.loading == transfer_id  # in place: only this makes it whole
        if not is_loading and self._serves(version, copy.content_digest):
            await self._forget_staged(transfer_id)
            return SwitchTimes()
        self._failed.check(transfer_id, version, "; push it again")
        with self._failed.noting_refusal(transfer_id):
            times = await self._load(copy)
        if version.policy == BASE_POLICY:
            await self._refresh_memory()
        _log.info(
            "serving %s: loaded in %.3f s, paused for %.3f s",
            version,
            times.load_seconds,
            times.pause_seconds,
        )
        return times

    async def _forget_staged(self, transfer_id: str) -> None:
        """Drop the staged bytes of a version that is served already. An order that is repeated
        late, once the version is retired, must not switch back to it."""
        await self._refresh_memory()
        if transfer_id in self.memory.staged_transfer_ids:
            try:
                await self._engine.discard(transfer_id)
            except WeftError as error:  # the coordinator orders it again with a heartbeat
                _log.warning("could not drop what was staged of %s: %s", transfer_id, error)

    async def load_in_place(
        self, transfer_id: str, version: PolicyVersion, timeout_seconds: float
    ) -> None:
        """Pause generation and load a base as it arrives, until it is committed or
        discarded; see ``Engine.load_in_place``."""
        order = self._load_in_place(transfer_id, version, timeout_seconds)
        await self.orders.run(order, f"beginning to load {version}")

    async def _load_in_place(
        self, transfer_id: str, version: PolicyVersion, timeout_seconds: float
    ) -> None:
        self._failed.check(transfer_id, version, "; push it again")
        with self._failed.noting_failure(transfer_id):
            await self._engine.load_in_place(transfer_id, version, timeout_seconds)
        # A restarted coordinator must know of the load to end it.
        await self._refresh_memory()
        _log.info("loading %s in place; requests wait", version)

    async def discard(self, transfer_id: str) -> None:
        """Drop what was staged for a transfer, and end its load in place.

        Takes its turn among orders to switch. Once it returns, ``vector`` shows whether one of
        them was of this transfer; later ones find nothing.
        """
        await self.orders.run(self._discard(transfer_id), "discarding what was staged")

    async def _discard(self, transfer_id: str) -> None:
        was_loading = self._engine.loading == transfer_id
        await self._engine.discard(transfer_id)
        if was_loading:
            await self._refresh_memory()

    async def switch(
        self, version: PolicyVersion, spilled: VersionCopy | None = None
    ) -> SwitchTimes:
        """Switch to a version that is held: flip an alias, load a retained base, or read the copy
        ``spilled`` from the spill directory.

        Raises:
            NotReadyError: ``NOT_RETAINED``; nothing changed.
            DigestMismatchError, CapacityError: See ``Engine.restore``; nothing changed.
            LoadFailedError: See ``Engine``.
        """
        return await self.orders.run(self._switch(version, spilled), f"switching to {version}")

    async def _switch(self, version: PolicyVersion, spilled: VersionCopy | None) -> SwitchTimes:
        # An alias is flipped, but not by an order to read what is served since.
        digest = spilled.content_digest if spilled else None
        if self._serves(version, digest) and (version.policy == BASE_POLICY or spilled):
            return SwitchTimes()
        try:
            try:
                self._check_held(version, digest)
                times = await self._switch_held(version)
            except NotFoundError:
                if spilled is None:
                    raise
                times = await self._switch_spilled(spilled)
        except (NotFoundError, NotReadyError) as error:
            raise NotReadyError(error.message, reason="NOT_RETAINED") from error
        if version.policy == BASE_POLICY:
            await self._refresh_memory()
        _log.info("switched to %s, paused for %.3f s", version, times.pause_seconds)
        return times

    def _check_held(self, version: PolicyVersion, content_digest: bytes | None) -> None:
        """Check that a version is not held with another digest."""
        if other := self.known.other_digest(version, content_digest):
            raise NotFoundError(f"{version} is held here with digest {other.hex()}")

    async def _switch_held(self, version: PolicyVersion) -> SwitchTimes:
        if version.policy == BASE_POLICY:
            return await self._base_served(version, await self._engine.apply_retained(version))
        await self._engine.set_alias(version)
        self.vector = self.vector.with_adapter(version)
        return SwitchTimes()

    async def _switch_spilled(self, copy: VersionCopy) -> SwitchTimes:
        transfer_id, version = copy.transfer_id, copy.version
        self._failed.check(transfer_id, version)
        await self._engine.restore(transfer_id, version, copy.content_digest, copy.layout_digest)
        return await self._load(copy)

    async def _load(self, copy: VersionCopy) -> SwitchTimes:
        if copy.version.policy != BASE_POLICY:
            return await self._load_adapter(copy)
        with self._failed.noting_failure(copy.transfer_id):
            times = await self._engine.apply_base(
                copy.transfer_id, copy.version, copy.content_digest
            )
        return await self._base_served(copy.version, times, copy.facts)

    async def _load_adapter(self, copy: VersionCopy) -> SwitchTimes:
        version = copy.version
        if version in self.retiring:  # by its number it would be dropped with it
            raise NotReadyError(f"{version} is being dropped here; wait until it is gone")
        held = self.vector.adapters.get(version.policy, AdapterVersions())
        alias = copy.alias if copy.alias in held.versions else 0
        with self._failed.noting_failure(copy.transfer_id):
            times = await self._engine.load_adapter(
                copy.transfer_id, version, copy.config_json, copy.content_digest, alias
            )
        self.vector = self.vector.with_adapter(version, alias)
        self.known.record_served(version)
        self.known.record_facts(version, copy.facts, self._has)
        return times

    async def _base_served(
        self, version: PolicyVersion, times: SwitchTimes, facts: VersionFacts | None = None
    ) -> SwitchTimes:
        """Record a base that the engine serves now; without facts, one that was known before."""
        self._as_started, self._compared = 0, (0, b"")
        self.vector = self.vector.with_base(version.version)
        self.known.record_served(version)
        if facts is not None:
            self.known.record_facts(version, facts, self._has)
        await self._compare_base()
        return times

    async def _compare_base(self) -> None:
        """Check whether the served base equals the one that the engine was started with. Done
        once for each base, as soon as the digest of the started one is known."""
        of = self.vector.base, self._engine.checkpoint.digest
        if of[0] <= 0 or not of[1] or of == self._compared:
            return
        try:
            if await self._engine.holds_started_with(PolicyVersion(BASE_POLICY, of[0])):
                self._as_started = of[0]
                _log.info("base@%d has the bytes that this replica was started with", of[0])
        except WeftError as error:  # it keeps no copy, for example
            _log.debug("base@%d is not compared with base@0: %s", of[0], error)
        self._compared = of

    def _has(self, version: PolicyVersion) -> bool:
        bases = (*self.memory.retained_bases, *self.memory.undo_bases)
        is_held = version.policy == BASE_POLICY and version.version in bases
        return is_held or self.vector.holds(version)

    async def _refresh_memory(self) -> None:
        """Update ``memory`` after a switch, so that the answer names what is retained. An error
        is only logged: the switch stands."""
        try:
            self.memory = await self._engine.memory()
        except WeftError as error:
            _log.warning("what the engine holds could not be read: %s", error)

    def _serves(self, version: PolicyVersion, content_digest: bytes | None) -> bool:
        """Return whether a version is served, with ``content_digest`` if one is given."""
        if not self.vector.holds(version):
            return False
        other = self.known.other_digest(version, content_digest)
        if version.policy == BASE_POLICY:
            return not (self.dirty_reason or other or self._engine.lacks_base)
        if other:
            raise DigestMismatchError(
                f"{version} is served here with digest {other.hex()}, not with that of the order; "
                "retire it first"
            )
        return True

    def held(self) -> Iterator[HeldVersion]:
        """Yield versions served, retained or spilled. Versions of unknown digest, and mixed
        weights, are left out."""
        for version, facts in self.known.facts.items():
            is_mixed = version == PolicyVersion(BASE_POLICY, self.vector.base) and (
                self.mixed_reason and version.version not in self.memory.retained_bases
            )
            if self._has(version) and not is_mixed:
                yield HeldVersion(version, facts.digest)
        yield from self.memory.spilled

    async def describe(self, version: PolicyVersion, content_digest: bytes) -> VersionFacts:
        """Return the known facts of a version that is held with that digest."""
        facts = self.known.facts.get(version)
        if facts is not None and facts.digest == content_digest and self._has(version):
            return facts
        if HeldVersion(version, content_digest, spilled=True) in self.memory.spilled:
            return await self._engine.spilled_facts(version, content_digest)
        raise NotFoundError(f"{version} is not held here with digest {content_digest.hex()}")

    # -- what is dropped, kept and spilled ---------------------------------------

    async def retire(
        self, versions: list[PolicyVersion], ended: Collection[str] = frozenset()
    ) -> None:
        """Stop serving adapter versions; those in use stay in ``retiring``.

        Args:
            ended: Policies that the pool has forgotten: their bare names go, too, where they
                stand for one of these versions.
        """
        for version in versions:
            if version.policy == BASE_POLICY:
                continue
            if version.policy in ended:  # in turn: a later version may be on its way here
                await self.orders.run(self._drop_alias(version), f"retiring {version}")
            if self._alias_of(version.policy) == version.version:
                continue
            self.vector = self.vector.without_adapter(version)
            self.retiring.add(version)
            self._spills.retire(version)
        await self.drop_unused()

    async def _drop_alias(self, version: PolicyVersion) -> None:
        """Let a bare name stand for nothing, if it stands for this version."""
        if self._alias_of(version.policy) == version.version:
            await self._engine.drop_alias(version.policy)
            self.vector = self.vector.without_adapter(version)

    def _alias_of(self, policy: str) -> int:
        return self.vector.adapters.get(policy, AdapterVersions()).alias

    async def drop_mistaken(self, mistaken: list[tuple[PolicyVersion, bytes]]) -> None:
        """Stop serving adapter versions whose bytes are not those of their numbers. Only
        versions that still have these digests are dropped; their aliases go with them."""
        for version, digest in mistaken:
            facts = self.known.facts.get(version)
            entry = self.vector.adapters.get(version.policy, AdapterVersions())
            if version.version not in entry.versions or facts is None or facts.digest != digest:
                continue
            if entry.alias == version.version:
                await self._engine.drop_alias(version.policy)
            self.vector = self.vector.without_adapter(version)
            self.retiring.add(version)
            _log.warning("dropping %s: its bytes are not those of the catalog", version)
        await self.drop_unused()

    async def drop_unused(self) -> None:
        """Drop the versions of ``retiring`` that nothing uses any more."""
        for version in sorted(self.retiring):
            if await self._engine.retire(version):
                self.retiring.discard(version)
                _log.info("retired %s", version)

    async def spill(self, *, serves_all: bool) -> None:
        """Have the versions served now written to disk; see ``SpillOrders.update``."""
        await self._spills.update(self.vector, self.memory.retained_bases, serves_all=serves_all)

    async def refresh(self, pins: tuple[int, ...]) -> None:
        """Have the engine keep the pinned bases, then read what it holds. ``pins`` and ``memory``
        change together."""
        if pins != self.pins:
            await self._engine.pin_bases(pins)
            _log.info("keeping the pinned bases %s", ", ".join(map(str, pins)) or "none")
        self.memory = await self._engine.memory()
        self.pins = pins
        await self._compare_base()


#: Policies whose newest number is remembered once nothing of them is served.
_MAX_POLICIES = 4_096


class KnownVersions:
    """Versions that one replica knows of from its orders."""

    def __init__(self) -> None:
        #: Facts of versions that are served or retained.
        self.facts: dict[PolicyVersion, VersionFacts] = {}
        self._newest: LruMapping[str, int] = LruMapping(_MAX_POLICIES)

    def newest(self, policy: str) -> int:
        """Return the highest number of a policy that was served here; 0 if none was."""
        return self._newest.get(policy) or 0

    def record_served(self, version: PolicyVersion) -> None:
        """Record that a version is served."""
        self._newest.put(version.policy, max(version.version, self.newest(version.policy)))

    def record_facts(
        self,
        version: PolicyVersion,
        facts: VersionFacts | None,
        is_held: Callable[[PolicyVersion], bool],
    ) -> None:
        """Record the facts of a served version; forget those of versions no longer held."""
        held = {v: f for v, f in self.facts.items() if v != version and is_held(v)}
        self.facts = held if facts is None else {**held, version: facts}

    def other_digest(self, version: PolicyVersion, content_digest: bytes | None) -> bytes:
        """Return a version's digest if it is known to differ from ``content_digest``; else
        empty. None matches every digest."""
        facts = self.facts.get(version)
        is_other = facts is not None and content_digest not in (None, facts.digest)
        return facts.digest if facts is not None and is_other else b""


# -- orders: carried out in turns, refused after a failure, or given only once --------


_T = TypeVar("_T")


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
    """Probes of an engine's workers, one at a time; each is passed on once. The coordinator may
    repeat an order, and a call to workers that hang is not ended by its caller."""

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
