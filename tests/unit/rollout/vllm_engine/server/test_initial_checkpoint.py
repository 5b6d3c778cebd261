"""Which checkpoint an engine was started with, by its arguments and the files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollout_side.vllm_engine.server.initial_checkpoint import InitialCheckpoint
from weft_rl.checkpoints.digest_cache import DigestCache
from weft_rl.checkpoints.reader import CheckpointReader
from weft_rl.contract.checkpoint import (
    DUMMY,
    READING,
    Checkpoint,
    CheckpointState,
    checkpoint_digest,
)
from weft_rl.contract.errors import NotReadyError


def settled(started_with: InitialCheckpoint) -> Checkpoint:
    assert started_with._reader is not None
    started_with._reader.wait(20)
    started_with.close()
    return started_with.checkpoint


def test_files_are_read_once_wherever_they_turn_out_to_lie(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    started_with = InitialCheckpoint("auto", DigestCache(None))
    started_with.read("not/here-yet", None)
    assert started_with.checkpoint is READING
    started_with.read(str(tmp_path), None, is_loaded=True)
    reader = started_with._reader
    started_with.read(str(tmp_path), None, is_loaded=True)
    assert started_with._reader is reader
    assert settled(started_with).state is CheckpointState.DIGESTED


def test_files_that_were_still_on_their_way_are_looked_for_again(tmp_path: Path) -> None:
    started_with = InitialCheckpoint("auto", DigestCache(None))
    started_with.read(str(tmp_path), None)
    assert settled(started_with).state is CheckpointState.NOT_COMPARED
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    started_with.read(str(tmp_path), None, is_loaded=True)
    assert settled(started_with).state is CheckpointState.DIGESTED


def test_a_folder_without_safetensors(tmp_path: Path) -> None:
    started_with = InitialCheckpoint("safetensors", DigestCache(None))
    started_with.read(str(tmp_path), None)
    found = settled(started_with)
    assert found.state is CheckpointState.NOT_COMPARED
    assert found.reason.startswith("there are no safetensors files in")


def test_what_is_nowhere_on_this_machine() -> None:
    started_with = InitialCheckpoint("auto", DigestCache(None))
    started_with.read("s3://bucket/model", None, is_loaded=True)
    assert "not on this machine" in started_with.checkpoint.reason


@pytest.mark.parametrize("load_format", ["pt", "gguf", "tensorizer", "sharded_state"])
def test_other_formats_are_not_compared(tmp_path: Path, load_format: str) -> None:
    started_with = InitialCheckpoint(load_format, DigestCache(None))
    started_with.read(str(tmp_path), None)
    assert load_format in started_with.checkpoint.reason
    assert started_with._reader is None


def test_dummy_weights(tmp_path: Path) -> None:
    started_with = InitialCheckpoint("dummy", DigestCache(None))
    started_with.read(str(tmp_path), None, is_loaded=True)
    assert started_with.checkpoint is DUMMY


def test_its_tensors_are_told_once_they_were_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    started_with = InitialCheckpoint("auto", DigestCache(tmp_path / "cache"))
    with monkeypatch.context() as patched:
        patched.setattr(CheckpointReader, "checkpoint", READING)
        started_with.read(str(tmp_path), None)
        with pytest.raises(NotReadyError, match="are being read"):
            started_with.tensors()
    digest = settled(started_with).digest
    assert checkpoint_digest(started_with.tensors()) == digest
    (tmp_path / "model.safetensors").write_bytes(b"gone")
    with pytest.raises(NotReadyError, match="cannot be read") as failed:
        started_with.tensors()
    assert failed.value.reason == "NOT_RETAINED"


async def test_files_that_were_replaced_are_found_out(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(3)}, file)
    started_with = InitialCheckpoint("auto", DigestCache(tmp_path / "cache"))
    await started_with.check_unchanged()  # what is not known yet cannot be compared
    started_with.read(str(tmp_path), None)
    settled(started_with)
    await started_with.check_unchanged()
    save_file({"w": torch.zeros(3)}, file)
    with pytest.raises(NotReadyError, match="have changed since") as failed:
        await started_with.check_unchanged()
    assert failed.value.reason == "NOT_RETAINED"


def test_weights_that_mean_nothing_have_no_tensors() -> None:
    with pytest.raises(NotReadyError, match="dummy weights"):
        InitialCheckpoint("dummy", DigestCache(None)).tensors()
