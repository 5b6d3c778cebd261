"""Tiny random models of many architectures: one configuration each, seconds to start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests import models
from tests.models import LAYERS, VOCAB
from tests.vision_models import KINDS

#: Largest difference of a log-probability, in nats, that is rounding: vLLM against transformers,
#: which computes in float32. By itself in bfloat16 it is 0.46 off at tiny models.
_BOUNDS = {"float32": 1e-4, "bfloat16": 0.5}
PROMPTS = ([5, 17, 99, 200, 33], [7, 8, 9, 10, 11, 12, 13, 14], [100])
#: Files of ``tests/e2e`` in which ``make test`` pushes some of them, too, and their names there.
_TESTED = {
    "Qwen2": ("test_vllm_engine_base.py", "qwen2"),
    "GptOss": ("test_models.py", "gpt_oss"),
    "DeepseekV3": ("test_models.py", "deepseek_v3"),
    "Qwen2_5_VL": ("test_vllm_engine_vision.py", "qwen2_5_vl"),
    "Qwen3VL": ("test_vllm_engine_vision.py", "qwen3_vl"),
}
#: Of models that see: without tokens that stand for images.
_TEXTS = ([5, 17, 99, 200, 33], [7, 8, 9, 20, 21, 22, 23, 24], [100])
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
#: What most configurations share. Heads have 32 elements: vLLM's CPU attention takes no fewer.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Architecture:
    """One architecture, as transformers names its configuration."""

    config: str
    """Class of ``transformers``."""
    settings: dict[str, Any]
    targets: tuple[str, ...] = ATTENTION
    """Modules that an adapter is of."""
    has_adapters: bool = True
    """False where vLLM serves no adapters on a CPU; they are merged all the same."""
    kind: str = ""
    """Kind of ``tests.models`` whose configuration it has, in place of ``settings``."""
    has_drafts: bool = False
    """True if the replica's files hold a layer for multi-token prediction, too, which transformers'
    model has not."""
    dtype: str = "float32"
    """Type that the replica computes in."""
    prompts: tuple[list[int], ...] = PROMPTS
    vision: str = ""
    """Kind of ``tests.vision_models`` that it is, with an encoder of images."""

    @property
    def test(self) -> tuple[str, str] | None:
        """File of ``tests/e2e`` in which ``make test`` pushes it, too, and its name there."""
        return _TESTED.get(self.name)

    @property
    def name(self) -> str:
        """Name of the architecture, in the table and on the command line."""
        return self.config.removesuffix("Config")

    @property
    def bound(self) -> float:
        """Largest difference, in nats, that is rounding."""
        return _BOUNDS[self.dtype]

    @property
    def adapter_targets(self) -> list[str] | str:
        """``target_modules`` of the adapter; of the language model alone where there are two."""
        if self.vision:
            language = KINDS[self.vision].language
            return rf"model\.{language}\..*\.({'|'.join(self.targets)})"
        return list(self.targets)

    def make_config(self) -> Any:
        """Return the configuration."""
        if self.kind:
            return models.make_config(self.kind, False)
        import transformers

        return getattr(transformers, self.config)(**self.settings)


def _dense(
    config: str,
    targets: tuple[str, ...] = (*ATTENTION, *MLP),
    *,
    has_adapters: bool = True,
    **more: Any,
) -> Architecture:
    return Architecture(config, {**_COMMON, **more}, targets, has_adapters)


def _moe(
    config: str,
    targets: tuple[str, ...] = ATTENTION,
    *,
    has_drafts: bool = False,
    **more: Any,
) -> Architecture:
    """Make one with experts, beside which vLLM serves no adapters without Triton."""
    settings = {**_COMMON, **more}
    return Architecture(config, settings, targets, has_adapters=False, has_drafts=has_drafts)


def _seeing(kind: str, targets: tuple[str, ...] = (*ATTENTION, *MLP), **more: Any) -> Architecture:
    return Architecture(f"{KINDS[kind].name}Config", {}, targets, vision=kind, **more)


_HEAD = {"head_dim": 32}
_GPT = {
    "vocab_size": VOCAB, "n_embd": 128, "n_layer": LAYERS, "n_head": 4, "n_positions": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": True,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

ARCHITECTURES: tuple[Architecture, ...] = (
    # -- dense
    _dense("LlamaConfig", **_HEAD),
    _dense("MistralConfig", **_HEAD, sliding_window=None),
    _dense("Qwen2Config"),
    _dense("Qwen3Config", **_HEAD),
    _dense("GemmaConfig", **_HEAD, tie_word_embeddings=True),
    _dense("Gemma2Config", **_HEAD, query_pre_attn_scalar=32, sliding_window=16,
           tie_word_embeddings=True),
    _dense("Gemma3TextConfig", **_HEAD, query_pre_attn_scalar=32, sliding_window=16,
           tie_word_embeddings=True),
    _dense("Phi3Config", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    _dense("PhiConfig", ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"),
           num_key_value_heads=4, partial_rotary_factor=0.5),
    _dense("OlmoConfig"),
    _dense("Olmo2Config"),
    _dense("GraniteConfig"),
    _dense("GlmConfig", (*ATTENTION, "gate_up_proj", "down_proj"), **_HEAD, attention_bias=True),
    _dense("Glm4Config", (*ATTENTION, "down_proj"), **_HEAD, attention_bias=True),
    _dense("StableLmConfig", has_adapters=False, partial_rotary_factor=0.5),
    _dense("Starcoder2Config", (*ATTENTION, "c_fc", "c_proj"), sliding_window=None),
    _dense("CohereConfig", tie_word_embeddings=True),
    _dense("NemotronConfig", (*ATTENTION, "up_proj", "down_proj"), **_HEAD,
           partial_rotary_factor=0.5),
    _dense("SmolLM3Config"),
    _dense("Exaone4Config", **_HEAD, sliding_window=16, sliding_window_pattern=2),
    _dense("GPTNeoXConfig", ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
           num_key_value_heads=4),  # it shares none, and vLLM would
    Architecture("FalconConfig", {
        **{k: v for k, v in _COMMON.items() if k not in ("intermediate_size",)},
        "num_kv_heads": 2, "new_decoder_architecture": True, "ffn_hidden_size": 512,
        "tie_word_embeddings": True,
    }, ("query_key_value", "dense"), has_adapters=False),
    Architecture("GPT2Config", _GPT, ("c_attn",), has_adapters=False),
    Architecture("OPTConfig", {
        "vocab_size": VOCAB, "hidden_size": 128, "ffn_dim": 256, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "max_position_embeddings": 512, "word_embed_proj_dim": 128,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }, ("q_proj", "k_proj", "v_proj", "out_proj")),
    # -- experts
    _moe("MixtralConfig", **_HEAD, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    _moe("Qwen2MoeConfig", **_EXPERTS, shared_expert_intermediate_size=64, decoder_sparse_step=1),
    _moe("Qwen3MoeConfig", **_HEAD, **_EXPERTS, decoder_sparse_step=1, norm_topk_prob=True),
    _moe("OlmoeConfig", num_experts=4, num_experts_per_tok=2),
    _moe("GraniteMoeConfig", num_local_experts=4, num_experts_per_tok=2),
    _moe("Glm4MoeConfig", has_drafts=True, num_nextn_predict_layers=1, **_HEAD, n_routed_experts=4,
         num_experts_per_tok=2, moe_intermediate_size=64, n_shared_experts=1,
         first_k_dense_replace=1,
         partial_rotary_factor=0.5),
    _moe("GptOssConfig", **_HEAD, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
         layer_types=["sliding_attention", "full_attention"]),
    # -- latent keys and values
    Architecture("DeepseekV2Config", {}, ("q_proj", "o_proj"), has_adapters=False,
                 kind="deepseek_v2"),
    Architecture("DeepseekV3Config", {}, ("q_b_proj", "o_proj"), has_adapters=False,
                 kind="deepseek_v3"),
    # -- state spaces
    Architecture("Mamba2Config", {
        "vocab_size": VOCAB, "hidden_size": 128, "num_hidden_layers": LAYERS, "num_heads": 8,
        "head_dim": 32, "state_size": 16, "n_groups": 1, "chunk_size": 16, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
    }, ("in_proj",), has_adapters=False),
    Architecture("FalconH1Config", {
        **_COMMON, **_HEAD, "mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32,
        "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 16,
    }, ATTENTION, has_adapters=False),
    # -- with an encoder of images
    _seeing("qwen2_vl"),
    _seeing("qwen2_5_vl"),
    _seeing("qwen3_vl"),
    # On a CPU vLLM's linear attention takes bfloat16 alone, and no prompt of one token.
    _seeing("qwen3_5", dtype="bfloat16", prompts=_TEXTS[:2]),
    _seeing("gemma3"),
    _seeing("mistral3"),
    _seeing("llava"),
    _seeing("internvl"),
    _seeing("idefics3"),
    _seeing("paligemma"),
    _seeing("glm4v", (*ATTENTION, "gate_up_proj", "down_proj")),
)  # fmt: skip
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
