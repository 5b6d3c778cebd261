"""The soak's own judgement: it must be able to fail."""

import pytest

from tests.processes import Holding
from tests.soak.checks import Answer, check
from tests.soak.leaks import Course, problems_of

# Log-probabilities of four tokens by base version.
EXPECTED = {3: [-1.0, -2.0, -3.0, -4.0], 4: [-1.5, -2.5, -3.5, -4.5], 5: [-1.9, -2.9, -3.9, -4.9]}


def answer(log_probs, spans=None, asked="math", named="math@7"):
    return Answer(
        url="http://replica",
        asked=asked,
        named=named,
        prompt=(1, 2),
        tokens=(9, 9, 9, 9),
        log_probs=tuple(log_probs),
        spans=spans,
        floor={"base": 3, "math": 7},
        ended_at=0.0,
    )


def judged(*args, **kwargs):
    return check(answer(*args, **kwargs), [3, 4, 5], EXPECTED.__getitem__)


def test_an_answer_of_one_version_passes():
    verdict = judged([-1.0, -2.0, -3.00001, -4.0])
    assert (verdict.problem, verdict.num_bases) == ("", 1)
    assert max(verdict.differences) == pytest.approx(1e-5)


@pytest.mark.parametrize("spans", [None, ((3, 0, 2), (5, 2, 4))])
def test_an_answer_across_a_push_passes(spans):
    verdict = judged([-1.0, -2.0, -3.9, -4.9], spans)
    assert (verdict.problem, verdict.num_bases) == ("", 2)


@pytest.mark.parametrize(
    ("log_probs", "spans", "problem"),
    [
        ([-1.0, -2.0, -3.5, -4.0], None, "token 3 fits none"),  # back to an older base
        ([-1.0, -2.1, -3.0, -4.0], None, "token 1 fits none"),
        ([-1.0, -2.0, -3.9, -4.9], ((3, 0, 3), (5, 3, 4)), "differ by 9.0e-01"),
        ([-1.0, -2.0, -3.0, -4.0], ((3, 0, 3),), "end early"),
        ([-1.0, -2.0, -3.0, -4.0], ((3, 0, 1), (4, 2, 4)), "holes"),
        ([-1.9, -2.9, -3.5, -4.5], ((5, 0, 2), (4, 2, 4)), "base@4 answered after"),
        ([-1.0, -2.0, -3.0, -4.0], ((2, 0, 4),), "base@2 answered after base@3"),
    ],
)
def test_wrong_tokens_and_spans_are_found(log_probs, spans, problem):
    assert problem in judged(log_probs, spans).problem


@pytest.mark.parametrize(
    ("asked", "named", "problem"),
    [
        ("math@8", "math@7", "asked for math@8"),
        ("math", "math@6", "after math@7 was pushed"),
        ("math", "code@9", "code@9 answered"),
        ("math", "tiny", "tiny answered"),
        ("tiny", "math@7", "math@7 answered"),
    ],
)
def test_a_wrong_name_is_found(asked, named, problem):
    right = EXPECTED[3]
    assert problem in judged(right, asked=asked, named=named).problem


def course(**grown):
    """Six looks at one process of which some figures grow from the third on."""
    made = Course([50, 100, 150, 200, 250, 300], num_warm=2, memory_bound=1024.0)
    still = {"threads": 9, "descriptors": 30, "segments": 4, "memory_bytes": 10**8}
    made.seen["engine"] = [
        Holding(**{k: v + max(0, i - 1) * grown.get(k, 0) for k, v in still.items()})
        for i in range(6)
    ]
    return made


def test_what_does_not_grow_is_no_leak():
    assert problems_of(course()) == []
    assert problems_of(course(memory_bytes=50_000)) == []  # 1,000 bytes a push


@pytest.mark.parametrize(
    ("grown", "problem"),
    [
        ({"threads": 1}, "threads grew from 9 to 13"),
        ({"descriptors": 1}, "descriptors grew"),
        ({"segments": 1}, "segments grew"),
        ({"memory_bytes": 60_000}, "memory grows by 1.2 KiB a push"),
    ],
)
def test_a_leak_is_found(grown, problem):
    (found,) = problems_of(course(**grown))
    assert problem in found
