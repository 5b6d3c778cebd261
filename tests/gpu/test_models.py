"""Models of text on GPUs: what is pushed is served as by an engine that started from it.

Two replicas of a kind, each in a pool of its own, start from other weights: one stages bases, one
loads them in place. Each is then given what the other one started from, and answers as that did;
then its own again, and answers bit for bit as it did at its start. The first is on the trainer's
GPU, the second on the last one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.gpu_pool import GpuPool
from tests.gpu.conftest import Note
from tests.gpu.test_pushes import (
    COMMON,
    DEVICE,
    DRY,
    LORA,
    NUM_GPUS,
    VLLM,
    Answers,
    Pushed,
    answers,
    answers_alike,
    save,
)
from tests.models import draw_base
from tests.quantised_files import quantise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not NUM_GPUS and not DRY, reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(600),
]

BASE = "base-model"
_ROUNDED = {True: "bitwise", False: "within its kernels' rounding, bitwise each time"}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
_GPT_OSS: tuple[str, dict[str, Any], tuple[str, ...]] = (
    "GptOssConfig",
    {
        **COMMON,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    (),
)
_QWEN3_MOE: tuple[str, dict[str, Any]] = (
    "Qwen3MoeConfig",
    {**COMMON, **_EXPERTS, "decoder_sparse_step": 1, "norm_topk_prob": True},
)
#: Methods whose files have quantised linear layers; those of gpt-oss have quantised experts.
_LINEAR = ("fp8", "fp8_block", "nvfp4", "awq", "gptq", "compressed-tensors")
#: By kind: class of transformers, settings, and further options of vLLM.
_KINDS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "fp8_per_tensor": ("Qwen3Config", COMMON, ("--quantization", "fp8_per_tensor")),
    "fp8_per_channel": ("Qwen3Config", COMMON, ("--quantization", "fp8_per_channel")),
    "fp8_per_block": ("Qwen3Config", COMMON, ("--quantization", "fp8_per_block")),
    "mla": (
        "DeepseekV3Config",
        {
            **COMMON,
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
            "topk_method": "noaux_tc",
        },
        (),
    ),
    "gpt_oss": _GPT_OSS,
    **{f"{method}_files": ("Qwen3Config", COMMON, ()) for method in _LINEAR},
    "mxfp4_files": (*_GPT_OSS[:2], ("--moe-backend", "marlin")),
    "experts": (*_QWEN3_MOE, LORA),
    "fp8_experts": (*_QWEN3_MOE, ("--quantization", "fp8_per_tensor")),
}
#: Layers that a copy plan processes, four in each of four layers of a model.
_PROCESSED = {kind: 16 for kind in _KINDS if kind.startswith("fp8_per")}


@dataclass
class Pair:
    """Two replicas, and what each started from."""

    kind: str
    staged: Pushed
    in_place: Pushed
    models: tuple[Any, Any]
    adapters: tuple[tuple[Path, Path], ...]
    """By version: each expert by itself, all at once."""


def make_model(kind: str, seed: int, path: Path) -> Any:
    """Save a model that an engine can start from; returns it on the trainer's GPU, or its files if
    their weights are quantised."""
    import transformers

    name, settings, _ = _KINDS[kind]
    config = getattr(transformers, name)(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    draw_base(model, seed)
    save(model, path)
    method, _, files = kind.rpartition("_")
    if files == "files":
        return quantise(method, path)
    return model.to(DEVICE)


_RANK = 8


def make_adapters(path: Path, seed: int) -> tuple[Path, Path]:
    """One LoRA of every attention matrix and every expert, twice: each expert by itself, as vLLM
    takes it from a directory, and all at once, as PEFT saves it."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.05).bfloat16()

    hidden, inner, kv, count = 512, 256, 256, 8
    attention: dict[str, torch.Tensor] = {}
    one_by_one: dict[str, torch.Tensor] = {}
    at_once: dict[str, torch.Tensor] = {}
    for layer in range(4):
        prefix = f"base_model.model.model.layers.{layer}."
        for name, out in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            attention[f"{prefix}self_attn.{name}_proj.lora_A.weight"] = draw(_RANK, hidden)
            attention[f"{prefix}self_attn.{name}_proj.lora_B.weight"] = draw(out, _RANK)
        experts = f"{prefix}mlp.experts"
        up_a, up_b = draw(count, _RANK, hidden), draw(count, 2 * inner, _RANK)
        down_a, down_b = draw(count, _RANK, inner), draw(count, hidden, _RANK)
        for expert in range(count):
            for name, a, b in (
                ("gate", up_a, up_b[:, :inner]),
                ("up", up_a, up_b[:, inner:]),
                ("down", down_a, down_b),
            ):
                module = f"{experts}.{expert}.{name}_proj"
                one_by_one[f"{module}.lora_A.weight"] = a[expert].clone()
                one_by_one[f"{module}.lora_B.weight"] = b[expert].clone()
        for module, a, b in ((f"{experts}.base_layer", up_a, up_b), (experts, down_a, down_b)):
            at_once[f"{module}.lora_A.weight"] = a.flatten(0, 1).clone()
            at_once[f"{module}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1).clone()
    targets = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    for name, tensors, settings in (
        ("one-by-one", one_by_one, {"target_modules": targets}),
        ("at-once", at_once, {"target_modules": targets[:4], "target_parameters": parameters}),
    ):
        (path / name).mkdir(parents=True)
        save_file(attention | tensors, path / name / "adapter_model.safetensors")
        (path / name / "adapter_config.json").write_text(json.dumps({
            "peft_type": "LORA", "r": _RANK, "lora_alpha": 3 * _RANK, "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "x", "bias": "none", **settings,
        }))  # fmt: skip
    return path / "one-by-one", path / "at-once"


@pytest.fixture(scope="module", params=list(_KINDS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Pair]:
    kind = request.param
    work: Path = tmp_path_factory.mktemp(kind)
    models = tuple(make_model(kind, seed, work / f"weights{seed}") for seed in (1, 2))
    adapters: tuple[tuple[Path, Path], ...] = ()
    fresh: list[str] = []
    if kind == "experts":
        adapters = tuple(make_adapters(work / f"adapter{seed}", seed) for seed in (3, 4))
        fresh = ["--lora-modules", *(f"disk{i}={path}" for i, (path, _) in enumerate(adapters))]
    args = [*VLLM, *_KINDS[kind][2]]
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
        for each in pools:  # they have started beside others, which may take their time
            each.wait_ready(1, 60)
        yield Pair(kind, staged, in_place, models, adapters)
    finally:
        for each in pools:
            each.stop()


def test_each_answers_as_the_other_one_did(pair: Pair, note: Note) -> None:
    """Three times: by vLLM's reload, then by what that has taught."""
    started = answers(pair.staged.url, BASE), answers(pair.in_place.url, BASE)
    assert not answers_alike(pair.kind, *started)
    for pushed, order in ((pair.staged, (1, 0, 1)), (pair.in_place, (0, 1, 0))):
        own, seconds, of_other = order[1], [], []
        with pushed.publisher(bucket_bytes=4 * 2**20) as publisher:  # several a push
            for number in order:
                report = publisher.push_base(pair.models[number]).report
                seconds.append(report.seconds)
                found = answers(pushed.url, BASE)
                if number == own:
                    assert found == started[own], report
                else:
                    of_other.append(found)
                    assert answers_alike(pair.kind, found, started[number]), report
        assert of_other[0] == of_other[1]
        exact = of_other[0] == started[order[0]]
        how = pushed.how()
        took = ", ".join(f"{each * 1e3:.0f}" for each in seconds)
        where = "staged" if pushed is pair.staged else "in place"
        note(pair.kind, f"3 bases, {where}", f"{_ROUNDED[exact]}; {how}; {took} ms")
        if pair.kind in _PROCESSED and not DRY:
            assert f"and {_PROCESSED[pair.kind]} layers processed" in pushed.log()


@pytest.mark.parametrize("pair", ["experts"], indirect=True)
@pytest.mark.parametrize("at_once", [False, True])
def test_adapters_of_experts_answer_as_from_disk(pair: Pair, at_once: bool, note: Note) -> None:
    """Beside a base that was pushed; and two versions in one batch, which may round otherwise."""
    for pushed in (pair.staged, pair.in_place):
        with pushed.publisher() as publisher:
            publisher.push_base(pair.models[1])
    pushed, seconds = pair.staged, []
    expected = [answers(pair.in_place.url, f"disk{i}") for i in range(2)]
    first: list[Answers] = []
    with pushed.publisher() as publisher:
        for _ in range(3):
            results = [publisher.push_adapter(each[at_once], "math") for each in pair.adapters]
            seconds += [each.report.seconds for each in results]
            names = [str(each.version) for each in results]
            pushed_ones = [answers(pushed.url, name) for name in names]
            for found_one, wanted_one in zip(pushed_ones, expected, strict=True):
                assert answers_alike(pair.kind, found_one, wanted_one)
            first = first or pushed_ones
            assert pushed_ones == first
    assert not answers_alike(pair.kind, *first)
    assert not answers_alike(pair.kind, first[1], answers(pushed.url, BASE))
    with ThreadPoolExecutor() as pool:
        batched = list(pool.map(lambda name: answers(pushed.url, name), names))
    for version, right in zip(batched, expected, strict=True):
        for (_, got), (_, wanted) in zip(version, right, strict=True):
            assert abs(got[0] - wanted[0]) < 0.05  # the first token has no history of others
    exact = first == expected
    took = ", ".join(f"{each * 1e3:.0f}" for each in seconds)
    given = "all at once" if at_once else "one by one"
    note(
        pair.kind, f"2 adapters of attention and experts, {given}", f"{_ROUNDED[exact]}; {took} ms"
    )
    if not DRY:
        assert "is loaded by vLLM itself" not in pushed.log()
        assert "are loaded by vLLM itself" not in pushed.log()
