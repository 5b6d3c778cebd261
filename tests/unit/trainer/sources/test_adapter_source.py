"""The names that a publisher puts in place of PEFT's patterns mean the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn

from rollout_side.vllm_engine.compat.bridges import pattern_scaling
from tests import models
from trainer_side.params.choose import open_model
from trainer_side.ranks.ranks import OneRank
from trainer_side.sources.adapter_source import adapter_of_model, config_in_names, named_config
from trainer_side.sources.file_source import adapter_of_dir
from trainer_side.sources.source import CastRule
from weft_rl.contract.adapter import check_adapter
from weft_rl.contract.adapter_config import MAX_CONFIG_BYTES, named_value
from weft_rl.contract.capabilities import Capabilities
from weft_rl.contract.errors import InvalidAdapterError
from weft_rl.contract.tensors import DataType, Reference, TensorMeta

KEEP = CastRule(enabled=False)


class Layer(nn.Module):
    """Two projections, and one inside another module of the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4, 4)
        self.up = nn.Linear(4, 4)
        self.inner = nn.ModuleDict({"q": nn.Linear(4, 4)})
        self.norm = nn.LayerNorm(4)


class Model(nn.Module):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(4, 8)


def _reference() -> Reference:
    return Reference(
        "Model",
        tuple(
            TensorMeta(name, DataType.FLOAT32, tuple(param.shape))
            for name, param in Model().named_parameters()
        ),
    )


OUTER = ["body.layers.0.q", "body.layers.1.q"]
CAPABILITIES = Capabilities(
    engine_version="0",
    base_fingerprint="f",
    architecture="Model",
    base_dtype=DataType.FLOAT32,
    adapter_dtype=DataType.FLOAT32,
    lora_enabled=True,
    max_lora_rank=64,
    lora_modules=("q", "up", "head"),
)


@pytest.mark.parametrize(
    ("settings", "targets"),
    [
        ({"target_modules": ["q", "up"]}, ["q", "up"]),
        ({"target_modules": r".*\.(q|up)"}, ["q", "up"]),
        ({"target_modules": "all-linear"}, None),
        (
            {"target_modules": r"body\.layers\.\d\.(q|up)"},
            ["body.layers.0.q", "body.layers.1.q", "up"],
        ),
        ({"target_modules": r".*1\..*q"}, ["body.layers.1.inner.q", "body.layers.1.q"]),
        (
            {"target_modules": ["q"], "exclude_modules": r".*inner.*"},
            ["body.layers.0.q", "body.layers.1.q"],
        ),
        ({"target_modules": ["q", "up"], "exclude_modules": ["inner.q"]}, ["q", "up"]),
        ({"target_modules": ["up"], "layers_to_transform": [1]}, ["up"]),
        (
            {"target_modules": ["up"], "layers_to_transform": 1, "layers_pattern": "layers"},
            ["body.layers.1.up"],
        ),
    ],
)
@pytest.mark.parametrize(
    "patterns",
    [
        {},
        {"rank_pattern": {"q": 3}, "alpha_pattern": {"up": 5}},
        {"rank_pattern": {r".*1\.q": 3, "q": 5}, "alpha_pattern": {r"layers\.[0]\..*": 7.5}},
        {"rank_pattern": {"inner.q": 3, r"layers\.\d\.q": 6, "nothing": 9}},
        {"alpha_pattern": {"(inner|layers.1).q": 3, ".*": 4}, "use_rslora": True},
    ],
)
@pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning")
def test_names_mean_what_the_patterns_did(
    settings: dict[str, Any], targets: list[str] | None, patterns: dict[str, Any]
) -> None:
    model = get_peft_model(Model(), LoraConfig(r=2, lora_alpha=8, **settings, **patterns))
    adapter = adapter_of_model(open_model(model, OneRank()), "default", KEEP, check_base=False)
    config = json.loads(adapter.config_json)
    if targets is not None:
        assert sorted(config["target_modules"]) == targets
    metas = list(adapter.source.metas)
    check_adapter(adapter.config_json, metas, _reference(), CAPABILITIES)
    assert _scalings(model)
    for module, expected in _scalings(model).items():
        assert pattern_scaling(config, module) == expected
        rank = named_value(config["rank_pattern"] or {}, module, config["r"])
        assert rank == expected[0]
    if config["target_modules"] != ["up"] or not config["layers_to_transform"]:
        with pytest.raises(InvalidAdapterError, match="are not given"):
            check_adapter(adapter.config_json, metas[2:], _reference(), CAPABILITIES)


def _scalings(model: PeftModel) -> dict[str, tuple[int, float]]:
    """Rank and scaling of each module that PEFT wrapped, by the base's name."""
    prefix = "base_model.model."
    return {
        name.removeprefix(prefix): (module.r["default"], module.scaling["default"])
        for name, module in model.named_modules()
        if hasattr(module, "scaling")
    }


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning")
def test_experts_at_once_have_the_ranks_that_the_patterns_of_their_parameters_say(
    rank: int, tmp_path: Path
) -> None:
    path = models.make_model("qwen3_moe", tmp_path / "moe", seed=0)
    settings = LoraConfig(
        r=2,
        lora_alpha=8,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        rank_pattern={r".*\.gate_up_proj": rank},
        alpha_pattern={"experts.down_proj": 3},
    )
    model = get_peft_model(models.load_hf(path), settings)
    adapter = adapter_of_model(open_model(model, OneRank()), "default", KEEP, check_base=False)
    reference = Reference(
        "Qwen3MoeForCausalLM",
        tuple(
            TensorMeta(name, DataType.FLOAT32, tuple(tensor.shape))
            for name, tensor in load_file(path / "model.safetensors").items()
        ),
    )
    capable = replace(CAPABILITIES, lora_modules=("q_proj",), lora_on_experts=True)
    check_adapter(adapter.config_json, adapter.source.metas, reference, capable)
    config = json.loads(adapter.config_json)
    experts = "model.layers.0.mlp.experts"
    assert pattern_scaling(config, f"{experts}.base_layer") == (rank, 8 / rank)
    assert pattern_scaling(config, experts) == (2, 1.5)
    assert pattern_scaling(config, "model.layers.0.self_attn.q_proj") == (2, 4)


def test_of_a_directory_the_tensors_are_the_targets(tmp_path: Path) -> None:
    model = get_peft_model(
        Model(),
        LoraConfig(
            r=2,
            lora_alpha=8,
            target_modules=r".*1\..*q",
            rank_pattern={r".*inner\.q": 3},
        ),
    )
    model.save_pretrained(tmp_path)
    adapter = adapter_of_dir(tmp_path, KEEP)
    config = json.loads(adapter.config_json)
    assert config["target_modules"] == ["body.layers.1.inner.q", "body.layers.1.q"]
    check_adapter(adapter.config_json, adapter.source.metas, _reference(), CAPABILITIES)
    for module, expected in _scalings(model).items():
        assert pattern_scaling(config, module) == expected


def test_a_config_without_patterns_stays_as_it_is(tmp_path: Path) -> None:
    text = '{"peft_type":"LORA", "r": 8,   "lora_alpha": 1, "target_modules": ["q"]}'
    assert config_in_names(text, [], None) == text


def test_a_name_that_is_the_end_of_another() -> None:
    given = ["x.q", "m.x.q", "n.x.q"]
    config = {"r": 1, "lora_alpha": 1, "rank_pattern": {"m.x.q": 2, "^x.q": 3}}
    named = named_config(config, given, None)
    assert [named_value(named["rank_pattern"], m, 1) for m in given] == [3, 2, 1]
    assert [pattern_scaling(named, m)[0] for m in given] == [3, 2, 1]


def test_names_that_would_be_too_long_are_shortened_where_they_say_the_same() -> None:
    given = [f"model.layers.{i}.{'x' * 1000}.q" for i in range(2000)]
    tensors = [f"base_model.model.{m}.lora_A.weight" for m in given]
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ".*"}
    text = config_in_names(json.dumps(config), tensors, None)
    assert json.loads(text)["target_modules"] == ["q"]
    config["target_modules"] = "model.*"
    with pytest.raises(InvalidAdapterError, match=f"longer than {MAX_CONFIG_BYTES}"):
        config_in_names(json.dumps(config), tensors, lambda: [*given, "other.q"])


@pytest.mark.parametrize(
    "setting",
    [
        {"target_modules": "("},
        {"target_modules": ["q"], "exclude_modules": "*"},
        {"rank_pattern": {"(": 2}},
        {"alpha_pattern": [1]},
    ],
)
def test_what_is_no_pattern_is_refused_by_setting(setting: dict[str, Any]) -> None:
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, **setting}
    tensors = ["base_model.model.q.lora_A.weight"]
    with pytest.raises(InvalidAdapterError) as caught:
        config_in_names(json.dumps(config), tensors, lambda: ["q"])
    assert caught.value.metadata["setting"] in setting
