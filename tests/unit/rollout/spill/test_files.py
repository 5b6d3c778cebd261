"""The files of a spilled version: what others read, and what is refused when damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from rollout_side.memory.versions import StagedVersion
from rollout_side.spill.files import (
    FACTS,
    MANIFEST,
    read_facts,
    read_into,
    read_manifest,
    write_version,
)
from tests.unit.rollout.spill.held_versions import BASE, CONFIG, FINGERPRINT, flip, held
from weft_rl.contract.errors import InvalidManifestError, TransferAbortedError
from weft_rl.contract.tensors import DataType, TensorMeta


def write(directory: Path, copy: StagedVersion, **options: int) -> Path:
    directory.mkdir()
    write_version(directory, copy, CONFIG, FINGERPRINT, going_on=lambda: True, **options)
    return directory


def digest_of(directory: Path) -> bytes:
    """As a restore would, into memory that held something else before."""
    manifest = read_manifest(directory)
    return read_into(
        [directory],
        manifest,
        torch.full((manifest.wire_bytes,), 7, dtype=torch.uint8),
        lambda: None,
    )


@pytest.mark.parametrize("shard_bytes", [1, 700, 10**9])
def test_a_base_is_read_back_and_loads_as_a_checkpoint(tmp_path: Path, shard_bytes: int) -> None:
    copy = held("base@3", BASE)
    directory = write(tmp_path / "v", copy, shard_bytes=shard_bytes)
    assert digest_of(directory) == copy.content_digest
    assert read_manifest(directory) == copy.manifest
    facts = read_facts(directory)
    assert (str(facts.version), facts.fingerprint) == ("base@3", FINGERPRINT)
    files = sorted(directory.glob("*.safetensors"))
    assert len(files) == {1: 6, 700: 3, 10**9: 1}[shard_bytes]
    loaded: dict[str, torch.Tensor] = {}
    for file in files:
        loaded |= load_file(file)
    expected = dict(copy.tensors())
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        left, right = (t.reshape(-1).view(torch.uint8) for t in (loaded[name], tensor))
        assert torch.equal(left, right), name
    with safe_open(files[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}
    index = directory / "model.safetensors.index.json"
    assert index.exists() == (len(files) > 1)
    if index.exists():
        assert set(json.loads(index.read_text())["weight_map"]) == expected.keys()


def test_a_draft_is_in_a_file_that_a_reader_of_the_base_passes_over(tmp_path: Path) -> None:
    draft = [replace(meta, name=f"draft_model.{meta.name}") for meta in BASE[:2]]
    copy = held("base@3", [*BASE, *draft])
    directory = write(tmp_path / "v", copy)
    assert digest_of(directory) == copy.content_digest
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {"model.safetensors"}
    assert not any(name.startswith("draft_model.") for name in index["weight_map"])
    names = {meta.name for meta in draft}
    assert load_file(directory / "draft_model.safetensors").keys() == names


def test_an_adapter_is_a_peft_directory(tmp_path: Path) -> None:
    directory = write(tmp_path / "v", held("math@1", BASE[:1]))
    names = {path.name for path in directory.iterdir()}
    assert names == {"adapter_model.safetensors", "adapter_config.json", FACTS, MANIFEST}
    assert (directory / "adapter_config.json").read_text() == CONFIG


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(DataType)), st.lists(st.integers(1, 9), max_size=3).map(tuple)
        ),
        min_size=1,
        max_size=40,
    ),
    st.sampled_from([256, 1024, 65536]),
    st.sampled_from([1, 500, 10**9]),
)
def test_any_layout_is_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: list[tuple[DataType, tuple[int, ...]]],
    bucket_bytes: int,
    shard_bytes: int,
) -> None:
    metas = [TensorMeta(f"layers.{i}.w", dtype, shape) for i, (dtype, shape) in enumerate(tensors)]
    copy = held("base@1", metas, bucket_bytes)
    directory = write(tmp_path_factory.mktemp("any") / "v", copy, shard_bytes=shard_bytes)
    assert digest_of(directory) == copy.content_digest
    for file in directory.glob("*.safetensors"):
        load_file(file)


WEIGHTS = "model.safetensors"
DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut tensors": lambda d: (d / WEIGHTS).write_bytes((d / WEIGHTS).read_bytes()[:-3]),
    "cut header": lambda d: (d / WEIGHTS).write_bytes((d / WEIGHTS).read_bytes()[:20]),
    "empty": lambda d: (d / WEIGHTS).write_bytes(b""),
    "header": lambda d: flip(d / WEIGHTS, 8),
    "header size": lambda d: flip(d / WEIGHTS, 6),
    "manifest": lambda d: flip(d / MANIFEST, 30),
    "cut manifest": lambda d: (d / MANIFEST).write_bytes((d / MANIFEST).read_bytes()[:-5]),
    "facts": lambda d: (d / FACTS).write_text("{"),
    "other format": lambda d: (d / FACTS).write_text('{"format": 9}'),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found(tmp_path: Path, what: str) -> None:
    directory = write(tmp_path / "v", held("base@1", BASE))
    DAMAGE[what](directory)

    def read() -> None:
        read_facts(directory)
        digest_of(directory)

    with pytest.raises(InvalidManifestError):
        read()


def test_another_bit_is_another_digest(tmp_path: Path) -> None:
    copy = held("base@1", BASE)
    directory = write(tmp_path / "v", copy)
    flip(directory / WEIGHTS, -1)
    assert digest_of(directory) != copy.content_digest


def test_a_missing_file_is_the_disks_error_or_a_missing_tensor(tmp_path: Path) -> None:
    directory = write(tmp_path / "v", held("base@1", BASE), shard_bytes=700)
    sorted(directory.glob("*.safetensors"))[1].unlink()
    with pytest.raises(InvalidManifestError, match="is missing"):
        digest_of(directory)
    (directory / FACTS).unlink()
    with pytest.raises(FileNotFoundError):
        read_facts(directory)


def test_a_write_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "v").mkdir()
    with pytest.raises(TransferAbortedError, match="was dropped while"):
        write_version(tmp_path / "v", held("base@1", BASE), "", "f", going_on=lambda: False)
