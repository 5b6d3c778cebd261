"""Readiness waits until a replica has read what it was started with; other weights of the
same shapes stay out of service until a base is pushed."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from tests.doubles.engine import EngineDouble
from tests.doubles.pool import running_pool
from trainer_side import Publisher
from weft_rl.contract.checkpoint import READING, Checkpoint, CheckpointState, FileDigest

WEIGHTS = {"layers.0.q_proj.weight": torch.ones(8, 8)}


def checkpoint(content: bytes) -> Checkpoint:
    digest = content * 32
    return Checkpoint(CheckpointState.DIGESTED, digest, (FileDigest("model.safetensors", digest),))


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_another_checkpoint_is_out_of_service_until_a_base_comes(tmp_path):
    one, two = EngineDouble(WEIGHTS, base_copies=1), EngineDouble(WEIGHTS, base_copies=1)
    one.checkpoint, two.checkpoint = READING, checkpoint(b"2")
    with running_pool(tmp_path / "weft.db") as pool:
        first = pool.add_replica("replica-0", one)
        second = pool.add_replica("replica-1", two)
        until(lambda: second.is_ready)  # it binds what base@0 is
        assert not first.is_ready  # registered, not ready
        one.checkpoint = checkpoint(b"1")
        told = first.registration
        until(lambda: told is not None and told._reported_checkpoint == one.checkpoint)
        time.sleep(2 * 0.2)  # two heartbeats say the same
        assert not first.is_ready
        with Publisher(pool.target, trainer_id="trainer-a", timeout_seconds=30) as publisher:
            model = torch.nn.ModuleDict(
                {"layers": torch.nn.ModuleList([torch.nn.ModuleDict(
                    {"q_proj": torch.nn.Linear(8, 8, bias=False)})])}
            )  # fmt: skip
            publisher.push_base(model)
        until(lambda: first.is_ready and second.is_ready)
