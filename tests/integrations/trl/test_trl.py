"""GRPOTrainer and RLOOTrainer over a pool of real vLLM: what generates is what was trained."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.logprobs import MAX_ERROR
from tests.e2e.replicas import LORA_ARGS, running_coordinator, running_replicas, wait_ready
from tests.integrations.trl.ranks import Ranks, running_ranks
from tests.models import make_model

_GENERATIONS = 3


@dataclass(frozen=True)
class Case:
    """One training; any two settings of two fields meet in one of ``CASES``."""

    trainer: str
    mode: str
    ranks: int
    replicas: int
    accumulation: int
    iterations: int

    def __str__(self) -> str:
        return "-".join(map(str, asdict(self).values()))


#: By number of replicas: the second one joins a pool that has served for a while.
CASES = [
    Case("grpo", "full", 1, 1, 1, 1),
    Case("grpo", "adapter", 2, 1, 2, 1),
    Case("rloo", "merged", 1, 1, 2, 2),
    Case("rloo", "full", 2, 2, 2, 1),
    Case("rloo", "adapter", 1, 2, 1, 2),
    Case("grpo", "merged", 2, 2, 1, 1),
    Case("grpo", "full", 2, 2, 1, 2),
    Case("rloo", "merged", 2, 1, 1, 2),
]


class Pool:
    """A coordinator, and as many replicas as were asked for so far; trainers beside it."""

    def __init__(self, work: Path, target: str, model: Path, stack: ExitStack) -> None:
        self.target, self.model = target, model
        self._work, self._stack = work, stack
        self._replicas = 0
        self.generated: set[str] = set()
        self._ranks: dict[int, Ranks] = {}

    def grow(self, count: int) -> None:
        """Have so many replicas."""
        while self._replicas < count:
            more = running_replicas(
                self._work, self.target, [self.model], *LORA_ARGS, first=self._replicas
            )
            self._stack.enter_context(more)
            wait_ready(self.target, f"replica-{self._replicas}")
            self._replicas += 1

    def ranks(self, size: int) -> Ranks:
        """A trainer of so many ranks, which trains one case after the other."""
        if size not in self._ranks:
            self._ranks[size] = self._stack.enter_context(
                running_ranks(self._work, self.target, size)
            )
        return self._ranks[size]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    work = tmp_path_factory.mktemp("trl")
    model = make_model("qwen2", work / "model")
    with ExitStack() as stack:
        coordinator = stack.enter_context(running_coordinator(work))
        yield Pool(work, coordinator.target, model, stack)


def test_every_pair_of_settings_is_there() -> None:
    def found(cases: list[Case], one: str, other: str) -> set[Any]:
        return {(getattr(case, one), getattr(case, other)) for case in cases}

    values: Callable[[str], set[Any]] = lambda name: {getattr(case, name) for case in CASES}  # noqa: E731
    for one, other in itertools.combinations([field.name for field in fields(Case)], 2):
        assert found(CASES, one, other) == set(itertools.product(values(one), values(other)))
    assert {case.mode for case in CASES} == {"full", "adapter", "merged"}


@pytest.mark.parametrize("case", sorted(CASES, key=lambda case: case.replicas), ids=str)
def test_what_generates_is_what_was_trained(pool: Pool, case: Case) -> None:
    pool.grow(case.replicas)
    ranks = pool.ranks(case.ranks)
    ranks.do("restore", model=str(pool.model))
    answers = ranks.do(
        "rl", model=str(pool.model), trainer=case.trainer, mode=case.mode,
        accumulation=case.accumulation, iterations=case.iterations, generations=_GENERATIONS,
    )  # fmt: skip
    main = answers[0]
    assert "error" not in main, answers
    assert main["steps"] == _GENERATIONS * case.iterations
    # One version a generation, of the right policy, each one further.
    policy, first = main["asked"][0].split("@")
    assert policy == ("math" if case.mode == "adapter" else "base")
    numbers = list(range(int(first), int(first) + _GENERATIONS))
    assert main["asked"] == [f"{policy}@{number}" for number in numbers]
    assert main["versions"] == [[number] for number in numbers]
    assert [answer["last"] for answer in answers] == [main["asked"][-1]] * case.ranks
    # The trainer's own forward pass says what the replicas say; its first weights do not.
    assert len(main["parity"]) == _GENERATIONS
    assert max(main["parity"]) <= MAX_ERROR
    assert main["drift"][0] <= MAX_ERROR
    assert min(main["drift"][1:]) > 20 * MAX_ERROR
    # TRL's word for it; RLOO says nothing of the kind.
    if case.trainer == "grpo":
        assert len(main["logp_difference"]) == _GENERATIONS
        assert max(main["logp_difference"]) <= MAX_ERROR
    # Which one a prompt goes to depends on which is first known to serve its version.
    assert set(main["replicas"]) <= {f"replica-{i}" for i in range(case.replicas)}
    pool.generated |= set(main["replicas"])
    assert all(not answer["asked"] for answer in answers[1:])  # rank 0 alone generates


def test_both_replicas_generated(pool: Pool) -> None:
    assert pool.generated == {"replica-0", "replica-1"}


def test_a_generation_that_fails_ends_every_rank(pool: Pool) -> None:
    pool.grow(1)
    ranks = pool.ranks(2)
    answers = ranks.do(
        "rl", model=str(pool.model), trainer="grpo", mode="adapter", accumulation=1,
        iterations=1, generations=1, timeout=0.001,
    )  # fmt: skip
    assert {answer["type"] for answer in answers} == {"TransferTimeoutError"}
