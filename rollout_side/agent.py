"""A replica's agent: carries out the coordinator's orders and stays in the pool.

The composer of the rollout side: it introduces the engine to the control plane
and knows neither vLLM nor torch.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from rollout_side.config import AgentConfig
from rollout_side.engine import Engine, GroupSpec, MemoryUse, SwitchTimes
from rollout_side.registration import Identity, Registration
from weft.contract.errors import LoadFailedError, NotReadyError, StaleEpochError, WeftError
from weft.contract.names import BASE_POLICY, PolicyVersion
from weft.contract.versions import AdapterVersions, VersionVector
from weft.transport.host import local_address_towards, split_target

_log = logging.getLogger(__name__)

_REAP_SECONDS = 1.0
_MAX_FAILED = 64
_WILDCARDS = {"0.0.0.0", "::", ""}


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
        self._switching = asyncio.Lock()
        # The coordinator may have withdrawn what failed: a call that is repeated (gRPC
        # does when a connection breaks) must not switch to it after all.
        self._failed: deque[str] = deque(maxlen=_MAX_FAILED)

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
        self, transfer_id: str, version: PolicyVersion, config_json: str, content_digest: bytes
    ) -> SwitchTimes:
        """Switch to a staged version; one switch at a time.

        Raises:
            NotReadyError, DigestMismatchError: Nothing changed.
            LoadFailedError: As ``Engine``.
        """
        async with self._switching:
            if self._serves(version):
                return SwitchTimes()
            if transfer_id in self._failed:
                raise NotReadyError(f"{version} failed to load here before; push it again")
            try:
                if version.policy == BASE_POLICY:
                    times = await self.engine.apply_base(transfer_id, version, content_digest)
                    self.vector = self.vector.with_base(version.version)
                    self.dirty_reason = ""
                else:
                    times = await self.engine.load_adapter(
                        transfer_id, version, config_json, content_digest
                    )
                    self.vector = self.vector.with_adapter(version)
            except LoadFailedError as error:
                self._failed.append(transfer_id)
                if error.metadata.get("dirty") == "true":
                    self.dirty_reason = error.message
                raise
        _log.info(
            "serving %s: loaded in %.3f s, paused for %.3f s",
            version,
            times.load_seconds,
            times.pause_seconds,
        )
        return times

    async def retire(self, versions: list[PolicyVersion]) -> None:
        """Stop serving adapter versions; those in use stay in ``draining``."""
        for version in versions:
            entry = self.vector.adapters.get(version.policy, AdapterVersions())
            if entry.alias == version.version or version.policy == BASE_POLICY:
                continue
            self.vector = self.vector.without_adapter(version)
            self.draining.add(version)
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
        return version.version in entry.versions and entry.alias >= version.version

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
        return registration is not None and registration.ready.is_set() and not self.dirty_reason

    async def run(self) -> None:
        """Stay in the pool until cancelled, then leave it.

        Raises:
            WeftError: The pool refuses this replica for good.
        """
        loop = asyncio.get_running_loop()
        refused: asyncio.Future[WeftError] = loop.create_future()

        def fail(error: WeftError) -> None:
            loop.call_soon_threadsafe(refused.set_result, error)

        identity = Identity(
            address=self.address,
            capabilities=self.engine.capabilities,
            reference=self.engine.reference,
            model_name=self.engine.model_name,
        )
        registration = Registration(
            self.config, identity, current=lambda: (self.vector, self.memory), on_failed=fail
        )
        self.registration = registration
        registration.start()
        try:
            while not refused.done():
                await asyncio.wait({refused}, timeout=_REAP_SECONDS)
                if not self._switching.locked():  # the engine answers after the switch
                    await self._drop_unused()
                    self.memory = await self.engine.memory()
        finally:
            await asyncio.to_thread(registration.stop)
        raise refused.result()
