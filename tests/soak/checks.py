"""Whether an answer is what the versions that it names would say.

No clock, socket or model: the expected log-probabilities are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from weft_rl.contract.names import BASE_POLICY, PolicyVersion

#: fp32, vLLM against transformers on the same weights.
MAX_DIFFERENCE, MEAN_DIFFERENCE = 5e-5, 5e-6

#: Log-probabilities of an answer's tokens, by base version, under its adapter.
Expected = Callable[[int], Sequence[float]]


@dataclass(frozen=True)
class Answer:
    """What a client got, and what it knew."""

    url: str
    asked: str
    """Name of the model that was asked for."""
    named: str
    """Name of the model that says it answered."""
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    spans: tuple[tuple[int, int, int], ...] | None
    """(base version, first token, end), if the answer names them."""
    floor: Mapping[str, int]
    """Newest versions whose push had returned before the request was made."""
    ended_at: float

    @property
    def adapter(self) -> PolicyVersion | None:
        """The adapter version that it names; None for the base."""
        return PolicyVersion.parse(self.named) if "@" in self.named else None


@dataclass(frozen=True)
class Verdict:
    """What a check found; ``problem`` is empty when all is well."""

    problem: str = ""
    differences: tuple[float, ...] = ()
    """Of each log-probability."""
    num_bases: int = 1
    """How many base versions had a part in it."""


def check(answer: Answer, candidates: Sequence[int], expected: Expected) -> Verdict:
    """Check names, then every token.

    Args:
        candidates: Base versions that may have answered, ascending; used where the
            answer does not name them.
        expected: See ``Expected``; asked at most once a version.
    """
    problem = check_names(answer)
    if problem:
        return Verdict(problem)
    if answer.spans is not None:
        verdict = _named_spans(answer, answer.spans, expected)
    else:
        verdict = _found_spans(answer, candidates, expected)
    worst = max(verdict.differences, default=0.0)
    if not verdict.problem and worst > MAX_DIFFERENCE:
        return Verdict(f"log-probabilities differ by {worst:.1e}", verdict.differences)
    return verdict


def check_names(answer: Answer) -> str:
    """What is wrong about who says it answered; empty when nothing is."""
    policy, _, number = answer.asked.partition("@")
    if number and answer.named != answer.asked:
        return f"asked for {answer.asked}, {answer.named} answered"
    if not number and policy in answer.floor:
        if answer.adapter is None or answer.adapter.policy != policy:
            return f"asked for {answer.asked}, {answer.named} answered"
        if answer.adapter.version < answer.floor[policy]:
            return f"{answer.named} answered after {policy}@{answer.floor[policy]} was pushed"
    elif not number and "@" in answer.named:
        return f"asked for {answer.asked}, {answer.named} answered"
    return ""


def _named_spans(
    answer: Answer, spans: Sequence[tuple[int, int, int]], expected: Expected
) -> Verdict:
    at, floor = 0, answer.floor[BASE_POLICY]
    differences: list[float] = []
    for base, begin, end in spans:
        if begin != at or end <= begin:
            return Verdict(f"its spans have holes: {spans}")
        if base < floor:
            return Verdict(f"base@{base} answered after base@{floor} was there")
        want = expected(base)
        pairs = zip(answer.log_probs[begin:end], want[begin:end], strict=True)
        differences += [abs(got - wanted) for got, wanted in pairs]
        at, floor = end, base + 1
    if at != len(answer.tokens):
        return Verdict(f"its spans end early: {spans}")
    return Verdict("", tuple(differences), len(spans))


def _found_spans(answer: Answer, candidates: Sequence[int], expected: Expected) -> Verdict:
    """Each token must fit a base, and bases may only grow from token to token.

    To stay with a base as long as its tokens fit loses no solution.
    """
    used: set[int] = set()
    at, want = 0, expected(candidates[0])
    differences: list[float] = []
    for index, got in enumerate(answer.log_probs):
        nearest = abs(got - want[index])
        while abs(got - want[index]) > MAX_DIFFERENCE:
            at += 1
            if at == len(candidates):
                return Verdict(f"token {index} fits none of base@{list(candidates)}: {nearest:.1e}")
            want = expected(candidates[at])
        used.add(at)
        differences.append(abs(got - want[index]))
    return Verdict("", tuple(differences), len(used))
