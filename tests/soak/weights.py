"""Models of the soak: every version's weights follow from one seed, on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.models import TARGETS, draw_adapter, draw_base, load_hf

#: Adapters that are pushed, and their ranks.
RANKS = {"math": 8, "code": 16}
#: The seed that the engines' own weights, base@0, were made of.
FIRST_SEED = 0


def adapter_model(base: Path, policy: str) -> Any:
    """A PEFT model of a policy, as its trainer has it."""
    from peft import LoraConfig, get_peft_model

    rank = RANKS[policy]
    settings = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=list(TARGETS), task_type="CAUSAL_LM"
    )
    return get_peft_model(load_hf(base), settings).eval()


class Referee:
    """transformers and PEFT on the weights of any version; redraws what it lacks."""

    def __init__(self, base: Path) -> None:
        self._plain = load_hf(base).eval()
        self._wrapped = {policy: adapter_model(base, policy) for policy in RANKS}
        self._drawn: dict[str, tuple[int, int]] = {}

    @torch.no_grad()
    def log_probs(
        self,
        base_seed: int,
        adapter: tuple[str, int] | None,
        prompt: Sequence[int],
        tokens: Sequence[int],
    ) -> list[float]:
        """Of each of ``tokens`` after ``prompt`` and those before it.

        Args:
            base_seed: Of the base's weights.
            adapter: Its policy and the seed of its weights; None for the base alone.
        """
        self._draw(base_seed)
        model = self._plain
        if adapter is not None:
            policy, seed = adapter
            model = self._wrapped[policy]
            self._fill(policy, base_seed, seed)
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0].double()
        rows = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
        return [float(rows[i, token]) for i, token in enumerate(tokens)]

    def _draw(self, seed: int) -> None:
        if self._drawn.get("") != (seed, 0):
            draw_base(self._plain, seed)
            self._drawn[""] = (seed, 0)

    def _fill(self, policy: str, base_seed: int, seed: int) -> None:
        """Give a PEFT model the plain model's weights and its adapter's own."""
        if self._drawn.get(policy) == (base_seed, seed):
            return
        plain = dict(self._plain.named_parameters())
        wrapped = self._wrapped[policy]
        for name, parameter in wrapped.named_parameters():
            if "lora_" not in name:
                inner = name.removeprefix("base_model.model.").replace(".base_layer", "")
                parameter.copy_(plain[inner])
        draw_adapter(wrapped, seed)
        self._drawn[policy] = (base_seed, seed)
