"""Which version of the base an adapter was trained on, by what its trainer can know."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from trainer_side.sources.file_source import base_of_dir
from trainer_side.sources.origin import AdapterBase, KnownBases, TrainingBase
from weft_rl.checkpoints import reader
from weft_rl.checkpoints.digest_cache import DigestCache
from weft_rl.checkpoints.reader import read_checkpoint


@pytest.fixture
def origins() -> Iterator[KnownBases]:
    made = KnownBases(DigestCache(None))
    yield made
    made.close()


def save(path: Path) -> bytes:
    """A checkpoint; returns the digest that a replica of it tells."""
    path.mkdir(exist_ok=True)
    save_file({"w": torch.ones(3)}, path / "model.safetensors")
    files = [path / "model.safetensors"]
    return read_checkpoint(files, DigestCache(None), threading.Event()).digest


def soon() -> float:
    return time.monotonic() + 20


def test_what_the_user_says_comes_first(origins: KnownBases) -> None:
    module = torch.nn.Linear(1, 1)
    origins.pushed(AdapterBase(module), 3)
    found = origins.of(AdapterBase(module), 7, b"", soon())
    assert found == TrainingBase(7)


def test_then_what_was_pushed_from_the_same_module(origins: KnownBases, tmp_path: Path) -> None:
    module, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    digest = save(tmp_path)
    base = AdapterBase(module, str(tmp_path))
    assert origins.of(base, None, digest, soon(), must_know=True) == TrainingBase(0)
    origins.pushed(AdapterBase(module), 3)
    origins.pushed(AdapterBase(), 4)  # of a directory: no module
    assert origins.of(base, None, digest, soon(), must_know=True) == TrainingBase(3)
    assert origins.of(AdapterBase(other), None, digest, soon()).version is None


def test_then_the_checkpoint_that_it_was_loaded_from(origins: KnownBases, tmp_path: Path) -> None:
    base, digest = AdapterBase(None, str(tmp_path)), save(tmp_path)
    assert origins.of(base, None, digest, soon(), must_know=True) == TrainingBase(0)
    another = origins.of(base, None, b"1" * 32, soon())
    assert another.version is None
    assert "which is not what base@0 is" in another.why
    assert "no replica has told" in origins.of(base, None, b"", soon()).why


@pytest.mark.parametrize(
    ("name", "words"),
    [("", "say base="), ("nobody/has-this", "not on this machine"),
     ("/", "no safetensors files")],
)  # fmt: skip
def test_else_nobody_knows(origins: KnownBases, name: str, words: str) -> None:
    found = origins.of(AdapterBase(None, name), None, b"1" * 32, soon(), must_know=True)
    assert found.version is None
    assert words in found.why


def test_a_push_does_not_wait_for_the_disk_unless_it_must(
    origins: KnownBases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, digest, gate = AdapterBase(None, str(tmp_path)), save(tmp_path), threading.Event()
    read = reader.digest_file

    def slowly(*given: Any) -> Any:
        assert gate.wait(20)
        return read(*given)

    monkeypatch.setattr(reader, "digest_file", slowly)
    assert "still being read" in origins.of(base, None, digest, soon()).why
    hurried = origins.of(base, None, digest, time.monotonic(), must_know=True)
    assert "still being read" in hurried.why
    gate.set()
    assert origins.of(base, None, digest, soon(), must_know=True) == TrainingBase(0)
    assert origins.of(base, None, digest, soon()) == TrainingBase(0)


def test_what_transformers_and_peft_write_down(tmp_path: Path) -> None:
    module = SimpleNamespace(
        config=SimpleNamespace(_name_or_path="a/b", _commit_hash="c0ffee"), name_or_path="a/b"
    )
    assert AdapterBase.of(module).loaded_from == "a/b"
    assert AdapterBase.of(module).revision == "c0ffee"
    assert AdapterBase.of(torch.nn.Linear(1, 1)).loaded_from == ""
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "/m"}')
    assert base_of_dir(tmp_path) == AdapterBase(None, "/m", None)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": null}')
    assert base_of_dir(tmp_path) == AdapterBase()


def test_every_rank_learns_the_same() -> None:
    for origin in (TrainingBase(0), TrainingBase(None, "why\0not"), TrainingBase(7)):
        assert TrainingBase.decode(origin.encode(b"\0rest")) == (origin, b"\0rest")


def test_it_is_said_where_they_differ() -> None:
    assert TrainingBase(2).remarks(2, is_other=False) == ()
    assert TrainingBase(0).remarks(7, is_other=False) == ()  # the same bytes under another number
    assert TrainingBase(0).remarks(1, is_other=True) == ("trained on base@0, served over base@1",)
    assert TrainingBase(None, "who knows").remarks(0, is_other=False) == (
        "trained on base@?, served over base@0: who knows",
    )
