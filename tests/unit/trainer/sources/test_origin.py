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
from trainer_side.sources.origin import BaseOf, Origin, Origins
from weft_rl.checkpoints import reader
from weft_rl.checkpoints.digest_cache import DigestCache
from weft_rl.checkpoints.reader import read_checkpoint


@pytest.fixture
def origins() -> Iterator[Origins]:
    made = Origins(DigestCache(None))
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


def test_what_the_user_says_comes_first(origins: Origins) -> None:
    module = torch.nn.Linear(1, 1)
    origins.pushed(BaseOf(module), 3)
    found = origins.of(BaseOf(module), 7, b"", soon())
    assert found == Origin(7)


def test_then_what_was_pushed_from_the_same_module(origins: Origins, tmp_path: Path) -> None:
    module, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    digest = save(tmp_path)
    base = BaseOf(module, str(tmp_path))
    assert origins.of(base, None, digest, soon(), must_know=True) == Origin(0)
    origins.pushed(BaseOf(module), 3)
    origins.pushed(BaseOf(), 4)  # of a directory: no module
    assert origins.of(base, None, digest, soon(), must_know=True) == Origin(3)
    assert origins.of(BaseOf(other), None, digest, soon()).version is None


def test_then_the_checkpoint_that_it_was_loaded_from(origins: Origins, tmp_path: Path) -> None:
    base, digest = BaseOf(None, str(tmp_path)), save(tmp_path)
    assert origins.of(base, None, digest, soon(), must_know=True) == Origin(0)
    another = origins.of(base, None, b"1" * 32, soon())
    assert another.version is None
    assert "which is not what base@0 is" in another.why
    assert "no replica has told" in origins.of(base, None, b"", soon()).why


@pytest.mark.parametrize(
    ("name", "words"),
    [("", "say base="), ("nobody/has-this", "not on this machine"),
     ("/", "no safetensors files")],
)  # fmt: skip
def test_else_nobody_knows(origins: Origins, name: str, words: str) -> None:
    found = origins.of(BaseOf(None, name), None, b"1" * 32, soon(), must_know=True)
    assert found.version is None
    assert words in found.why


def test_a_push_does_not_wait_for_the_disk_unless_it_must(
    origins: Origins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, digest, gate = BaseOf(None, str(tmp_path)), save(tmp_path), threading.Event()
    read = reader.digest_file

    def slowly(path: Path, stop: threading.Event) -> Any:
        assert gate.wait(20)
        return read(path, stop)

    monkeypatch.setattr(reader, "digest_file", slowly)
    assert "still being read" in origins.of(base, None, digest, soon()).why
    hurried = origins.of(base, None, digest, time.monotonic(), must_know=True)
    assert "still being read" in hurried.why
    gate.set()
    assert origins.of(base, None, digest, soon(), must_know=True) == Origin(0)
    assert origins.of(base, None, digest, soon()) == Origin(0)


def test_what_transformers_and_peft_write_down(tmp_path: Path) -> None:
    module = SimpleNamespace(
        config=SimpleNamespace(_name_or_path="a/b", _commit_hash="c0ffee"), name_or_path="a/b"
    )
    assert BaseOf.of(module).loaded_from == "a/b"
    assert BaseOf.of(module).revision == "c0ffee"
    assert BaseOf.of(torch.nn.Linear(1, 1)).loaded_from == ""
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "/m"}')
    assert base_of_dir(tmp_path) == BaseOf(None, "/m", None)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": null}')
    assert base_of_dir(tmp_path) == BaseOf()


def test_every_rank_learns_the_same() -> None:
    for origin in (Origin(0), Origin(None, "why\0not"), Origin(7)):
        assert Origin.decode(origin.encode(b"\0rest")) == (origin, b"\0rest")


def test_it_is_said_where_they_differ() -> None:
    assert Origin(2).remarks(2, is_other=False) == ()
    assert Origin(0).remarks(7, is_other=False) == ()  # the same bytes under another number
    assert Origin(0).remarks(1, is_other=True) == ("trained on base@0, served over base@1",)
    assert Origin(None, "who knows").remarks(0, is_other=False) == (
        "trained on base@?, served over base@0: who knows",
    )
