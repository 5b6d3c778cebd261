"""A pool with a coordinator, two replicas and a trainer; a module may have its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documented import keeps_to_comments  # noqa: F401 (of every test here)
from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool, running_pool
from tests.integration.models import Model, weights
from trainer_side import Publisher


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with running_pool(tmp_path / "weft.db") as running:
        yield running


@pytest.fixture
def engines(pool: Pool) -> list[EngineDouble]:
    """Of replica-0 and replica-1."""
    doubles = [EngineDouble(weights(Model()), logprobs_mode="processed_logprobs") for _ in range(2)]
    for i, engine in enumerate(doubles):
        pool.add_replica(f"replica-{i}", engine)
    return doubles


@pytest.fixture
def publisher(pool: Pool) -> Iterator[Publisher]:
    with Publisher(pool.target, trainer_id="trainer-a", timeout_seconds=20) as running:
        yield running
