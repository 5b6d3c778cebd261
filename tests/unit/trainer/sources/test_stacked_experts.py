"""Experts that transformers stacks are sent as the ranks hold them."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.doubles.shards import sharded
from trainer_side.params.names import plan_conversions
from trainer_side.params.params import WholeParams
from trainer_side.sources.module_source import ModuleSource
from trainer_side.sources.source import CastRule

_NUM_RANKS = 3
_COMMON = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


def _model(kind: str) -> torch.nn.Module:
    torch.manual_seed(3)
    if kind == "mixtral":
        config = transformers.MixtralConfig(**_COMMON, num_local_experts=4)
    else:
        config = transformers.Qwen3MoeConfig(
            **_COMMON, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, head_dim=8
        )
    return transformers.AutoModelForCausalLM.from_config(config)


# Whole experts at each rank; rows of each; columns of each.
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_stacked_experts_lie_where_their_ranks_hold_them(kind: str, dim: int) -> None:
    model = _model(kind)
    whole = {name: param.detach() for name, param in model.named_parameters()}
    reference = ModuleSource(model, WholeParams(whole, "test"), CastRule())
    made = [torch.full(meta.shape, torch.nan) for meta in reference.metas]
    for rank in range(_NUM_RANKS):
        source = ModuleSource(model, sharded(whole, dim, rank, _NUM_RANKS), CastRule())
        assert source.metas == reference.metas
        for index, out in enumerate(made):
            elements = source.elements(index)
            assert elements is not None, source.metas[index].name
            own = [run for run in elements.runs if run.rank == rank]
            for number, run in enumerate(own):
                held = elements.held(number)
                assert held is not None
                run.of(out).copy_(held.view(run.shape))
    assert any(".experts.3." in meta.name for meta in reference.metas)
    for index, out in enumerate(made):
        want = [torch.empty_like(out)]
        reference.read(index, 1, want)
        assert torch.equal(out, want[0]), reference.metas[index].name


def _held(source: ModuleSource, index: int) -> torch.Tensor | None:
    elements = source.elements(index)
    return None if elements is None else elements.held(0)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_stacked_experts_that_lie_whole_are_sent_from_there(kind: str) -> None:
    """One by one they would be copied by a launch each, and digested in a second reading."""
    model = _model(kind)
    source = ModuleSource(model, WholeParams(dict(model.named_parameters()), "test"), CastRule())
    count = len(source.metas)
    want = [torch.empty(meta.shape) for meta in source.metas]
    source.read(0, count, want)
    storages = {param.untyped_storage().data_ptr() for param in model.parameters()}
    for index, (meta, wanted) in enumerate(zip(source.metas, want, strict=True)):
        found = _held(source, index)
        assert found is not None, meta.name
        assert found.untyped_storage().data_ptr() in storages
        assert found.is_contiguous()
        assert torch.equal(found.view(meta.shape), wanted), meta.name


def test_stacked_experts_that_do_not_lie_in_order_are_no_references() -> None:
    model = _model("qwen3_moe")
    whole = {name: param.detach() for name, param in model.named_parameters()}
    stacked = [name for name in whole if "experts" in name]
    whole |= {name: whole[name].transpose(1, 2).contiguous().transpose(1, 2) for name in stacked}
    source = ModuleSource(model, WholeParams(whole, "test"), CastRule())
    computed = {m.name for index, m in enumerate(source.metas) if _held(source, index) is None}
    assert computed == {meta.name for meta in source.metas if ".experts." in meta.name}


def test_what_is_computed_is_no_block() -> None:
    """Not even where a copy is computed in."""
    params = {"layers.0.a": torch.ones(4, 2), "layers.0.b": torch.ones(4, 2)}

    def revert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        out: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            halves = tensor.chunk(2)
            changed = halves[0].clone()
            if name.endswith("b"):
                changed += 1
            out |= {f"{name}.0": changed, f"{name}.1": halves[1].contiguous()}
            out[f"{name}.sum"], out[f"{name}.t"] = tensor.sum(0), tensor.t().contiguous()
        return out

    groups, _ = plan_conversions(params, revert)
    blocks = {
        target: block
        for group in groups
        for target, block in zip(group.targets, group.blocks, strict=True)
    }
    assert blocks["layers.0.a.0"] == ("layers.0.a", 0, 4)
    assert blocks["layers.0.a.1"] == ("layers.0.a", 4, 8)
    assert {name for name, block in blocks.items() if block} == {"layers.0.a.0", "layers.0.a.1"}
