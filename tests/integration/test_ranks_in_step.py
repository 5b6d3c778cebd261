"""Ranks of one trainer that have come apart are told at once, and push together the next time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.doubles.engine import EngineDouble
from tests.doubles.pool import running_pool
from tests.integration.models import Model, same, weights
from tests.trainers.launch import RankedTrainer, running_ranks

_SEED = 43
#: In which the others must have heard why a rank has left; it takes milliseconds.
_SOON_SECONDS = 3.0


@pytest.fixture(params=["ddp", "fsdp2"], ids=["whole", "sharded"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine() -> EngineDouble:
    return EngineDouble(weights(Model(9)))


@pytest.fixture
def trainer(
    request: pytest.FixtureRequest, kind: str, engine: EngineDouble, tmp_path: Path
) -> Iterator[RankedTrainer]:
    size = getattr(request, "param", 2)
    with running_pool(tmp_path / "weft.db", lost_after_seconds=60) as pool:
        pool.add_replica("replica-0", engine)
        with running_ranks(tmp_path, pool.target, size) as trainer:
            trainer.do("make", kind=kind)
            trainer.push("base")
            yield trainer


def _others(answers: list[dict[str, Any]], rank: int) -> list[dict[str, Any]]:
    return [answer for other, answer in enumerate(answers) if other != rank]


def _check_pushes(trainer: RankedTrainer, engine: EngineDouble, tmp_path: Path) -> None:
    trainer.push("base", timeout=20.0)
    trainer.do("save", path=str(tmp_path / "whole.pt"))
    assert same(engine.base, torch.load(tmp_path / "whole.pt"))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bad_argument_of_one_rank_is_told_to_the_other_at_once(
    trainer: RankedTrainer, engine: EngineDouble, rank: int, tmp_path: Path
) -> None:
    for _ in range(2):
        answers = trainer.do("push_disturbed", what="base", rank=rank, how="argument")
        assert {answer["error"] for answer in answers} == {"INVALID_REQUEST"}, answers
        (other,) = _others(answers, rank)
        assert f"rank {rank} of this trainer" in other["message"]
        assert other["ended"] - answers[rank]["ended"] < _SOON_SECONDS
    _check_pushes(trainer, engine, tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_make_different_calls_are_told_which_differs_in_what(
    trainer: RankedTrainer, engine: EngineDouble, rank: int, tmp_path: Path
) -> None:
    answers = trainer.do("push_disturbed", what="base", rank=rank, how="another")
    assert {answer["error"] for answer in answers} == {"INVALID_REQUEST"}, answers
    ours, theirs = ("base", "another") if rank else ("another", "base")
    text = f"rank 1 has policy={theirs!r} where rank 0 has policy={ours!r}"
    assert all(text in answer["message"] for answer in answers), answers
    _check_pushes(trainer, engine, tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_call_left_out_ends_at_the_others_deadline_and_the_next_push_works(
    trainer: RankedTrainer, engine: EngineDouble, rank: int, tmp_path: Path
) -> None:
    for _ in range(2):
        answers = trainer.do("push_disturbed", what="base", rank=rank, how="skip", timeout=1.5)
        (other,) = _others(answers, rank)
        assert other["error"] == "RANK_GONE", other
        assert f"rank {rank}" in other["message"]
        assert other["ended"] - other["began"] < 1.5 + _SOON_SECONDS
    _check_pushes(trainer, engine, tmp_path)


@pytest.mark.parametrize("trainer", [2, 4], indirect=True)
def test_every_push_after_a_disturbed_one_works(
    trainer: RankedTrainer, engine: EngineDouble, tmp_path: Path
) -> None:
    chosen = random.Random(_SEED)
    size = len(trainer.processes)
    for _ in range(12):
        how = chosen.choice(["interrupt"] * 4 + ["argument", "skip"])
        rank, after = chosen.randrange(size), chosen.choice([0.002, 0.005, 0.01, 0.05, 0.1])
        timeout = 1.5 if how == "skip" else 20.0
        answers = trainer.do(
            "push_disturbed", what="base", rank=rank, how=how, after=after, timeout=timeout
        )
        ended = [answer["ended"] for answer in answers if "ended" in answer]
        if how != "skip":
            assert max(ended) - min(ended) < 5, (how, rank, after, answers)
        trainer.do("train", steps=1)
        _check_pushes(trainer, engine, tmp_path)
