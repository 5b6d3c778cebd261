"""The only replica of a pool is killed in the middle of a push between GPUs: the push is begun
again, and goes to the replica that takes its place.

With more replicas the others go on: ``python -m benchmarks.gpu --share --replicas 2``.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.gpu_pool import QWEN3_8B, GpuPool, write_config
from tests.gpu.conftest import Note
from tests.gpu.test_pushes import DEVICE, DRY, NUM_GPUS, VLLM, answers, config_of
from trainer_side import Publisher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < 2 and not DRY, reason="needs two NVIDIA GPUs"),
    pytest.mark.timeout(300),
]


def _config() -> dict[str, Any]:
    if DRY:
        return {**config_of("dense").to_dict(), "architectures": ["Qwen3ForCausalLM"]}
    return {**QWEN3_8B, "num_hidden_layers": 8, "vocab_size": 4096}


@pytest.mark.parametrize("backend", ["gloo"] if DRY else ["nccl", "one-sided"])
def test_the_push_goes_to_the_next_replica(backend: str, tmp_path: Path, note: Note) -> None:
    path = write_config(tmp_path / "model", _config())
    pool = GpuPool(tmp_path)
    struck: list[float] = []

    def launch(name: str) -> None:
        gpus = "1,0" if backend == "one-sided" else "0" if DRY else "1"
        pool.launch(name, gpus, path, *VLLM, "--load-format", "dummy")

    def strike(policy: str, verified: int, total: int) -> None:
        if is_due and verified >= total // 3 and not struck:
            struck.append(time.monotonic())
            os.killpg(pool.replicas["killed"].pid, 9)
            launch("next")

    is_due = False
    try:
        pool.start()
        launch("killed")
        pool.url("killed")
        with torch.device(DEVICE):
            config = Qwen3Config(**_config())
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with Publisher(
            pool.target,
            trainer_id="test",
            backend=backend,
            progress=strike,
            bucket_bytes=(1 if DRY else 64) * 2**20,
            timeout_seconds=200,
        ) as publisher:
            publisher.push_base(model)
            is_due = True
            version, report = publisher.push_base(model)
            seconds = time.monotonic() - struck[0]
        assert report.num_replicas == 1
        assert report.backend == backend
        assert any("killed is gone" in remark for remark in report.remarks), report.remarks
        pool.wait_ready(1, 30)
        url = pool.url("next")
        assert answers(url, str(version)) == answers(url, "base-model")
        found = f"{version} at the next, {seconds:.1f} s later, its start included"
        note("Qwen3, 8 layers", f"a base over {backend}, its only member killed", found)
    finally:
        pool.stop()
