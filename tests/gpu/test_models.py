"""Models of many kinds on GPUs: what is pushed is served as by an engine that started from it.

Two replicas of a kind, each in a pool of its own, start from other weights: one stages bases, one
loads them in place. Each is then given what the other one started from, and answers as that did,
bit for bit; then its own again. The first is on the trainer's GPU, the second on the last one.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.gpu_pool import GpuPool
from tests.gpu.conftest import Note
from tests.gpu.test_pushes import DEVICE, DRY, LORA, NUM_GPUS, PROMPTS, Pushed
from tests.models import IMAGE_SIZE, draw_base, make_tokenizer, make_vision_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not NUM_GPUS and not DRY, reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]

#: With a cache of a size that is given, engines may start beside one another on a GPU.
_VLLM = ("--max-model-len", "512", "--kv-cache-memory-bytes", "500000000", "--enforce-eager",
         "--gpu-memory-utilization", "0.1", "--max-num-seqs", "16")  # fmt: skip
_COMMON: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
#: By kind: class of transformers, settings, and further options of vLLM.
_KINDS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "fp8_per_tensor": ("Qwen3Config", _COMMON, ("--quantization", "fp8_per_tensor")),
    "fp8_per_channel": ("Qwen3Config", _COMMON, ("--quantization", "fp8_per_channel")),
    "fp8_per_block": ("Qwen3Config", _COMMON, ("--quantization", "fp8_per_block")),
    "mla": (
        "DeepseekV3Config",
        {
            **_COMMON,
            "num_key_value_heads": 8,
            "head_dim": None,
            "kv_lora_rank": 512,
            "q_lora_rank": 256,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 256,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
        },
        (),
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            **_COMMON,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        (),
    ),
    "experts": (
        "Qwen3MoeConfig",
        {**_COMMON, **_EXPERTS, "decoder_sparse_step": 1, "norm_topk_prob": True},
        LORA,
    ),
    "images": ("", {}, ("--limit-mm-per-prompt", '{"image": 2}')),
}
#: Layers that a copy plan processes, four in each of four layers of a model.
_PROCESSED = {kind: 16 for kind in _KINDS if kind.startswith("fp8")}


@dataclass
class Pair:
    """Two replicas, and what each started from."""

    kind: str
    staged: Pushed
    in_place: Pushed
    models: tuple[Any, Any]
    adapters: tuple[Path, ...]


def make_model(kind: str, seed: int, path: Path) -> Any:
    """A model on the trainer's GPU, saved so that an engine can start from it."""
    import transformers

    name, settings, _ = _KINDS[kind]
    if kind == "images":
        make_vision_model(path, seed=seed)
        return transformers.AutoModelForImageTextToText.from_pretrained(
            path, dtype=torch.bfloat16
        ).to(DEVICE)
    config = getattr(transformers, name)(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    draw_base(model, seed)
    model.save_pretrained(path)
    make_tokenizer(path)
    return model.to(DEVICE)


def make_adapter(path: Path, seed: int) -> Path:
    """LoRA of every attention matrix and every expert, in the names that vLLM takes."""
    generator, rank = torch.Generator().manual_seed(seed), 8
    hidden, inner, kv = 512, 256, 256
    tensors = {}
    shapes = {
        f"self_attn.{n}_proj": s
        for n, s in {
            "q": (512, hidden),
            "k": (kv, hidden),
            "v": (kv, hidden),
            "o": (hidden, 512),
        }.items()
    }
    for expert in range(8):
        shapes |= {
            f"mlp.experts.{expert}.{n}_proj": s
            for n, s in {
                "gate": (inner, hidden),
                "up": (inner, hidden),
                "down": (hidden, inner),
            }.items()
        }
    for layer in range(4):
        for module, (out, width) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.{module}.lora_"
            a = torch.randn(rank, width, generator=generator) * 0.05
            b = torch.randn(out, rank, generator=generator) * 0.05
            tensors[f"{name}A.weight"], tensors[f"{name}B.weight"] = a.bfloat16(), b.bfloat16()
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors")
    targets = sorted({module.rpartition(".")[2] for module in shapes})
    (path / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets,
        "task_type": "CAUSAL_LM", "base_model_name_or_path": "x", "bias": "none",
    }))  # fmt: skip
    return path


def answers(kind: str, url: str, model: str = "base-model") -> list[tuple[list[str], list[float]]]:
    """Greedy tokens and their log-probabilities, one prompt at a time."""
    if kind == "images":
        return [_about_image(url, seed) for seed in (0, 1, 0)]
    found = []
    for prompt in PROMPTS:
        body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0.0,
                "logprobs": 1, "ignore_eos": True}  # fmt: skip
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        logprobs = answer.json()["choices"][0]["logprobs"]
        found.append((logprobs["tokens"], logprobs["token_logprobs"]))
    return found


def _about_image(url: str, seed: int) -> tuple[list[str], list[float]]:
    from PIL import Image

    size = (IMAGE_SIZE, IMAGE_SIZE, 3)
    pixels = torch.randint(0, 256, size, generator=torch.Generator().manual_seed(seed))
    file = io.BytesIO()
    Image.fromarray(pixels.to(torch.uint8).numpy()).save(file, "PNG")
    image = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [{"type": "text", "text": "w20 w21"},
               {"type": "image_url", "image_url": {"url": image}}]  # fmt: skip
    body = {"model": "base-model", "messages": [{"role": "user", "content": content}],
            "max_tokens": 8, "temperature": 0, "logprobs": True, "ignore_eos": True}  # fmt: skip
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found = answer.json()["choices"][0]["logprobs"]["content"]
    return [each["token"] for each in found], [each["logprob"] for each in found]


@pytest.fixture(scope="module", params=list(_KINDS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Pair]:
    kind = request.param
    work: Path = tmp_path_factory.mktemp(kind)
    models = tuple(make_model(kind, seed, work / f"weights{seed}") for seed in (1, 2))
    adapters: tuple[Path, ...] = ()
    fresh: list[str] = []
    if kind == "experts":
        adapters = tuple(make_adapter(work / f"adapter{seed}", seed) for seed in (3, 4))
        fresh = ["--lora-modules", *(f"disk{i}={path}" for i, path in enumerate(adapters))]
    args = [*_VLLM, *_KINDS[kind][2]]
    pools = [GpuPool(work / name) for name in ("staged", "in-place")]
    last = str(max(NUM_GPUS - 1, 0))
    try:
        for each in pools:
            each.work.mkdir()
            each.start()
        verbose = ("--log-level", "debug")
        pools[0].launch("pushed", "0", work / "weights1", *args, options=verbose)
        options = ("--staging", "in-place", *verbose)
        # It sees the trainer's GPU, and reads its memory.
        gpus = last if last == "0" else f"{last},0"
        pools[1].launch("pushed", gpus, work / "weights2", *args, *fresh, options=options)
        staged, in_place = (Pushed(each, each.url("pushed")) for each in pools)
        yield Pair(kind, staged, in_place, models, adapters)
    finally:
        for each in pools:
            each.stop()


def test_each_answers_as_the_other_one_did(pair: Pair, note: Note) -> None:
    """Three times: by vLLM's reload, then by what that has taught."""
    first = answers(pair.kind, pair.staged.url)
    second = answers(pair.kind, pair.in_place.url)
    assert first != second
    for pushed, order in ((pair.staged, (1, 0, 1)), (pair.in_place, (0, 1, 0))):
        seconds = []
        with pushed.publisher(bucket_bytes=4 * 2**20) as publisher:  # several a push
            for number in order:
                report = publisher.push_base(pair.models[number]).report
                seconds.append(report.seconds)
                assert answers(pair.kind, pushed.url) == (first, second)[number], report
        how = pushed.how()
        took = ", ".join(f"{each * 1e3:.0f}" for each in seconds)
        where = "staged" if pushed is pair.staged else "in place"
        note(pair.kind, f"3 bases, {where}", f"bitwise; {how}; {took} ms")
        if pair.kind in _PROCESSED and not DRY:
            assert f"and {_PROCESSED[pair.kind]} layers processed" in pushed.log()


def test_adapters_of_experts_answer_as_from_disk(pair: Pair, note: Note) -> None:
    """Both at once in one batch, beside a base that is pushed."""
    if not pair.adapters:
        pytest.skip("takes no adapters")
    pushed = pair.staged
    with pushed.publisher() as publisher:
        publisher.push_base(pair.models[1])
        expected = [answers(pair.kind, pair.in_place.url, f"disk{i}") for i in range(2)]
        with pair.in_place.publisher() as other:
            other.push_base(pair.models[1])
        expected = [answers(pair.kind, pair.in_place.url, f"disk{i}") for i in range(2)]
        assert expected[0] != expected[1] != answers(pair.kind, pushed.url)
        for _ in range(2):
            results = [publisher.push_adapter(path, "math") for path in pair.adapters]
            found = [answers(pair.kind, pushed.url, str(r.version)) for r in results]
            assert found == expected
        took = ", ".join(f"{r.report.seconds * 1e3:.0f}" for r in results)
    how = "copies" if "loaded by vLLM itself" not in pushed.log() else "vLLM itself"
    note(pair.kind, "2 adapters of attention and experts", f"bitwise; by {how}; {took} ms")
