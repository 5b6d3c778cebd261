"""Coordinator, as a process runs it, or a test or a replica embeds it."""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import signal
import time
from collections.abc import Callable

from weft_rl.coordinator.config import CoordinatorConfig
from weft_rl.coordinator.decisions.replicas import sleeps
from weft_rl.coordinator.decisions.state.pool import PoolState, with_whole_lease
from weft_rl.coordinator.page.pages import pages
from weft_rl.coordinator.runtime.catalog.database import Catalog, Snapshot
from weft_rl.coordinator.runtime.driver import Driver
from weft_rl.coordinator.runtime.manifests import LayoutCache, ReferenceCache, UploadQueue
from weft_rl.coordinator.runtime.metrics import pool_registry
from weft_rl.coordinator.runtime.traces import TransferTraces
from weft_rl.coordinator.runtime.watchers import Feed
from weft_rl.coordinator.services.calls import (
    AdminServicer,
    PublishServicer,
    RegistryServicer,
)
from weft_rl.coordinator.services.inspect import InspectServicer
from weft_rl.coordinator.services.rendezvous import RendezvousServicer
from weft_rl.rpc.security.guard import AccessFile
from weft_rl.rpc.server import Security, Servicer, WeftServer, bind, make_server
from weft_rl.telemetry.metrics import refusal_counter
from weft_rl.telemetry.ports import Ports
from weft_rl.telemetry.traces import open_tracer
from weft_rl.tracing import NO_TRACER, untraced
from weft_rl.v1 import (
    admin_pb2_grpc,
    inspect_pb2_grpc,
    publish_pb2_grpc,
    registry_pb2_grpc,
    rendezvous_pb2_grpc,
)

_log = logging.getLogger(__name__)


class Coordinator:
    """All parts of one coordinator; ``start`` and ``stop`` it on one event loop."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self.config = config
        self.port = 0
        self._catalog: Catalog | None = None
        self.driver: Driver | None = None
        self._server: WeftServer | None = None
        self._deciding: asyncio.Task[None] | None = None
        self._tracer = NO_TRACER
        self._security: Security | None = None
        #: Metrics and health, where they have ports of their own.
        self.ports = Ports()

    @property
    def target(self) -> str:
        """HOST:PORT to dial, once started."""
        return f"{self.config.listen.rpartition(':')[0]}:{self.port}"

    async def start(self) -> int:
        """Open the catalog, listen, and begin to decide; returns the port.

        Raises:
            CatalogError: The catalog is in use, foreign or too new.
            UnsupportedError: Tracing is on, and what it needs is not installed.
            NotReadyError: The address cannot be listened on.
        """
        self._catalog = await asyncio.to_thread(Catalog.open, self.config.catalog)
        try:
            await self._start(self._catalog)
        except BaseException:
            await self.stop()
            raise
        return self.port

    async def _start(self, catalog: Catalog) -> None:
        config = self.config
        security = self._security = Security(
            credentials=config.credentials,
            access=AccessFile(config.access) if config.access else None,
            insecure=config.insecure,
        )
        manifests, references = LayoutCache(), ReferenceCache()
        traces = self._traces(lambda: driver.now()) if config.telemetry.traces else None
        uploads = UploadQueue()
        known = catalog.snapshot()
        state, feed = _initial_state(known, self.config), Feed(former=known.events)
        metrics_registry, metrics = pool_registry(lambda: driver.state, lambda: driver.now())
        driver = self.driver = Driver(
            state,
            catalog,
            references,
            feed,
            manifests=manifests,
            commit_seconds=self.config.commit_timeout_seconds,
            credentials=config.credentials,
            on_step=[
                *([metrics.count] if config.telemetry.metrics else []),
                *([traces.follow] if traces else []),
            ],
            trace_context=traces.context_of if traces else untraced,
        )
        publish = PublishServicer(driver, manifests, references, uploads, traces)
        inspect = InspectServicer(driver, feed, lambda: self.target)
        registry = RegistryServicer(driver, references, uploads)
        rendezvous = RendezvousServicer(driver.groups, manifests)
        self._server = await make_server(
            [
                Servicer(
                    "weft.v1.InspectService",
                    inspect,
                    inspect_pb2_grpc.add_InspectServiceServicer_to_server,
                ),
                Servicer(
                    "weft.v1.AdminService",
                    AdminServicer(driver),
                    admin_pb2_grpc.add_AdminServiceServicer_to_server,
                ),
                Servicer(
                    "weft.v1.PublishService",
                    publish,
                    publish_pb2_grpc.add_PublishServiceServicer_to_server,
                ),
                Servicer(
                    "weft.v1.RegistryService",
                    registry,
                    registry_pb2_grpc.add_RegistryServiceServicer_to_server,
                ),
                Servicer(
                    "weft.v1.RendezvousService",
                    rendezvous,
                    rendezvous_pb2_grpc.add_RendezvousServiceServicer_to_server,
                ),
            ],
            security,
            on_refused=refusal_counter(metrics_registry),
        )
        self.port = bind(self._server.server, self.config.listen, security)
        self.ports = await Ports.open(
            config.telemetry,
            self._server,
            metrics_registry,
            security,
            pages(inspect.lists.by_name),
        )
        self._deciding = driver.start()
        await self._server.server.start()
        _log.info(
            "coordinator listens on %s, generation %s, catalog %s",
            self.target,
            state.generation,
            self.config.catalog,
        )

    def _traces(self, now: Callable[[], float]) -> TransferTraces:
        self._tracer = open_tracer("weft-coordinator")
        return TransferTraces(self._tracer, now)

    async def wait(self) -> None:
        """Wait until the coordinator is stopped.

        Raises:
            Exception: It cannot continue: the catalog could not be written.
        """
        if self._deciding is not None:
            await asyncio.shield(self._deciding)

    def look_again(self) -> None:
        """Read the files of rules, certificates and tokens again."""
        if self._security is not None:
            self._security.look_again()
        self.ports.look_again()

    async def stop(self) -> None:
        """End calls under way within ``stop_seconds``, and close the catalog.

        Idempotent. A transfer that was not committed is aborted at the next start.
        """
        server, self._server = self._server, None
        driver, self.driver = self.driver, None
        catalog, self._catalog = self._catalog, None
        await self.ports.close()
        if driver is not None:
            await driver.stop()
        if server is not None:
            await server.server.stop(self.config.stop_seconds)
        if catalog is not None:
            catalog.close()
        await asyncio.to_thread(self._tracer.close)


def _initial_state(known: Snapshot, config: CoordinatorConfig) -> PoolState:
    now, restarted = time.monotonic(), known.generation > 1
    policies = [with_whole_lease(policy, config.settings, now) for policy in known.policies]
    return PoolState(
        settings=config.settings,
        generation=known.generation,
        wall_offset_seconds=time.time() - now,
        restart_over_at=now + restarted * config.settings.lost_after_seconds,
        fingerprint=known.fingerprint,
        architecture=known.architecture,
        checkpoint=known.checkpoint,
        base_contents=known.base_contents,
        as_started=known.as_started,
        epoch_counter=known.epoch,
        opened_generation=known.generation,
        opened_epoch_counter=known.epoch,
        number_floor=known.number_floor,
        token_floor=known.token_floor,
        coordinator_id=secrets.token_hex(8),
        pool_id=known.pool_id,
        fresh_pool_id=secrets.token_hex(8),
        started_at=now,
        secret=secrets.token_hex(32),
        policies={policy.name: policy for policy in policies if not policy.is_over},
        forgotten={policy.name: policy for policy in policies if policy.is_over},
        out_of_service=known.out_of_service,
        sleeps={
            replica_id: sleeps.restored(order, now, config.settings.lease_seconds)
            for replica_id, order in known.sleeps.items()
        },
    )


async def serve(
    config: CoordinatorConfig, *, ready: Callable[[int, Ports], None] | None = None
) -> None:
    """Run a coordinator until SIGTERM or SIGINT, then stop it in order. SIGHUP has it read its
    files again.

    Args:
        ready: Called with the port, and those beside it, once calls are answered.

    Raises:
        WeftError: It cannot start; says why.
        Exception: It cannot continue: the catalog could not be written.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    coordinator = Coordinator(config)
    loop.add_signal_handler(signal.SIGHUP, coordinator.look_again)
    try:
        port = await coordinator.start()
        # Imported modules stay: the collector's full passes, in which nobody is answered, need
        # not look at them.
        gc.collect()
        gc.freeze()
        if ready is not None:
            ready(port, coordinator.ports)
        told = loop.create_task(stopping.wait())
        failed = loop.create_task(coordinator.wait())
        await asyncio.wait([told, failed], return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if failed.done():
            failed.result()
        failed.cancel()
        _log.info("coordinator stops")
    finally:
        await coordinator.stop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)
