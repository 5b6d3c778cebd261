"""A model that sees, pushed between GPUs: seen images answer as on a fresh engine, bit by bit.

The trainer is this process, on GPU 0, which also has the fresh engine; replicas have GPU 1, or
share the one that there is. Everything is bfloat16, as it is used.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from benchmarks.gpu_pool import GpuPool
from tests.gpu.conftest import Note
from tests.gpu.test_pushes import DEVICE, DRY, LORA, NUM_GPUS, VLLM
from tests.models import load_hf, make_adapter
from tests.vision_models import make_vision_model, random_image
from trainer_side import Publisher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not NUM_GPUS and not DRY, reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(400),
]
KIND = "qwen3_vl"
ARGS = (*VLLM, *LORA, "--enable-tower-connector-lora")
#: Modules of adapters: of the language model, and of the encoder, too.
TARGETS = {
    "reads": r".*language_model\..*_proj",
    "sees": r".*(language_model\..*_proj|visual\.blocks\..*(qkv|proj|linear_fc1|linear_fc2))",
}


@dataclass
class Place:
    """A fresh engine, replicas that began with other weights, and what is pushed."""

    fresh: str
    pools: dict[str, GpuPool]
    urls: dict[str, str]
    weights: Path
    other: Path
    adapters: dict[str, Path]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    work = tmp_path_factory.mktemp("vision")
    weights, other, began_with = (
        make_vision_model(KIND, work / name, seed=seed, dtype=torch.bfloat16)
        for seed, name in enumerate(("weights", "other", "began"))
    )
    adapters = {
        name: make_adapter(weights, work / name, seed=3, target_modules=targets)
        for name, targets in TARGETS.items()
    }
    pools = {name: GpuPool(work / f"pool-{name}") for name in ("fresh", "staged", "in-place")}
    try:
        for name, pool in pools.items():
            pool.work.mkdir()
            pool.start()
            if name == "fresh":
                loras = [f"{adapter}={path}" for adapter, path in adapters.items()]
                pool.launch(name, "0", weights, *ARGS, "--lora-modules", *loras)
            else:
                gpu = "1" if NUM_GPUS > 1 else "0"
                how = ("--staging", "in-place") if name == "in-place" else ()
                pool.launch(name, gpu, began_with, *ARGS, options=how)
        urls = {name: pool.url(name) for name, pool in pools.items()}
        yield Place(urls["fresh"], pools, urls, weights, other, adapters)
    finally:
        for pool in pools.values():
            pool.stop()


def answers(url: str, model: str) -> list[Any]:
    """Greedy tokens about two images, and their log-probabilities, one image at a time."""
    found = []
    for seed in (1, 2):
        file = io.BytesIO()
        random_image(seed).save(file, "PNG")
        image = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        content = [
            {"type": "text", "text": "w20 w21"},
            {"type": "image_url", "image_url": {"url": image}},
            {"type": "text", "text": "w30"},
        ]
        body = {"model": model, "messages": [{"role": "user", "content": content}],
                "max_tokens": 12, "temperature": 0.0, "logprobs": True, "ignore_eos": True,
                "return_tokens_as_token_ids": True}  # fmt: skip
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        logprobs = answer.json()["choices"][0]["logprobs"]["content"]
        found.append([(each["token"], each["logprob"]) for each in logprobs])
    return found


@pytest.mark.parametrize("way", ["staged", "in-place"])
def test_a_seen_image_answers_as_on_a_fresh_engine(place: Place, way: str, note: Note) -> None:
    expected, url = answers(place.fresh, "base-model"), place.urls[way]
    assert answers(place.fresh, "base-model") == expected
    weights, other = (load_hf(path).bfloat16().to(DEVICE) for path in (place.weights, place.other))
    target = place.pools[way].target
    with Publisher(target, trainer_id="test", progress=None, timeout_seconds=90) as publisher:
        for _ in range(2):
            assert answers(url, "base-model") != expected
            publisher.push_base(weights)
            assert answers(url, "base-model") == expected
            publisher.push_base(other)
        publisher.push_base(weights)
        for name, adapter in place.adapters.items():
            publisher.push_adapter(adapter, name)
            assert answers(url, name) == answers(place.fresh, name) != expected
        publisher.push_base(weights)
        assert answers(url, "sees") == answers(place.fresh, "sees")
    note("Qwen3-VL", f"5 bases and 2 adapters, {way}", "bitwise a fresh engine's, seen images")
