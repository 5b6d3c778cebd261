"""A replica on the trainer's own GPU sleeps: what it answers once it is awake is what it answered
before, bit for bit, or what was pushed meanwhile. At level 2 too, where vLLM forgets the weights
and the slots of adapters. One GPU is enough; engines start one after another.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
import torch

from benchmarks.gpu_pool import QWEN3_8B, GpuPool, write_config
from tests.gpu.conftest import Note
from tests.gpu.test_pushes import (
    DEVICE,
    DRY,
    LORA,
    VLLM,
    Pushed,
    answers,
    config_of,
    make_model,
    save,
)
from tests.models import draw_adapter
from trainer_side import Publisher
from weft_rl.contract.errors import CapacityError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.device_count() and not DRY, reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(400),
]
_CACHE = ("--kv-cache-memory-bytes", "8000000000")
# Far below what that takes.
_FREED_BYTES = 4 * 2**30
_BASE = "base-model"

Answers = list[tuple[list[str], list[float]]]
Level = Literal[1, 2]


@dataclass
class Place:
    """A replica on the trainer's GPU, and what it answers awake."""

    pushed: Pushed
    staging: str
    publisher: Publisher
    adapter: Path
    wrapped: Any
    """The model that the adapter is of."""
    one: Any
    other: Any
    of_one: Answers
    of_other: Answers
    of_adapter: Answers
    of_merged: Answers

    def sleep(self, level: Level) -> int:
        """Have it sleep; returns the bytes that are free since."""
        before = _free_bytes()
        self._asleep = self.publisher.rollouts_asleep(level=level, when_running="abort")
        slept = self._asleep.__enter__()
        assert slept == (() if DRY else ("pushed",))
        assert self.refuses() is not DRY
        return _free_bytes() - before

    def wake(self) -> None:
        """Have it awake, and routed to."""
        self.end_sleep()
        self.pushed.pool.wait_ready(1, 30)

    def end_sleep(self) -> None:
        """Have it awake; without a copy of its weights it is not routed to yet."""
        self._asleep.__exit__(None, None, None)

    def refuses(self) -> bool:
        """Whether it takes no requests."""
        body = {"model": _BASE, "prompt": [5], "max_tokens": 1}
        answer = httpx.post(f"{self.pushed.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code in (200, 503), answer.text
        return answer.status_code == 503

    def answers(self, model: str = _BASE) -> Answers:
        """Of one model, now."""
        return answers(self.pushed.url, model)

    def has_no_copy(self, level: Level) -> bool:
        """Whether a sleep leaves it nothing to load the last push from."""
        return level == 2 and self.staging == "in-place" and not DRY


def _free_bytes() -> int:
    return 0 if DRY else torch.cuda.mem_get_info(0)[0]


# Two processes on one GPU: NCCL refuses them, and bytes go over gloo, or inside that GPU.
@pytest.fixture(scope="module", params=[("auto", "gloo"), ("in-place", "auto")], ids=str)
def place(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Place]:
    """A replica on the trainer's GPU, which is told to be able to sleep."""
    from peft import LoraConfig, get_peft_model

    staging, backend = request.param
    work: Path = tmp_path_factory.mktemp(f"sleep-{staging}")
    pool = GpuPool(work).start()
    try:
        options = ["--staging", staging, "--log-level", "debug"]
        options += [] if DRY else ["--enable-sleep"]  # which a CPU has not
        model = save(make_model("dense", 0), work / "other")
        pool.launch("pushed", "0", model, *VLLM, *_CACHE, *LORA, options=options)
        settings = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear",
                              exclude_modules=["lm_head"], task_type="CAUSAL_LM")  # fmt: skip
        wrapped = get_peft_model(make_model("dense", 1), settings)
        draw_adapter(wrapped, 3)
        wrapped.to(torch.bfloat16).save_pretrained(work / "adapter")
        pushed = Pushed(pool, pool.url("pushed"))
        with pushed.publisher(backend=backend) as publisher:
            one, other = make_model("dense", 1), make_model("dense", 2)
            of_start = answers(pushed.url, _BASE)
            # What it was started with has no copy: it is read from the files again.
            with publisher.rollouts_asleep(level=2):
                pass
            pool.wait_ready(1, 30)
            assert answers(pushed.url, _BASE) == of_start
            found = []
            for push in (
                lambda: publisher.push_base(other),
                lambda: publisher.push_merged(wrapped),
                lambda: publisher.push_base(one),
            ):
                push()
                found.append(answers(pushed.url, _BASE))
            of_other, of_merged, of_one = found
            publisher.push_adapter(work / "adapter", "math")
            of_adapter = answers(pushed.url, "math")
            each = (of_start, of_one, of_other, of_merged, of_adapter)
            assert len({str(answer) for answer in each}) == len(each)
            yield Place(
                pushed, staging, publisher, work / "adapter", wrapped, one, other,
                of_one, of_other, of_adapter, of_merged,
            )  # fmt: skip
    finally:
        pool.stop()


@pytest.fixture(params=[1, 2], ids=["level 1", "level 2"])
def level(request: pytest.FixtureRequest, place: Place) -> Level:
    """At which it sleeps, once it serves ``one``, and the adapter."""
    found: Level = request.param
    # A sleep before this one may have dropped the copy that level 2 wakes from.
    if found == 2 or place.answers() != place.of_one:
        place.publisher.push_base(place.one)
        place.pushed.pool.wait_ready(1, 30)
    return found


def test_it_answers_as_before(place: Place, level: Level, note: Note) -> None:
    freed = place.sleep(level)
    assert DRY or freed > _FREED_BYTES
    began = time.monotonic()
    if place.has_no_copy(level):
        place.end_sleep()
        assert place.refuses()
        place.publisher.push_base(place.one)
        place.pushed.pool.wait_ready(1, 30)
    else:
        place.wake()
    seconds = time.monotonic() - began
    assert place.answers() == place.of_one
    assert place.answers("math") == place.of_adapter
    found = f"bitwise as before; {freed / 2**30:.1f} GiB were free; awake in {seconds:.1f} s"
    note(f"dense, {place.staging}", f"sleep at level {level}", found)


def test_it_answers_what_was_pushed_as_it_slept(place: Place, level: Level, note: Note) -> None:
    place.sleep(level)
    place.publisher.push_base(place.other)
    assert place.refuses() is not DRY
    place.wake()
    assert place.answers() == place.of_other

    place.sleep(level)
    place.publisher.push_merged(place.wrapped)
    place.wake()
    assert place.answers() == place.of_merged

    place.sleep(level)
    began = time.monotonic()
    place.publisher.push_base(place.one)
    version = place.publisher.push_adapter(place.adapter, "math").version
    place.wake()
    seconds = time.monotonic() - began
    assert place.answers(str(version)) == place.of_adapter
    assert place.answers() == place.of_one
    found = f"bitwise as pushed awake; base, adapter and waking {seconds:.1f} s"
    note(f"dense, {place.staging}", f"2 bases, 1 merged, asleep at level {level}", found)


def test_an_adapter_pushed_as_it_slept_brings_no_base(place: Place, level: Level) -> None:
    place.sleep(level)
    version = place.publisher.push_adapter(place.adapter, "math").version
    assert place.refuses() is not DRY
    if place.has_no_copy(level):
        place.publisher.push_base(place.one)
    place.wake()
    assert place.answers(str(version)) == place.of_adapter
    assert place.answers() == place.of_one


def test_its_weights_sleep_again_once_a_push_has_woken_them(place: Place, level: Level) -> None:
    place.sleep(level)
    once = _free_bytes()
    place.publisher.push_base(place.other)
    place.sleep(level)
    assert abs(_free_bytes() - once) < _FREED_BYTES
    place.publisher.push_base(place.one)
    place.wake()
    assert place.answers() == place.of_one
    assert place.answers("math") == place.of_adapter


def test_the_end_of_the_lease_wakes_it(place: Place) -> None:
    place.sleep(1)
    place.publisher.close()
    place.pushed.pool.wait_ready(1, 60)
    assert place.answers() == place.of_one
    assert place.answers("math") == place.of_adapter


# Of a model whose buckets, were all of them received first, would leave it no room to wake.
_WIDE_LAYERS, _BUCKET_BYTES = 16, 2**28
_SLACK_BYTES = 2 * 2**30


def _wide_config() -> dict[str, Any]:
    if DRY:
        return {**config_of("dense").to_dict(), "architectures": ["Qwen3ForCausalLM"]}
    return {**QWEN3_8B, "num_hidden_layers": _WIDE_LAYERS, "vocab_size": 4096}


@torch.no_grad()
def _draw(model: Any, seed: int) -> None:
    """Weights that follow from the seed, where they lie: on the host it takes minutes."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    for parameter in model.parameters():
        mean, width = (0.0, 0.02) if parameter.dim() > 1 else (1.0, 0.1)
        parameter.normal_(mean, width, generator=generator)


def _leave(num_bytes: int) -> torch.Tensor | None:
    """Take all of the GPU's memory but so much, as a trainer does."""
    torch.cuda.empty_cache()
    taken = 0 if DRY else max(0, _free_bytes() - num_bytes)
    return torch.empty(taken, dtype=torch.uint8, device=DEVICE) if taken else None


def test_a_trainer_that_leaves_little_more_than_the_weights_loads_them_in_place(
    tmp_path: Path, note: Note
) -> None:
    """What a replica receives first while it generates, it has no room for asleep; and where
    there is none for its weights, the push is refused and they are as they were."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = _wide_config()
    path = write_config(tmp_path / "wide", config)
    pool = GpuPool(tmp_path / "pool")
    pool.work.mkdir()
    pool.start()
    try:
        options = ["--staging", "in-place", *([] if DRY else ["--enable-sleep"])]
        pool.launch("pushed", "0", path, *VLLM, "--load-format", "dummy", options=options)
        pushed = Pushed(pool, pool.url("pushed"))
        with torch.device(DEVICE):
            model = AutoModelForCausalLM.from_config(Qwen3Config(**config), dtype=torch.bfloat16)
        model_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        settings: dict[str, Any] = {} if DRY else {"bucket_bytes": _BUCKET_BYTES}
        with pushed.publisher(**settings) as publisher:
            found = []
            for seed in (2, 1):
                _draw(model, seed)
                publisher.push_base(model)
                found.append(answers(pushed.url, _BASE))
            of_two, of_one = found
            assert of_one != of_two

            with publisher.rollouts_asleep(when_running="abort"):
                taken = _leave(model_bytes // 2)
                _draw(model, 2)
                if not DRY:
                    with pytest.raises(CapacityError, match="sleeping weights"):
                        publisher.push_base(model)
                del taken
                torch.cuda.empty_cache()
            pool.wait_ready(1, 30)
            assert answers(pushed.url, _BASE) == of_one

            with publisher.rollouts_asleep(when_running="abort"):
                left = model_bytes + 3 * _BUCKET_BYTES + _SLACK_BYTES
                taken = _leave(left)
                publisher.push_base(model)
                del taken
                torch.cuda.empty_cache()
            pool.wait_ready(1, 30)
            assert answers(pushed.url, _BASE) == of_two
            found_text = f"bitwise as pushed awake, {left / 2**30:.1f} GiB left by the trainer"
            note("wide, in-place", "a base, asleep beside a full GPU", found_text)
    finally:
        pool.stop()
