"""When a replica has its workers learn from the files of base@0, and what it leaves alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollout_side.memory.digest_reading import TensorDigests
from rollout_side.memory.messages import unpacked
from rollout_side.vllm_engine.http.middleware import RequestTracker
from rollout_side.vllm_engine.server.base_switch import learn_copies
from rollout_side.vllm_engine.server.initial_checkpoint import InitialCheckpoint
from rollout_side.vllm_engine.server.request_gate import RequestGate
from rollout_side.vllm_engine.server.requests_at_switch import EngineCaches
from rollout_side.vllm_engine.server.worker_calls import Deadlines, WorkerCalls
from tests.doubles.vllm import FakeEngine, failed
from weft_rl.checkpoints.digest_cache import DigestCache
from weft_rl.contract.checkpoint import StoredTensor
from weft_rl.transport.digests.wsum64 import tensor_digest

_WEIGHT = torch.arange(6, dtype=torch.bfloat16).view(2, 3)


def started(path: Path, load_format: str = "auto") -> InitialCheckpoint:
    save_file({"layer.weight": _WEIGHT}, path / "model.safetensors")
    found = InitialCheckpoint(load_format, DigestCache(None))
    found.read(str(path), None, is_loaded=True)
    return found


async def learn(
    engine: FakeEngine, found: InitialCheckpoint, *, is_served: bool = True
) -> RequestGate:
    workers = WorkerCalls(engine, Deadlines(), num_ranks=1)
    gate = RequestGate(engine, workers, RequestTracker(), EngineCaches(engine))
    async with asyncio.timeout(20):
        await learn_copies(found, workers, gate, lambda: is_served)
    return gate


async def test_the_workers_are_told_what_the_files_hold(tmp_path: Path) -> None:
    engine = FakeEngine()
    await learn(engine, started(tmp_path))
    digest = tensor_digest(_WEIGHT.reshape(-1).view(torch.uint8))
    (told,) = engine.last_args["weft_learn_copies"]
    tensor = StoredTensor("layer.weight", "BF16", (2, 3), digest)
    assert unpacked(TensorDigests, told) == TensorDigests((tensor,))


async def test_what_was_pushed_meanwhile_is_left_alone(tmp_path: Path) -> None:
    engine = FakeEngine()
    await learn(engine, started(tmp_path), is_served=False)
    assert engine.calls == []


async def test_weights_without_files_teach_nothing(tmp_path: Path) -> None:
    engine = FakeEngine()
    await learn(engine, started(tmp_path, "dummy"))
    await learn(engine, InitialCheckpoint("pt"))
    assert engine.calls == []


async def test_a_failure_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    engine.answers["weft_learn_copies"] = lambda: [failed("INTERNAL")]
    with caplog.at_level("INFO"):
        gate = await learn(engine, started(tmp_path))
    assert "learnt from the first push" in caplog.text
    assert not gate.dirty_reason
