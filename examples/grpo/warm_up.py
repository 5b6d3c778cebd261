"""The supervised warm-up: the model learns the format, and is right half of the time.

python -m examples.grpo.warm_up MODEL_DIR
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import torch

from examples.grpo.loss import completion_logprobs, model_inputs
from examples.grpo.task import EOS, MAX_TOKENS, PAD, guess, make_model, make_tokenizer, problems

_STEPS = 400
_BATCH = 128
_LEARNING_RATE = 3e-3
_RIGHT = 0.5


def make_warm_model(path: Path, seed: int = 0, steps: int = _STEPS) -> None:
    """Save a warmed model and its tokenizer under ``path``."""
    tokenizer, model = make_tokenizer(), make_model(seed)
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, total_steps=steps)
    for step in range(steps):
        batch = _examples(tokenizer, rng)
        logits = model(**model_inputs(**batch)).logits
        logprobs = completion_logprobs(logits, batch["completion_ids"])
        mask = batch["completion_mask"]
        loss = -(logprobs * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"warm-up step {step + 1}, loss {loss.item():.3f}", flush=True)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def _examples(tokenizer: Any, rng: random.Random) -> dict[str, torch.Tensor]:
    """Problems with answers that are right half of the time, and else made up."""
    drawn = problems(_BATCH, rng)
    answers = [each.answer if rng.random() < _RIGHT else guess(rng) for each in drawn]
    prompts = [tokenizer(each.prompt)["input_ids"] for each in drawn]
    completions = [[*tokenizer(str(answer))["input_ids"], EOS] for answer in answers]
    width = max(map(len, prompts))
    prompt_ids = torch.tensor([[PAD] * (width - len(row)) + row for row in prompts])
    completion_ids = torch.tensor([row + [PAD] * (MAX_TOKENS - len(row)) for row in completions])
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_ids != PAD,
        "completion_ids": completion_ids,
        "completion_mask": completion_ids != PAD,
    }


if __name__ == "__main__":
    make_warm_model(Path(sys.argv[1]))
