"""Tiny random models that see, their processors, and what transformers says they answer.

All images are ``IMAGE_SIZE`` pixels wide and high, which are ``IMAGE_TOKENS`` tokens or more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.models import COMMON, draw_base, load_hf, load_peft, make_tokenizer

IMAGE_SIZE, IMAGE_TOKEN, IMAGE_TOKENS = 56, 10, 4
_PATCH = 14
_EDGE = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
#: hidden_size / num_attention_heads, where there is no head_dim: vLLM's CPU attention takes 32.
_WIDE = {key: value for key, value in COMMON.items() if key != "head_dim"} | {"hidden_size": 128}
_MROPE = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4}
#: A tower as CLIP, SigLIP and Idefics have it ...
_TOWER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": IMAGE_SIZE,
    "patch_size": _PATCH,
}
#: ... and as Qwen has it; its last layer merges four patches into a token.
_MERGING_TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": _PATCH,
}
_QWEN_IDS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 11,
    "vision_start_token_id": 12,
    "vision_end_token_id": 13,
    "tie_word_embeddings": False,
}
_QWEN_WORDS = {
    IMAGE_TOKEN: "<|image_pad|>",
    11: "<|video_pad|>",
    12: "<|vision_start|>",
    13: "<|vision_end|>",
}
_QWEN_IMAGE = "<|vision_start|> <|image_pad|> <|vision_end|>"
_IDEFICS_WORDS = {
    IMAGE_TOKEN: "<image>",
    11: "<fake_token_around_image>",
    12: "<global-img>",
    13: "<end_of_utterance>",
}

_HUB = "vision_tower.vision_model."


@dataclass(frozen=True)
class VisionKind:
    """One architecture, as transformers names its configuration and its model."""

    name: str
    """Name without "Config" and "ForConditionalGeneration"."""
    config: Callable[[], Mapping[str, Any]]
    """Function that returns the configuration's settings."""
    processor: Callable[[Any], Any]
    """Function that makes a processor with a tokenizer."""
    words: Mapping[int, str]
    """Special tokens."""
    image: str = "<image>"
    """How a prompt has an image."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Special tokens by what the processor calls them."""
    prompt: str = "w20 w21 IMAGE w30"
    language: str = "language_model"
    """Name of the language model's modules, in memory below ``model``."""
    causal_type: int | None = None
    """``token_type_ids`` by which transformers lets no token see a later one. It lets those of an
    image, and vLLM on a CPU does not, which is nats off."""
    files_have: str = ""
    """Prefix of the encoder's names in the files that people have; transformers saves them without
    its last component, and vLLM does not read those."""

    @property
    def prompt_with_image(self) -> str:
        """Prompt as ``GenerateService`` takes it, and as most chat templates here make it."""
        return self.prompt.replace("IMAGE", self.image)


def make_vision_model(
    kind: str, path: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Path:
    """Save a random model with a processor; returns ``path``.

    Args:
        kind: Key of ``KINDS``.
        path: Where.
        seed: Of its weights.
        dtype: Of the weights in its file.
    """
    import transformers

    of = KINDS[kind]
    config = getattr(transformers, f"{of.name}Config")(**of.config())
    model = getattr(transformers, f"{of.name}ForConditionalGeneration")(config).float()
    draw_base(model, seed)
    model.get_output_embeddings().weight.data[list(of.words)[:4]] = 0  # none of these is sampled
    model.to(dtype).save_pretrained(path)
    if of.files_have:
        _rename(path / "model.safetensors", "vision_tower.", of.files_have)
    make_tokenizer(path, of.words, of.roles)
    of.processor(transformers.AutoTokenizer.from_pretrained(path)).save_pretrained(path)
    return path


def _rename(file: Path, old: str, new: str) -> None:
    tensors = {
        new + name.removeprefix(old) if name.startswith(old) else name: tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})


def _chat_template(image: str) -> str:
    return (
        "{% for m in messages %}{% for part in m['content'] %}"
        "{% if part['type'] == 'text' %} {{ part['text'] }} {% else %} IMAGE {% endif %}"
        "{% endfor %}{% endfor %}"
    ).replace("IMAGE", image)


def random_image(seed: int) -> Image.Image:
    """Return an image whose pixels follow from the seed."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (IMAGE_SIZE, IMAGE_SIZE, 3), generator=generator)
    return Image.fromarray(pixels.to(torch.uint8).numpy())


class VisionReferee:
    """transformers' and PEFT's log-probabilities of given tokens after an image."""

    def __init__(self, kind: str) -> None:
        self._kind = KINDS[kind]
        self._models: dict[tuple[Path, Path | None], Any] = {}

    def logprobs(
        self,
        model: Path,
        image: Image.Image,
        tokens: Sequence[int],
        adapter: Path | None = None,
        tail: str = "",
    ) -> tuple[list[int], list[float]]:
        """Return the prompt's tokens, and the log-probability of each of ``tokens`` after them.

        ``tail`` ends the prompt.
        """
        import transformers

        key = (model, adapter)
        if key not in self._models:
            loaded = load_hf(model) if adapter is None else load_peft(model, adapter)
            self._models[key] = loaded.eval()
        processor = transformers.AutoProcessor.from_pretrained(model)
        prompt = self._kind.prompt_with_image + tail
        inputs = dict(processor(images=image, text=prompt, return_tensors="pt"))
        inputs.pop("labels", None)  # for training
        ids = inputs["input_ids"]
        inputs["input_ids"] = torch.cat([ids, torch.tensor([tokens])], dim=1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        for name in ("token_type_ids", "mm_token_type_ids"):
            if name in inputs:
                of_text = torch.zeros(1, len(tokens), dtype=ids.dtype)
                inputs[name] = torch.cat([inputs[name], of_text], dim=1)
        if self._kind.causal_type is not None:
            inputs["token_type_ids"].fill_(self._kind.causal_type)
        with torch.no_grad():
            logits = self._models[key](**inputs).logits[0]
        rows = torch.log_softmax(logits.float(), -1)[-len(tokens) - 1 : -1]
        found = [float(row[token]) for row, token in zip(rows, tokens, strict=True)]
        return ids[0].tolist(), found


# -- configurations ---------------------------------------------------------------


def _llama() -> dict[str, Any]:
    return {"model_type": "llama", **COMMON}


def _qwen2_5_vl() -> Mapping[str, Any]:
    tower = {**_MERGING_TOWER, "out_hidden_size": 128, "fullatt_block_indexes": [0]}
    return {
        "text_config": {**_WIDE, "rope_parameters": _MROPE},
        "vision_config": tower,
        **_QWEN_IDS,
    }


def _qwen2_vl() -> Mapping[str, Any]:
    tower = {"depth": 2, "embed_dim": 64, "hidden_size": 128, "mlp_ratio": 1, "num_heads": 2,
             "patch_size": _PATCH}  # fmt: skip
    return {
        "text_config": {**_WIDE, "rope_parameters": _MROPE},
        "vision_config": tower,
        **_QWEN_IDS,
    }


def _qwen3_vl() -> Mapping[str, Any]:
    tower = {**_MERGING_TOWER, "out_hidden_size": 64, "num_position_embeddings": 16,
             "deepstack_visual_indexes": [0]}  # fmt: skip
    rope = {**_MROPE, "mrope_interleaved": True, "mrope_section": [6, 5, 5]}
    return {"text_config": {**COMMON, "rope_parameters": rope}, "vision_config": tower, **_QWEN_IDS}


def _qwen3_5() -> Mapping[str, Any]:
    tower = {**_MERGING_TOWER, "out_hidden_size": 64, "num_position_embeddings": 16}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True,
            "mrope_section": [6, 5, 5], "partial_rotary_factor": 1.0}  # fmt: skip
    text = {
        **COMMON,
        "rope_parameters": rope,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
    }
    return {"text_config": text, "vision_config": tower, **_QWEN_IDS}


def _gemma3() -> Mapping[str, Any]:
    text = {
        **COMMON,
        "query_pre_attn_scalar": 32,
        "sliding_window": 64,
        "tie_word_embeddings": True,
    }
    return {
        "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model", **_TOWER, "vision_use_head": False},
        "mm_tokens_per_image": IMAGE_TOKENS,
        "image_token_index": IMAGE_TOKEN,
        "boi_token_index": 11,
        "eoi_token_index": 12,
    }


def _mistral3() -> Mapping[str, Any]:
    return {
        "text_config": {"model_type": "mistral", **COMMON, "sliding_window": None},
        "vision_config": {"model_type": "pixtral", **_TOWER},
        "image_token_index": IMAGE_TOKEN,
        "vision_feature_layer": -1,
        "tie_word_embeddings": False,
    }


def _llava() -> Mapping[str, Any]:
    return {
        "text_config": _llama(),
        "vision_config": {"model_type": "clip_vision_model", **_TOWER},
        "image_token_index": IMAGE_TOKEN,
        "vision_feature_layer": -1,
        "tie_word_embeddings": False,
    }


def _paligemma() -> Mapping[str, Any]:
    return {
        "text_config": {"model_type": "gemma", **COMMON, "tie_word_embeddings": True},
        "vision_config": {"model_type": "siglip_vision_model", **_TOWER, "vision_use_head": False},
        "image_token_index": IMAGE_TOKEN,
        "projection_dim": 64,
    }


def _internvl() -> Mapping[str, Any]:
    return {
        "text_config": {"model_type": "qwen2", **_WIDE},
        "vision_config": _TOWER,
        "image_token_id": IMAGE_TOKEN,
        "image_seq_length": IMAGE_TOKENS,
        "tie_word_embeddings": False,
    }


def _idefics3() -> Mapping[str, Any]:
    return {
        "text_config": _llama(),
        "vision_config": _TOWER,
        "image_token_id": IMAGE_TOKEN,
        "scale_factor": 2,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
    }


def _glm4v() -> Mapping[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3],
            "partial_rotary_factor": 0.5}  # fmt: skip
    return {
        "text_config": {**_WIDE, "rope_parameters": rope, "attention_bias": True},
        "vision_config": {**_MERGING_TOWER, "out_hidden_size": 128, "image_size": IMAGE_SIZE},
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": 11,
        "image_start_token_id": 12,
        "image_end_token_id": 13,
        "video_start_token_id": 14,
        "video_end_token_id": 15,
        "tie_word_embeddings": False,
    }


# -- processors -------------------------------------------------------------------


def _qwen(name: str, video: str) -> Callable[[Any], Any]:
    def make(tokenizer: Any) -> Any:
        import transformers

        pixels = {"shortest_edge": IMAGE_SIZE**2, "longest_edge": IMAGE_SIZE**2}
        settings = {"patch_size": _PATCH, "size": pixels}
        return getattr(transformers, f"{name}Processor")(
            image_processor=transformers.Qwen2VLImageProcessor(**settings),
            tokenizer=tokenizer,
            video_processor=getattr(transformers, f"{video}VideoProcessor")(**settings),
            chat_template=_chat_template(_QWEN_IMAGE),
        )

    return make


def _glm4v_processor(tokenizer: Any) -> Any:
    import transformers

    pixels = {"shortest_edge": IMAGE_SIZE**2, "longest_edge": 2 * IMAGE_SIZE**2}
    settings = {"patch_size": _PATCH, "size": pixels}
    return transformers.Glm4vProcessor(
        image_processor=transformers.Glm4vImageProcessor(**settings),
        tokenizer=tokenizer,
        video_processor=transformers.Glm4vVideoProcessor(**settings),
        chat_template=_chat_template("<|begin_of_image|> <|image|> <|end_of_image|>"),
    )


def _gemma3_processor(tokenizer: Any) -> Any:
    import transformers

    return transformers.Gemma3Processor(
        image_processor=transformers.Gemma3ImageProcessor(
            size=_EDGE, image_seq_length=IMAGE_TOKENS
        ),
        tokenizer=tokenizer,
        image_seq_length=IMAGE_TOKENS,
        chat_template=_chat_template("<start_of_image>"),
    )


def _pixtral_processor(tokenizer: Any) -> Any:
    import transformers

    return transformers.PixtralProcessor(
        image_processor=transformers.PixtralImageProcessor(
            size={"longest_edge": IMAGE_SIZE}, patch_size=_PATCH
        ),
        tokenizer=tokenizer,
        patch_size=_PATCH,
        spatial_merge_size=2,
        chat_template=_chat_template("[IMG]"),
    )


def _llava_processor(tokenizer: Any) -> Any:
    import transformers

    return transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(
            size={"shortest_edge": IMAGE_SIZE}, crop_size=_EDGE
        ),
        tokenizer=tokenizer,
        patch_size=_PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_chat_template("<image>"),
    )


def _paligemma_processor(tokenizer: Any) -> Any:
    import transformers

    images = transformers.SiglipImageProcessor(size=_EDGE)
    images.image_seq_length = (IMAGE_SIZE // _PATCH) ** 2
    return transformers.PaliGemmaProcessor(
        image_processor=images, tokenizer=tokenizer, chat_template=_chat_template("<image>")
    )


def _internvl_processor(tokenizer: Any) -> Any:
    import transformers

    return transformers.InternVLProcessor(
        image_processor=transformers.GotOcr2ImageProcessor(
            size=_EDGE, crop_to_patches=False, min_patches=1, max_patches=1
        ),
        tokenizer=tokenizer,
        video_processor=transformers.InternVLVideoProcessor(size=_EDGE),
        image_seq_length=IMAGE_TOKENS,
        chat_template=_chat_template("<IMG_CONTEXT>"),
    )


def _idefics3_processor(tokenizer: Any) -> Any:
    import transformers

    edge = {"longest_edge": IMAGE_SIZE}
    return transformers.Idefics3Processor(
        image_processor=transformers.Idefics3ImageProcessor(
            size=edge, max_image_size=edge, do_image_splitting=False
        ),
        tokenizer=tokenizer,
        image_seq_len=IMAGE_TOKENS,
        chat_template=_chat_template("<image>"),
    )


KINDS: Mapping[str, VisionKind] = {
    "qwen2_vl": VisionKind(
        "Qwen2VL", _qwen2_vl, _qwen("Qwen2VL", "Qwen2VL"), _QWEN_WORDS, _QWEN_IMAGE
    ),
    "qwen2_5_vl": VisionKind(
        "Qwen2_5_VL", _qwen2_5_vl, _qwen("Qwen2_5_VL", "Qwen2VL"), _QWEN_WORDS, _QWEN_IMAGE
    ),
    "qwen3_vl": VisionKind(
        "Qwen3VL", _qwen3_vl, _qwen("Qwen3VL", "Qwen3VL"), _QWEN_WORDS, _QWEN_IMAGE
    ),
    "qwen3_5": VisionKind(
        "Qwen3_5",
        _qwen3_5,
        _qwen("Qwen3VL", "Qwen3VL"),
        # transformers reads its tokenizer as Qwen's, which knows no words that are not special.
        {**_QWEN_WORDS, **{number: chr(number) for number in range(33, 127)}},
        _QWEN_IMAGE,
    ),
    "gemma3": VisionKind(
        "Gemma3",
        _gemma3,
        _gemma3_processor,
        {
            IMAGE_TOKEN: "<image_soft_token>",
            11: "<start_of_image>",
            12: "<end_of_image>",
            **{13 + more: "\n" * (1 + more) for more in range(4)},
        },
        "<start_of_image>",
        {
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        causal_type=0,
        files_have=_HUB,
    ),
    "mistral3": VisionKind(
        "Mistral3",
        _mistral3,
        _pixtral_processor,
        {IMAGE_TOKEN: "[IMG]", 11: "[IMG_BREAK]", 12: "[IMG_END]"},
        "[IMG]",
    ),
    "llava": VisionKind(
        "Llava", _llava, _llava_processor, {IMAGE_TOKEN: "<image>"}, files_have=_HUB
    ),
    "internvl": VisionKind(
        "InternVL",
        _internvl,
        _internvl_processor,
        {IMAGE_TOKEN: "<IMG_CONTEXT>", 11: "<img>", 12: "</img>", 13: "<video>"},
        "<IMG_CONTEXT>",
        {
            "context_image_token": "<IMG_CONTEXT>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "video_token": "<video>",
        },
    ),
    "idefics3": VisionKind(
        "Idefics3", _idefics3, _idefics3_processor, _IDEFICS_WORDS, language="text_model"
    ),
    "paligemma": VisionKind(
        "PaliGemma",
        _paligemma,
        _paligemma_processor,
        {IMAGE_TOKEN: "<image>", 11: "\n"},
        prompt="w20 w21 w30",  # vLLM puts the image before it
        causal_type=1,
        files_have=_HUB,
    ),
    "glm4v": VisionKind(
        "Glm4v",
        _glm4v,
        _glm4v_processor,
        {
            IMAGE_TOKEN: "<|image|>",
            11: "<|video|>",
            12: "<|begin_of_image|>",
            13: "<|end_of_image|>",
            14: "<|begin_of_video|>",
            15: "<|end_of_video|>",
        },
        "<|begin_of_image|> <|image|> <|end_of_image|>",
    ),
}
