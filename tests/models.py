"""Tiny random models, adapters of them, and what transformers and PEFT say they answer.

head_dim is 32 (vLLM's CPU attention refuses 16), everything is float32 and seeded.
Weights are large enough that answers are peaked: a wrong weight is seen at once. One file: each
kind is a table's row or a few lines over the same configuration and the same drawing of weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.quantised_files import GROUP, QUANTIZATION, four_bit_codes, pack_four_bits

VOCAB = 256
LAYERS = 2
#: Adapters of the tests; vLLM's engines here allow rank 16.
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

#: What tiny text models share.
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_model(kind: str, path: Path, *, seed: int = 0, tied: bool = False) -> Path:
    """Save a random model with a tokenizer.

    Args:
        kind: "qwen2", "llama", "qwen3", "qwen3_moe", "mixtral", "glm4_moe", "deepseek_v2",
            "deepseek_v3", "gpt_oss" or "lfm2".
        path: Where; returned.
        seed: Of its weights.
        tied: Whether lm_head shares the embedding's weight.
    """
    config = make_config(kind, tied)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw_base(model, seed)
    model.save_pretrained(path)
    make_tokenizer(path)
    return path


def make_drafted(kind: str, path: Path, *, seed: int = 0) -> tuple[Path, Path | None]:
    """Save a model whose next token follows from the last one, and one that drafts for it.

    Both depend on signs that are drawn with the weights: a draft of another seed is of no use.

    Args:
        kind: "mtp" (GLM-4-MoE: its checkpoint has the draft), "eagle", "eagle3" or "draft_model".
        path: Where both are saved; returned, with the draft's directory where it has one.
        seed: Of the weights.
    """
    from safetensors.torch import load_file, save_file

    target = make_model(_DRAFTED[kind], path / "model", seed=seed)
    tensors = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    signs = (torch.rand(COMMON["hidden_size"], generator=generator) > 0.5) * 2.0 - 1
    order = torch.randperm(VOCAB, generator=generator)
    tensors = {name: _quiet(name, tensor) for name, tensor in tensors.items()}
    tensors["model.norm.weight"] = signs
    tensors["lm_head.weight"] = torch.empty_like(tensors["lm_head.weight"])
    tensors["lm_head.weight"][order] = tensors["model.embed_tokens.weight"] * signs
    draft = _draft_of(kind, tensors, signs, generator)
    if kind == "eagle3":
        draft = _eagle3_of(tensors["model.embed_tokens.weight"], order, generator)
    config = json.loads((target / "config.json").read_text())
    if kind == "mtp":
        config["num_nextn_predict_layers"] = 1
        save_file({**tensors, **draft}, target / "model.safetensors", metadata={"format": "pt"})
        (target / "config.json").write_text(json.dumps(config))
        return target, None
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    if kind != "draft_model":
        config |= {"architectures": [_EAGLE[kind]], "num_hidden_layers": 1}
    if kind == "eagle3":
        config |= {"draft_vocab_size": VOCAB // 2, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    (path / "draft").mkdir()
    save_file(draft, path / "draft" / "model.safetensors", metadata={"format": "pt"})
    (path / "draft" / "config.json").write_text(json.dumps(config))
    make_tokenizer(path / "draft")
    return target, path / "draft"


#: How much more a draft's layers add than the model's own.
_NOISE = 15.0
_DRAFTED = {"mtp": "glm4_moe", "eagle": "llama", "eagle3": "llama", "draft_model": "qwen3"}
_EAGLE = {"eagle": "EagleLlamaForCausalLM", "eagle3": "Eagle3LlamaForCausalLM"}


def _quiet(name: str, tensor: torch.Tensor, factor: float = 0.05) -> torch.Tensor:
    """Let layers add little to what they are given: the embedding of the last token."""
    is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
    return tensor * factor if is_output else tensor.clone()


def _draft_of(
    kind: str, tensors: dict[str, torch.Tensor], signs: torch.Tensor, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """The tensors of a draft that is mostly right: noise in its layers is what makes it fail."""
    width = len(signs)
    last = f"model.layers.{LAYERS - 1}."
    layer = {
        name.removeprefix(last): _quiet(name, tensor, _NOISE)
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    projection = torch.cat([torch.eye(width), torch.zeros(width, width)], 1)
    noise = 0.2 if kind == "mtp" else 0.04  # whose input is not normed
    projection += torch.randn(projection.shape, generator=generator) * noise
    if kind == "mtp":
        more = f"model.layers.{LAYERS}."
        norms = {"enorm": torch.ones(width), "hnorm": torch.ones(width), "shared_head.norm": signs}
        return {
            **{more + name: tensor for name, tensor in layer.items()},
            **{f"{more}{name}.weight": norm.clone() for name, norm in norms.items()},
            f"{more}eh_proj.weight": projection,
            f"{more}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
            f"{more}shared_head.head.weight": tensors["lm_head.weight"].clone(),
        }
    if kind.startswith("eagle"):
        del layer["input_layernorm.weight"]  # its first layer has none
        layer = {f"layers.0.{name}": tensor for name, tensor in layer.items()}
        return {**layer, "fc.weight": signs[:, None] * projection}
    return {name: layer.get(name.removeprefix(last), tensor) for name, tensor in tensors.items()}


def _eagle3_of(
    embedding: torch.Tensor, order: torch.Tensor, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """The tensors of a draft that knows every other token: it sees the embedding of the last but
    one, and what follows that one's successor."""
    width = embedding.shape[1]
    known = torch.arange(0, VOCAB, 2)
    head = torch.empty_like(embedding)
    head[order[order]] = embedding

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.05

    layer = {
        "self_attn.q_proj": drawn(128, 2 * width),
        "self_attn.k_proj": drawn(64, 2 * width),
        "self_attn.v_proj": drawn(64, 2 * width),
        "self_attn.o_proj": drawn(width, 128),
        "mlp.gate_proj": drawn(128, width),
        "mlp.up_proj": drawn(128, width),
        "mlp.down_proj": drawn(width, 128),
        **dict.fromkeys(("hidden_norm", "input_layernorm", "post_attention_layernorm"),
                        torch.ones(width)),
    }  # fmt: skip
    return {
        **{f"midlayer.{name}.weight": tensor.clone() for name, tensor in layer.items()},
        "fc.weight": torch.cat([torch.eye(width), torch.zeros(width, 2 * width)], 1),
        "norm.weight": torch.ones(width),
        "lm_head.weight": head[known].contiguous(),
        "d2t": known - torch.arange(len(known)),
        "t2d": torch.arange(VOCAB) % 2 == 0,
    }


def make_quantised(method: str, path: Path, plain: Path, *, seed: int = 0) -> Path:
    """Save a random Qwen3 whose linear weights have 4 bits, and the same model with plain ones.

    Args:
        method: "awq", "gptq" or "compressed-tensors".
        path: Where; returned.
        plain: Where the plain one is saved.
        seed: Of its weights.
    """
    from safetensors.torch import load_file, save_file

    make_model("qwen3", plain, seed=seed)
    tensors = load_file(plain / "model.safetensors")
    packed: dict[str, torch.Tensor] = {}
    for name, weight in list(tensors.items()):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in TARGETS:
            packed[name] = weight
            continue
        codes, scales = four_bit_codes(weight)
        tensors[name] = ((codes - 8).unflatten(1, (-1, GROUP)) * scales[..., None]).flatten(1)
        made = pack_four_bits(method, codes, scales)
        packed.update({f"{module}.{part}": tensor for part, tensor in made.items()})
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    path.mkdir(parents=True)
    save_file(packed, path / "model.safetensors", metadata={"format": "pt"})
    make_tokenizer(path)
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = QUANTIZATION[method]
    (path / "config.json").write_text(json.dumps(config))
    return path


def make_kv_scaled(path: Path, scale: float, *, seed: int = 0) -> Path:
    """Save a random Qwen3 with scales for a KV cache of 8 bits; returns ``path``."""
    from safetensors.torch import load_file, save_file

    make_model("qwen3", path, seed=seed)
    file = path / "model.safetensors"
    scales = {
        f"model.layers.{layer}.self_attn.{side}_scale": torch.tensor([scale])
        for layer in range(LAYERS)
        for side in "kv"
    }
    save_file({**load_file(file), **scales}, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "float-quantized",
        "config_groups": {},
        "kv_cache_scheme": {
            "num_bits": 8,
            "type": "float",
            "strategy": "tensor",
            "dynamic": False,
            "symmetric": True,
        },
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def save_config(kind: str, path: Path) -> None:
    """Save what a model of ``make_model`` says of itself, without its weights."""
    config = make_config(kind, False)
    config.save_pretrained(path)


@torch.no_grad()
def draw_base(model: Any, seed: int) -> None:
    """Give every weight of a model a value that follows from the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            width = 0.35 if "embed" in name or "lm_head" in name else 0.12
            parameter.normal_(0.0, width, generator=generator)
        elif name.endswith(".bias"):
            parameter.normal_(0.0, 0.1, generator=generator)
        else:
            parameter.uniform_(0.8, 1.2, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.3, generator=generator)


@torch.no_grad()
def draw_adapter(model: Any, seed: int) -> None:
    """The same for the adapter of a PEFT model; its B is not zero."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.08)


def make_config(kind: str, tied: bool) -> Any:
    import transformers

    common = {**COMMON, "tie_word_embeddings": tied}
    if kind == "qwen2":
        # Qwen2 has no head_dim of its own in vLLM: hidden_size / heads.
        return transformers.Qwen2Config(**{**common, "hidden_size": 128})
    if kind == "llama":
        return transformers.LlamaConfig(**common)
    if kind == "qwen3":
        return transformers.Qwen3Config(**common)
    if kind == "qwen3_moe":
        return transformers.Qwen3MoeConfig(
            **common,
            moe_intermediate_size=64,
            num_experts=4,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
            norm_topk_prob=True,
        )
    if kind == "mixtral":
        return transformers.MixtralConfig(
            **common, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
        )
    if kind in ("deepseek_v2", "deepseek_v3"):
        return _deepseek_config(kind, common)
    if kind == "glm4_moe":  # a dense layer, and one whose router has a bias that is a buffer
        return transformers.Glm4MoeConfig(
            **common,
            moe_intermediate_size=64,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=1,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            use_qk_norm=True,
        )
    if kind == "gpt_oss":
        return transformers.GptOssConfig(
            **common,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention"],
        )
    if kind == "lfm2":  # vLLM reads widths that the files of real ones name
        lfm2 = {key: value for key, value in common.items() if key != "head_dim"}
        widths = dict.fromkeys(("conv_dim", "conv_dim_out", "block_dim"), lfm2["hidden_size"])
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        return transformers.Lfm2Config(
            **{**lfm2, **heads, **widths},
            block_auto_adjust_ff_dim=False,
            layer_types=["conv", "full_attention"],
        )
    raise ValueError(f"no tiny model of kind {kind!r}")


def _deepseek_config(kind: str, common: dict[str, Any]) -> Any:
    """Latent keys and values, a dense layer and one of experts, as in the real ones."""
    import transformers

    latent = {
        **{key: value for key, value in common.items() if key != "head_dim"},
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,  # as large as in the real ones: vLLM has kernels for that
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 64,
        # With default RoPE vLLM's CPU kernel is nats off: it takes heads for tokens.
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
    }
    if kind == "deepseek_v2":
        return transformers.DeepseekV2Config(
            **latent, q_lora_rank=None, n_group=1, topk_group=1, norm_topk_prob=False
        )
    return transformers.DeepseekV3Config(
        **latent,
        q_lora_rank=64,
        n_group=2,
        topk_group=1,
        norm_topk_prob=True,
        topk_method="noaux_tc",  # as in real files: the router has a bias ...
        scoring_func="sigmoid",  # ... and this; transformers assumes both, vLLM neither
        num_nextn_predict_layers=0,
    )


def make_tokenizer(
    path: Path, special: Mapping[int, str] | None = None, roles: Mapping[str, str] | None = None
) -> None:
    """Save a tokenizer of one word a token: ``w0`` to ``w255``, but for those that are special.

    ``roles`` names special tokens by attributes that the tokenizer has for them.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    named = special or {}
    words.update({named.get(i, f"w{i}"): i for i in range(4, VOCAB)})
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=dict(roles) if roles else list(named.values()),
    ).save_pretrained(path)


def make_adapter(
    model: Path,
    path: Path,
    *,
    seed: int,
    rank: int = 8,
    targets: Sequence[str] = TARGETS,
    **settings: Any,
) -> Path:
    """Save a random LoRA of ``model`` whose B is not zero.

    Args:
        model: Directory of the base.
        path: Where; returned.
        seed: Of its weights.
        rank: ``r``; ``lora_alpha`` is twice that unless set.
        targets: ``target_modules``.
        settings: Further settings of PEFT's ``LoraConfig``.
    """
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(
        load_hf(model),
        LoraConfig(
            **{
                "r": rank,
                "lora_alpha": 2 * rank,
                "target_modules": list(targets),
                "task_type": "CAUSAL_LM",
                **settings,
            }
        ),
    )
    draw_adapter(wrapped, seed)
    wrapped.save_pretrained(path, save_embedding_layers=False)
    return path


def rename_modules(adapter: Path, path: Path, old: str, new: str) -> Path:
    """Save a copy of an adapter whose tensors name modules that no model has."""
    from safetensors.torch import load_file, save_file

    path.mkdir(parents=True)
    tensors = load_file(adapter / "adapter_model.safetensors")
    renamed = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(renamed, path / "adapter_model.safetensors")
    config = (adapter / "adapter_config.json").read_text()
    (path / "adapter_config.json").write_text(config.replace(old, new))
    return path


def adapter_config(adapter: Path) -> str:
    """The adapter_config.json of a saved adapter, as a publisher sends it."""
    from safetensors import safe_open

    from trainer_side.sources.adapter_source import config_in_names

    with safe_open(adapter / "adapter_model.safetensors", "pt") as tensors:
        names = list(tensors.keys())
    return config_in_names((adapter / "adapter_config.json").read_text(), names, None)


class Referee:
    """transformers' and PEFT's log-probabilities of given tokens."""

    def __init__(self) -> None:
        self._models: dict[tuple[Path, Path | None], Any] = {}

    def logprobs(
        self,
        model: Path,
        prompt: Sequence[int],
        tokens: Sequence[int],
        adapter: Path | None = None,
        temperature: float = 1.0,
    ) -> list[float]:
        """Log-probability of each of ``tokens`` after ``prompt`` and those before it."""
        key = (model, adapter)
        if key not in self._models:
            loaded = load_hf(model) if adapter is None else load_peft(model, adapter)
            self._models[key] = loaded.eval()
        ids = torch.tensor([[*prompt, *tokens]])
        with torch.no_grad():
            logits = self._models[key](input_ids=ids).logits[0].float()
        log_probs = torch.log_softmax(logits / temperature, dim=-1)
        begin = len(prompt) - 1
        return [float(log_probs[begin + i, token]) for i, token in enumerate(tokens)]

    def logprobs_over_kept_cache(
        self,
        old: Path,
        new: Path,
        prompt: Sequence[int],
        tokens: Sequence[int],
        num_old: int,
        adapter: Path | None = None,
    ) -> list[float]:
        """Log-probability of each token behind the first ``num_old``, by the new model over the
        keys and values that the old one has computed of what it had sampled."""
        ids = torch.tensor([[*prompt, *tokens]])
        self.logprobs(new, prompt, tokens[:1], adapter)
        self.logprobs(old, prompt, tokens[:1], adapter)  # both are loaded
        at = len(prompt) + num_old - 1  # the last one that was sampled goes in with the next
        with torch.no_grad():
            cache = self._models[old, adapter](input_ids=ids[:, :at], use_cache=True)
            logits = self._models[new, adapter](
                input_ids=ids[:, at:], past_key_values=cache.past_key_values
            ).logits[0]
        log_probs = torch.log_softmax(logits.float(), dim=-1)
        return [float(log_probs[i, token]) for i, token in enumerate(tokens[num_old:])]


def load_hf(model: Path) -> Any:
    """A saved model, by transformers."""
    import transformers

    (architecture,) = transformers.AutoConfig.from_pretrained(model).architectures
    return getattr(transformers, architecture).from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )


def load_peft(model: Path, adapter: Path) -> Any:
    """A saved adapter on a saved model, by PEFT."""
    return put_adapter(load_hf(model), adapter)


def put_adapter(model: Any, adapter: Path) -> Any:
    """A saved adapter on a model in memory, by PEFT."""
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(adapter))


def load_quantised(model: Path, bits: int) -> Any:
    """A saved model with 4-bit (nf4) or 8-bit linears, by bitsandbytes."""
    import warnings

    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = (
        BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        if bits == 4
        else BitsAndBytesConfig(load_in_8bit=True)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # bitsandbytes about CPU kernels
        loaded = AutoModelForCausalLM.from_pretrained(
            model, quantization_config=config, dtype=torch.bfloat16, attn_implementation="eager"
        )
        loaded(input_ids=torch.tensor([[5, 6, 7]]))  # moves the scales of 8-bit weights
    return loaded
