"""Why a tensor is not sent as the ranks hold it: said in the terms of who trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.doubles.shards import OneOfSeveral, sharded
from trainer_side.params import names
from trainer_side.params.merged import MergedParams
from trainer_side.params.names import unwrapped_name
from trainer_side.params.sharded import GatheredParam, Sharded, ShardedParams
from trainer_side.sources.module_source import ModuleSource
from trainer_side.sources.source import CastRule, HeldTensors, ParamsSource, held_tensors


def _gathered(tensor: torch.Tensor, why: str) -> GatheredParam:
    return GatheredParam(tensor.shape, tensor.dtype, lambda: tensor, tensor, why)


def _why(source: ModuleSource | ParamsSource, name: str) -> str:
    index = [meta.name for meta in source.metas].index(name)
    assert source.elements(index) is None
    return source.why_gathered(index)


def _merged(base: nn.Module, why_not: Mapping[str, str], **settings: Any) -> ModuleSource:
    """Of two ranks; with the parameters whose names end so left to their framework."""
    model: Any = get_peft_model(base, LoraConfig(r=4, **settings))
    whole = {unwrapped_name(name): param.detach() for name, param in model.named_parameters()}
    placed: dict[str, Sharded | GatheredParam] = dict(sharded(whole, 0, 0, 2).placed)
    for name, tensor in whole.items():
        for end, why in why_not.items():
            if name.endswith(end):
                placed[name] = _gathered(tensor, why)
    params = ShardedParams(placed, "test", OneOfSeveral(0, 2))
    return ModuleSource(model.get_base_model(), MergedParams(model, params, "default"), CastRule())


@pytest.mark.parametrize(
    ("tensor", "why_not", "settings", "why"),
    [
        ("0.weight", {}, {"use_dora": True}, "DoRA needs whole rows"),
        ("0.bias", {}, {"lora_bias": True}, "lora_bias is merged at rank 0"),
        ("1.weight", {"1.weight": "summed"}, {}, "summed"),
        ("0.weight", {"base_layer.weight": "summed"}, {}, "summed"),
        ("0.weight", {"lora_B.default.weight": "summed"}, {}, "LoRA's factors: summed"),
    ],
)
def test_of_a_merge(
    tensor: str, why_not: Mapping[str, str], settings: Mapping[str, Any], why: str
) -> None:
    base = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    assert _why(_merged(base, why_not, target_modules=["0"], **settings), tensor).startswith(why)


def test_of_a_checkpoint_that_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def revert(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: t.t().contiguous() if name == "t" else t[:2] for name, t in tensors.items()}

    monkeypatch.setattr(names, "reverter", lambda model: revert)
    whole = {"t": torch.zeros(4, 6), "s": torch.zeros(4, 6)}
    placed = {**sharded({"t": whole["t"]}, 0, 0, 2).placed, "s": _gathered(whole["s"], "summed")}
    params = ShardedParams(placed, "test", OneOfSeveral(0, 2))
    source = ModuleSource(nn.Module(), params, CastRule())
    assert _why(source, "t") == "the checkpoint's form of it is computed"
    assert _why(source, "s") == "summed"


def test_of_what_only_a_framework_can_put_together() -> None:
    whole = {"a": torch.zeros(64), "s": torch.zeros(4)}
    placed = {**sharded({"a": whole["a"]}, 0, 0, 2).placed, "s": _gathered(whole["s"], "summed")}
    params = ShardedParams(placed, "test", OneOfSeveral(0, 2))
    source = ParamsSource(params, {"a": "a", "s": "s"}, CastRule(), "test")
    assert _why(source, "s") == "summed"
    assert isinstance(held_tensors(source, params.ranks, 2), HeldTensors)
