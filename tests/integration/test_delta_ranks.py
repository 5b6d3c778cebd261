"""Trainers of several ranks, with their real frameworks, push what has changed of what they hold.

The engines are doubles: one stages, one loads in place. One file: the ranks take seconds to start.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.doubles.engine import EngineDouble
from tests.doubles.pool import Pool, running_pool
from tests.integration.models import Model, same, until, weights
from tests.integration.replicas import is_ready
from tests.trainers.launch import RankedTrainer, running_ranks

KINDS = ("ddp", "fsdp1", "fsdp1_flat", "fsdp2", "tp", "zero1", "zero2", "zero3")
#: Kinds that hold the whole model at each rank, of which one sends.
WHOLE = ("ddp", "zero1", "zero2")
#: Elements that are changed: every so many-th of what each rank holds.
STRIDE = 40


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    # Nobody is lost here for being slow: some frameworks keep both cores busy.
    with running_pool(tmp_path_factory.mktemp("pool") / "weft.db", lost_after_seconds=60) as pool:
        yield pool


@pytest.fixture(scope="module")
def engines(pool: Pool) -> list[EngineDouble]:
    doubles = [
        EngineDouble(weights(Model(9)), base_copies=1),
        EngineDouble(weights(Model(9)), in_place=True, is_readable=True),
    ]
    for number, engine in enumerate(doubles):
        pool.add_replica(f"replica-{number}", engine)
    return doubles


@pytest.fixture(scope="module")
def trainer(
    pool: Pool, engines: list[EngineDouble], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RankedTrainer]:
    with running_ranks(tmp_path_factory.mktemp("ranks"), pool.target, 2) as trainer:
        yield trainer


def begun(trainer: RankedTrainer, kind: str, **settings: int) -> None:
    """Make a trainer of a kind, trained for a step, whose publisher sends deltas."""
    trainer.do("make", kind=kind)
    trainer.do("train", steps=1)
    trainer.do("close")
    trainer.do("open", delta="always", **settings)


def check_whole(trainer: RankedTrainer, engines: list[EngineDouble], path: Path) -> None:
    """Check that the engines serve what the framework itself says that the ranks hold."""
    trainer.do("save", path=str(path))
    whole = {name: tensor.float() for name, tensor in torch.load(path).items()}
    served = [same(engine.base, whole) for engine in engines]
    assert all(served), served


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_trainer_sends_what_has_changed_of_what_its_ranks_hold(
    kind: str, engines: list[EngineDouble], trainer: RankedTrainer, tmp_path: Path
) -> None:
    begun(trainer, kind)
    for number in range(4):
        answers = trainer.do("push", what="base")
        assert not any("error" in answer for answer in answers), answers
        assert [a["is_delta"] for a in answers] == [number > 0] * 2, answers
        # Each rank keeps a copy of what it sends, and no more but the rest of some blocks.
        copied = [a["copied_bytes"] for a in answers]
        assert 1.0 <= sum(copied) / answers[0]["total_bytes"] < 1.1
        assert all(copied) is (kind not in WHOLE), answers
        check_whole(trainer, engines, tmp_path / "whole.pt")
        trainer.do("nudge", stride=STRIDE, by=0.5**number)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero3"])
@pytest.mark.parametrize("in_place", [False, True])
def test_ranks_send_all_elements_beside_the_delta_where_a_replica_cannot_take_it(
    kind: str,
    in_place: bool,
    pool: Pool,
    engines: list[EngineDouble],
    trainer: RankedTrainer,
    tmp_path: Path,
) -> None:
    """By one rank or by two, each with its part of both."""
    other = EngineDouble(weights(Model(9)), in_place=in_place)
    pool.add_replica("replica-9", other)
    try:
        until(lambda: is_ready(pool, "replica-9"))  # what the pool serves, it clones
        begun(trainer, kind)
        for number in range(3):
            answers = trainer.do("push", what="base")
            assert not any("error" in answer for answer in answers), answers
            assert [a["is_delta"] for a in answers] == [number > 0] * 2, answers
            assert number == 0 or all("replica-9" in a["why"] for a in answers), answers
            check_whole(trainer, [*engines, other], tmp_path / "whole.pt")
            trainer.do("nudge", stride=STRIDE, by=0.5**number)
    finally:
        pool.remove_replica("replica-9")


def test_a_rank_that_gathers_sends_what_has_changed_for_all(
    engines: list[EngineDouble], trainer: RankedTrainer, tmp_path: Path
) -> None:
    begun(trainer, "fsdp2", max_senders=1)
    for number in range(3):
        answers = trainer.do("push", what="base")
        assert not any("error" in answer for answer in answers), answers
        assert [a["is_delta"] for a in answers] == [number > 0] * 2, answers
        assert [bool(a["copied_bytes"]) for a in answers] == [True, False]
        check_whole(trainer, engines, tmp_path / "whole.pt")
        trainer.do("nudge", stride=STRIDE, by=0.5**number)


@pytest.mark.parametrize(("kind", "gives"), [("ddp", True), ("ddp", False), ("fsdp2", True)])
def test_named_tensors_that_all_ranks_gather_are_compared_as_they_come(
    kind: str, gives: bool, engines: list[EngineDouble], trainer: RankedTrainer, tmp_path: Path
) -> None:
    """In another order each time; rank 1 takes part though it gives none, where nothing is sharded.
    What one rank cannot gather ends the push of both, and the next one."""
    begun(trainer, kind)
    named = {"stop": [-1, -1], "fail": [-1, -1], "give": [True, gives]}
    for number in range(3):
        answers = trainer.do("push_named", seed=number, **named)
        assert not any("error" in answer for answer in answers), answers
        assert [a["is_delta"] for a in answers] == [number > 0] * 2, answers
        assert [bool(a["copied_bytes"]) for a in answers] == [True, False]
        check_whole(trainer, engines, tmp_path / "whole.pt")
        trainer.do("nudge", stride=STRIDE, by=0.5**number)
    if gives:
        alone = [[5, -1], [-1, 5]] if kind == "ddp" else []  # else the other waits in a gather
        for fail in ([5, 5], *alone):
            answers = trainer.do("push_named", seed=7, **{**named, "fail": fail})
            assert all("out of memory" in a["message"] for a in answers), answers
    for is_delta in (False, True):
        answers = trainer.do("push_named", seed=8, **named)
        # Where no rank has failed, the copy is still of what the pool serves.
        assert [a["is_delta"] for a in answers] == [is_delta or not gives] * 2, answers
        check_whole(trainer, engines, tmp_path / "whole.pt")
        trainer.do("nudge", stride=STRIDE, by=0.25)


def test_a_rank_whose_copy_is_of_something_else_is_found_and_all_send_whole(
    engines: list[EngineDouble], trainer: RankedTrainer, tmp_path: Path
) -> None:
    """Leave out rank 1's copy alone: the ranks go on in step."""
    begun(trainer, "fsdp2")
    trainer.do("push", what="base")
    trainer.do("spoil_copy", rank=1)
    trainer.do("nudge", stride=STRIDE, by=1.0)
    answers = trainer.do("push", what="base")
    assert not any("error" in answer for answer in answers), answers
    assert "the pool refused a delta" in answers[0]["why"]
    check_whole(trainer, engines, tmp_path / "whole.pt")
    for _ in range(2):  # one whole, for a pause
        trainer.do("nudge", stride=STRIDE, by=1.0)
        answers = trainer.do("push", what="base")
    assert all(answer["is_delta"] for answer in answers), answers
    check_whole(trainer, engines, tmp_path / "whole.pt")


def test_a_rank_that_has_lost_its_copy_makes_all_send_whole(
    engines: list[EngineDouble], trainer: RankedTrainer, tmp_path: Path
) -> None:
    begun(trainer, "fsdp2")
    trainer.do("push", what="base")
    trainer.do("spoil_copy", rank=1, is_lost=True)
    trainer.do("nudge", stride=STRIDE, by=1.0)
    answers = trainer.do("push", what="base")
    assert answers[0]["why"] == "a rank has no copy of what the pool committed last"
    check_whole(trainer, engines, tmp_path / "whole.pt")
    trainer.do("nudge", stride=STRIDE, by=1.0)
    answers = trainer.do("push", what="base")
    assert all(answer["is_delta"] for answer in answers), answers
    check_whole(trainer, engines, tmp_path / "whole.pt")
