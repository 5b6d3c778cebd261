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

from trainer_side.params.params import TensorWatcher
from trainer_side.sources.base_content import BaseContent, PushedContent
from trainer_side.sources.file_source import base_of_dir
from trainer_side.sources.origin import AdapterBase, KnownBases, TrainingBase
from weft_rl.checkpoints import reader
from weft_rl.checkpoints.digest_cache import DigestCache
from weft_rl.checkpoints.reader import read_checkpoint
from weft_rl.contract.manifest import plan_buckets
from weft_rl.contract.tensors import DataType, TensorMeta
from weft_rl.transport.digests.wsum64 import content_digest, digests_of


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


def based(module: torch.nn.Module, loaded_from: str = "", *, is_whole: bool = True) -> AdapterBase:
    """A base as an adapter's push hands it over: as it is now."""
    watcher = TensorWatcher(dict(module.named_parameters()))
    content = BaseContent(module, watcher) if is_whole else None
    return AdapterBase(module, loaded_from, None, watcher.states(), content)


class One(torch.nn.Module):
    """A model of one weight, called as that of ``save``."""

    def __init__(self, value: float = 1.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((3,), value, dtype=dtype))


def push(origins: KnownBases, module: torch.nn.Module, version: int, *, by: bool = True) -> None:
    """Note a push of a module; of what it holds alone, unless ``by``."""
    metas = tuple(
        TensorMeta(name, DataType.FLOAT32, tuple(p.shape)) for name, p in module.named_parameters()
    )
    digest = content_digest(digests_of([p.detach().float() for p in module.parameters()]))
    content = PushedContent(plan_buckets(metas, 2**20), digest)
    origins.pushed(based(module) if by else AdapterBase(), version, content)


def test_what_the_user_says_comes_first(origins: KnownBases) -> None:
    module = One()
    push(origins, module, 3)
    assert origins.of(based(module), 7, b"", soon()) == TrainingBase(7)


@pytest.mark.parametrize("is_whole", [True, False])
def test_then_what_was_pushed_from_the_same_module(
    origins: KnownBases, tmp_path: Path, is_whole: bool
) -> None:
    module, digest = One(2.0), save(tmp_path)
    push(origins, module, 3)
    push(origins, One(5.0), 4)
    base = based(module, str(tmp_path), is_whole=is_whole)
    assert origins.of(base, None, digest, soon(), must_know=True) == TrainingBase(3)


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("by_data", [True, False])
def test_a_module_that_was_changed_since_is_that_version_no_more(
    origins: KnownBases, is_whole: bool, by_data: bool
) -> None:
    module = One()
    push(origins, module, 3)
    with torch.no_grad():
        (module.w.data if by_data else module.w).add_(1)
    found = origins.of(based(module, is_whole=is_whole), None, b"1" * 32, soon())
    assert found.version is None
    assert "changed since it was base@3" in found.why
    if is_whole:
        with torch.no_grad():
            module.w.sub_(1)
        assert origins.of(based(module), None, b"1" * 32, soon()) == TrainingBase(3)


def test_what_counts_is_the_content_whichever_module_it_was_pushed_from(
    origins: KnownBases,
) -> None:
    push(origins, One(2.0), 3, by=False)
    push(origins, One(4.0), 4, by=False)
    assert origins.of(based(One(2.0)), None, b"", soon()) == TrainingBase(3)
    assert origins.of(based(One(4.0, torch.bfloat16)), None, b"", soon()) == TrainingBase(4)
    assert origins.of(based(One(3.0)), None, b"", soon()).version is None


def test_base_0_is_known_by_its_content_alone(origins: KnownBases, tmp_path: Path) -> None:
    digest = save(tmp_path)
    assert origins.of(based(One()), None, digest, soon()) == TrainingBase(0)
    assert origins.of(based(One(2.0)), None, digest, soon()).version is None


def test_a_model_that_was_changed_after_it_was_loaded_is_not_its_checkpoint(
    origins: KnownBases, tmp_path: Path
) -> None:
    digest, module = save(tmp_path), One()
    base = based(module, str(tmp_path))
    assert origins.of(base, None, digest, soon(), must_know=True) == TrainingBase(0)
    module.load_state_dict({"w": torch.zeros(3)})
    found = origins.of(based(module, str(tmp_path)), None, digest, soon(), must_know=True)
    assert found.version is None
    assert "changed since" in found.why
    wider = One(1.0, torch.float64)  # by which it is loaded changes nothing
    found = origins.of(based(wider, str(tmp_path)), None, digest, soon(), must_know=True)
    assert found == TrainingBase(0)
    with torch.no_grad():
        wider.w.add_(1)
    found = origins.of(based(wider, str(tmp_path)), None, digest, soon(), must_know=True)
    assert found.version is None


def test_a_base_is_read_once_while_it_stays_as_it_is(
    origins: KnownBases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, module, reads = save(tmp_path), One(), []
    read = BaseContent.digests
    monkeypatch.setattr(BaseContent, "digests", lambda *given: reads.append(1) or read(*given))
    for _ in range(3):
        assert origins.of(based(module), None, digest, soon()) == TrainingBase(0)
    assert len(reads) == 1


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


def test_the_first_push_waits_until_the_checkpoint_is_read_and_says_how_far_it_is(
    origins: KnownBases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, digest = AdapterBase(None, str(tmp_path)), save(tmp_path)
    said: list[tuple[str, int, int]] = []
    gate, read = threading.Event(), reader.digest_file

    def slowly(*given: Any) -> Any:
        assert gate.wait(20)
        return read(*given)

    def on_reading(*given: Any) -> None:
        said.append(given)
        gate.set()

    monkeypatch.setattr(reader, "digest_file", slowly)
    found = origins.of(base, None, digest, soon(), on_reading=on_reading)
    assert found == TrainingBase(0)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert said[0] == (str(tmp_path), 0, size)
    monkeypatch.setattr(reader, "digest_file", lambda *_: pytest.fail("it was read again"))
    assert origins.of(base, None, digest, soon()) == TrainingBase(0)


def test_a_live_base_is_read_once_and_says_how_far_it_is(origins: KnownBases) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 5, bias=False))
    said: list[tuple[str, int, int]] = []
    origins.of(based(module), None, b"1" * 32, soon(), on_reading=lambda *now: said.append(now))
    name, total = "the base model", 4 * (4 * 3 + 3 + 3 * 5)
    assert said == [(name, read, total) for read in (0, 48, 60, total)]
    origins.of(based(module), None, b"1" * 32, soon(), on_reading=pytest.fail)


def test_an_error_of_whoever_is_told_is_not_taken_for_one_of_the_base(origins: KnownBases) -> None:
    def on_reading(*now: Any) -> None:
        raise OSError("the bar is gone")

    with pytest.raises(OSError, match="the bar is gone"):
        origins.of(based(One()), None, b"1" * 32, soon(), on_reading=on_reading)


def test_a_push_leaves_time_for_itself_and_does_not_wait_without_need(
    origins: KnownBases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, digest, gate = AdapterBase(None, str(tmp_path)), save(tmp_path), threading.Event()
    read = reader.digest_file

    def slowly(*given: Any) -> Any:
        assert gate.wait(20)
        return read(*given)

    monkeypatch.setattr(reader, "digest_file", slowly)
    assert "still being read" in origins.of(base, None, b"", soon()).why
    deadline = time.monotonic() + 0.5
    assert "still being read" in origins.of(base, None, digest, deadline).why
    assert time.monotonic() < deadline
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
