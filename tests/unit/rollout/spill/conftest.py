"""Fixtures of spill directories."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.rollout.spill.workers import Worker


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def make(owner: str = "r0", **options: Any) -> Worker:
        workers.append(Worker(tmp_path, owner, **options))
        return workers[-1]

    yield make
    for worker in workers:
        worker.spiller.close()
