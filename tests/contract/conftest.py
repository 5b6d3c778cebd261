"""A coordinator in this process, and what talks to it; all closed afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.doubles.replicas import CAPABILITIES, FakeReplica, FakeTrainer
from weft.coordinator.config import CoordinatorConfig
from weft.coordinator.server import Coordinator


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
        made = FakeTrainer(self.target, trainer_id, policy)
        self.things.append(made)
        return await made.ready()

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


@pytest.fixture
def catalog_path(tmp_path: Path) -> Path:
    return tmp_path / "catalog.db"
