"""Agent of a replica, which takes the coordinator's orders and stays in the pool.

The composer of the rollout side: it introduces the engine to the control plane
and knows neither vLLM nor torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rollout_side.agent.name_resolution import OUT_OF_CONTACT, refused_aliases, resolve
from rollout_side.agent.registration import (
    HeartbeatOrders,
    HeldVersions,
    OrderKey,
    OrderSource,
    Registration,
)
from rollout_side.agent.serving import ProbeOrders, ServedVersions, SleepOrders
from rollout_side.config import AgentConfig
from rollout_side.engine import (
    AliasRefusals,
    Engine,
    JoinOrder,
    SendOrder,
    SleepOrder,
)
from rollout_side.waits import seconds_to_tick
from weft_rl.contract.errors import NotReadyError, StaleEpochError, WeftError
from weft_rl.contract.names import HEAD_ROOM, PolicyVersion, VersionVector, check_counted
from weft_rl.contract.replica_report import AbsentPolicy, DrainNote, ReplicaReport, ReplicaWork
from weft_rl.rpc.channel import local_address_towards, split_target

_log = logging.getLogger(__name__)

#: New requests are still taken for so long: routers and balancers need a moment to
#: notice that this replica is not ready.
NOTICE_SECONDS = 1.0
_POLL_SECONDS = 0.05
# For the coordinator to say whether an order is its own.
_CONFIRM_SECONDS = 3.0


class Drainer:
    """Drainer of one replica. Used on the event loop, except ``report``."""

    def __init__(
        self,
        num_requests: Callable[[], int],
        refuse: Callable[[str], None],
        is_needed: Callable[[], bool],
    ) -> None:
        self._num_requests, self._refuse, self._is_needed = num_requests, refuse, is_needed
        self._began = asyncio.Event()
        self._refuse_at = self._deadline = float("inf")
        self._reason = ""

    @property
    def is_draining(self) -> bool:
        """True once the drain has begun; it ends only with the process."""
        return self._began.is_set()

    def report(self) -> DrainNote | None:
        """Return the drain to report to the coordinator; None before it begins. Quick and
        thread-safe."""
        if not self.is_draining:
            return None
        return DrainNote(max(0.0, self._deadline - time.monotonic()), self._reason)

    def begin(self, seconds: float, reason: str) -> None:
        """Begin the drain, or shorten the time of the one under way."""
        now = time.monotonic()
        self._deadline = min(self._deadline, now + seconds)
        if self.is_draining:
            return
        self._reason = reason
        self._refuse_at = now + NOTICE_SECONDS
        _log.info("draining for at most %.1f s: %s", seconds, reason)
        self._began.set()

    async def wait_drained(self) -> str:
        """Wait until nothing runs and no transfer needs the replica, or the time is over."""
        await self._began.wait()
        refusing = False
        while (now := time.monotonic()) < self._deadline:
            if now >= self._refuse_at and not refusing:
                refusing = True
                self._refuse(f"this replica is leaving ({self._reason}): ask another")
            if refusing and not self._num_requests() and not self._is_needed():
                return f"drained: {self._reason}"
            await asyncio.sleep(_POLL_SECONDS)
        left = [f"{self._num_requests()} requests were cut"] if self._num_requests() else []
        left += ["a transfer was left"] if self._is_needed() else []
        return f"drained: {self._reason}; the time was over" + "".join(f", {what}" for what in left)


#: How long one thing may hold the event loop before it is reported as work.
_LOOP_SECONDS = 2.0
_WILDCARDS = {"0.0.0.0", "::", ""}


def _objection(known: OrderSource, order: OrderSource) -> WeftError | None:
    """Return why an order is not of the coordinator that has answered so; None if it may be."""
    if order.pool_id and known.pool_id and order.pool_id != known.pool_id:
        return NotReadyError(
            f"the order is of pool {order.pool_id[:80]}, and this replica belongs to pool "
            f"{known.pool_id}: an address leads to another replica than before. To move this "
            "one, restart it with that pool's coordinator",
            reason="POOL_MISMATCH",
            metadata={"pool_id": known.pool_id, "given": order.pool_id[:80]},
        )
    for what, given, told in (
        ("coordinator generation", order.generation, known.generation),
        ("epoch", order.epoch, known.epoch + HEAD_ROOM),
        ("number", order.number, known.number + HEAD_ROOM),
    ):
        if given > told:
            return StaleEpochError(
                f"the order is of {what} {given}, to which this replica's coordinator has not "
                "counted"
            )
    return None


class Agent:
    """One replica's membership in a pool; what it serves is in ``serving``. All methods but
    ``report`` run on the event loop that ``engine`` belongs to."""

    def __init__(self, config: AgentConfig, engine: Engine) -> None:
        self.config = config
        self.engine = engine
        #: Versions, which the coordinator's orders change through the servicer.
        self.serving = ServedVersions(engine, self._after_switch)
        #: Address of the ReplicaService; see ``advertise``.
        self.address = ""
        self.registration: Registration | None = None
        self._answer: HeartbeatOrders | None = None
        self._aliases = OUT_OF_CONTACT
        engine.refuse_aliases(self._aliases)
        self._drain = Drainer(engine.num_requests, self._close, self._is_needed)
        self._in_transfer = False
        self._closed = self._ordered = ""
        self._order = OrderKey(0, 0)
        # How far the coordinator has counted, as it said last; None before it has answered.
        self._told: OrderSource | None = None
        self._num_told = 0
        self._pins_ordered: tuple[int, ...] = ()
        self._absent: Mapping[str, AbsentPolicy] = {}
        self._last_epoch = 0
        self._answered = asyncio.Event()
        # When the event loop last ran ``run``.
        self._ticked_at = float("inf")
        self._probes = ProbeOrders(engine)
        self._sleeps = SleepOrders(engine, self.serving.orders)

    # -- orders, from the servicer -------------------------------------------

    async def join_group(self, order: JoinOrder) -> None:
        """Have the receivers join a side group."""
        ticket = order.ticket
        self._last_epoch = max(self._last_epoch, ticket.epoch)
        if order.is_probe:
            await self._probes.start(order)
            return
        _log.debug(
            "joining group %s of trainer %s as rank %d of %d, epoch %d",
            ticket.group_id,
            order.trainer_id,
            ticket.rank,
            ticket.size,
            ticket.epoch,
        )
        await self.engine.join_group(order)

    async def send(self, order: SendOrder) -> None:
        """Send a held version to a side group.

        Raises:
            NotFoundError: It is not held.
        """
        self._last_epoch = max(self._last_epoch, order.ticket.epoch)
        _log.info(
            "sending a clone of %s to group %s, epoch %d",
            order.version,
            order.ticket.group_id,
            order.ticket.epoch,
        )
        await self.engine.send(order)

    async def fall_asleep(self, order: SleepOrder) -> None:
        """Put the engine to sleep, by the newest order; see ``SleepOrders``."""
        await self._sleeps.fall_asleep(order)
        self.hurry()

    async def wake_up(self) -> None:
        """Wake the engine; see ``SleepOrders``."""
        await self._sleeps.wake_up()
        self.hurry()

    # -- requests for tokens ---------------------------------------------------

    def requested(self, asked: str) -> PolicyVersion:
        """Return the version that answers a request for ``asked``; see ``resolve``."""
        newest = self.serving.known.newest
        return resolve(asked, self._served(), newest, self._aliases, self._absent)

    def _served(self) -> VersionVector:
        return self.serving.vector.with_base(self.engine.base_version)

    def _after_switch(self) -> None:
        """Decide anew which aliases to refuse, if any may be: most switches change none."""
        answer = self._answer
        may_be_refused = answer is None or bool(
            answer.lacking or answer.lacking_more or answer.base_doubt
        )
        if may_be_refused or self._aliases != AliasRefusals():
            self._update_aliases()

    def _update_aliases(self) -> None:
        """Refuse the aliases that stand for other versions in the pool, and take all others."""
        registration, answer = self.registration, self._answer
        refused, was = OUT_OF_CONTACT, self._aliases
        if registration is not None and registration.in_contact and answer is not None:
            refused = refused_aliases(answer, self._served())
        if refused == was:
            return
        self._aliases = refused
        self.engine.refuse_aliases(refused)
        if refused.is_away is not was.is_away:
            self.hurry()  # the report shows it
        if refused.is_away:
            _log.warning("%s", self.refusing)
        elif (refused.every, refused.named.keys()) != (was.every, was.named.keys()):
            some = "; ".join([refused.every] * bool(refused.every) or [*refused.named.values()][:3])
            _log.info("bare names are %s", f"refused: {some}" if some else "taken")

    # -- membership ----------------------------------------------------------

    def advertise(self, port: int) -> None:
        """Decide the address that others reach this replica by."""
        host = self.config.advertise_host or split_target(self.config.listen)[0]
        if host in _WILDCARDS:
            host = local_address_towards(self.config.coordinator)
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def host(self) -> str:
        """Host part of ``address``; side groups bind it."""
        return split_target(self.address)[0]

    @property
    def is_ready(self) -> bool:
        """True if it serves all it should, by the coordinator, and refuses no requests."""
        registration = self.registration
        return (
            registration is not None
            and registration.in_contact
            and registration.ready.is_set()
            and not self.serving.dirty_reason
            and not self._drain.is_draining
            and not self.refusing
            and self.engine.asleep is None
            and self._sleeps.to_sleep is None
        )

    @property
    def refusing(self) -> str:
        """Reason why the engine refuses new requests now; empty while it takes them.
        Refusals for mixed weights are not included."""
        if self._closed or self._ordered or not self._aliases.is_away:
            return self._closed or self._ordered
        why = self.registration.trouble if self.registration else ""
        text = "bare names are refused: it is out of contact with the coordinator"
        return f"{text} ({why})" if why else text

    @property
    def order_number(self) -> int:
        """Number of the coordinator's newest order to refuse requests, or to take them."""
        return self._order.number

    def report(self) -> ReplicaReport:
        """Return the state of this replica; quick, on any thread."""
        # The order's number is read before its reason, and on the loop's thread set after it.
        # The number of a former coordinator means nothing to this one.
        order, registration = self._order, self.registration
        known = registration.coordinator_generation if registration else 0
        serving, memory = self.serving, self.serving.memory
        vector = serving.vector
        return ReplicaReport(
            version_vector=vector,
            retained_base_versions=memory.retained_bases,
            undo_base_versions=memory.undo_bases,
            takes_deltas=memory.takes_deltas,
            spilled_versions=frozenset(copy.version for copy in memory.spilled),
            dirty_reason=serving.mixed_reason,
            base_as_started=serving.is_as_started(vector.base),
            refusing=self.refusing,
            order_number=order.number if order.generation == known else 0,
            sleep=self.engine.asleep,
            drain=self._drain.report(),
            adapter_used_bytes=memory.adapter_bytes,
            pinned_base_versions=frozenset(serving.pins),
            pinned_base_bytes=memory.pinned_base_bytes,
            engine=self.engine.report,
            work=self._work(),
        )

    def holdings(self) -> HeldVersions:
        """Return what a heartbeat tells."""
        return HeldVersions(
            self.report(),
            self.serving.memory.staged_transfer_ids,
            self.engine.checkpoint,
            held=frozenset(self.serving.held()),
            last_epoch=self._last_epoch,
            to_sleep=self._sleeps.to_sleep,
        )

    def _work(self) -> ReplicaWork | None:
        """Return the work under way, with the seconds since it made progress; on any thread.
        The event loop counts as work while what it runs holds it."""
        now, engine, order = time.monotonic(), self.engine.work, self.serving.orders.running
        if engine.owed:
            return ReplicaWork(f"its engine, {engine.owed}", now - engine.seen_at)
        if order is not None:
            return ReplicaWork(order.what, now - max(order.begun_at, engine.seen_at))
        held_for = now - self._ticked_at
        return ReplicaWork("its event loop", held_for) if held_for > _LOOP_SECONDS else None

    def order_refusal(self, order: OrderKey, reason: str) -> bool:
        """Refuse new requests from now on, or take them again if ``reason`` is empty. An order
        older than the last changes nothing. Return whether the reason changed."""
        # One of before the first registration may be of a coordinator that this one never had.
        is_of_none = self._told is not None and self._told.generation < self._order.generation
        if order < self._order and not is_of_none:
            return False
        changes = reason != self._ordered
        self._ordered = reason
        self.engine.refuse_requests(self._closed or reason)
        self._order = order
        if changes:
            _log.info("new requests are %s", f"refused: {reason}" if reason else "taken")
        return changes

    async def check_source(self, order: OrderSource) -> None:
        """Refuse an order that is not of the coordinator that this replica is registered with.

        What it has told may be older than its order: it is asked once more, for a few seconds at
        most.
        """
        check_counted("coordinator generation", order.generation)
        check_counted("epoch", order.epoch)
        check_counted("order number", order.number)
        # An answer that is on its way may be older than the order: the one after it counts.
        enough, deadline = self._num_told + 2, time.monotonic() + _CONFIRM_SECONDS
        while self._told is not None and (error := _objection(self._told, order)) is not None:
            if self._num_told >= enough or time.monotonic() >= deadline:
                raise error
            self.hurry()
            await asyncio.sleep(_POLL_SECONDS)

    def hurry(self) -> None:
        """Send the next heartbeat at once, so that the coordinator learns the state and answers."""
        if self.registration is not None:
            self.registration.hurry()

    # -- leaving the pool ------------------------------------------------------

    def drain(self, seconds: float, reason: str) -> None:
        """Stop being ready, and leave when nothing runs, or after ``seconds``. Idempotent; a later
        call can only shorten the time. See ``wait_drained``."""
        begins = not self._drain.is_draining
        self._drain.begin(seconds, reason)
        if begins:
            self._in_transfer = True  # until the coordinator answers
            if self.registration is not None:
                self.registration.hurry()

    async def wait_drained(self) -> str:
        """Wait for the end of a drain, whoever began it; return a description of how it ended. The
        process is to end then; ``run`` continues until it is cancelled."""
        return await self._drain.wait_drained()

    async def wait_answer(self) -> None:
        """Wait until the coordinator has answered again, or a second is over. ``is_ready`` may
        have changed then."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds_to_tick()):
                await self._answered.wait()
        self._answered.clear()

    def _take_told(self, told: OrderSource) -> None:
        self._told = told
        self._num_told += 1

    def take_answer(self, answer: HeartbeatOrders) -> None:
        """Follow the orders in the answer to a heartbeat."""
        self._answered.set()
        self._answer = answer
        self._update_aliases()
        if answer.is_draining:
            self._in_transfer = answer.in_transfer
        if answer.drain is not None:
            self.drain(answer.drain.time_left_seconds, answer.drain.reason)
        if self.order_refusal(answer.order, answer.out_of_service.refusal):
            self.hurry()
        self._pins_ordered = answer.pinned_base_versions
        absent = {one.policy: one for one in answer.absent_policies}
        if absent != self._absent:
            self._absent = absent
            self.engine.set_absent(absent)

    def _close(self, reason: str) -> None:
        self._closed = reason
        self.engine.refuse_requests(reason)

    def _is_needed(self) -> bool:
        """Return whether a transfer needs this replica; False while the coordinator is away, since
        nobody knows then."""
        registration = self.registration
        return registration is not None and registration.is_known and self._in_transfer

    async def run(self) -> None:
        """Stay in the pool until cancelled, then leave it.

        Raises:
            WeftError: The pool refuses this replica for good.
        """
        loop = asyncio.get_running_loop()
        refused: asyncio.Future[WeftError] = loop.create_future()
        on_loop = partial(partial, loop.call_soon_threadsafe)
        registration = Registration(
            self.config,
            self.address,
            self.engine,
            current=self.holdings,
            on_failed=on_loop(refused.set_result),
            on_answer=on_loop(self.take_answer),
            on_ordered=on_loop(self.order_refusal),
            on_told=on_loop(self._take_told),
        )
        self.registration = registration
        await self.serving.refresh(self._pins_ordered)  # registration names what is spilled
        registration.start()
        chores = asyncio.create_task(self._keep_up(), name="chores")
        ends: set[asyncio.Future[Any]] = {refused, chores}
        try:
            while not refused.done():
                self._ticked_at = time.monotonic()
                await asyncio.wait(ends, timeout=seconds_to_tick())
                if chores.done():
                    chores.result()  # raises: it has no other end
                self._update_aliases()
        finally:
            chores.cancel()
            await asyncio.to_thread(registration.stop)
        raise refused.result()

    async def _keep_up(self) -> None:
        """Do the chores due each second, and only log their errors. Workers that do not answer
        may be back later, and an engine that has died ends the process elsewhere."""
        trouble = ""
        while True:
            await asyncio.sleep(seconds_to_tick())
            if self.serving.is_switching:  # the engine answers after the switch
                continue
            try:
                await self.serving.drop_unused()
                await self.serving.refresh(self._pins_ordered)
                await self.serving.spill(serves_all=self.is_ready)
            except WeftError as error:
                if error.message != trouble:
                    _log.warning(
                        "the engine does not answer, and is asked again each second: %s", error
                    )
                trouble = error.message
            else:
                if trouble:
                    _log.info("the engine answers again")
                trouble = ""
