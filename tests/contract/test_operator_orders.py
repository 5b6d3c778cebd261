"""READY means that it answers: what an operator orders is enforced, and said, at once.

A real agent, with heartbeats so rare that they have no part in it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
import torch

from rollout_side.agent.agent import Agent
from rollout_side.config import AgentConfig
from tests.contract.conftest import Pool
from tests.doubles.agent import serve
from tests.doubles.engine import EngineDouble
from tests.waits import eventually
from weft_rl.rpc.channel import open_aio_channel
from weft_rl.rpc.status import error_from_rpc
from weft_rl.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    inspect_pb2,
    inspect_pb2_grpc,
    publish_pb2,
    publish_pb2_grpc,
    registry_pb2,
    replica_pb2,
    replica_pb2_grpc,
)

_RARE_SECONDS = 600.0


class Replica:
    """One agent with an engine double, and an operator's stubs."""

    def __init__(self, agent: Agent, engine: EngineDouble, channel: grpc.aio.Channel) -> None:
        self.agent, self.engine, self.target = agent, engine, agent.config.coordinator
        self.inspect = inspect_pb2_grpc.InspectServiceStub(channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(channel)

    async def seen(self) -> inspect_pb2.Replica:
        (seen,) = (await self.inspect.ListReplicas(inspect_pb2.ListReplicasRequest())).replicas
        return seen

    async def ready(self) -> None:
        await eventually(lambda: self.agent.is_ready)
        assert (await self.seen()).state == inspect_pb2.REPLICA_STATE_READY

    async def keep_out(self) -> None:
        request = admin_pb2.CordonRequest(replica_id="r0", reason="odd answers", no_pushes=True)
        await self.admin.Cordon(request)


@pytest_asyncio.fixture
async def replica(pool: Pool) -> AsyncIterator[Replica]:
    await pool.restart(heartbeat_seconds=_RARE_SECONDS, lost_after_seconds=_RARE_SECONDS)
    engine = EngineDouble({"w": torch.zeros(8, 8)})
    config = AgentConfig(coordinator=pool.target, replica_id="r0", http_url="http://127.0.0.1:1")
    agent = Agent(config, engine)
    server = await serve(agent)
    running = asyncio.create_task(agent.run())
    async with open_aio_channel(pool.target) as channel:
        yield Replica(agent, engine, channel)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    engine.close()
    await server.stop(None)


async def test_orders_are_enforced_at_once_and_ready_means_open(replica: Replica) -> None:
    await replica.ready()
    await replica.keep_out()
    assert (await replica.seen()).state == inspect_pb2.REPLICA_STATE_OUT_OF_SERVICE
    await eventually(lambda: "odd answers" in replica.engine.refuse_reason)
    assert not replica.agent.is_ready
    async with asyncio.timeout(10):
        while (await replica.seen()).state_reason != "by an operator: odd answers":
            await asyncio.sleep(0.01)  # it has not said yet that it refuses
    answer = await replica.admin.Uncordon(admin_pb2.UncordonRequest(replica_id="r0"))
    assert answer.state == inspect_pb2.REPLICA_STATE_PENDING_WEIGHTS
    assert "it said last: an operator took this replica out of service" in answer.state_reason
    async with asyncio.timeout(10):
        while (await replica.seen()).state != inspect_pb2.REPLICA_STATE_READY:
            await asyncio.sleep(0.01)
    assert replica.engine.refuse_reason == ""
    await replica.ready()


async def test_a_cordon_is_heard_at_once_too(replica: Replica) -> None:
    await replica.ready()
    await replica.admin.Cordon(admin_pb2.CordonRequest(replica_id="r0"))
    await eventually(lambda: not replica.agent.is_ready)
    assert replica.engine.refuse_reason == ""
    await replica.admin.Uncordon(admin_pb2.UncordonRequest(replica_id="r0"))
    await replica.ready()


_BY = "an operator took this replica out of service: "


async def test_an_order_that_comes_late_is_not_obeyed(replica: Replica) -> None:
    await replica.ready()
    generation = replica.agent.registration.coordinator_generation  # type: ignore[union-attr]

    async def order(number: int, reason: str, **other: object) -> tuple[str, int]:
        request = replica_pb2.RefuseRequestsRequest(
            coordinator_generation=generation,
            order_number=number,
            out_of_service=registry_pb2.OutOfService(no_pushes=bool(reason), reason=reason),
        )
        for name, value in other.items():
            setattr(request, name, value)
        async with open_aio_channel(replica.agent.address) as channel:
            stub = replica_pb2_grpc.ReplicaServiceStub(channel)
            answer = await stub.RefuseRequests(request)
        return answer.refusing.removeprefix(_BY), answer.order_number

    assert await order(7, "new") == ("new", 7)
    assert await order(6, "") == ("new", 7)
    assert await order(7, "new") == ("new", 7)
    assert replica.engine.refuse_reason == f"{_BY}new"
    assert await order(8, "") == ("", 8)
    for other in ({"coordinator_generation": generation - 1}, {"incarnation": "another"}):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await order(9, "late", **other)
        assert error_from_rpc(refused.value).reason == "EPOCH_FENCED"
    assert replica.engine.refuse_reason == ""


async def test_what_no_operator_keeps_out_of_service_is_not_put_back(replica: Replica) -> None:
    await replica.ready()
    await replica.admin.Drain(admin_pb2.DrainRequest(replica_id="r0", reason="old card"))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await replica.admin.Uncordon(admin_pb2.UncordonRequest(replica_id="r0"))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert error_from_rpc(refused.value).reason == "NOT_TAKEN_OUT_OF_SERVICE"


@pytest.mark.parametrize("level", [-1, 3])
@pytest.mark.parametrize("service", ["admin", "publish", "replica"])
async def test_a_level_of_sleep_that_there_is_not_is_refused(
    replica: Replica, service: str, level: int
) -> None:
    await replica.ready()
    finish = registry_pb2.WHEN_RUNNING_FINISH
    asked = {
        "admin": admin_pb2.SleepReplicaRequest(replica_id="r0", when_running=finish, level=level),
        "publish": publish_pb2.SleepRolloutsRequest(when_running=finish, level=level),
        "replica": replica_pb2.SleepRequest(
            coordinator_generation=replica.agent.registration.coordinator_generation,  # type: ignore[union-attr]
            when_running=finish,
            level=level,
        ),
    }[service]
    async with (
        open_aio_channel(replica.agent.address) as channel,
        open_aio_channel(replica.target) as coordinator,
    ):
        call = {
            "admin": replica.admin.SleepReplica,
            "publish": publish_pb2_grpc.PublishServiceStub(coordinator).SleepRollouts,
            "replica": replica_pb2_grpc.ReplicaServiceStub(channel).Sleep,
        }[service]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(asked, timeout=10)  # type: ignore[operator]
    error = error_from_rpc(refused.value)
    assert (error.reason, str(level) in error.message) == ("INVALID_REQUEST", True)
    assert replica.engine.asleep is None
