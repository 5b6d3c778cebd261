"""The tenants' adapters: of mixed ranks and modules, each version drawn from a seed of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.models import TARGETS, draw_adapter, load_hf
from weft_rl.contract.names import PolicyVersion

#: vLLM's slots have the largest; a smaller one must leave nothing of what was there before.
RANKS = (1, 2, 3, 4, 6, 8, 12, 16)
#: Likewise one of fewer modules.
MODULES = (TARGETS, ("q_proj", "v_proj"))
#: Seeds of one tenant's versions.
_VERSIONS = 1000


class Tenant:
    """One policy, and its PEFT model, which has the weights of one version at a time.

    Args:
        base: Directory of the base model.
        index: Among all tenants; what rank, modules and seeds follow from.
    """

    def __init__(self, base: Path, index: int) -> None:
        from peft import LoraConfig, get_peft_model

        self.policy = f"tenant-{index:02d}"
        self.rank = RANKS[index % len(RANKS)]
        modules = MODULES[index // len(RANKS) % len(MODULES)]
        settings = LoraConfig(
            r=self.rank, lora_alpha=16, target_modules=list(modules), task_type="CAUSAL_LM"
        )
        self.model: Any = get_peft_model(load_hf(base), settings).eval()
        self._first_seed = index * _VERSIONS
        self._drawn = 0

    def draw(self, number: int) -> None:
        """Give the model the weights of a version."""
        if self._drawn != number:
            draw_adapter(self.model, self._first_seed + number)
            self._drawn = number

    def version(self, number: int) -> PolicyVersion:
        """The name of a version."""
        return PolicyVersion(self.policy, number)

    @torch.no_grad()
    def logprobs(self, number: int, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Log-probability, by transformers and PEFT, of each of ``tokens`` after ``prompt`` and
        those before it, under a version."""
        self.draw(number)
        logits = self.model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0].double()
        rows = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
        return [float(rows[i, token]) for i, token in enumerate(tokens)]
