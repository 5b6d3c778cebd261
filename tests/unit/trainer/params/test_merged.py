"""Merging on the way out gives what PEFT's merge gives, and changes nothing."""

import copy
import warnings

import pytest
import torch
from torch import nn

from tests import models
from trainer_side.params.choose import open_model
from trainer_side.params.merged import MergedParams
from trainer_side.params.quantised import DequantisedParams
from trainer_side.pushes.content import adapter_content, base_content
from trainer_side.ranks.ranks import OneRank
from weft_rl.contract.errors import InvalidAdapterError, InvalidRequestError, UnsupportedError


class Tiny(nn.Module):
    """An embedding, a linear with bias, and transformers' (in, out) kind of linear."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.embed = nn.Embedding(40, 24)
        self.up = nn.Linear(24, 300)
        self.down = nn.Linear(300, 24, bias=False)
        self.conv = Conv1D(36, 24)
        self.to(dtype)


def trained(model, **settings):
    """A LoRA of random values around ``model``."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about fan_in_fan_out, which PEFT then sets
        wrapped = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 6, **settings}))
    with torch.no_grad():
        for name, param in wrapped.named_parameters():
            if "lora_" in name:
                param.copy_(torch.randn_like(param).abs() * 0.3)
    return wrapped


def fetched(model, adapter="default", dtype=torch.float32):
    """All of a model's base, merged, in ``dtype``."""
    opened = open_model(model, OneRank())
    params = MergedParams(opened.module, opened.params, adapter)
    names = list(params.metas)
    outs = [torch.empty(params.metas[name].shape, dtype=dtype) for name in names]
    params.fetch(names, [dtype] * len(names), outs)
    return dict(zip(names, outs, strict=True))


def peft_merged(model, adapter="default"):
    """The same by PEFT, on a copy."""
    merged = copy.deepcopy(model).merge_and_unload(adapter_names=[adapter])
    return {name: p.detach() for name, p in merged.named_parameters()}


LINEARS = ["up", "down"]
CASES = {
    "plain": {"target_modules": LINEARS},
    "rslora": {"target_modules": LINEARS, "use_rslora": True},
    "patterns": {"target_modules": LINEARS, "rank_pattern": {"up": 7},
                 "alpha_pattern": {"down": 3}},
    "conv1d": {"target_modules": ["conv", "up"]},
    "embedding": {"target_modules": ["embed", "up"]},
    "dora": {"target_modules": LINEARS, "use_dora": True},
    "bias": {"target_modules": ["up"], "lora_bias": True},
    "whole modules": {"target_modules": ["up"], "modules_to_save": ["down"]},
    "pissa": {"target_modules": LINEARS, "init_lora_weights": "pissa"},
    "olora": {"target_modules": LINEARS, "init_lora_weights": "olora"},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_sum_is_pefts(case):
    model = trained(Tiny(), **CASES[case])
    if case == "whole modules":
        with torch.no_grad():
            model.base_model.model.down.modules_to_save["default"].weight.add_(1.0)
    expected, got = peft_merged(model), fetched(model)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(got[name], tensor, rtol=1e-6, atol=1e-6), name
    assert not torch.equal(got["up.weight"], model.base_model.model.up.base_layer.weight)


@pytest.mark.parametrize("case", ["plain", "embedding", "dora"])
def test_autocast_of_the_training_does_not_reach_the_sum(case):
    model = trained(Tiny(), **CASES[case])
    expected = fetched(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = fetched(model)
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def test_a_half_precision_base_is_rounded_once():
    model = trained(Tiny(torch.bfloat16), target_modules=LINEARS)
    layer = model.base_model.model.up
    a, b = (part["default"].weight.double() for part in (layer.lora_A, layer.lora_B))
    exact = layer.base_layer.weight.double() + (b @ a) * layer.scaling["default"]
    got = fetched(model, dtype=torch.bfloat16)["up.weight"]
    error = (got.double() - exact).abs()
    assert bool((error <= exact.abs() * 2**-8 + 1e-6).all())  # half a unit in the last place


def test_experts_of_one_parameter(tmp_path):
    path = models.make_model("qwen3_moe", tmp_path / "moe", seed=0)
    model = trained(
        models.load_hf(path),
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    expected, got = peft_merged(model), fetched(model)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(got[name], tensor, rtol=1e-5, atol=1e-6), name


def test_one_adapter_of_several():
    model = trained(Tiny(), target_modules=LINEARS)
    from peft import LoraConfig

    model.add_adapter("second", LoraConfig(r=2, target_modules=["up"]))
    with torch.no_grad():
        model.base_model.model.up.lora_B["second"].weight.fill_(0.5)
    for adapter in ("default", "second"):
        expected, got = peft_merged(model, adapter), fetched(model, adapter)
        for name, tensor in expected.items():
            assert torch.allclose(got[name], tensor, rtol=1e-6, atol=1e-6), (adapter, name)
    with pytest.raises(InvalidAdapterError, match="no adapter 'third'; it has default, second"):
        fetched(model, "third")


def test_the_trained_weights_are_the_same_after_a_hundred_pushes():
    model = trained(Tiny(torch.bfloat16), target_modules=["up", "down", "embed"])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(100):
        fetched(model, dtype=torch.bfloat16)
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name]), name


def test_tied_weights_are_refused(tmp_path):
    path = models.make_model("qwen2", tmp_path / "tied", seed=0, tied=True)
    model = trained(models.load_hf(path), target_modules=["embed_tokens"])
    with pytest.raises(UnsupportedError, match=r"embed_tokens.weight is tied to another weight"):
        fetched(model)


def test_what_cannot_be_merged_on_the_way():
    merged = trained(Tiny(), target_modules=LINEARS)
    merged.merge_adapter()
    with pytest.raises(InvalidAdapterError, match="merged into its base already"):
        fetched(merged)
    with pytest.raises(UnsupportedError, match=r"Conv2d cannot be merged during a push"):
        fetched(trained(nn.Sequential(nn.Conv2d(2, 3, 1)), target_modules=["0"]))
    with pytest.raises(UnsupportedError, match="trainable tokens"):
        fetched(trained(Tiny(), target_modules=["up"], trainable_token_indices={"embed": [1]}))


def test_each_method_takes_its_own_kind_of_model():
    with pytest.raises(InvalidRequestError, match="push_merged its base"):
        base_content(trained(Tiny(), target_modules=LINEARS), OneRank(), True)
    with pytest.raises(InvalidRequestError, match="push_merged needs a PEFT model"):
        base_content(Tiny(), OneRank(), True, "default")


# -- quantised bases -----------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return models.make_model("qwen2", tmp_path_factory.mktemp("q") / "model", seed=0)


def quantised(path, bits):
    return trained(models.load_quantised(path, bits), target_modules=["q_proj", "down_proj"])


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_base_is_dequantised_then_merged(saved, bits):
    from peft.utils.integrations import dequantize_module_weight

    model = quantised(saved, bits)
    got = fetched(model)
    base = model.get_base_model()
    plain = dict(models.load_hf(saved).named_parameters())
    assert got.keys() == plain.keys()
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"):
        layer = base.get_submodule(f"model.layers.0.{name}")
        whole = dequantize_module_weight(getattr(layer, "base_layer", layer)).float()
        if hasattr(layer, "lora_A"):
            delta = (
                layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
            )
            whole = whole + (delta * layer.scaling["default"]).float()
        assert torch.allclose(got[f"model.layers.0.{name}.weight"], whole, atol=2e-3), name
    assert torch.equal(got["model.norm.weight"], plain["model.norm.weight"].bfloat16().float())


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_base_is_reported(saved, bits):
    model = quantised(saved, bits)
    (remark,) = adapter_content(model, OneRank(), True, "default", True).remarks
    assert f"quantised to {bits} bits" in remark
    assert "differ" in remark
    (remark,) = base_content(model, OneRank(), True, "default").remarks
    assert "dequantised" in remark
    assert base_content(models.load_hf(saved), OneRank(), True).remarks == ()


def test_a_quantised_base_has_the_shapes_of_a_plain_one(saved):
    from trainer_side.sources.adapter_source import adapter_of_model
    from trainer_side.sources.source import CastRule

    packed, plain = (
        adapter_of_model(
            open_model(model, OneRank()), "default", CastRule(False), check_base=True
        ).base
        for model in (
            quantised(saved, 4),
            trained(models.load_hf(saved), target_modules=["q_proj"]),
        )
    )
    assert packed == plain
    assert packed.shapes["model.layers.0.self_attn.k_proj"] == (64, 128)


def test_a_base_that_is_quantised_and_sharded_is_refused(saved, monkeypatch):
    monkeypatch.setattr(DequantisedParams, "is_collective", True)
    with pytest.raises(UnsupportedError, match="both quantised and sharded"):
        base_content(quantised(saved, 4), OneRank(), True, "default")
