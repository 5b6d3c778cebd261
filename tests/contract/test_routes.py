"""WatchRoutes over real stubs: lists, and coordinators that go and come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from tests.contract.conftest import Pool
from weft_rl.rpc.channel import open_aio_channel
from weft_rl.rpc.codec import vector_from_proto
from weft_rl.rpc.pool_listing import RouteList
from weft_rl.rpc.status import error_from_rpc
from weft_rl.v1 import admin_pb2, inspect_pb2, inspect_pb2_grpc


@asynccontextmanager
async def _following(pool: Pool) -> AsyncIterator[Any]:
    async with open_aio_channel(pool.target) as channel:
        call = inspect_pb2_grpc.InspectServiceStub(channel).WatchRoutes(
            inspect_pb2.WatchRoutesRequest(), timeout=20
        )
        yield call
        call.cancel()


async def _next(call: Any, known: RouteList) -> inspect_pb2.WatchRoutesResponse:
    """The whole list after the next change."""
    while True:
        message = await call.read()
        assert message is not grpc.aio.EOF
        if (routes := known.follow(message)) is not None:
            return routes


async def _until(call: Any, known: RouteList, *replica_ids: str) -> inspect_pb2.WatchRoutesResponse:
    """The first list of exactly these replicas."""
    while True:
        routes = await _next(call, known)
        if [route.replica_id for route in routes.routes] == list(replica_ids):
            return routes


async def _cordon(pool: Pool, replica_id: str, *, off: bool = False) -> None:
    order = "Uncordon" if off else "Cordon"
    await pool.order(order, getattr(admin_pb2, f"{order}Request")(replica_id=replica_id))


async def test_the_whole_list_at_first_and_then_what_changes(pool: Pool) -> None:
    async with _following(pool) as call:
        known, first = RouteList(), await call.read()
        assert (first.whole, first.more, list(first.routes)) == (True, False, [])
        assert first.previous_revision == -1
        await pool.replica("r1")
        await pool.replica("r0")
        both = await _until(call, known, "r0", "r1")
        assert both.revision > first.revision
        assert both.coordinator_generation == first.coordinator_generation == 1
        assert (both.routes[0].http_url, both.routes[0].model_name) == (
            "http://127.0.0.1:1",
            "tiny",
        )
        listed = {r.replica_id: r.address for r in (await pool.seen()).replicas}
        assert {r.replica_id: r.address for r in both.routes} == listed
        await _cordon(pool, "r0")
        await _until(call, known, "r1")
        await _cordon(pool, "r0", off=True)
        await _until(call, known, "r0", "r1")
        await (await pool.trainer()).push()
        while True:
            routes = (await _next(call, known)).routes
            vectors = [vector_from_proto(route.version_vector) for route in routes]
            if [v.adapters["math"].alias if v.adapters else 0 for v in vectors] == [1, 1]:
                break


async def test_a_change_names_what_it_leads_from_and_who_is_gone(pool: Pool) -> None:
    await pool.replica("r0")
    await pool.replica("r1")
    async with _following(pool) as call:
        known = RouteList()
        before = await _until(call, known, "r0", "r1")
        await _cordon(pool, "r1")
        change = await call.read()
        assert (change.whole, list(change.routes)) == (False, [])
        assert list(change.removed_replica_ids) == ["r1"]
        assert change.previous_revision == before.revision < change.revision


async def test_readers_are_told_when_the_coordinator_stops(pool: Pool) -> None:
    async with _following(pool) as call:
        await call.read()
        assert pool.coordinator is not None
        stopping = asyncio.create_task(pool.coordinator.stop())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert error_from_rpc(caught.value).reason == "COORDINATOR_AWAY"
        await stopping


async def test_a_restarted_coordinator_tells_no_list_before_replicas_could_register(
    pool: Pool,
) -> None:
    await pool.restart(heartbeat_seconds=0.5, lost_after_seconds=2.0)
    async with _following(pool) as call:
        reading = asyncio.create_task(call.read())
        replica = await pool.replica("r0")
        while not reading.done():
            await replica.heartbeat()
            await asyncio.wait({reading}, timeout=0.1)
        first = await reading
        assert [route.replica_id for route in first.routes] == ["r0"]
        assert first.coordinator_generation == 2
