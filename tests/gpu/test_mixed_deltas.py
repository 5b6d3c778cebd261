"""A push between GPUs that is a delta to one replica and whole to another: each answers as it does
to the same weights sent whole.

The other replica quantises as it loads in place, so that it takes no delta. The trainer has GPU 0;
replicas share it where there are no two more, which NCCL needs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_pool import GpuPool
from tests.gpu.conftest import Note
from tests.gpu.test_pushes import NUM_GPUS, VLLM, Answers, answers, make_model, save
from trainer_side import Publisher

DRY = "WEFT_GPU_DRY_RUN" in os.environ  # the same on CPUs: for writing this file
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not NUM_GPUS and not DRY, reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(400),
]
_KIND = "dense"
#: Compiled kernels are compared elsewhere; without them engines start in seconds.
_VLLM = (*VLLM, "--enforce-eager")


@dataclass
class Replicas:
    """A pool of a replica that takes deltas and of one that does not, and a fresh engine."""

    pool: GpuPool
    taker: str
    other: str
    fresh: str
    model: Any
    """Weights of the fresh engine."""

    def answers(self) -> tuple[Answers, Answers]:
        """Return what the two replicas answer."""
        return answers(self.taker, "base-model"), answers(self.other, "base-model")


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: Any) -> Iterator[Replicas]:
    work: Path = tmp_path_factory.mktemp("mixed")
    model = make_model(_KIND, 1)
    path, began_with = save(model, work / "weights"), save(make_model(_KIND, 0), work / "other")
    # Each sees the trainer's GPU, and reads its memory.
    taker, other = ("1,0", "2,0") if NUM_GPUS > 2 else ("0", "0")
    pools = [GpuPool(work / name) for name in ("pool", "beside")]
    try:
        for each in pools:
            each.work.mkdir()
            each.start()
        quantised = () if DRY else ("--quantization", "fp8")
        pools[0].launch("taker", taker, began_with, *_VLLM, options=("--staging", "auto"))
        pools[0].launch("other", other, began_with, *_VLLM, *quantised,
                        options=("--staging", "in-place"))  # fmt: skip
        pools[1].launch("fresh", "0", path, *_VLLM)
        urls = [pools[0].url("taker"), pools[0].url("other"), pools[1].url("fresh")]
        pools[0].wait_registered(2, 120)
        yield Replicas(pools[0], *urls, model)
    finally:
        for each in pools:
            each.stop()


def _stepped(model: Any) -> Any:
    """Return a model of which a fiftieth of the elements differ."""
    other = make_model(_KIND, 1)
    with torch.no_grad():
        for parameter in other.parameters():
            changed = torch.rand_like(parameter, dtype=torch.float32) < 0.02
            parameter[changed] *= -1.5
    return other


@pytest.mark.parametrize("backend", ["one-sided", "stream", "nccl"])
def test_each_answers_as_if_all_was_sent_whole(
    replicas: Replicas, backend: str, note: Note
) -> None:
    if backend == "nccl" and NUM_GPUS < 3:
        pytest.skip("NCCL takes no two members on one GPU: it needs three")
    expected, other = answers(replicas.fresh, "base-model"), _stepped(replicas.model)
    settings: dict[str, Any] = {"backend": backend, "progress": None, "timeout_seconds": 90}
    settings |= {"trainer_id": "test", "bucket_bytes": 4 * 2**20}
    with Publisher(replicas.pool.target, delta="never", **settings) as publisher:
        assert publisher.push_base(replicas.model).report.backend == backend
        wanted = replicas.answers()
        assert wanted[0] == expected
    with Publisher(replicas.pool.target, delta="always", **settings) as publisher:
        publisher.push_base(other)
        before = replicas.answers()
        assert all(now != then for now, then in zip(before, wanted, strict=True))
        report = publisher.push_base(replicas.model).report
        assert report.delta.is_delta, report.delta
        assert report.delta.num_whole_replicas == 1, report.delta
        assert "other" in report.delta.whole_reason
        assert replicas.answers() == wanted
        publisher.push_base(other)
        assert replicas.answers() == before
    sent = f"{report.sent_bytes} of {report.total_bytes} bytes; both bitwise as sent whole"
    note("dense, dense in FP8", f"2 mixed deltas over {backend}", sent)
