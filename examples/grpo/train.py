"""A GRPO trainer: the pool's replicas make its rollouts, it learns, and pushes after each step.

python -m examples.grpo.train --coordinator HOST:PORT --model MODEL_DIR
python -m examples.grpo.train --coordinator HOST:PORT --model MODEL_DIR --policy math --rank 8
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from examples.grpo.loss import (
    check_on_policy,
    completion_logprobs,
    group_advantages,
    grpo_loss,
    importance_ratios,
    model_inputs,
)
from examples.grpo.task import MAX_TOKENS, PAD, problems, rewards
from trainer_side import PaddedBatch, PolicyVersion, Publisher, RolloutClient, Sampling, pad

BASE = "base"
_PROMPTS = 16
_SAMPLES = 8
_TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What one trainer has of its own."""

    coordinator: str
    model: Path
    policy: str = BASE
    """An adapter's name, or ``base``: every weight is trained."""
    rank: int = 8
    """Of the adapter."""
    base: str = "same"
    """Which base an adapter is for; see ``Publisher.push_adapter``."""
    learning_rate: float = 5e-4
    """At the first step; it falls linearly to 0."""
    steps: int = 60
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Step:
    """What was seen of one step."""

    step: int
    version: int
    """Which version of the policy made its samples."""
    reward: float
    """Their mean."""
    ratio: float
    """The mean importance ratio of their tokens, before the weights changed."""
    ratio_distance: float
    """How far from 1 the farthest of these is."""
    generate_seconds: float
    learn_seconds: float
    push_seconds: float


def train(settings: Settings, note: Callable[[Step], None]) -> None:
    """Learn; calls ``note`` after each step.

    Raises:
        MisalignedError: Samples are not of the weights, or not at the places, that they must be.
        WeftError: A push or a rollout failed.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    learner = _Learner(settings)
    rng = random.Random(settings.seed)
    with (
        Publisher(settings.coordinator, trainer_id=f"grpo-{settings.policy}") as publisher,
        RolloutClient(settings.coordinator, timeout_seconds=_TIMEOUT_SECONDS) as rollouts,
    ):
        version = _push(publisher, learner.model, settings)
        for step in range(settings.steps):
            began = time.monotonic()
            drawn = problems(_PROMPTS, rng)
            groups = rollouts.generate(
                [tokenizer(each.prompt)["input_ids"] for each in drawn],
                model=version,
                n=_SAMPLES,
                sampling=Sampling(max_tokens=MAX_TOKENS, seed=rng.getrandbits(31)),
            )
            generated = time.monotonic()
            batch = pad(groups, pad_token_id=PAD)
            answers = tokenizer.batch_decode(batch.completion_ids, skip_special_tokens=True)
            earned = rewards(answers, [each.answer for each in drawn for _ in range(_SAMPLES)])
            ratio, distance = learner.learn(batch, earned)
            learnt = time.monotonic()
            made_by, version = version, _push(publisher, learner.model, settings)
            note(
                Step(
                    step=step,
                    version=made_by.version,
                    reward=float(earned.mean()),
                    ratio=ratio,
                    ratio_distance=distance,
                    generate_seconds=generated - began,
                    learn_seconds=learnt - generated,
                    push_seconds=time.monotonic() - learnt,
                )
            )


class _Learner:
    """The model, and how it learns from a batch of samples of its own."""

    def __init__(self, settings: Settings) -> None:
        self.model = load_model(settings)
        self._weights = [each for each in self.model.parameters() if each.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._weights, lr=settings.learning_rate, betas=(0.9, 0.99), weight_decay=0.0
        )
        self._schedule = torch.optim.lr_scheduler.LinearLR(
            self._optimizer, 1.0, 0.0, total_iters=settings.steps
        )

    def learn(self, batch: PaddedBatch, earned: torch.Tensor) -> tuple[float, float]:
        """One step; returns the mean importance ratio, and the largest distance of one from 1."""
        mask = batch.completion_mask
        inputs = model_inputs(batch.prompt_ids, batch.prompt_mask, batch.completion_ids, mask)
        logprobs = completion_logprobs(self.model(**inputs).logits, batch.completion_ids)
        ratios = importance_ratios(logprobs, batch.logprobs, mask)
        distance = check_on_policy(ratios)
        self._optimizer.zero_grad()
        grpo_loss(ratios, group_advantages(earned, _SAMPLES), mask).backward()
        torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
        self._optimizer.step()
        self._schedule.step()
        return float(ratios.detach()[mask].double().mean()), distance


def load_model(settings: Settings) -> Any:
    """Load the model, with LoRA's factors where an adapter is trained."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(settings.seed)
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    if settings.policy == BASE:
        return model
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=2 * settings.rank,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def _push(publisher: Publisher, model: Any, settings: Settings) -> PolicyVersion:
    if settings.policy == BASE:
        return publisher.push_base(model).version
    # Samples over another base than one's own are of another policy: rather none.
    return publisher.push_adapter(model, settings.policy, base=settings.base).version


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn by GRPO; prints a line of JSON a step.")
    parser.add_argument("--coordinator", required=True, help="HOST:PORT")
    parser.add_argument("--model", type=Path, required=True, help="what the replicas serve")
    parser.add_argument("--policy", default=BASE, help="an adapter's name; base: every weight")
    parser.add_argument("--rank", type=int, default=8, help="of the adapter")
    parser.add_argument("--base", default="same", help="that an adapter is for: 'only base@N'")
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="falls linearly to 0")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    settings = Settings(**vars(parser.parse_args()))
    train(settings, lambda step: print(json.dumps(asdict(step)), flush=True))


if __name__ == "__main__":
    main()
