"""How far what a pool serves is from a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.models import load_hf
from trainer_side import RolloutClient, SampleGroup, Sampling

PROMPT = [5, 9, 33, 70, 12]
#: Of a log-probability, in float32.
MAX_ERROR = 5e-5
#: How far other weights are at least.
MIN_CHANGE = 0.05


def logprob_error(model: Any, prompt: list[int], tokens: list[int], said: list[float]) -> float:
    """The largest difference of a model's log-probabilities from those that were said."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0].float()
    wanted = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    wanted = wanted.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    return float((wanted - torch.tensor(said)).abs().max())


def sampled(coordinator: str, policy: str) -> SampleGroup:
    """What the pool answers now."""
    sampling = Sampling(max_tokens=12, ignore_eos=True)
    with RolloutClient(coordinator) as client:
        (group,) = client.generate([PROMPT], model=policy, n=4, sampling=sampling)
    return group


def version(group: SampleGroup) -> int:
    """The one version that made all of it."""
    (number,) = {number for one in group.samples for number in one.versions.tolist()}
    return number


def error(group: SampleGroup, model: Any) -> float:
    """The largest of its samples."""
    if isinstance(model, Path):
        model = load_hf(model)
    return max(
        logprob_error(model, PROMPT, one.token_ids.tolist(), one.logprobs.tolist())
        for one in group.samples
    )
