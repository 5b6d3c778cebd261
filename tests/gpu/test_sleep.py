"""A replica on the trainer's own GPU sleeps: what it answers once it is awake is what it answered
before, bit for bit, or what was pushed meanwhile. One GPU is enough."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from benchmarks.gpu_pool import GpuPool
from tests.gpu.conftest import Note
from tests.gpu.test_pushes import DRY, LORA, VLLM, Pushed, answers, make_model, save
from tests.models import draw_adapter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.device_count() and not DRY, reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(400),
]
# Far below what the engine's KV cache takes.
_FREED_BYTES = 4 * 2**30


@pytest.fixture(scope="module", params=["auto", "in-place"])
def pushed(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Pushed]:
    """A replica on the trainer's GPU, which is told to be able to sleep."""
    work: Path = tmp_path_factory.mktemp(f"sleep-{request.param}")
    pool = GpuPool(work).start()
    try:
        options = ["--staging", request.param, "--log-level", "debug"]
        options += [] if DRY else ["--enable-sleep"]  # which a CPU has not
        model = save(make_model("dense", 0), work / "other")
        pool.launch("pushed", "0", model, *VLLM, *LORA, options=options)
        yield Pushed(pool, pool.url("pushed"))
    finally:
        pool.stop()


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: Any) -> Path:
    """A directory that PEFT saved."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear",
                          exclude_modules=["lm_head"], task_type="CAUSAL_LM")  # fmt: skip
    wrapped = get_peft_model(make_model("dense", 1).cpu(), settings)
    draw_adapter(wrapped, 3)
    path: Path = tmp_path_factory.mktemp("adapter")
    wrapped.to(torch.bfloat16).save_pretrained(path)
    return path


def _refuses(pushed: Pushed) -> bool:
    body = {"model": "base-model", "prompt": [5], "max_tokens": 1}
    return httpx.post(f"{pushed.url}/v1/completions", json=body, timeout=60).status_code == 503


def test_answers_survive_sleep_and_pushes_into_it(
    pushed: Pushed, adapter: Path, note: Note
) -> None:
    one, other = make_model("dense", 1), make_model("dense", 2)
    slept = () if DRY else ("pushed",)
    with pushed.publisher(backend="gloo") as publisher:  # NCCL refuses two on one GPU
        publisher.push_base(other)
        of_other = answers(pushed.url, "base-model")
        publisher.push_base(one)
        publisher.push_adapter(adapter, "math")
        of_one, of_adapter = answers(pushed.url, "base-model"), answers(pushed.url, "math")
        assert len({str(found) for found in (of_one, of_other, of_adapter)}) == 3

        before = 0 if DRY else torch.cuda.mem_get_info(0)[0]
        assert publisher.sleep_rollouts() == slept
        freed = 0 if DRY else torch.cuda.mem_get_info(0)[0] - before
        assert DRY or freed > _FREED_BYTES
        assert _refuses(pushed) is not DRY
        assert publisher.wake_rollouts() == slept
        assert answers(pushed.url, "base-model") == of_one
        assert answers(pushed.url, "math") == of_adapter

        publisher.sleep_rollouts(when_running="abort")
        publisher.push_base(other)
        assert _refuses(pushed) is not DRY
        publisher.wake_rollouts()
        assert answers(pushed.url, "base-model") == of_other

        publisher.sleep_rollouts()
        publisher.push_base(one)
        version = publisher.push_adapter(adapter, "math")
        publisher.wake_rollouts()
        assert answers(pushed.url, str(version)) == of_adapter
        assert answers(pushed.url, "base-model") == of_one
        publisher.sleep_rollouts()
    if not DRY:
        pushed.pool.wait_ready(1, 60)  # the lease has ended
    assert answers(pushed.url, "base-model") == of_one
    found = f"bitwise before, after and pushed into sleep; {freed / 2**30:.1f} GiB were free"
    note("dense", "4 sleeps on the trainer's GPU", found)
