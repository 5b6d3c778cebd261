"""The mapping of a model's parameters to the tensors of its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from trainer_side.params.names import CheckpointMapping

_PARTS = {"plain": [], "root": [""], "root and the model in it": ["model", ""]}


def _made() -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        vocab_size=32,
    )
    return Qwen3MoeForCausalLM(config)


@pytest.fixture(params=_PARTS)
def model(request: pytest.FixtureRequest) -> Iterator[Qwen3MoeForCausalLM]:
    """A model of transformers' whose checkpoint has other tensors than it has parameters, of which
    FSDP2 shards some parts."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _made()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for part in _PARTS[request.param]:
            fully_shard(model.get_submodule(part), mesh=mesh)
        yield model
    finally:
        dist.destroy_process_group()


def _names(mapping: CheckpointMapping, model: Qwen3MoeForCausalLM) -> list[str]:
    assert mapping.revert is not None
    params = {name: torch.empty(p.shape) for name, p in model.named_parameters()}
    return [*mapping.revert(params)]


def test_a_sharded_model_has_the_checkpoint_of_a_whole_one(model: Qwen3MoeForCausalLM) -> None:
    whole = _made()
    expected = _names(CheckpointMapping.of(whole), whole)
    assert "model.layers.0.mlp.experts.1.down_proj.weight" in expected
    assert _names(CheckpointMapping.of(model), model) == expected


def test_a_frozen_mapping_follows_no_change_of_the_model(model: Qwen3MoeForCausalLM) -> None:
    mapping, frozen = CheckpointMapping.of(model), CheckpointMapping.frozen(model)
    expected = _names(mapping, model)
    model.config.model_type = "of nobody"
    assert _names(mapping, model) != expected
    assert _names(frozen, model) == expected
    assert frozen.kind == type(model).__name__
