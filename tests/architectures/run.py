"""One architecture through the whole path: trainer, coordinator, real vLLM, transformers beside.

A replica is started from random weights. Others are pushed, then the first ones again, then an
adapter, then the same merged. Each answer is compared with transformers or PEFT.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests import models, vision_models
from tests.architectures.specs import Architecture
from tests.e2e.replicas import LORA_ARGS, MODEL_NAME, running_coordinator, running_replicas
from tests.models import LAYERS
from trainer_side import ImagePrompt, Publisher, RolloutClient, Sampling, WeftError
from weft_rl.cli.demo.main import complete

#: Of images that a model with an encoder is asked about, at every step the same.
IMAGE_SEEDS = (1, 2)
#: What is done, in the order that it is done in.
STEPS = ("start", "base", "back", "adapter", "merged")


def run(architecture: Architecture) -> dict[str, str]:
    """Take an architecture through all steps.

    Returns:
        For each step "equal" (bitwise), a difference in nats ("3e-06"), or the error.
    """
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        work = Path(folder)
        fresh, other = (_save(architecture, work / name, i) for i, name in enumerate(("a", "b")))
        targets = architecture.adapter_targets
        adapter = models.make_adapter(fresh, work / "adapter", seed=1, target_modules=targets)
        coordinator = stack.enter_context(running_coordinator(work))
        args = [*(LORA_ARGS if architecture.has_adapters else ()), "--dtype", architecture.dtype]
        with _recorded(found, "start"):
            if architecture.has_drafts:
                _add_drafts(fresh)
            replicas = running_replicas(work, coordinator.target, [fresh], *args)
            (url,) = stack.enter_context(replicas)
        if "start" in found:
            return found
        publisher = stack.enter_context(
            Publisher(coordinator.target, trainer_id="models", timeout_seconds=120)
        )
        client = stack.enter_context(RolloutClient(coordinator.target, timeout_seconds=120))
        check = _Checks(url, client, architecture, found)
        when_fresh: list[Any] = []
        with _recorded(found, "start"):
            when_fresh = check.compare("start", fresh)
        with _recorded(found, "base"):
            publisher.push_base(models.load_hf(other))
            check.compare("base", other)
        with _recorded(found, "back"):
            publisher.push_base(models.load_hf(fresh))
            answers = check.compare("back", fresh)
            if answers == when_fresh:
                found["back"] = "equal"
        if architecture.has_adapters:
            with _recorded(found, "adapter"):
                publisher.push_adapter(models.load_peft(fresh, adapter), "math")
                check.compare("adapter", fresh, adapter, model="math")
        with _recorded(found, "merged"):
            publisher.push_merged(models.load_peft(fresh, adapter))
            check.compare("merged", fresh, adapter)
    return found


class _Checks:
    """Answers of one replica, compared with transformers'."""

    def __init__(
        self, url: str, client: RolloutClient, architecture: Architecture, found: dict[str, str]
    ) -> None:
        self._url, self._client, self._found = url, client, found
        self._kind, self._prompts = architecture.vision, architecture.prompts
        self._referee = models.Referee()
        self._seeing = vision_models.VisionReferee(self._kind) if self._kind else None

    def compare(
        self, step: str, base: Path, adapter: Path | None = None, model: str = MODEL_NAME
    ) -> list[Any]:
        """Ask for all prompts; record how far the answers are off, and return them."""
        answers = [complete(self._url, model, prompt) for prompt in self._prompts]
        off = 0.0
        for answer, prompt in zip(answers, self._prompts, strict=True):
            want = self._referee.logprobs(base, prompt, answer.tokens, adapter)
            pairs = zip(answer.log_probs, want, strict=True)
            off = max(off, *(abs(ours - theirs) for ours, theirs in pairs))
        about_images, off_images = self._ask_about_images(base, adapter, model)
        self._found[step] = f"{max(off, off_images):.0e}"
        return [*((answer.tokens, answer.log_probs) for answer in answers), *about_images]

    def _ask_about_images(
        self, base: Path, adapter: Path | None, model: str
    ) -> tuple[list[Any], float]:
        if self._seeing is None:
            return [], 0.0
        answers, off = [], 0.0
        for image in (vision_models.random_image(seed) for seed in IMAGE_SEEDS):
            (group,) = self._client.generate(
                [ImagePrompt(vision_models.KINDS[self._kind].prompt_with_image, [image])],
                model="base" if model == MODEL_NAME else model,
                sampling=Sampling(temperature=0, max_tokens=12, ignore_eos=True),
            )
            (sample,) = group.samples
            tokens, ours = sample.token_ids.tolist(), sample.logprobs.tolist()
            told, want = self._seeing.logprobs(base, image, tokens, adapter)
            if told != group.prompt_token_ids:
                raise AssertionError(f"the prompt is {told}, not {group.prompt_token_ids}")
            off = max(off, *(abs(a - b) for a, b in zip(ours, want, strict=True)))
            answers.append((tokens, ours))
        return answers, off


@contextlib.contextmanager
def _recorded(found: dict[str, str], step: str) -> Iterator[None]:
    """Record a failure inside the ``with`` as what became of a step."""
    try:
        yield
    except WeftError as error:
        is_ours = "ended early" not in error.message
        found[step] = f"{error.reason}: {error.message}" if is_ours else "vLLM does not start it"
    except Exception as error:
        found[step] = f"{type(error).__name__}: {error}"


def _save(architecture: Architecture, path: Path, seed: int) -> Path:
    if architecture.vision:
        dtype = getattr(torch, architecture.dtype)
        return vision_models.make_vision_model(architecture.vision, path, seed=seed, dtype=dtype)
    config = architecture.make_config()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    models.draw_base(model, seed)
    if model.config.tie_word_embeddings:  # else each token is followed by itself, surely
        model.get_input_embeddings().weight.data.mul_(0.2)
    model.save_pretrained(path)
    models.make_tokenizer(path)
    return path


def _add_drafts(path: Path) -> None:
    """Add the tensors of a layer for multi-token prediction to a checkpoint's file."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    last, more = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    drafts = {
        name.replace(last, more): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    width = tensors["model.norm.weight"].numel()
    for name in ("enorm", "hnorm", "shared_head.norm"):
        drafts[f"{more}{name}.weight"] = torch.ones(width)
    drafts[f"{more}eh_proj.weight"] = torch.ones(width, 2 * width)
    save_file({**tensors, **drafts}, file, metadata={"format": "pt"})


def is_fine(result: str, bound: float) -> bool:
    """Return whether a step's result is an answer within ``Architecture.bound``."""
    if result == "equal":
        return True
    try:
        return float(result) <= bound
    except ValueError:
        return False
