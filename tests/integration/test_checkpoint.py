"""Readiness waits until a replica has read what it was started with; other weights of the
same shapes stay out of service until a base is pushed."""

from __future__ import annotations

import copy
import threading
import time

import torch
from safetensors.torch import save_file

from tests.doubles.engine import EngineDouble
from tests.doubles.pool import running_pool
from tests.integration.models import Model, peft_of, weights
from tests.waits import stays, until
from trainer_side import Publisher
from weft_rl.checkpoints import reader
from weft_rl.checkpoints.digest_cache import DigestCache
from weft_rl.contract.checkpoint import READING, Checkpoint, CheckpointState, FileDigest

WEIGHTS = {"layers.0.q_proj.weight": torch.ones(8, 8)}


def checkpoint(content: bytes) -> Checkpoint:
    digest = content * 32
    return Checkpoint(CheckpointState.DIGESTED, digest, (FileDigest("model.safetensors", digest),))


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
        stays(lambda: not first.is_ready, 2 * 0.2)  # two heartbeats say the same
        with Publisher(pool.target, trainer_id="trainer-a", timeout_seconds=30) as publisher:
            model = torch.nn.ModuleDict(
                {"layers": torch.nn.ModuleList([torch.nn.ModuleDict(
                    {"q_proj": torch.nn.Linear(8, 8, bias=False)})])}
            )  # fmt: skip
            publisher.push_base(model)
        until(lambda: first.is_ready and second.is_ready)


def test_the_first_push_of_an_adapter_waits_for_its_bases_checkpoint(tmp_path, monkeypatch, capsys):
    """However long it takes to read: nobody is warned of a base that is known a moment later."""
    model = Model()
    save_file(weights(model), tmp_path / "model.safetensors")
    tuned = peft_of(copy.deepcopy(model))
    tuned.peft_config["default"].base_model_name_or_path = str(tmp_path)
    tuned.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    files, read = [tmp_path / "model.safetensors"], reader.digest_file
    engine = EngineDouble(weights(model))
    engine.checkpoint = reader.read_checkpoint(files, DigestCache(None), threading.Event())
    numbers = []

    def slowly(*given):
        numbers.append(time.sleep(1.0))
        return read(*given)

    monkeypatch.setattr(reader, "digest_file", slowly)
    monkeypatch.setattr(reader.DigestCache, "of_user", lambda: DigestCache(None))
    monkeypatch.setattr("weft_rl.progress.LineView.first_seconds", 0.3)
    with running_pool(tmp_path / "weft.db") as pool:
        pool.add_replica("replica-0", engine)
        with Publisher(pool.target, trainer_id="trainer-a", timeout_seconds=30) as publisher:
            for _ in range(2):
                report = publisher.push_adapter(tmp_path / "adapter", "math").report
                assert report.remarks == ()
    assert len(numbers) == 1
    assert (
        f"push of math: reading {tmp_path}, to know the base's version by"
        in capsys.readouterr().err
    )
