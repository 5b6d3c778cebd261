"""What a replica shows of its memory and of its switches."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch

from rollout_side.agent.agent import Agent
from rollout_side.agent.servicers import ReplicaServicer
from rollout_side.config import AgentConfig, RolloutConfig
from rollout_side.engine import SwitchTimes
from rollout_side.service.metrics import ReplicaMetrics
from tests.contract.served_replica import MANIFEST, Served
from tests.doubles.engine import EngineDouble
from tests.waits import eventually
from weft_rl.rpc.channel import open_aio_channel
from weft_rl.rpc.server import Servicer, bind, make_server
from weft_rl.v1 import replica_pb2_grpc


class Counted:
    """A served replica, and its metrics."""

    def __init__(self, served: Served, metrics: ReplicaMetrics) -> None:
        self.served = served
        self.metrics = metrics

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"weft_{name}", labels)


@pytest_asyncio.fixture
async def counted() -> AsyncIterator[Counted]:
    engine = EngineDouble({"w": torch.zeros(8, 8)}, base_copies=2)
    config = AgentConfig(coordinator="127.0.0.1:1", replica_id="r0")
    agent = Agent(config, engine)
    metrics = ReplicaMetrics(agent, RolloutConfig(agent=config, vllm_args=[], spill_bytes=2**30))
    servicer = ReplicaServicer(agent, metrics.switched)
    add = replica_pb2_grpc.add_ReplicaServiceServicer_to_server
    server = (await make_server([Servicer("weft.v1.ReplicaService", servicer, add)])).server
    agent.advertise(bind(server, "127.0.0.1:0"))
    await server.start()
    async with open_aio_channel(agent.address) as channel:
        stub = replica_pb2_grpc.ReplicaServiceStub(channel)
        yield Counted(Served(agent, engine, stub), metrics)
    engine.close()
    await server.stop(None)


async def test_switches_are_counted_by_kind(counted: Counted) -> None:
    await counted.served.commit("base@1")
    await counted.served.commit("math@1")
    await counted.served.commit("math@2")
    assert counted.value("switches_total", kind="base") == 1
    assert counted.value("switches_total", kind="adapter") == 2


async def test_which_share_of_the_drafts_of_a_base_is_accepted(counted: Counted) -> None:
    engine = counted.served.engine
    assert counted.value("draft_acceptance") is None
    engine.drafted = 100, 70
    assert counted.value("draft_acceptance") == 0.7
    counted.metrics.switched("math", SwitchTimes())
    assert counted.value("draft_acceptance") == 0.7
    counted.metrics.switched("base", SwitchTimes())
    assert counted.value("draft_acceptance") is None
    engine.drafted = 140, 80
    assert counted.value("draft_acceptance") == 0.25


async def test_what_a_switch_cost(counted: Counted) -> None:
    times = SwitchTimes(pause_seconds=0.5, load_seconds=0.25, num_begun=3)
    counted.metrics.switched("base", times)
    counted.metrics.switched("math", SwitchTimes(load_seconds=0.125))
    counted.metrics.switched("base", SwitchTimes())  # it was served already
    assert counted.value("replica_pause_seconds_sum") == 0.5
    assert counted.value("replica_pause_seconds_count") == 1
    assert counted.value("requests_at_switch_total", became="recomputed") == 3
    assert counted.value("requests_at_switch_total", became="kept") == 0
    assert counted.value("load_seconds_sum", kind="base") == 0.25
    assert counted.value("load_seconds_sum", kind="adapter") == 0.125
    assert counted.value("load_seconds_count", kind="base") == 1


async def test_stores_are_shown_beside_their_bounds(counted: Counted) -> None:
    served, capabilities = counted.served, counted.served.engine.capabilities
    await served.commit("math@1")
    await served.agent.serving.refresh(())
    assert counted.value("store_bytes", store="adapters") == MANIFEST.wire_bytes
    bound = counted.value("store_limit_bytes", store="adapters")
    assert bound == capabilities.adapter_capacity_bytes
    assert counted.value("store_bytes", store="staging") == 0
    assert counted.value("store_bytes", store="spill") is None, "it has no such directory"
    assert counted.value("requests_running") == 0
    assert counted.value("replica_ready") == 0, "no coordinator has said so"


async def test_a_spill_directory_is_looked_at_off_the_loop(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_side.service.metrics.SPILL_LOOK_SECONDS", 0.01)
    counted.served.engine.spills = True
    looks = iter([OSError("no such directory"), 700])

    def measure() -> int:
        found = next(looks, 700)
        if isinstance(found, OSError):
            raise found
        return found

    looking = asyncio.create_task(counted.metrics.watch_spill(measure))
    await eventually(lambda: counted.value("store_bytes", store="spill") == 700)
    assert counted.value("store_limit_bytes", store="spill") == 2**30
    looking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await looking
