"""A replica's agent: keeps it in the pool and carries out the coordinator's orders.

The composer of the rollout side: it introduces the engine to the control plane
and knows neither vLLM nor torch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import grpc

from rollout_side.config import AgentConfig
from rollout_side.engine import Engine, GroupSpec, MemoryUse, SwitchTimes
from weft.contract.errors import (
    LoadFailedError,
    NotFoundError,
    PeerUnavailableError,
    RequestConflictError,
    StaleEpochError,
    TransferTimeoutError,
    WeftError,
)
from weft.contract.names import BASE_POLICY, PolicyVersion
from weft.contract.versions import AdapterVersions, VersionVector
from weft.rpc.channel import open_aio_channel
from weft.rpc.codec import (
    capabilities_to_proto,
    duration_from_proto,
    vector_to_proto,
)
from weft.rpc.manifest_codec import reference_to_chunks
from weft.rpc.status import error_from_rpc
from weft.transport.host import local_address_towards, split_target
from weft.v1 import registry_pb2 as pb
from weft.v1.registry_pb2_grpc import RegistryServiceStub

if TYPE_CHECKING:  # exists in the stubs' types only
    from weft.v1.registry_pb2_grpc import RegistryServiceAsyncStub

_log = logging.getLogger(__name__)

_CALL_SECONDS = 10.0
_REFERENCE_SECONDS = 60.0
_RETRY_SECONDS = 1.0
_REAP_SECONDS = 1.0
_WILDCARDS = {"0.0.0.0", "::", ""}


class Agent:
    """One replica's membership in a pool, and what it serves.

    All methods run on one event loop. ``run`` stays registered until cancelled.
    """

    def __init__(self, config: AgentConfig, engine: Engine) -> None:
        self.config = config
        self.engine = engine
        self.vector = VersionVector()
        self.dirty_reason = ""
        #: Set while the coordinator knows this process.
        self.registered = asyncio.Event()
        #: Set while this replica serves all that the pool serves.
        self.ready = asyncio.Event()
        self.draining: set[PolicyVersion] = set()
        self.address = ""
        # Asked after each switch, not at each heartbeat: the engine answers between
        # its steps, and a heartbeat must not wait for a long one.
        self.memory = MemoryUse(adapter_bytes=0, staging_bytes=0)
        self._generation = 0
        self._switching = asyncio.Lock()
        self._conflict_since: float | None = None

    # -- orders, from the servicer -------------------------------------------

    def check_generation(self, generation: int) -> None:
        """Refuse an order of a coordinator older than the one registered with.

        Raises:
            StaleEpochError: It is older.
        """
        if generation < self._generation:
            raise StaleEpochError(
                f"coordinator generation {generation} was replaced by {self._generation}"
            )

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
                if error.metadata.get("dirty") == "true":
                    self.dirty_reason = error.message
                raise
            self.memory = await self.engine.memory()
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
            gone = await self.engine.retire(version)
            self.vector = self.vector.without_adapter(version)
            if gone:
                self._retired(version)
            else:
                self.draining.add(version)
        self.memory = await self.engine.memory()

    def _retired(self, version: PolicyVersion) -> None:
        self.draining.discard(version)
        _log.info("retired %s", version)

    async def _reap_draining(self) -> None:
        """Drop versions that can no longer be requested once nobody uses them."""
        while True:
            await asyncio.sleep(_REAP_SECONDS)
            for version in sorted(self.draining):
                if await self.engine.retire(version):
                    self._retired(version)
                    self.memory = await self.engine.memory()

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

    async def run(self) -> None:
        """Register, then heartbeat; registers again whenever the coordinator asks.

        Returns when cancelled, after leaving the pool.

        Raises:
            WeftError: The pool refuses this replica for good (another base model,
                no backend in common, or its id stays taken).
        """
        channel = open_aio_channel(self.config.coordinator)
        stub = RegistryServiceStub(channel)
        reaping = asyncio.create_task(self._reap_draining())
        try:
            await self._stay_registered(stub)
        except asyncio.CancelledError:
            await self._leave(stub)
            raise
        finally:
            reaping.cancel()
            await channel.close()

    async def _stay_registered(self, stub: RegistryServiceAsyncStub) -> None:
        interval: float | None = None
        away = False
        while True:
            try:
                if interval is None:
                    interval = await self._register(stub)
                    away = False
                else:
                    await self._heartbeat(stub)
                    if away:
                        _log.info("in contact with the coordinator again")
                        away = False
                await asyncio.sleep(interval)
            except grpc.aio.AioRpcError as rpc_error:
                error = error_from_rpc(rpc_error)
                if isinstance(error, NotFoundError):
                    _log.info("the coordinator does not know this replica: registering again")
                    self.registered.clear()
                    interval = None
                elif isinstance(error, PeerUnavailableError | TransferTimeoutError):
                    if not away:
                        _log.warning("no contact with the coordinator: %s", error.message)
                    away = True
                    await asyncio.sleep(_RETRY_SECONDS)
                elif self._worth_waiting(error):
                    await asyncio.sleep(_RETRY_SECONDS)
                else:
                    raise error from rpc_error

    def _worth_waiting(self, error: WeftError) -> bool:
        """A former process of the same id is forgotten after some missed heartbeats."""
        if not isinstance(error, RequestConflictError):
            return False
        now = asyncio.get_running_loop().time()
        if self._conflict_since is None:
            _log.warning("waiting for a former process to be forgotten: %s", error.message)
            self._conflict_since = now
        return now - self._conflict_since < self.config.conflict_patience_seconds

    async def _register(self, stub: RegistryServiceAsyncStub) -> float:
        request = pb.RegisterRequest(
            replica_id=self.config.replica_id,
            incarnation=self.config.incarnation,
            address=self.address,
            http_url=self.config.http_url,
            capabilities=capabilities_to_proto(self.engine.capabilities),
            version_vector=vector_to_proto(self.vector),
            model_name=self.engine.model_name,
        )
        response = await stub.Register(request, timeout=_CALL_SECONDS)
        self._conflict_since = None
        self._generation = response.coordinator_generation
        if response.reference_wanted:
            await stub.PutReference(self._reference_chunks(), timeout=_REFERENCE_SECONDS)
        _log.info(
            "registered as %s with coordinator generation %d",
            self.config.replica_id,
            self._generation,
        )
        await self._heartbeat(stub)
        self.registered.set()
        return duration_from_proto(response.heartbeat_interval)

    def _reference_chunks(self) -> Iterator[pb.PutReferenceRequest]:
        for chunk in reference_to_chunks(self.engine.reference):
            yield pb.PutReferenceRequest(chunk=chunk)

    async def _heartbeat(self, stub: RegistryServiceAsyncStub) -> None:
        request = pb.HeartbeatRequest(
            replica_id=self.config.replica_id,
            incarnation=self.config.incarnation,
            version_vector=vector_to_proto(self.vector),
            adapter_used_bytes=self.memory.adapter_bytes,
        )
        response = await stub.Heartbeat(request, timeout=_CALL_SECONDS)
        if response.ready and not self.dirty_reason:
            self.ready.set()
        else:
            self.ready.clear()

    async def _leave(self, stub: RegistryServiceAsyncStub) -> None:
        request = pb.LeaveRequest(
            replica_id=self.config.replica_id, incarnation=self.config.incarnation
        )
        try:
            await stub.Leave(request, timeout=2.0, wait_for_ready=False)
        except grpc.aio.AioRpcError as error:
            _log.info("could not say goodbye to the coordinator: %s", error_from_rpc(error))
