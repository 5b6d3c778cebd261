"""Routes to the replicas that may be sent requests, followed as long as the client lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import grpc

from trainer_side.rollouts.dispatch import BusyReplica
from trainer_side.rollouts.sample import OverAnotherBase
from weft_rl.contract.errors import (
    InvalidRequestError,
    NotAllowedError,
    PeerUnavailableError,
    WeftError,
)
from weft_rl.contract.names import PolicyVersion
from weft_rl.rpc.channel import open_aio_channel
from weft_rl.rpc.codec import POLICY_VERSION, vector_from_proto
from weft_rl.rpc.pool_listing import RouteList
from weft_rl.rpc.security.credentials import Credentials
from weft_rl.rpc.status import error_from_rpc
from weft_rl.v1 import inspect_pb2 as pb
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

_RETRY_SECONDS = 0.5
#: Replicas whose reasons are told at most.
_MAX_REASONS = 3


class Routes:
    """Routes that follow the coordinator's list; the last one stands while it is away.

    Args:
        on_routes: Function called with the whole list, at every change.
    """

    def __init__(
        self,
        coordinator: str,
        credentials: Credentials,
        connect_seconds: float,
        on_routes: Callable[[Iterable[BusyReplica]], None],
    ) -> None:
        self._coordinator, self._credentials = coordinator, credentials
        self._connect_seconds, self._on_routes = connect_seconds, on_routes
        #: Versions that the pool serves over another base than they were trained on.
        self.over_another_base: Mapping[PolicyVersion, OverAnotherBase] = {}
        self._is_known = False
        self._failure: WeftError | None = None
        self._changed = asyncio.Event()

    async def follow(self) -> None:
        """Follow the coordinator's list until cancelled."""
        while True:
            try:
                async with open_aio_channel(self._coordinator, self._credentials) as channel:
                    await self._follow(InspectServiceStub(channel))
            except grpc.RpcError as error:
                self._failure = error_from_rpc(error)
            except WeftError as error:
                self._failure = error
            self._changed.set()
            await asyncio.sleep(_RETRY_SECONDS)

    async def _follow(self, stub: Any) -> None:
        known = RouteList()
        async for message in stub.WatchRoutes(pb.WatchRoutesRequest()):
            self._failure = None
            routes = known.follow(message)
            if routes is not None:
                self._is_known = True
                self.over_another_base = {
                    one.version: one for one in map(_over_another_base, routes.over_another_base)
                }
                self._on_routes(_target(route) for route in routes.routes)
                self._changed.set()

    async def why_not_ready(self, seconds: float) -> str:
        """Ask the coordinator why replicas are not ready; empty where it does not say so."""
        try:
            async with open_aio_channel(self._coordinator, self._credentials) as channel:
                stub = InspectServiceStub(channel)
                return _reasons(await stub.GetPool(pb.GetPoolRequest(), timeout=seconds))
        except grpc.RpcError as error:
            return f"the coordinator does not say why: {error_from_rpc(error).message}"
        except WeftError:  # a file of the credentials
            return ""

    async def known(self, deadline: float) -> None:
        """Wait for the first list of routes.

        Args:
            deadline: Time of the event loop's clock at which to give up.

        Raises:
            PeerUnavailableError: ``COORDINATOR_UNREACHABLE``: no coordinator answers there.
            NotAllowedError: The coordinator does not let this caller read.
            InvalidRequestError: The credentials cannot be used.
        """
        clock = asyncio.get_running_loop()
        patience = min(deadline, clock.time() + self._connect_seconds)
        while not self._is_known:
            if isinstance(self._failure, InvalidRequestError | NotAllowedError):
                raise self._failure
            now = clock.time()
            # One that answers and has no list yet was just started: it is waited for.
            if now >= deadline or (now >= patience and self._failure is not None):
                why = self._failure.message if self._failure else "it told no routes"
                raise PeerUnavailableError(
                    f"the coordinator at {self._coordinator} was not reached in "
                    f"{self._connect_seconds:.0f} s: {why}; check the address, or give "
                    "connect_seconds= to wait for one that is still starting",
                    reason="COORDINATOR_UNREACHABLE",
                )
            self._changed.clear()
            try:
                until = patience if now < patience else deadline
                async with asyncio.timeout_at(until):
                    await self._changed.wait()
            except TimeoutError:
                pass


def _reasons(pool: pb.GetPoolResponse) -> str:
    """Return why some replicas of a pool are not ready; empty where all are."""
    unready = [r for r in pool.replicas if r.state != pb.REPLICA_STATE_READY]
    told = [
        f"{r.replica_id} is {pb.ReplicaState.Name(r.state)[14:].lower().replace('_', ' ')}"
        + (f": {r.state_reason}" if r.state_reason else "")
        for r in unready[:_MAX_REASONS]
    ]
    if len(unready) > _MAX_REASONS:
        told.append(f"and {len(unready) - _MAX_REASONS} more")
    return "; ".join(told) if pool.replicas else "no replica is in the pool"


def _over_another_base(message: pb.OverAnotherBase) -> OverAnotherBase:
    return OverAnotherBase(
        POLICY_VERSION.decode(message.version),
        message.trained_on_base_version,
        message.base_version,
    )


def _target(route: pb.Route) -> BusyReplica:
    return BusyReplica(route.replica_id, route.address, vector_from_proto(route.version_vector))
