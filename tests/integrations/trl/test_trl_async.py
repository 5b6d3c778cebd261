"""AsyncGRPOTrainer over two replicas of real vLLM: what it trains on was made by the version that
it takes it to be of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.replicas import LORA_ARGS, running_coordinator, running_replicas
from tests.models import make_model
from weft_cli.demo.processes import Process

_SECONDS = 240.0
_RATIO_ERROR = 1e-3


@dataclass(frozen=True)
class Pool:
    work: Path
    target: str
    model: Path

    def train(self, policy: str, staleness: int, steps: int) -> dict[str, Any]:
        """How a training went."""
        args = ("-m", "tests.integrations.trl.async_trainer", self.target, str(self.model),
                str(self.work), policy, str(staleness), str(steps))  # fmt: skip
        env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        process = Process(f"async-{policy}-{staleness}", args, self.work, env)
        try:
            return process.answer(_SECONDS)
        finally:
            process.stop()


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


def check_samples(outcome: dict[str, Any], steps: int) -> list[bool]:
    """What the trainer pushed and how stale samples may be; whether each sample was made by the
    weights of the version that TRL takes it to be of, or of a later one."""
    assert "error" not in outcome, outcome
    first = outcome["versions"][0]
    assert outcome["versions"] == list(range(first, first + steps + 1))
    assert len(outcome["logs"]) == steps
    # What is trained first was made by just these weights. (TRL takes what comes next from its
    # queue before it trains, and counts staleness then.)
    assert outcome["logs"][0] == {"ratio": pytest.approx(1, abs=_RATIO_ERROR), "staleness": 0}
    # Weights of different versions are told apart by it.
    errors = [error for sample in outcome["samples"] for error in sample["errors"].values()]
    assert max(errors) > 10 * _RATIO_ERROR
    return [
        min(
            error
            for version, error in sample["errors"].items()
            if int(version) >= sample["version"]
        )
        <= _RATIO_ERROR
        for sample in outcome["samples"]
    ]


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
