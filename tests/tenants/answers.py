"""Answers to exact versions, held against transformers and PEFT."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.e2e.logprobs import MAX_ERROR, MEAN_ERROR
from tests.tenants.models import Tenant
from weft_rl.contract.names import PolicyVersion

#: Two versions' greedy answers to one prompt differ at least so much in some log-probability,
#: if not in a token: far more than an answer may differ from the referee's.
MIN_APART = 20 * MAX_ERROR


@dataclass(frozen=True)
class Answer:
    """What one replica answered."""

    asked: PolicyVersion
    named: PolicyVersion | None
    """The adapter that says it answered."""
    replica: str
    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]


@dataclass
class Judge:
    """Says whether answers are of the versions that were asked for.

    Args:
        tenants: By policy; their models are drawn anew, so nobody pushes meanwhile.
    """

    tenants: dict[str, Tenant]
    problems: list[str] = field(default_factory=list)
    num_answers: int = 0
    num_logprobs: int = 0
    worst: float = 0.0
    _sum: float = 0.0

    @property
    def mean(self) -> float:
        """Mean difference of a log-probability."""
        return self._sum / max(1, self.num_logprobs)

    def judge(self, answer: Answer) -> None:
        """Compare one answer with what its version says of the same tokens."""
        self.num_answers += 1
        asked, where = answer.asked, f"{answer.asked} at {answer.replica}"
        if answer.named != asked:
            self.problems.append(f"{where} was answered by {answer.named}")
            return
        if not answer.tokens:
            self.problems.append(f"{where} answered nothing")
            return
        want = self.tenants[asked.policy].logprobs(asked.version, answer.prompt, answer.tokens)
        errors = [abs(a - b) for a, b in zip(want, answer.logprobs, strict=True)]
        if max(errors) > MAX_ERROR:
            self.problems.append(f"{where}: log-probabilities are off by {max(errors):.1e}")
        self.num_logprobs += len(errors)
        self.worst = max(self.worst, *errors)
        self._sum += sum(errors)

    def check_mean(self) -> None:
        """Hold the mean of all differences against its bound."""
        if self.mean > MEAN_ERROR:
            self.problems.append(f"log-probabilities differ by {self.mean:.1e} on average")


def least_apart(answers: Sequence[Answer]) -> float:
    """Of all pairs of answers of equal tokens, by different versions, the least largest
    difference of a log-probability; infinite where no two have the same tokens."""
    return min(
        (
            max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))
            for one, other in itertools.combinations(answers, 2)
            if one.asked != other.asked and list(one.tokens) == list(other.tokens)
        ),
        default=float("inf"),
    )
