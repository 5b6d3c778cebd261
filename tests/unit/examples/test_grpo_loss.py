"""The loss of examples/grpo: every log-probability is of its own token, wherever padding is."""

import math

import pytest
import torch

from examples.grpo.loss import (
    MAX_DISTANCE,
    MisalignedError,
    check_on_policy,
    completion_logprobs,
    group_advantages,
    grpo_loss,
    importance_ratios,
    model_inputs,
)
from examples.grpo.task import PAD, make_model

PROMPTS = [[4, 5, 6, 7], [8, 9], [10, 11, 12]]
COMPLETIONS = [[13, 2], [14, 15, 16, 2], [2]]


@pytest.fixture(scope="module")
def model():
    made = make_model(seed=0)
    with torch.no_grad():
        for weight in made.parameters():  # peaked, so that wrong places are far from right ones
            weight.mul_(2)
    return made.eval()


@pytest.fixture(scope="module")
def batch():
    """Prompts padded on the left, completions on the right."""
    before, after = max(map(len, PROMPTS)), max(map(len, COMPLETIONS))
    prompts = torch.tensor([[PAD] * (before - len(row)) + row for row in PROMPTS])
    completions = torch.tensor([row + [PAD] * (after - len(row)) for row in COMPLETIONS])
    return {
        "prompt_ids": prompts,
        "prompt_mask": prompts != PAD,
        "completion_ids": completions,
        "completion_mask": completions != PAD,
    }


@pytest.fixture(scope="module")
def sampled(model, batch):
    """The log-probability of each token by the chain rule: from what stands before it, alone."""
    logprobs = torch.zeros(batch["completion_ids"].shape)
    with torch.no_grad():
        for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
            for place, token in enumerate(completion):
                before = torch.tensor([prompt + completion[:place]])
                logprobs[row, place] = model(before).logits[0, -1].log_softmax(-1)[token]
    return logprobs


def ratios_of(model, batch, sampled, shift=0):
    """``shift`` reads each prediction at a neighbour's place."""
    with torch.no_grad():
        logits = model(**model_inputs(**batch)).logits.roll(shift, dims=1)
    logprobs = completion_logprobs(logits, batch["completion_ids"])
    return importance_ratios(logprobs, sampled, batch["completion_mask"])


def test_padding_on_either_side_moves_no_log_probability(model, batch, sampled):
    ratios = ratios_of(model, batch, sampled)
    assert check_on_policy(ratios) < 1e-5
    assert torch.equal(ratios[~batch["completion_mask"]], torch.ones(5))


@pytest.mark.parametrize("shift", [-1, 1])
def test_log_probabilities_one_place_off_are_caught(model, batch, sampled, shift):
    ratios = ratios_of(model, batch, sampled, shift)
    with pytest.raises(MisalignedError, match="right after a push"):
        check_on_policy(ratios)
    # Not by a whisker, and by the mean that the example is judged by as well.
    assert abs(ratios[batch["completion_mask"]].mean() - 1) > 100 * MAX_DISTANCE


def test_a_prompt_padded_on_the_wrong_side_is_caught(model, batch, sampled):
    wrong = dict(batch)
    wrong["prompt_ids"] = torch.tensor([[*row, *[PAD] * (4 - len(row))] for row in PROMPTS])
    wrong["prompt_mask"] = wrong["prompt_ids"] != PAD
    with pytest.raises(MisalignedError):
        check_on_policy(ratios_of(model, wrong, sampled))


def test_a_ratio_that_is_no_number_is_caught():
    with pytest.raises(MisalignedError, match="nan"):
        check_on_policy(torch.tensor([1.0, math.nan]))


def test_temperature_is_that_of_the_sampling():
    # Of a prompt of one token and a completion of one: the first column is about the second.
    logits = torch.tensor([[[1.0, 3.0], [9.0, 0.0]]])
    (logprob,) = completion_logprobs(logits, torch.tensor([[1]]), temperature=0.5).flatten()
    assert logprob.item() == pytest.approx(-math.log(1 + math.exp(-4)), rel=1e-5)


def test_advantages_compare_the_samples_of_one_prompt():
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0])
    better, worse, *equal = group_advantages(rewards, 2).tolist()
    assert better == pytest.approx(0.5**0.5, rel=1e-3)
    assert worse == -better
    assert equal == [0.0, 0.0]


def test_what_is_better_becomes_likelier_and_only_within_the_clip():
    mask = torch.tensor([[1, 1], [1, 0]]).bool()
    advantages = torch.tensor([1.0, -1.0])
    logprobs = torch.zeros(2, 2, requires_grad=True)
    sampled = torch.tensor([[0.0, -1.0], [0.0, -5.0]])  # one is far likelier now
    loss = grpo_loss(importance_ratios(logprobs, sampled, mask), advantages, mask)
    assert loss.item() == pytest.approx(-(1.0 + 1.2 - 1.0) / 3)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-1 / 3, 0.0], [1 / 3, 0.0]]))
