"""A coordinator in this process, and what talks to it; all closed afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from rollout_side.agent.agent import Agent
from rollout_side.config import AgentConfig
from tests.contract.served_replica import Served, serving
from tests.documented import keeps_to_comments  # noqa: F401 (of every test here)
from tests.doubles.audit_log import audit_lines
from tests.doubles.engine import EngineDouble
from tests.doubles.replicas import FakeReplica
from tests.doubles.tiny_model import CAPABILITIES
from tests.doubles.trainer import FakeTrainer
from weft_rl.coordinator.config import CoordinatorConfig
from weft_rl.coordinator.server import Coordinator
from weft_rl.rpc.channel import open_aio_channel
from weft_rl.rpc.security.credentials import UNUSED_FILES
from weft_rl.v1 import admin_pb2_grpc, inspect_pb2, inspect_pb2_grpc


class Pool:
    """A coordinator with fake replicas and trainers."""

    def __init__(self, catalog: Path) -> None:
        self.catalog = catalog
        self.coordinator: Coordinator | None = None
        self.things: list[Any] = []

    @property
    def target(self) -> str:
        assert self.coordinator is not None
        return self.coordinator.target

    async def start(self, **options: Any) -> Pool:
        options = {"lost_after_seconds": 6.0, "stop_seconds": 0.2} | options
        config = CoordinatorConfig(catalog=self.catalog, listen="127.0.0.1:0", **options)
        self.coordinator = Coordinator(config)
        await self.coordinator.start()
        return self

    async def restart(self, **options: Any) -> Pool:
        assert self.coordinator is not None
        await self.coordinator.stop()
        return await self.start(**options)

    async def replica(self, replica_id: str = "r0", **capabilities: Any) -> FakeReplica:
        made = FakeReplica(
            self.target, replica_id, dataclasses.replace(CAPABILITIES, **capabilities)
        )
        self.things.append(made)
        return await made.start()

    async def trainer(self, trainer_id: str = "trainer", policy: str = "math") -> FakeTrainer:
        """A trainer that owns a policy; after a restart, the process that owned it before."""
        made = FakeTrainer(self.target, trainer_id, policy)
        for former in self.things:
            is_it = isinstance(former, FakeTrainer) and former.target != self.target
            if is_it and (former.trainer_id, former.policy) == (trainer_id, policy):
                made.session_id = former.session_id
        self.things.append(made)
        return await made.ready()

    def newcomer(self, trainer_id: str = "trainer", policy: str = "math") -> FakeTrainer:
        """A trainer that has asked for nothing yet."""
        made = FakeTrainer(self.target, trainer_id, policy)
        self.things.append(made)
        return made

    async def order(self, method: str, request: Any, timeout: float = 10.0) -> Any:
        """Have AdminService answer a request."""
        async with open_aio_channel(self.target) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            return await getattr(stub, method)(request, timeout=timeout)

    async def versions(self, policy: str = "math") -> list[inspect_pb2.Version]:
        """The versions of a policy, newest first."""
        async with open_aio_channel(self.target) as channel:
            stub = inspect_pb2_grpc.InspectServiceStub(channel)
            request = inspect_pb2.ListVersionsRequest(policy=policy)
            return list((await stub.ListVersions(request, timeout=10)).versions)

    async def seen(self) -> inspect_pb2.GetPoolResponse:
        """What anybody sees of it."""
        async with open_aio_channel(self.target) as channel:
            stub = inspect_pb2_grpc.InspectServiceStub(channel)
            return await stub.GetPool(inspect_pb2.GetPoolRequest(), timeout=10)

    async def stop(self) -> None:
        for thing in reversed(self.things):
            await thing.stop()
        if self.coordinator is not None:
            await self.coordinator.stop()


@pytest_asyncio.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    made = Pool(tmp_path / "catalog.db")
    await made.start()
    yield made
    await made.stop()


@pytest.fixture(autouse=True)
def _files_of_other_tests() -> Iterator[None]:
    """What this process does not use is of the whole process, as its environment is."""
    yield
    for line in UNUSED_FILES.list():
        UNUSED_FILES.drop(line.partition(":")[0])


@pytest.fixture
def catalog_path(tmp_path: Path) -> Path:
    return tmp_path / "catalog.db"


@pytest_asyncio.fixture
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    """A replica that no coordinator knows; its parameter: whether it loads in place."""
    in_place = getattr(request, "param", False)
    engine = EngineDouble({"w": torch.zeros(8, 8)}, base_copies=2, in_place=in_place)
    agent = Agent(AgentConfig(coordinator="127.0.0.1:1", replica_id="r0"), engine)
    async with serving(agent, engine) as replica:
        yield replica


@pytest.fixture
def audited() -> Iterator[list[dict[str, str]]]:
    """The audit log, line by line."""
    with audit_lines() as lines:
        yield lines
