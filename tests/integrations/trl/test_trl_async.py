"""AsyncGRPOTrainer over two replicas of real vLLM: what it trains on was made by the version that
it takes it to be of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.replicas import LORA_ARGS, running_coordinator, running_replicas
from tests.integrations.trl.async_training import check_samples, train_async
from tests.models import make_model


@dataclass(frozen=True)
class Pool:
    work: Path
    target: str
    model: Path

    def train(self, policy: str, staleness: int, steps: int) -> dict[str, Any]:
        """How a training went."""
        return train_async(self.work, self.target, self.model, policy, staleness, steps)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    work = tmp_path_factory.mktemp("trl-async")
    model = make_model("qwen2", work / "model")
    with (
        running_coordinator(work) as coordinator,
        running_replicas(work, coordinator.target, [model, model], *LORA_ARGS),
    ):
        yield Pool(work, coordinator.target, model)


def test_versions_are_asked_for_that_the_pool_keeps(pool: Pool) -> None:
    outcome = pool.train("few", 4, 2)
    assert outcome["error"] == "INVALID_REQUEST"
    assert "`weft retain few 6`" in outcome["message"]
    assert outcome["versions"] == []


# The base last: it would be under the adapters.
@pytest.mark.parametrize(("policy", "staleness"), [("math", 0), ("math", 2), ("base", 0)])
def test_a_sample_is_of_its_version(pool: Pool, policy: str, staleness: int) -> None:
    outcome = pool.train(policy, staleness, 4)
    is_right = check_samples(outcome, 4)
    assert len({sample["version"] for sample in outcome["samples"]}) > 1
    assert max(log["staleness"] for log in outcome["logs"]) <= staleness
    if policy == "base":  # a push may come between two tokens of one
        assert sum(is_right) > 0.8 * len(is_right)
    else:
        assert all(is_right)
