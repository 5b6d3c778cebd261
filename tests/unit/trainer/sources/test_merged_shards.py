"""LoRA that each rank merges into what it holds, of any layer: as one rank merges it whole."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.doubles.shards import sharded
from trainer_side.params.merged import MergedParams
from trainer_side.params.names import unwrapped_name
from trainer_side.params.params import WholeParams
from trainer_side.sources.module_source import ModuleSource
from trainer_side.sources.source import CastRule

_NUM_RANKS = 3


class _Layers(nn.Module):
    """An embedding, a linear, and transformers' (in, out) kind of one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(40, 24), nn.Linear(24, 30)
        self.conv = Conv1D(36, 24)


def _moe(kind: str) -> nn.Module:
    common: dict[str, Any] = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2,
    }  # fmt: skip
    config: Any
    if kind == "mixtral":
        config = transformers.MixtralConfig(**common, num_local_experts=4)
    else:
        config = transformers.Qwen3MoeConfig(
            **common, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, head_dim=8
        )
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def _trained(kind: str) -> Any:
    torch.manual_seed(3)
    if kind == "layers":
        model, settings = _Layers(), LoraConfig(r=4, target_modules=["embed", "up", "conv"])
    else:
        model = _moe(kind)
        experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        settings = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=experts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about fan_in_fan_out, which PEFT then sets
        wrapped = get_peft_model(model, settings)
    with torch.no_grad():
        for name, param in wrapped.named_parameters():
            if "lora_" in name:
                param.copy_(torch.randn_like(param))
    return wrapped


# Whole experts at each rank, or rows of a matrix; rows of each expert; columns.
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("kind", ["layers", "qwen3_moe", "mixtral"])
def test_what_each_rank_merges_is_what_one_merges_whole(kind: str, dim: int) -> None:
    model = _trained(kind)
    whole = {unwrapped_name(name): param.detach() for name, param in model.named_parameters()}
    base = model.get_base_model()
    merged = MergedParams(model, WholeParams(whole, "test"), "default")
    reference = ModuleSource(base, merged, CastRule())
    made = [torch.full(meta.shape, torch.nan) for meta in reference.metas]
    given: dict[int, torch.Tensor] = {}

    def source_of(rank: int) -> ModuleSource:
        params = sharded(whole, dim, rank, _NUM_RANKS, given)
        return ModuleSource(base, MergedParams(model, params, "default"), CastRule())

    for rank in range(_NUM_RANKS):
        source_of(rank).prepare()  # so that each has given its parts of the factors
    computed: set[str] = set()
    for rank in range(_NUM_RANKS):
        source = source_of(rank)
        source.prepare()
        for index, out in enumerate(made):
            elements = source.elements(index)
            assert elements is not None, source.metas[index].name
            for number, run in enumerate(run for run in elements.runs if run.rank == rank):
                part = torch.empty(run.size)
                if elements.held(number) is None:
                    computed.add(source.metas[index].name)
                elements.fill(number, part)
                run.of(out).copy_(part.view(run.shape))
    trained = ("embed", "up", "conv") if kind == "layers" else ("q_proj", ".experts.3.")
    assert all(any(part in name for name in computed) for part in trained), computed
    for index, out in enumerate(made):
        want = [torch.empty_like(out)]
        reference.read(index, 1, want)
        largest = float(want[0].abs().max())
        assert torch.allclose(out, want[0], rtol=0, atol=4 * 2**-23 * largest), reference.metas[
            index
        ].name
