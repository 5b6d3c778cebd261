"""Trainings go on where one replica is killed as it generates, and one as it receives a push."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.logprobs import MAX_ERROR
from tests.integrations.strike_points import check_struck, in_generation, in_push
from tests.integrations.struck import SURVIVOR, StruckPool, struck_pool
from tests.integrations.trl.async_training import check_samples, train_async
from tests.integrations.trl.ranks import running_ranks
from tests.models import make_model

_GENERATIONS = 4


@dataclass(frozen=True)
class Struck:
    pool: StruckPool
    model: Path

    @property
    def work(self) -> Path:
        return self.pool.work


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Struck]:
    work = tmp_path_factory.mktemp("trl-struck")
    model = make_model("qwen2", work / "model")
    with struck_pool(work, model) as pool:
        yield Struck(pool, model)


def test_grpo_goes_on(struck: Struck) -> None:
    struck.pool.arm()
    with running_ranks(struck.work, struck.pool.target, 2) as ranks:
        answers = ranks.do(
            "rl", model=str(struck.model), trainer="grpo", mode="adapter", accumulation=1,
            iterations=1, generations=_GENERATIONS,
        )  # fmt: skip
    main = answers[0]
    assert "error" not in main, answers
    assert main["steps"] == _GENERATIONS
    assert main["asked"] == [f"math@{number}" for number in range(1, _GENERATIONS + 1)]
    assert main["versions"] == [[number] for number in range(1, _GENERATIONS + 1)]
    assert max(main["parity"]) <= MAX_ERROR
    assert SURVIVOR in main["replicas"]
    check_struck(in_generation(struck.work), in_push(struck.work))


def test_async_grpo_goes_on(struck: Struck) -> None:
    struck.pool.arm()
    outcome = train_async(struck.work, struck.pool.target, struck.model, "async", 2, 4)
    assert all(check_samples(outcome, 4))
    check_struck(in_generation(struck.work), in_push(struck.work))


def test_a_callback_pushes_on(struck: Struck) -> None:
    """Nobody generates: one replica is killed as it receives."""
    struck.pool.arm()
    with running_ranks(struck.work, struck.pool.target, 1) as ranks:
        (answer,) = ranks.do(
            "callback", model=str(struck.model), policy="called", steps=4, every=1,
            saved=str(struck.work / "saved"),
        )  # fmt: skip
    assert answer["version"].startswith("called@"), answer
    check_struck(in_push(struck.work))
