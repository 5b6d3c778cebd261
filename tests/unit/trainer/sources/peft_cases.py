"""Cases of PEFT: each method, each setting of LoRA, and what a live model holds besides.

``verdict`` says of each what three pushes make of it: "equal" to the model's own forward, or why it
was refused. A receiver is a base without PEFT, told what a push would send. Methods and settings
are those of the installed PEFT. One file: it is one table, and what judges its rows.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import tempfile
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners import lora
from safetensors.torch import save_file
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rollout_side.vllm_engine.compat.bridges import pattern_scaling
from trainer_side.params.choose import open_model
from trainer_side.params.merged import MergedParams
from trainer_side.pushes.content import base_content
from trainer_side.ranks.ranks import OneRank
from trainer_side.sources.adapter_source import adapter_of_model
from trainer_side.sources.file_source import adapter_of_dir
from trainer_side.sources.source import Adapter, CastRule
from weft_rl.contract.adapter import check_adapter
from weft_rl.contract.capabilities import Capabilities
from weft_rl.contract.errors import InvalidAdapterError, WeftError
from weft_rl.contract.tensors import DataType, Reference, TensorMeta

#: Largest difference of a logit that is rounding.
BOUND = 2e-5
#: Least difference that each case's training makes, so that "equal" says something.
MOVED = 1e-3
_KEEP = CastRule(enabled=False)
_TOKENS = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8]])
_SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head",
            "c_attn")  # fmt: skip


def base(kind: str = "qwen2") -> Any:
    """The base, the same each time."""
    torch.manual_seed(0)
    if kind == "moe":
        more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SIZES, head_dim=32, **more)).eval()
    if kind == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=64, n_positions=64, n_embd=64, n_layer=2, n_head=2,
                       tie_word_embeddings=False)
        ).eval()  # fmt: skip
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**_SIZES)).eval()
    return Qwen2ForCausalLM(Qwen2Config(**_SIZES, tie_word_embeddings=kind == "tied")).eval()


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    config: Callable[[], Any]
    base: str = "qwen2"
    then: Callable[[Any], Any] = lambda model: None
    """Done with the trained model; returns what is pushed in its place, or None."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """What its adapter_config.json says, where no model can be made here."""
    mixed: bool = False
    saved: bool = True
    """True if a saved directory is the same model."""


@dataclass(frozen=True)
class Verdict:
    """What each way makes of a case: "equal", or why not."""

    adapter: str
    directory: str
    merged: str


def made(case: Case) -> Any:
    """The case's model, as if trained."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain: Any = base(case.base)
        model: Any = peft.get_peft_model(plain, case.config(), mixed=case.mixed)
        trained(model)
        other = case.then(model)
        return model if other is None else other


def trained(model: nn.Module) -> None:
    """Change what is trained, and LoRA where nothing is."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.requires_grad or "lora_" in name:
                param.add_(torch.randn_like(param) * 0.2)
    model.eval()


def verdict(case: Case) -> Verdict:
    """What three pushes make of a case.

    Raises:
        AssertionError: A push is not equal, or changed the model.
    """
    try:
        model = made(case)
    except Exception as error:
        if not case.written:
            raise
        return _unmade(case, error)  # a library that is not here, a base of another kind
    saved = _way(case, model, lambda: _directory(model, case.base)) if case.saved else ""
    before = copy.deepcopy(model.state_dict())
    found = Verdict(
        _way(case, model, lambda: _adapter(model, case.base)),
        saved,
        _way(case, model, lambda: _merged(model, case.base)),
    )
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(_bytes(before[key]) == _bytes(after[key]) for key in before)
    return found


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def _way(case: Case, model: Any, push: Callable[[], Adapter | dict[str, Any]]) -> str:
    try:
        sent = push()
    except WeftError as error:
        return f"{error.reason}: {error.message}"
    with torch.no_grad():
        own, plain = model(_TOKENS).logits, base(case.base)
        assert (own - plain(_TOKENS).logits).abs().max() > MOVED, "nothing was trained"
        off = (received(sent, plain)(_TOKENS).logits - own).abs().max().item()
    return "equal" if off < BOUND else f"off by {off:.2g}"


def _adapter(model: Any, kind: str) -> Adapter:
    adapter = adapter_of_model(open_model(model, OneRank()), "default", _KEEP, check_base=True)
    return _checked(adapter, kind)


def _directory(model: Any, kind: str) -> Adapter:
    with tempfile.TemporaryDirectory() as path:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.save_pretrained(path)
        return _checked(adapter_of_dir(Path(path), _KEEP), kind)


def _checked(adapter: Adapter, kind: str) -> Adapter:
    """The adapter, if the coordinator would begin its push."""
    plain = base(kind)
    metas = tuple(
        TensorMeta(name, DataType.FLOAT32, tuple(param.shape))
        for name, param in plain.named_parameters()
    )
    reference = Reference(type(plain).__name__, metas)
    check_adapter(adapter.config_json, adapter.source.metas, reference, _CAPABILITIES)
    return adapter


_CAPABILITIES = Capabilities(
    engine_version="0", base_fingerprint="f", architecture="any", base_dtype=DataType.FLOAT32,
    adapter_dtype=DataType.FLOAT32, lora_enabled=True, max_lora_rank=64, lora_modules=_TARGETS,
    lora_on_experts=True,
)  # fmt: skip


def _merged(model: Any, kind: str) -> dict[str, torch.Tensor]:
    base_content(model, OneRank(), True, "default")
    opened = open_model(model, OneRank())
    params = MergedParams(opened.module, opened.params, "default")
    sent = {name: torch.empty(meta.shape) for name, meta in params.metas.items()}
    params.fetch([*sent], [torch.float32] * len(sent), [*sent.values()])
    assert sent.keys() == dict(base(kind).named_parameters()).keys()
    return sent


@torch.no_grad()
def received(sent: Adapter | dict[str, torch.Tensor], plain: Any) -> Any:
    """The base ``plain``, changed as a receiver would change it."""
    if isinstance(sent, dict):
        for name, tensor in sent.items():
            plain.get_parameter(name).copy_(tensor)
        return plain
    outs = [torch.empty(meta.shape) for meta in sent.source.metas]
    sent.source.read(0, len(outs), outs)
    tensors = {m.name: t for m, t in zip(sent.source.metas, outs, strict=True)}
    config = json.loads(sent.config_json)
    for name in [name for name in tensors if name.endswith("lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        a, b = tensors[name], tensors[name.replace("lora_A", "lora_B")]
        if "experts" in module:
            _add_experts(plain, module, a, b, config)
        else:
            _, scaling = pattern_scaling(config, module)
            plain.get_parameter(f"{module}.weight").add_(b @ a, alpha=scaling)
    return plain


def _add_experts(
    plain: Any, module: str, a: torch.Tensor, b: torch.Tensor, config: dict[str, Any]
) -> None:
    experts, inner, _ = module.partition(".base_layer")
    name = f"{experts}.{'gate_up_proj' if inner else 'down_proj'}"
    _, scaling = pattern_scaling(config, module)
    whole = plain.get_parameter(name)
    num = len(whole)
    for i, (own_a, own_b) in enumerate(
        zip(a.unflatten(0, (num, -1)), b.unflatten(1, (-1, num)).unbind(-1), strict=True)
    ):
        whole[i].add_(own_b @ own_a, alpha=scaling)


def _unmade(case: Case, error: Exception) -> Verdict:
    """What is said of a config that no model can be made of here."""
    config = {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj"], **case.written}
    with tempfile.TemporaryDirectory() as path:
        (Path(path) / "adapter_config.json").write_text(json.dumps(config))
        save_file({}, Path(path) / "adapter_model.safetensors")
        try:
            adapter_of_dir(Path(path), _KEEP)
        except InvalidAdapterError as refusal:
            said = f"{refusal.reason}: {refusal.message}"
            return Verdict(said, said, "not run")
    raise AssertionError(f"{case.name} is taken, and could not be made here") from error


# -- methods -----------------------------------------------------------------------------------

# What a method needs besides what they have in common.
_NEEDS: dict[str, dict[str, Any]] = {
    "ADALORA": {"init_r": 2, "target_r": 1, "total_step": 10},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 8},
    "IA3": {"feedforward_modules": []},
    "MISS": {"r": 4},
    "RANDLORA": {"r": 4},
    "ROAD": {"group_size": 8},
    "SHIRA": {"r": 2},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [3, 14]},
    "VBLORA": {"vector_length": 8, "num_vectors": 16},
    "WAVEFT": {"n_frequency": 16},
}
_COMMON = {"target_modules": ["q_proj", "v_proj"], "num_virtual_tokens": 4, "token_dim": 64}


def methods() -> Iterator[Case]:
    """Every method of the installed PEFT."""
    for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items():
        known = {own.name for own in dataclasses.fields(config)}
        given = {key: value for key, value in _COMMON.items() if key in known}
        given |= {"task_type": "CAUSAL_LM", **_NEEDS.get(kind.value, {})}

        def make(config: Any = config, given: dict[str, Any] = given) -> Any:
            return config(**given)

        yield Case(kind.value, make, written={"peft_type": kind.value})
    yield Case("several (PeftMixedModel)", lora_config(), then=_and_loha, mixed=True, saved=False)


def _and_loha(model: Any) -> None:
    model.add_adapter("other", peft.LoHaConfig(r=2, target_modules=["v_proj"]))
    model.set_adapter(["default", "other"])
    trained(model)


# -- settings of LoRA --------------------------------------------------------------------------


def lora_config(**settings: Any) -> Callable[[], Any]:
    """A function that makes a LoraConfig."""
    given = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"], **settings}

    def make() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return peft.LoraConfig(**given)

    return make


_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "task_type": [{"task_type": "CAUSAL_LM"}],
    "peft_type": [],
    "auto_mapping": [{"auto_mapping": {"base_model_class": "Qwen2ForCausalLM"}}],
    "peft_version": [{"peft_version": "0.1"}],
    "base_model_name_or_path": [{"base_model_name_or_path": "any"}],
    "revision": [{"revision": "main"}],
    "inference_mode": [{"inference_mode": True}],
    "r": [{"r": 3}],
    "target_modules": [
        {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        {"target_modules": r".*\.1\..*(q|gate)_proj"},
        {"target_modules": "all-linear"},
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"target_modules": ["lm_head", "q_proj"]},
    ],
    "exclude_modules": [
        {"exclude_modules": r".*\.0\..*"},
        {"exclude_modules": ["layers.1.mlp.up_proj"]},
    ],
    "lora_alpha": [{"lora_alpha": 32}],
    "lora_dropout": [{"lora_dropout": 0.5}],
    "fan_in_fan_out": [{"fan_in_fan_out": True, "target_modules": ["c_attn"], "base": "gpt2"}],
    "bias": [{"bias": "all"}, {"bias": "lora_only"}],
    "use_rslora": [
        {"use_rslora": True},
        {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up_proj": 9}},
    ],
    "modules_to_save": [{"modules_to_save": ["lm_head"]}, {"modules_to_save": ["norm"]}],
    "init_lora_weights": [],
    "layers_to_transform": [{"layers_to_transform": [1]}],
    "layers_pattern": [{"layers_to_transform": 0, "layers_pattern": "layers"}],
    "rank_pattern": [{"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 5}}],
    "alpha_pattern": [{"alpha_pattern": {r".*0.*q_proj": 2.5, "up_proj": 5}}],
    "megatron_config": [{"megatron_config": {"tensor_model_parallel_size": 2}}],
    "megatron_core": [{"megatron_core": "megatron.other"}],
    "trainable_token_indices": [{"trainable_token_indices": [3, 14]}],
    "loftq_config": [{"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}],
    "eva_config": [{"init_lora_weights": "eva"}],
    "corda_config": [{"init_lora_weights": "corda"}],
    "lora_ga_config": [{"init_lora_weights": "lora_ga"}],
    "use_dora": [{"use_dora": True}, {"use_dora": True, "use_rslora": True}],
    "velora_config": [{"velora_config": {"num_groups": 8}}],
    "alora_invocation_tokens": [{"alora_invocation_tokens": [15], "task_type": "CAUSAL_LM"}],
    "use_qalora": [{"use_qalora": True}],
    "qalora_group_size": [{"qalora_group_size": 8}],
    "monteclora_config": [{"monteclora_config": {}}],
    "layer_replication": [{"layer_replication": [(0, 2), (1, 2)], "base": "llama"}],
    "runtime_config": [{"runtime_config": {"ephemeral_gpu_offload": True}}],
    "lora_bias": [{"lora_bias": True, "target_modules": ["q_proj"]},
                  {"lora_bias": True, "target_modules": ["o_proj"]}],
    "target_parameters": [
        {"target_parameters": _EXPERTS, "target_modules": [], "base": "moe"},
        {"target_parameters": _EXPERTS, "rank_pattern": {r".*gate_up_proj": 2},
         "target_modules": ["q_proj"], "base": "moe"},
        {"target_parameters": ["q_proj.weight"], "target_modules": []},
    ],
    "use_bdlora": [{"use_bdlora": {"target_modules_bd_a": ["q_proj"], "nblocks": 2,
                                   "target_modules_bd_b": ["up_proj"]}}],
    "arrow_config": [{"arrow_config": {"top_k": 2}}],
    "kasa_config": [{"kasa_config": {}}],
    "ensure_weight_tying": [
        {"ensure_weight_tying": True, "modules_to_save": ["embed_tokens"], "base": "tied"},
        {"ensure_weight_tying": True, "target_modules": ["embed_tokens"], "base": "tied"},
        {"modules_to_save": ["embed_tokens"], "base": "tied"},
    ],
}  # fmt: skip
_NESTED = {
    "velora_config": "VeloraConfig", "monteclora_config": "MontecloraConfig",
    "arrow_config": "ArrowConfig", "kasa_config": "KasaConfig", "use_bdlora": "BdLoraConfig",
    "runtime_config": "LoraRuntimeConfig",
}  # fmt: skip


def settings() -> Iterator[Case]:
    """Every setting of the installed PEFT's LoraConfig, on; those that nobody has looked at
    included."""
    for own in dataclasses.fields(peft.LoraConfig):
        for given in _OPTIONS.get(own.name, [{own.name: _any_value(own)}]):
            yield _setting(given)
    for start in sorted(_starts()):
        yield _setting({"init_lora_weights": start})


def unseen() -> list[str]:
    """Settings of the installed PEFT that nobody has written a row for."""
    return [f.name for f in dataclasses.fields(peft.LoraConfig) if f.name not in _OPTIONS]


def _setting(given: dict[str, Any]) -> Case:
    settings = {key: value for key, value in given.items() if key != "base"}
    name = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    kind = given.get("base", "qwen2")
    values = dict(settings)
    for key, config in _NESTED.items():
        if key in values:
            values[key] = getattr(lora.config, config)(**values[key])
    written = {"peft_type": "LORA", **settings}
    label = name + ("" if kind == "qwen2" else f" ({_BASES[kind]})")
    return Case(label, lora_config(**values), kind, written=written)


_BASES = {"tied": "tied embedding", "moe": "experts", "gpt2": "Conv1D", "llama": "Llama"}


def _any_value(own: dataclasses.Field[Any]) -> Any:
    """A value of a setting that nobody has looked at, that is not its default."""
    return not own.default if isinstance(own.default, bool) else "on"


def _starts() -> set[Any]:
    """Every value that PEFT lists for init_lora_weights."""
    kinds = typing.get_type_hints(peft.LoraConfig)["init_lora_weights"]
    listed = {value for kind in typing.get_args(kinds) for value in typing.get_args(kind)}
    fields = {own.name: own for own in dataclasses.fields(peft.LoraConfig)}
    listed |= {*fields["init_lora_weights"].metadata.get("lora_variants", ())}
    return {str(value).replace("[number of iters]", "4") for value in listed} | {"lora_ga"}


# -- what a live model holds -------------------------------------------------------------------


def states() -> Iterator[Case]:
    """What people do with a model beside training its adapter."""

    def case(name: str, then: Callable[[Any], Any], **more: Any) -> Case:
        kind, config = more.pop("base", "qwen2"), more.pop("config", lora_config())
        return Case(name, config, kind, then, saved=False, **more)

    yield case("norms trained beside it", _also("norm"))
    yield case("embedding trained beside it", _also("embed_tokens"))
    yield case("head trained beside it", _also("lm_head"))
    yield case("one bias trained beside it", _also("layers.1.self_attn.v_proj.bias"))
    yield case("base not frozen", _also(""))
    yield case("norms trained, in activation checkpointing", _checkpointed)
    yield case("set_scale", _scaled(lambda layer: layer.set_scale("default", 2.5)))
    yield case("scale_layer", _scaled(lambda layer: layer.scale_layer(0.3)))
    yield case("scaling of one layer set", _one_scaled)
    yield case(
        "scaling set, rsLoRA and patterns",
        _one_scaled,
        config=lora_config(
            use_rslora=True, rank_pattern={"q_proj": 2}, alpha_pattern={"up_proj": 9}
        ),
    )
    yield case(
        "scaling set, experts",
        _one_scaled,
        base="moe",
        config=lora_config(target_modules=["q_proj"], target_parameters=_EXPERTS),
    )
    yield case("scaling set, DoRA", _one_scaled, config=lora_config(use_dora=True))
    yield case(
        "scaling set, embedding",
        _scaled(lambda layer: layer.set_scale("default", 2.5)),
        config=lora_config(target_modules=["embed_tokens", "q_proj"]),
    )
    yield case("config edited after it was used", _edited)
    for setting in ({"use_dora": True}, {"modules_to_save": ["norm"]}, {"lora_bias": True},
                    {"trainable_token_indices": [3]}, {"kasa_config": lora.config.KasaConfig()},
                    {"alora_invocation_tokens": [15]}):  # fmt: skip
        given = {**setting, "target_modules": ["q_proj", "k_proj", "v_proj"]}
        yield case(
            f"config that says no {next(iter(setting))} any more",
            _denied(*setting),
            config=lora_config(**given),
        )
    yield case("ranks padded (prepare_model_for_compiled_hotswap)", _padded)
    yield case("another adapter hotswapped in", _hotswapped)
    yield case("merged (merge_adapter)", lambda model: model.merge_adapter())
    yield case("another adapter, inactive", _and(active=False))
    yield case("another adapter, inactive and trained", _and(active=False, trained=True))
    yield case("another adapter, active too", _and(active=True))
    yield case("another adapter, merged", _and(active=False, merged=True))
    yield case(
        "another adapter that changed the base (PiSSA)",
        _and(active=False, init_lora_weights="pissa"),
    )
    yield case("two adapters added up (add_weighted_adapter)", _added_up)
    yield case("inactive in some layers", _partly_active)
    yield case("disabled in some layers", _partly_disabled)
    yield case("forward hook on a layer", _hooked(lambda layer: layer))
    yield case("forward hook on lora_B", _hooked(lambda layer: layer.lora_B["default"]))
    yield case("forward pre-hook on lora_A", _hooked_before)
    yield case("forward hook on the base layer", _hooked(lambda layer: layer.base_layer))
    yield case("forward of a layer replaced", _own_forward)
    yield case("parametrization of lora_A", _parametrized(lambda layer: layer.lora_A["default"]))
    yield case("lora_A replaced by a module of one's own", _own_part)
    yield case("subclass of PEFT's layer", _subclassed)
    yield case("custom module (_register_custom_module)", lambda model: None, config=_custom)
    yield case("variant of one's own", _own_variant)
    yield case("tensor of one's own in a layer", _own_tensor)
    yield case("factor of one's own in a layer", _own_factor)


def _also(part: str) -> Callable[[Any], Any]:
    def train(model: Any) -> None:
        torch.manual_seed(2)
        with torch.no_grad():
            for name, param in model.named_parameters():
                if part in name and "lora_" not in name:
                    param.requires_grad_(True)
                    param.mul_(1 + torch.randn_like(param) * 0.2)

    return train


def _checkpointed(model: Any) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    _also("norm")(model)
    apply_activation_checkpointing(model, check_fn=lambda m: type(m).__name__.endswith("Layer"))


def layers(model: Any) -> list[Any]:
    """The LoRA layers of a model."""
    return [part for part in model.modules() if isinstance(part, lora.LoraLayer)]


def _scaled(scale: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def then(model: Any) -> None:
        for layer in layers(model):
            scale(layer)

    return then


def _one_scaled(model: Any) -> None:
    layers(model)[0].scaling["default"] *= 1.7
    layers(model)[-1].scaling["default"] = 0.0


def _edited(model: Any) -> None:
    config = model.peft_config["default"]
    config.lora_alpha, config.alpha_pattern, config.rank_pattern = 99, {"q_proj": 3}, {".*": 4}


def _denied(setting: str) -> Callable[[Any], Any]:
    default = next(f.default for f in dataclasses.fields(peft.LoraConfig) if f.name == setting)

    def then(model: Any) -> None:
        setattr(model.peft_config["default"], setting, default)

    return then


def _padded(model: Any) -> None:
    from peft.utils.hotswap import prepare_model_for_compiled_hotswap

    prepare_model_for_compiled_hotswap(model, target_rank=8)


def _hotswapped(model: Any) -> None:
    from peft.utils.hotswap import hotswap_adapter

    other = peft.get_peft_model(base(), lora_config(lora_alpha=20)())
    trained(other)
    with tempfile.TemporaryDirectory() as path:
        other.save_pretrained(path)
        hotswap_adapter(model, path, adapter_name="default")


def _and(
    *, active: bool, trained: bool = False, merged: bool = False, **settings: Any
) -> Callable[[Any], Any]:
    def then(model: Any) -> None:
        model.add_adapter("other", lora_config(**settings)())
        torch.manual_seed(3)
        with torch.no_grad():
            for name, param in model.named_parameters():
                if ".other." in name:
                    param.add_(torch.randn_like(param) * 0.2)
        if active:
            model.base_model.set_adapter(["default", "other"])
        for name, param in model.named_parameters():
            if ".other." in name:
                param.requires_grad_(trained or active)
        if merged:
            model.merge_adapter(["other"])

    return then


def _added_up(model: Any) -> Any:
    _and(active=False)(model)
    model.add_weighted_adapter(["default", "other"], [0.5, 0.5], "both", combination_type="cat")
    model.delete_adapter("default")
    model.add_weighted_adapter(["both"], [1.0], "default", combination_type="cat")
    model.set_adapter("default")


def _partly_active(model: Any) -> None:
    _and(active=False)(model)
    layers(model)[0].set_adapter(["other"])


def _partly_disabled(model: Any) -> None:
    layers(model)[0].enable_adapters(False)


def _hooked(part: Callable[[Any], nn.Module]) -> Callable[[Any], Any]:
    def then(model: Any) -> None:
        part(layers(model)[0]).register_forward_hook(_double)

    return then


def _double(module: nn.Module, given: Any, out: torch.Tensor) -> torch.Tensor:
    return out * 2


def _hooked_before(model: Any) -> None:
    layers(model)[0].lora_A["default"].register_forward_pre_hook(lambda module, given: given[0] * 2)


def _own_forward(model: Any) -> None:
    layer = layers(model)[0]
    own = layer.forward
    layer.forward = lambda x: own(x) * 2


class _Twice(nn.Module):
    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2


def _parametrized(part: Callable[[Any], nn.Module]) -> Callable[[Any], Any]:
    def then(model: Any) -> None:
        nn.utils.parametrize.register_parametrization(part(layers(model)[0]), "weight", _Twice())

    return then


class _OwnLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def _own_part(model: Any) -> None:
    layers(model)[0].lora_A["default"].__class__ = _OwnLinear


class _OwnLayer(lora.layer.Linear):
    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(x, *args, **kwargs) * 2


def _subclassed(model: Any) -> None:
    layers(model)[0].__class__ = _OwnLayer


def _custom() -> Any:
    config = lora_config()()
    config._register_custom_module({nn.Linear: _OwnLayer})
    return config


class _OwnVariant(lora.variants.MiCALinearVariant):
    @staticmethod
    def forward(
        module: Any, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        return result * 2


def _own_variant(model: Any) -> None:
    layers(model)[0].lora_variant["default"] = _OwnVariant()


def _own_tensor(model: Any) -> None:
    layers(model)[0].lora_gate = nn.ParameterDict({"default": torch.ones(1)})


def _own_factor(model: Any) -> None:
    layers(model)[0].lora_gamma = {"default": 0.5}
