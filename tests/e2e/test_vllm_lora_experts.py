"""LoRA of experts, as vLLM packs it; its layers for them need a GPU (tests/gpu/test_models.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout_side.vllm_engine.loading import lora_hook

weights: Any = pytest.importorskip("vllm.lora.lora_weights")

# vLLM's and torch's own, at import
pytestmark = pytest.mark.filterwarnings("ignore")

EXPERTS, RANK, HIDDEN, INNER = 3, 2, 6, 4
LAYER = "model.layers.0.mlp.experts"
MODULES = [f"{LAYER}.{e}.{n}_proj" for e in range(EXPERTS) for n in ("gate", "down", "up")]


def packed(loras: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What vLLM's manager makes of a layer's experts, for its ``set_lora``."""
    lora = SimpleNamespace(loras=loras)
    adapters = SimpleNamespace(packed_modules={LAYER: MODULES})
    lora_hook._prepare_experts(lora, adapters)
    found = weights.PackedLoRALayerWeights.pack_moe([lora.loras[name] for name in MODULES], LAYER)
    found.optimize()
    return found.lora_a, found.lora_b


def test_experts_at_once_are_packed_as_one_by_one() -> None:
    """With a scaling for each kind of projection, which rsLoRA and patterns may give."""
    a_up, b_up = torch.randn(EXPERTS, RANK, HIDDEN), torch.randn(EXPERTS, 2 * INNER, RANK)
    a_down, b_down = torch.randn(EXPERTS, RANK, INNER), torch.randn(EXPERTS, HIDDEN, RANK)
    scalings = {"gate": 3.0, "up": 3.0, "down": 0.5}
    one_by_one = {}
    for expert in range(EXPERTS):
        for name, a, b in (
            ("gate", a_up, b_up[:, :INNER]),
            ("up", a_up, b_up[:, INNER:]),
            ("down", a_down, b_down),
        ):
            module = f"{LAYER}.{expert}.{name}_proj"
            one_by_one[module] = weights.LoRALayerWeights(
                module, RANK, 7, a[expert].clone(), b[expert].clone(), scaling=scalings[name]
            )
    at_once = {
        name: weights.LoRALayerWeights(
            name, RANK, 7, a.flatten(0, 1), b.permute(1, 2, 0).flatten(1), scaling=scaling
        )
        for name, a, b, scaling in (
            (f"{LAYER}.base_layer", a_up, b_up, 3.0),
            (LAYER, a_down, b_down, 0.5),
        )
    }
    expected = (
        [a_up, a_down, a_up],
        [b_up[:, :INNER] * 3, b_down * 0.5, b_up[:, INNER:] * 3],
    )
    for loras in (one_by_one, at_once):
        for found, right in zip(packed(loras), expected, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(found, right, strict=True))
