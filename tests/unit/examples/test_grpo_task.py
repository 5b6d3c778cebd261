"""Rewards of examples/grpo, and the bounds that it is judged by."""

from concurrent.futures import ThreadPoolExecutor

from examples.grpo.__main__ import Trainer, missed_bounds
from examples.grpo.task import rewards
from examples.grpo.train import Step

TRAINER = Trainer("full", (), 0.85)


def steps_of(rewards, ratio=1.0):
    return [
        Step(
            step=number,
            version=number + 1,
            reward=reward,
            ratio=ratio,
            ratio_distance=abs(ratio - 1),
            generate_seconds=0.1,
            learn_seconds=0.1,
            push_seconds=0.1,
        )
        for number, reward in enumerate(rewards)
    ]


def test_an_answer_is_right_if_it_is_worth_what_is_expected_on_any_thread():
    answers = ["15", "7+8", "1 5", "", "51", "5"]
    with ThreadPoolExecutor(1) as pool:
        earned = pool.submit(rewards, answers, [15, 15, 15, 15, 15, 5]).result()
    assert earned.tolist() == [1, 1, 0, 0, 0, 1]


def test_a_run_within_its_bounds_misses_none():
    assert missed_bounds(TRAINER, steps_of([0.5] * 10 + [0.9] * 10)) == []


def test_each_bound_that_is_missed_is_named():
    assert missed_bounds(TRAINER, steps_of([0.5] * 10 + [0.84] * 10)) == [
        "full: reward 0.84 at last, not over 0.85"
    ]
    assert missed_bounds(TRAINER, steps_of([0.9] * 20)) == [
        "full: reward 0.90 at first, which is not about 0.5"
    ]
    missed = missed_bounds(TRAINER, steps_of([0.5] + [0.9] * 10, ratio=1.002))
    assert len(missed) == 11
    assert missed[0] == "full: mean importance ratio 1.002000 at step 0"
