"""Tiny models for tests with the engine double, and what identifies them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tests.waits import until as until

HIDDEN = 32


class Model(nn.Module):
    """Three "layers" with the names that the double's LoRA modules have."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(50, HIDDEN)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"q_proj": nn.Linear(HIDDEN, HIDDEN), "v_proj": nn.Linear(HIDDEN, 16)})
            for _ in range(3)
        )


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of a model's parameters."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def peft_of(model: nn.Module, seed: int = 0, scale: float = 1.0, **settings: Any) -> Any:
    """A LoRA adapter around ``model``, with values of that standard deviation."""
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(
        model, LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **settings})
    )
    torch.manual_seed(100 + seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, scale)
    return wrapped


def lora(peft_model: Any) -> dict[str, torch.Tensor]:
    """Copies of an adapter's tensors, as they are pushed."""
    from peft import get_peft_model_state_dict

    return {k: v.detach().clone() for k, v in get_peft_model_state_dict(peft_model).items()}


def same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    """Whether names and values are equal, bit by bit."""
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def step(model: nn.Module, share: float = 0.02) -> None:
    """Change a share of the elements, some by a unit in the last place and some by more."""
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(-1)
            at = torch.rand(len(flat)) < share
            flat.view(torch.int32)[at] += torch.randint(1, 3, (int(at.sum()),), dtype=torch.int32)
