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


def reader_of(initial_checkpoint: InitialCheckpoint) -> CheckpointReader | None:
    return initial_checkpoint._reader


def settled(initial_checkpoint: InitialCheckpoint) -> Checkpoint:
    reader = reader_of(initial_checkpoint)
    assert reader is not None
    reader.wait(20)
    initial_checkpoint.close()
    return initial_checkpoint.checkpoint


def test_files_are_read_once_wherever_they_turn_out_to_lie(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    initial_checkpoint = InitialCheckpoint("auto", DigestCache(None))
    initial_checkpoint.read("not/here-yet", None)
    assert initial_checkpoint.checkpoint is READING
    initial_checkpoint.read(str(tmp_path), None, is_loaded=True)
    reader = reader_of(initial_checkpoint)
    initial_checkpoint.read(str(tmp_path), None, is_loaded=True)
    assert reader_of(initial_checkpoint) is reader
    assert settled(initial_checkpoint).state is CheckpointState.DIGESTED


def test_files_that_were_still_on_their_way_are_looked_for_again(tmp_path: Path) -> None:
    initial_checkpoint = InitialCheckpoint("auto", DigestCache(None))
    initial_checkpoint.read(str(tmp_path), None)
    assert settled(initial_checkpoint).state is CheckpointState.NOT_COMPARED
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    initial_checkpoint.read(str(tmp_path), None, is_loaded=True)
    assert settled(initial_checkpoint).state is CheckpointState.DIGESTED


def test_files_of_a_download_directory(tmp_path: Path) -> None:
    repo = tmp_path / "models--not--in-the-cache"
    folder = repo / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(folder.name)
    save_file({"w": torch.ones(3)}, folder / "model.safetensors")
    initial_checkpoint = InitialCheckpoint("auto", DigestCache(None), download_dir=str(tmp_path))
    initial_checkpoint.read("not/in-the-cache", None)
    assert settled(initial_checkpoint).state is CheckpointState.DIGESTED


def test_a_folder_without_safetensors(tmp_path: Path) -> None:
    initial_checkpoint = InitialCheckpoint("safetensors", DigestCache(None))
    initial_checkpoint.read(str(tmp_path), None)
    found = settled(initial_checkpoint)
    assert found.state is CheckpointState.NOT_COMPARED
    assert found.reason.startswith("there are no safetensors files in")


def test_what_is_nowhere_on_this_machine() -> None:
    initial_checkpoint = InitialCheckpoint("auto", DigestCache(None))
    initial_checkpoint.read("s3://bucket/model", None, is_loaded=True)
    assert "not on this machine" in initial_checkpoint.checkpoint.reason


@pytest.mark.parametrize("load_format", ["pt", "gguf", "tensorizer", "sharded_state"])
def test_other_formats_are_not_compared(tmp_path: Path, load_format: str) -> None:
    initial_checkpoint = InitialCheckpoint(load_format, DigestCache(None))
    initial_checkpoint.read(str(tmp_path), None)
    assert load_format in initial_checkpoint.checkpoint.reason
    assert reader_of(initial_checkpoint) is None


def test_dummy_weights(tmp_path: Path) -> None:
    initial_checkpoint = InitialCheckpoint("dummy", DigestCache(None))
    initial_checkpoint.read(str(tmp_path), None, is_loaded=True)
    assert initial_checkpoint.checkpoint is DUMMY


def test_its_tensors_are_told_once_they_were_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    initial_checkpoint = InitialCheckpoint("auto", DigestCache(tmp_path / "cache"))
    with monkeypatch.context() as patched:
        patched.setattr(CheckpointReader, "checkpoint", READING)
        initial_checkpoint.read(str(tmp_path), None)
        with pytest.raises(NotReadyError, match="are being read"):
            initial_checkpoint.tensors()
    digest = settled(initial_checkpoint).digest
    assert checkpoint_digest(initial_checkpoint.tensors()) == digest
    (tmp_path / "model.safetensors").write_bytes(b"gone")
    with pytest.raises(NotReadyError, match="cannot be read") as failed:
        initial_checkpoint.tensors()
    assert failed.value.reason == "NOT_RETAINED"


async def test_files_that_were_replaced_are_found_out(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(3)}, file)
    initial_checkpoint = InitialCheckpoint("auto", DigestCache(tmp_path / "cache"))
    await initial_checkpoint.check_unchanged()  # what is not known yet cannot be compared
    initial_checkpoint.read(str(tmp_path), None)
    settled(initial_checkpoint)
    await initial_checkpoint.check_unchanged()
    save_file({"w": torch.zeros(3)}, file)
    with pytest.raises(NotReadyError, match="have changed since") as failed:
        await initial_checkpoint.check_unchanged()
    assert failed.value.reason == "NOT_RETAINED"


def test_weights_that_mean_nothing_have_no_tensors() -> None:
    with pytest.raises(NotReadyError, match="dummy weights"):
        InitialCheckpoint("dummy", DigestCache(None)).tensors()
