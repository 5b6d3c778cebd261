"""A replica's agent: carries out the coordinator's orders and stays in the pool.

The composer of the rollout side: it introduces the engine to the control plane
and knows neither vLLM nor torch.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rollout_side.config import AgentConfig
from rollout_side.drain import Drain
from rollout_side.engine import (
    Engine,
    GroupSpec,
    MemoryUse,
    SendOrder,
    SpillOrder,
    SwitchTimes,
)
from rollout_side.registration import Holdings, Identity, Registration, Told
from weft.contract.errors import (
    LoadFailedError,
    NotFoundError,
    NotReadyError,
    StaleEpochError,
    WeftError,
)
from weft.contract.names import BASE_POLICY, PolicyVersion
from weft.contract.versions import AdapterVersions, VersionVector
from weft.transport.host import local_address_towards, split_target

_log = logging.getLogger(__name__)

_REAP_SECONDS = 1.0
_MAX_FAILED = 64
_WILDCARDS = {"0.0.0.0", "::", ""}


@dataclass(frozen=True, kw_only=True)
class SpilledCopy:
    """What a version in the spill directory must be, and how it is served; see
    ``weft.v1.SpilledCopy``."""

    transfer_id: str
    config_json: str
    content_digest: bytes
    layout_digest: bytes
    alias: int


class Agent:
    """One replica's membership in a pool, and what it serves.

    All methods run on the event loop that ``engine`` belongs to.
    """

    def __init__(self, config: AgentConfig, engine: Engine) -> None:
        self.config = config
        self.engine = engine
        self.vector = VersionVector()
        self.dirty_reason = ""
        #: Versions that can no longer be requested but still answer old requests.
        self.draining: set[PolicyVersion] = set()
        #: Where the ReplicaService answers; see ``advertise``.
        self.address = ""
        # Asked after each switch, not at each heartbeat: the engine answers between
        # its steps, and a heartbeat must not wait for a long one.
        self.memory = MemoryUse(adapter_bytes=0, staging_bytes=0)
        self.registration: Registration | None = None
        self._aliases_hidden = False
        self._drain = Drain(engine.num_requests, self._close, self._is_needed)
        self._in_transfer = False
        self._closed = ""
        self._pins_told: tuple[int, ...] = ()
        self._pins: tuple[int, ...] = ()
        self._switching = asyncio.Lock()
        # The coordinator may have withdrawn what failed: a call that is repeated (gRPC
        # does when a connection breaks) must not switch to it after all.
        self._failed: deque[str] = deque(maxlen=_MAX_FAILED)
        # Ordered retired, and not yet told to the spill directory.
        self._retired: set[PolicyVersion] = set()
        self._spill_order = SpillOrder()

    # -- orders, from the servicer -------------------------------------------

    def check_generation(self, generation: int) -> None:
        """Refuse an order of a coordinator older than the one registered with.

        Raises:
            StaleEpochError: It is older.
        """
        newest = self.registration.coordinator_generation if self.registration else 0
        if generation < newest:
            raise StaleEpochError(f"coordinator generation {generation} was replaced by {newest}")

    async def join_group(self, trainer_id: str, spec: GroupSpec) -> None:
        """Have the receivers join a side group."""
        _log.info(
            "joining group %s of trainer %s as rank %d of %d, epoch %d",
            spec.group_id,
            trainer_id,
            spec.rank,
            spec.size,
            spec.epoch,
        )
        await self.engine.join_group(spec)

    async def commit(
        self,
        transfer_id: str,
        version: PolicyVersion,
        config_json: str,
        content_digest: bytes,
        alias: int = 0,
    ) -> SwitchTimes:
        """Switch to a staged version; one switch at a time. An adapter's alias stands
        for it afterwards, or for ``alias`` if that version is served.

        Raises:
            NotReadyError, DigestMismatchError: Nothing changed.
            LoadFailedError: As ``Engine``.
        """
        return await self._in_turn(
            self._commit(transfer_id, version, config_json, content_digest, alias)
        )

    async def _commit(
        self,
        transfer_id: str,
        version: PolicyVersion,
        config_json: str,
        content_digest: bytes,
        alias: int,
    ) -> SwitchTimes:
        if self._serves(version):
            return SwitchTimes()
        if transfer_id in self._failed:
            raise NotReadyError(f"{version} failed to load here before; push it again")
        if version.policy == BASE_POLICY:
            load = self.engine.apply_base(transfer_id, version, content_digest)
            times = await self._load_base(version, load, transfer_id)
            await self._look_at_memory()
        else:
            times = await self._load_adapter(
                version, transfer_id, config_json, content_digest, alias
            )
        _log.info(
            "serving %s: loaded in %.3f s, paused for %.3f s",
            version,
            times.load_seconds,
            times.pause_seconds,
        )
        return times

    async def _in_turn(self, order: Coroutine[Any, Any, SwitchTimes]) -> SwitchTimes:
        """Carry out one order at a time, to its end: cut off in the middle it would leave
        mixed weights. One whose caller went away while it waited is not begun."""
        try:
            await self._switching.acquire()
        except asyncio.CancelledError:
            order.close()
            raise
        work = asyncio.ensure_future(order)
        work.add_done_callback(lambda _: self._switching.release())
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(_log_unheard)
            raise

    async def switch(
        self, version: PolicyVersion, spilled: SpilledCopy | None = None
    ) -> SwitchTimes:
        """Switch to a version that is held: flip an alias, load a retained base, or
        read it from the spill directory as ``spilled`` says.

        Raises:
            NotReadyError: ``NOT_RETAINED``; nothing changed.
            DigestMismatchError, CapacityError: As ``Engine.restore``; nothing changed.
            LoadFailedError: As ``Engine``.
        """
        return await self._in_turn(self._switch(version, spilled))

    async def _switch(self, version: PolicyVersion, spilled: SpilledCopy | None) -> SwitchTimes:
        # An alias is flipped, but not by an order to read what is served since.
        if self._serves(version) and (version.policy == BASE_POLICY or spilled):
            return SwitchTimes()
        try:
            try:
                times = await self._switch_held(version)
            except NotFoundError:
                if spilled is None:
                    raise
                times = await self._switch_spilled(version, spilled)
        except (NotFoundError, NotReadyError) as error:
            raise NotReadyError(error.message, reason="NOT_RETAINED") from error
        if version.policy == BASE_POLICY:
            await self._look_at_memory()
        _log.info("switched to %s, paused for %.3f s", version, times.pause_seconds)
        return times

    async def _switch_held(self, version: PolicyVersion) -> SwitchTimes:
        if version.policy == BASE_POLICY:
            return await self._load_base(version, self.engine.apply_retained(version))
        await self.engine.set_alias(version)
        self.vector = self.vector.with_adapter(version)
        return SwitchTimes()

    async def _switch_spilled(self, version: PolicyVersion, copy: SpilledCopy) -> SwitchTimes:
        transfer_id, digest = copy.transfer_id, copy.content_digest
        if transfer_id in self._failed:
            raise NotReadyError(f"{version} failed to load here before")
        await self.engine.restore(transfer_id, version, digest, copy.layout_digest)
        if version.policy == BASE_POLICY:
            load = self.engine.apply_base(transfer_id, version, digest)
            return await self._load_base(version, load, transfer_id)
        return await self._load_adapter(version, transfer_id, copy.config_json, digest, copy.alias)

    async def _load_adapter(
        self,
        version: PolicyVersion,
        transfer_id: str,
        config_json: str,
        content_digest: bytes,
        alias: int,
    ) -> SwitchTimes:
        held = self.vector.adapters.get(version.policy, AdapterVersions())
        alias = alias if alias in held.versions else 0
        with self._noting_failure(transfer_id):
            times = await self.engine.load_adapter(
                transfer_id, version, config_json, content_digest, alias
            )
        self.vector = self.vector.with_adapter(version, alias)
        return times

    async def _load_base(
        self,
        version: PolicyVersion,
        load: Coroutine[Any, Any, SwitchTimes],
        transfer_id: str = "",
    ) -> SwitchTimes:
        with self._noting_failure(transfer_id):
            times = await load
        self.vector = self.vector.with_base(version.version)
        self.dirty_reason = ""
        return times

    @contextmanager
    def _noting_failure(self, transfer_id: str = "") -> Iterator[None]:
        try:
            yield
        except LoadFailedError as error:
            if transfer_id:
                self._failed.append(transfer_id)
            if error.metadata.get("dirty") == "true":
                self.dirty_reason = error.message
            raise

    async def _look_at_memory(self) -> None:
        """After a switch, so that the answer tells what is retained. What is served
        is served, whatever becomes of this look."""
        try:
            self.memory = await self.engine.memory()
        except WeftError as error:
            _log.warning("could not ask the engine what it holds: %s", error)

    async def send(self, order: SendOrder) -> None:
        """Send a held version to a side group.

        Raises:
            NotFoundError: It is not held.
        """
        _log.info(
            "sending a clone of %s@%d to group %s, epoch %d",
            order.policy,
            order.version,
            order.group.group_id,
            order.group.epoch,
        )
        await self.engine.send(order)

    async def retire(self, versions: list[PolicyVersion]) -> None:
        """Stop serving adapter versions; those in use stay in ``draining``."""
        for version in versions:
            entry = self.vector.adapters.get(version.policy, AdapterVersions())
            if entry.alias == version.version or version.policy == BASE_POLICY:
                continue
            self.vector = self.vector.without_adapter(version)
            self.draining.add(version)
            if self.engine.spills:
                self._retired.add(version)
        await self._drop_unused()

    async def _drop_unused(self) -> None:
        for version in sorted(self.draining):
            if await self.engine.retire(version):
                self.draining.discard(version)
                _log.info("retired %s", version)

    def _serves(self, version: PolicyVersion) -> bool:
        if version.policy == BASE_POLICY:
            return self.vector.base == version.version and not self.dirty_reason
        entry = self.vector.adapters.get(version.policy, AdapterVersions())
        return version.version in entry.versions

    # -- staying in the pool -------------------------------------------------

    def advertise(self, port: int) -> None:
        """Decide the address that others reach this replica by."""
        host = self.config.advertise_host or split_target(self.config.listen)[0]
        if host in _WILDCARDS:
            host = local_address_towards(self.config.coordinator)
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def host(self) -> str:
        """The host part of ``address``; side groups bind it."""
        return split_target(self.address)[0]

    @property
    def is_ready(self) -> bool:
        """Whether the coordinator says that this replica serves all it should."""
        registration = self.registration
        return (
            registration is not None
            and registration.in_contact
            and registration.ready.is_set()
            and not self.dirty_reason
            and not self._drain.under_way
        )

    def _holdings(self) -> Holdings:
        drain = self._drain.note()
        return Holdings(self.vector, self.memory, self.dirty_reason, drain, self._pins)

    # -- leaving it in good order ----------------------------------------------

    def drain(self, seconds: float, reason: str) -> None:
        """Stop being ready, and leave when nothing runs, or after ``seconds``.

        Idempotent; a later call can only shorten the time. See ``drained``.
        """
        begins = not self._drain.under_way
        self._drain.begin(seconds, reason)
        if begins:
            self._in_transfer = True  # until the coordinator says otherwise
            if self.registration is not None:
                self.registration.hurry()

    async def drained(self) -> str:
        """Wait for the end of a drain, whoever began it; returns how it ended.

        The process is to end then; ``run`` goes on until it is cancelled.
        """
        return await self._drain.over()

    def _told(self, told: Told) -> None:
        if told.is_draining:
            self._in_transfer = told.in_transfer
        if told.drain is not None:
            self.drain(told.drain.seconds, told.drain.reason)
        self.engine.refuse_requests(self._closed or told.refuse_reason)
        self._pins_told = told.pins

    def _close(self, reason: str) -> None:
        self._closed = reason
        self.engine.refuse_requests(reason)

    def _is_needed(self) -> bool:
        """Whether a transfer needs this replica; nobody can tell while the coordinator
        is away."""
        registration = self.registration
        return registration is not None and registration.is_known and self._in_transfer

    async def _watch_contact(self, registration: Registration) -> None:
        """Refuse bare names while nobody can say what they stand for now."""
        if registration.in_contact is not self._aliases_hidden:
            return
        self._aliases_hidden = not registration.in_contact
        await self.engine.hide_aliases(self._aliases_hidden)
        _log.warning(
            "bare names are %s",
            "refused: no contact with the coordinator" if self._aliases_hidden else "taken again",
        )

    async def _spill(self) -> None:
        """Have written to disk what is served now, beside all else."""
        adapters = [
            PolicyVersion(name, version)
            for name, entry in self.vector.adapters.items()
            for version in entry.versions
        ]
        adapters.sort(key=lambda v: (-v.version, v.policy))
        bases = [PolicyVersion(BASE_POLICY, number) for number in self.memory.retained_bases]
        order = SpillOrder(
            keep=(*adapters, *bases),
            retired=tuple(sorted(self._retired)),
            served_base=self.vector.base,
            settled=self.is_ready,
        )
        if order != self._spill_order:
            await self.engine.spill(order)
            self._spill_order = order
            self._retired.difference_update(order.retired)

    async def _look_at_engine(self) -> None:
        """Have it keep what is pinned, then see what it holds; the coordinator is told of
        both at once."""
        pins = self._pins_told
        if pins != self._pins:
            await self.engine.pin_bases(pins)
            _log.info("keeping the pinned bases %s", ", ".join(map(str, pins)) or "none")
        self.memory = await self.engine.memory()
        self._pins = pins

    async def run(self) -> None:
        """Stay in the pool until cancelled, then leave it.

        Raises:
            WeftError: The pool refuses this replica for good.
        """
        loop = asyncio.get_running_loop()
        refused: asyncio.Future[WeftError] = loop.create_future()

        def fail(error: WeftError) -> None:
            loop.call_soon_threadsafe(refused.set_result, error)

        def hear(told: Told) -> None:
            loop.call_soon_threadsafe(self._told, told)

        identity = Identity(
            address=self.address,
            capabilities=self.engine.capabilities,
            reference=self.engine.reference,
            model_name=self.engine.model_name,
        )
        registration = Registration(
            self.config,
            identity,
            current=self._holdings,
            on_failed=fail,
            on_told=hear,
        )
        self.registration = registration
        self.memory = await self.engine.memory()  # what is spilled, say, is registered
        registration.start()
        try:
            while not refused.done():
                await asyncio.wait({refused}, timeout=_REAP_SECONDS)
                await self._watch_contact(registration)
                if not self._switching.locked():  # the engine answers after the switch
                    await self._drop_unused()
                    await self._look_at_engine()
                    if self.engine.spills:
                        await self._spill()
        finally:
            await asyncio.to_thread(registration.stop)
        raise refused.result()


def _log_unheard(work: asyncio.Future[SwitchTimes]) -> None:
    """What became of an order that nobody waits for any more; the heartbeat tells it."""
    if not work.cancelled() and (error := work.exception()) is not None:
        _log.warning("an order whose caller had gone away failed: %s", error)
