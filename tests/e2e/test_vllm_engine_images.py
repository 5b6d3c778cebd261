"""A model that sees: what its encoder made of an image is of one base."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from rollout_side.engine import GenerateOrder, PromptImage
from tests.e2e.engine_process import LORA_ARGS, EngineProcess
from tests.e2e.generations import joined
from tests.models import IMAGE_SIZE, IMAGE_TOKEN, IMAGE_TOKENS, make_vision_model
from weft_rl.contract.adapter import check_adapter
from weft_rl.contract.errors import InvalidAdapterError, InvalidRequestError, LoadFailedError
from weft_rl.contract.names import STARTED_WITH
from weft_rl.contract.sampling import Sampling
from weft_rl.contract.tensors import DataType, Reference, TensorMeta

#: vLLM against Hugging Face in fp32.
BOUND = 5e-5
NUM_TOKENS = 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base and another one."""
    root = tmp_path_factory.mktemp("vision")
    return make_vision_model(root / "base", seed=0), make_vision_model(root / "other", seed=1)


@pytest.fixture(scope="module")
def engine(models: tuple[Path, Path]) -> Iterator[EngineProcess]:
    # What becomes of running requests can be chosen anew where they can be kept.
    engine = EngineProcess(models[0], tuple(LORA_ARGS), running_requests="keep").start()
    yield engine
    engine.stop()


def image(seed: int) -> Image.Image:
    pixels = torch.randint(
        0, 256, (IMAGE_SIZE, IMAGE_SIZE, 3), generator=torch.Generator().manual_seed(seed)
    )
    return Image.fromarray(pixels.to(torch.uint8).numpy())


def ask(engine: EngineProcess, seed: int) -> tuple[list[int], list[float]]:
    """Greedy tokens about an image, with their log-probabilities, over HTTP."""
    file = io.BytesIO()
    image(seed).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [
        {"type": "text", "text": "w20 w21"},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "w30"},
    ]
    response = engine.http.post(
        "/v1/chat/completions",
        json={
            "model": "tiny",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "logprobs": True,
            "ignore_eos": True,
            "return_tokens_as_token_ids": True,
        },
    )
    assert response.status_code == 200, response.text
    got = response.json()["choices"][0]["logprobs"]["content"]
    return [int(e["token"].removeprefix("token_id:")) for e in got], [e["logprob"] for e in got]


def ask_for_tokens(
    engine: EngineProcess, seed: int, prompt: str | list[int], form: str
) -> tuple[list[int], list[float]]:
    """The same by way of GenerateService's order."""
    file = io.BytesIO()
    image(seed).save(file, "PNG")
    pixels = PromptImage(height=IMAGE_SIZE, width=IMAGE_SIZE, rgb=image(seed).tobytes())
    order = GenerateOrder(
        prompt=prompt,
        images=[PromptImage(file=file.getvalue()) if form == "PNG" else pixels],
        sampling=Sampling(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True),
    )
    number, first = engine.call("generations.begin", order)
    chunks, error = engine.call("generations.read", number)
    assert error is None
    assert engine.call("generations.told_prompt").count(IMAGE_TOKEN) == IMAGE_TOKENS
    (sample,) = joined([*first, *chunks], 1)
    return sample.tokens, sample.logprobs


def assert_of(model: Path, got: tuple[list[int], list[float]], seed: int) -> None:
    """Hold an answer against transformers."""
    import transformers

    tokens, logprobs = got
    processor = transformers.AutoProcessor.from_pretrained(model)
    inputs = processor(images=image(seed), text="w20 w21 <image> w30", return_tensors="pt")
    assert (inputs.input_ids == IMAGE_TOKEN).sum() == IMAGE_TOKENS
    inputs["input_ids"] = torch.cat([inputs.input_ids, torch.tensor([tokens])], dim=1)
    inputs["attention_mask"] = torch.ones_like(inputs.input_ids)
    loaded = transformers.Idefics3ForConditionalGeneration.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        logits = loaded(**inputs).logits[0]
    want = torch.log_softmax(logits.float(), -1)[-len(tokens) - 1 : -1]
    off = max(abs(float(row[t]) - p) for row, t, p in zip(want, tokens, logprobs, strict=True))
    assert off <= BOUND, f"{off} nats from the answer of {model.name}"


def test_a_seen_image_is_seen_anew_by_each_base(
    engine: EngineProcess, models: tuple[Path, Path]
) -> None:
    base, other = models
    assert_of(base, ask(engine, seed=1), seed=1)
    asked = "w20 w21 <image> w30"
    assert_of(base, ask_for_tokens(engine, 2, asked, "PNG"), seed=2)
    engine.push_base("base@1", other)
    assert_of(other, ask(engine, seed=1), seed=1)
    assert_of(other, ask_for_tokens(engine, 2, asked, "PNG"), seed=2)
    engine.call("generations.choose", "recompute")
    engine.call("apply_retained", STARTED_WITH)
    assert_of(base, ask(engine, seed=1), seed=1)
    engine.call("generations.choose", "abort")
    engine.push_base("base@2", other)
    assert_of(other, ask(engine, seed=1), seed=1)


def test_a_prompt_of_token_ids_takes_pixels(
    engine: EngineProcess, models: tuple[Path, Path]
) -> None:
    """One placeholder for each image; the answer tells all tokens that the model makes of it."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(models[1])
    ids = tokenizer("w20 w21 <image> w30").input_ids
    assert ids.count(IMAGE_TOKEN) == 1
    served = models[1]  # since the pushes above
    assert_of(served, ask_for_tokens(engine, 3, ids, "pixels"), seed=3)


@pytest.mark.parametrize(
    ("prompt", "images"),
    [
        ("w20 w21", [PromptImage(height=8, width=8, rgb=bytes(192))]),
        ("<image>", [PromptImage(height=8, width=9, rgb=bytes(192))]),
        ("<image>", [PromptImage(file=b"%PDF-1.7")]),
    ],
    ids=["without a placeholder", "of other bytes", "of another format"],
)
def test_images_that_cannot_be_are_refused(
    engine: EngineProcess, prompt: str, images: list[PromptImage]
) -> None:
    with pytest.raises(InvalidRequestError):
        engine.call("generations.begin", GenerateOrder(prompt=prompt, images=images))


TEXT = "model.text_model.layers.0.self_attn.q_proj"
VISION = "model.vision_model.encoder.layers.0.self_attn.q_proj"


def make_lora(path: Path, modules: list[str], reference: Reference) -> Path:
    """Save a LoRA of these modules, as PEFT does."""
    path.mkdir()
    tensors = {}
    for module in modules:
        out_features, in_features = reference.by_name[f"{module}.weight"].shape
        for side, shape in (("A", (4, in_features)), ("B", (out_features, 4))):
            tensors[f"base_model.model.{module}.lora_{side}.weight"] = torch.full(shape, 0.1)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"}
    config["target_modules"] = modules  # type: ignore[assignment]
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("modules", [[TEXT], [TEXT, VISION], [VISION]])
def test_a_lora_is_taken_where_vllm_applies_it(
    engine: EngineProcess, tmp_path: Path, modules: list[str]
) -> None:
    """The encoder's modules are called as those of the language model."""
    capabilities, reference = engine.facts["capabilities"], engine.facts["reference"]
    assert capabilities.lora_unapplied == ("model.vision_model",)
    assert {"q_proj", "down_proj"} < set(capabilities.lora_modules)
    adapter = make_lora(tmp_path / "adapter", modules, reference)
    metas = [
        TensorMeta(name, DataType.FLOAT32, tuple(tensor.shape))
        for name, tensor in load_file(adapter / "adapter_model.safetensors").items()
    ]
    config = (adapter / "adapter_config.json").read_text()
    name = f"of-{len(modules)}"
    if VISION not in modules:
        check_adapter(config, metas, reference, capabilities)
        engine.push_adapter(f"{name}@1", adapter)
        return
    with pytest.raises(InvalidAdapterError, match=re.escape(VISION)):
        check_adapter(config, metas, reference, capabilities)
    with pytest.raises(LoadFailedError, match="vLLM applies no LoRA to"):
        engine.push_adapter(f"{name}@2", adapter)
