"""Models that see: bases, merged bases and adapters, each asked about images that were seen before.

What an encoder made of an image is of one base; the encoder's modules can carry a LoRA only where
vLLM is told so.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import httpx
import pytest
import torch
import transformers
from safetensors.torch import save_file

from rollout_side.engine import AliasRefusals, GenerateOrder, PromptImage
from tests.e2e.engine_process import LORA_ARGS, EngineProcess
from tests.e2e.generations import joined
from tests.models import load_peft, make_adapter, rename_modules
from tests.vision_models import (
    IMAGE_SIZE,
    IMAGE_TOKEN,
    IMAGE_TOKENS,
    KINDS,
    VisionReferee,
    make_vision_model,
    random_image,
)
from trainer_side.params.choose import open_model
from trainer_side.params.merged import MergedParams
from trainer_side.ranks.ranks import OneRank
from trainer_side.sources.adapter_source import adapter_of_model
from trainer_side.sources.file_source import adapter_of_dir
from trainer_side.sources.module_source import ModuleSource
from trainer_side.sources.source import CastRule
from weft_rl.contract.adapter import check_adapter
from weft_rl.contract.capabilities import RunningRequests
from weft_rl.contract.errors import InvalidAdapterError, InvalidRequestError, LoadFailedError
from weft_rl.contract.names import STARTED_WITH
from weft_rl.contract.sampling import Sampling
from weft_rl.contract.tensors import DataType, TensorMeta, check_base

KEEP = CastRule(enabled=False)
#: vLLM against Hugging Face in fp32.
BOUND = 5e-5
NUM_TOKENS = 4
#: End of a prompt: with it, and an image, a block of the KV cache is full, and found again.
TAIL = " w30" * 140
CHOICES: tuple[RunningRequests, ...] = get_args(RunningRequests)
#: What modules of the language model begin with in files and in vLLM, where a trainer's memory has
#: ``KINDS``' name.
NAMES = {
    "qwen2_5_vl": ("model.", "language_model.model."),
    "qwen3_vl": ("model.language_model.", "language_model.model."),
    "idefics3": ("model.text_model.", "model.text_model."),
    "llava": ("language_model.model.", "language_model.model."),
    "gemma3": ("language_model.model.", "language_model.model."),
}
#: Modules that see, of kinds that are started with vLLM's option that lets an encoder carry a LoRA.
#: (With it LLaVA's engine ends at the first image with an adapter, on a CPU.)
TOWERS = {"qwen3_vl": r".*visual\.blocks\..*(qkv|proj|linear_fc1|linear_fc2)"}

Answer = tuple[list[int], list[float]]


@dataclass(frozen=True)
class Case:
    """A running engine, and what it is asked about."""

    kind: str
    engine: EngineProcess
    base: Path
    """Served at the start ..."""
    other: Path
    """... another one ..."""
    adapter: Path
    """... and an adapter of the language model, on the first."""
    referee: VisionReferee


#: Kinds that `make test` runs; tests/unit/docs/test_models.py reads it.
IN_CI = ("qwen2_5_vl", "qwen3_vl")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=() if kind in IN_CI else pytest.mark.matrix)
        for kind in (*IN_CI, *(kind for kind in NAMES if kind not in IN_CI))
    ],
)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    kind, root = request.param, tmp_path_factory.mktemp("vision")
    base, other = (make_vision_model(kind, root / f"{seed}", seed=seed) for seed in (0, 1))
    adapter = make_adapter(
        base, root / "adapter", seed=1, target_modules=rf".*{KINDS[kind].language}\..*_proj"
    )
    args = [*LORA_ARGS, *(("--enable-tower-connector-lora",) if kind in TOWERS else ())]
    # What becomes of running requests can be chosen anew where they can be kept.
    engine = EngineProcess(base, tuple(args), running_requests="keep").start()
    yield Case(kind, engine, base, other, adapter, VisionReferee(kind))
    engine.stop()


def as_png(seed: int) -> bytes:
    file = io.BytesIO()
    random_image(seed).save(file, "PNG")
    return file.getvalue()


def ask(case: Case, seed: int, model: str = "tiny") -> Answer:
    """Greedy tokens about an image, with their log-probabilities, over HTTP."""
    response = post(case, seed, model)
    assert response.status_code == 200, response.text
    got = response.json()["choices"][0]["logprobs"]["content"]
    return [int(e["token"].removeprefix("token_id:")) for e in got], [e["logprob"] for e in got]


def post(
    case: Case, seed: int, model: str = "tiny", timeout: float = 60.0, **settings: object
) -> httpx.Response:
    """Ask about an image over HTTP."""
    url = f"data:image/png;base64,{base64.b64encode(as_png(seed)).decode()}"
    content = [
        {"type": "text", "text": "w20 w21"},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": f"w30{TAIL}"},
    ]
    return case.engine.http.post(
        "/v1/chat/completions",
        timeout=timeout,
        json={
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "logprobs": True,
            "ignore_eos": True,
            "return_tokens_as_token_ids": True,
            **settings,
        },
    )


def ask_for_tokens(case: Case, seed: int, prompt: str | list[int], form: str) -> Answer:
    """The same by way of GenerateService's order."""
    pixels = PromptImage(height=IMAGE_SIZE, width=IMAGE_SIZE, rgb=random_image(seed).tobytes())
    order = GenerateOrder(
        prompt=prompt,
        images=[PromptImage(file=as_png(seed)) if form == "PNG" else pixels],
        sampling=Sampling(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True),
    )
    number, first = case.engine.call("generations.begin", order)
    chunks, error = case.engine.call("generations.read", number)
    assert error is None
    assert case.engine.call("generations.told_prompt").count(IMAGE_TOKEN) >= IMAGE_TOKENS
    (sample,) = joined([*first, *chunks], 1)
    return sample.tokens, sample.logprobs


def off(case: Case, model: Path, got: Answer, seed: int, adapter: Path | None = None) -> float:
    """Return how far an answer is from transformers', or PEFT's, in nats."""
    tokens, logprobs = got
    _, want = case.referee.logprobs(model, random_image(seed), tokens, adapter, TAIL)
    return max(abs(a - b) for a, b in zip(logprobs, want, strict=True))


def assert_sees(case: Case, model: Path, adapter: Path | None = None) -> None:
    """Hold answers about images, which were all seen before, over both ways."""
    asked = KINDS[case.kind].prompt_with_image + TAIL
    for seed, got in ((1, ask(case, 1)), (2, ask_for_tokens(case, 2, asked, "PNG"))):
        assert off(case, model, got, seed, adapter) <= BOUND, f"{model.name}, image {seed}"


def test_a_seen_image_is_seen_anew_by_each_base(case: Case) -> None:
    """In each choice of what becomes of running requests."""
    assert_sees(case, case.base)
    for number, choice in enumerate(CHOICES, start=1):
        case.engine.call("generations.choose", choice)
        case.engine.push_base(f"base@{number}", case.other)
        assert_sees(case, case.other)
        case.engine.call("apply_retained", STARTED_WITH)
        assert_sees(case, case.base)


def test_an_image_of_a_request_that_ended_early_is_seen_in_the_next(case: Case) -> None:
    """vLLM counts an image as sent once it is prepared, whatever becomes of its request."""
    case.engine.call("refuse_aliases", AliasRefusals(every="the pool serves base@7"))
    for model in ("tiny", "base"):
        refused = post(case, 11, model)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert refused.headers["weft-reason"] == "REFUSING"
    case.engine.call("refuse_aliases", AliasRefusals())
    assert off(case, case.base, ask(case, 11), 11) <= BOUND
    assert post(case, 12, "base@77").status_code == 404
    assert off(case, case.base, ask(case, 12), 12) <= BOUND
    # Refused by vLLM itself, behind the preparation of the image.
    for seed, settings in enumerate(
        ({"max_tokens": 10**6}, {"logit_bias": {"9999": 1.0}}, {"top_logprobs": 99}), start=13
    ):
        assert post(case, seed, **settings).status_code == 400, settings
        assert off(case, case.base, ask(case, seed), seed) <= BOUND
    for seed in (21, 22, 23):  # a client that has gone
        with contextlib.suppress(httpx.TimeoutException):
            post(case, seed, timeout=0.01)
        assert off(case, case.base, ask(case, seed), seed) <= BOUND


def test_the_trial_at_the_start_left_no_count(case: Case) -> None:
    assert case.engine.facts["counted"] == []


def test_a_prompt_of_token_ids_takes_pixels(case: Case) -> None:
    """One placeholder for each image; the answer tells all tokens that the model makes of it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(case.base)
    ids = tokenizer(KINDS[case.kind].prompt_with_image + TAIL).input_ids
    assert ids.count(IMAGE_TOKEN) <= 1
    assert off(case, case.base, ask_for_tokens(case, 3, ids, "pixels"), 3) <= BOUND


def test_an_adapter_has_the_names_of_memory_files_or_vllm(case: Case, tmp_path: Path) -> None:
    facts = case.engine.facts
    opened = open_model(load_peft(case.base, case.adapter), OneRank())
    live = adapter_of_model(opened, "default", KEEP, check_base=True)
    assert live.base is not None
    live.base.check(facts["reference"])
    check_adapter(live.config_json, live.source.metas, facts["reference"], facts["capabilities"])
    memory = f"model.{KINDS[case.kind].language}."
    for number, prefix in enumerate((memory, *NAMES[case.kind]), start=1):
        renamed = rename_modules(case.adapter, tmp_path / f"{number}", memory, prefix)
        read = adapter_of_dir(renamed, KEEP)
        config, metas = read.config_json, read.source.metas
        check_adapter(config, metas, facts["reference"], facts["capabilities"])
        case.engine.push_adapter(f"math@{number}", renamed)
        got = ask(case, 1, f"math@{number}")
        assert off(case, case.base, got, 1, case.adapter) <= BOUND
        assert off(case, case.base, got, 1) > 10 * BOUND


def test_a_merged_adapter_is_a_base_of_its_own(case: Case, tmp_path: Path) -> None:
    """Return tensors and names as ``push_merged`` makes them."""
    opened = open_model(load_peft(case.base, case.adapter), OneRank())
    params = MergedParams(opened.module, opened.params, "default")
    source = ModuleSource(opened.module.get_base_model(), params, KEEP)
    check_base(source.metas, case.engine.facts["reference"])
    tensors = {meta.name: torch.empty(meta.shape) for meta in source.metas}
    source.read(0, len(tensors), [*tensors.values()])
    save_file(tensors, tmp_path / "model.safetensors")
    case.engine.push_base("base@9", tmp_path)
    assert_sees(case, case.base, case.adapter)
    case.engine.call("apply_retained", STARTED_WITH)


def test_a_lora_of_the_encoder_is_served_or_refused_by_name(case: Case, tmp_path: Path) -> None:
    facts = case.engine.facts
    if case.kind in TOWERS:
        assert facts["capabilities"].lora_unapplied == ()
        for number in (1, 2):  # both have seen the image, and so has the base
            targets = TOWERS[case.kind]
            folder = tmp_path / f"{number}"
            adapter = make_adapter(case.base, folder, seed=number, target_modules=targets)
            read = adapter_of_dir(adapter, KEEP)
            config_json, metas = read.config_json, read.source.metas
            check_adapter(config_json, metas, facts["reference"], facts["capabilities"])
            case.engine.push_adapter(f"sees@{number}", adapter)
            got = ask(case, 1, f"sees@{number}")
            assert off(case, case.base, got, 1, adapter) <= BOUND
            assert off(case, case.base, got, 1) > 10 * BOUND
        assert_sees(case, case.base)
        return
    begins = facts["capabilities"].lora_unapplied
    module = next(m for m in facts["reference"].modules if m.name.startswith(begins))
    rows, columns = module.shape
    for number, name in enumerate(module.names):
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [name]}
        shapes = {"lora_A": (4, columns), "lora_B": (rows, 4)}
        tensors = {f"base_model.model.{name}.{side}.weight": torch.full(shape, 0.1)
                   for side, shape in shapes.items()}  # fmt: skip
        metas = [TensorMeta(n, DataType.FLOAT32, tuple(t.shape)) for n, t in tensors.items()]
        with pytest.raises(InvalidAdapterError, match=re.escape(name)):
            check_adapter(json.dumps(config), metas, facts["reference"], facts["capabilities"])
        folder = tmp_path / f"{number}"
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps({**config, "bias": "none"}))
        with pytest.raises(LoadFailedError, match="vLLM applies no LoRA to"):
            case.engine.push_adapter(f"refused@{number + 1}", folder)


@pytest.mark.parametrize(
    ("prompt", "images"),
    [
        ("w20 w21", [PromptImage(height=8, width=8, rgb=bytes(192))]),
        ("IMAGE", [PromptImage(height=8, width=9, rgb=bytes(192))]),
        ("IMAGE", [PromptImage(file=b"%PDF-1.7")]),
    ],
    ids=["without a placeholder", "of other bytes", "of another format"],
)
def test_images_that_cannot_be_are_refused(
    case: Case, prompt: str, images: list[PromptImage]
) -> None:
    asked = prompt.replace("IMAGE", KINDS[case.kind].prompt_with_image)
    with pytest.raises(InvalidRequestError):
        case.engine.call("generations.begin", GenerateOrder(prompt=asked, images=images))
