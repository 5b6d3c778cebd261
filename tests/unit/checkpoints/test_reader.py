"""What a checkpoint on disk holds: the same digest however it is cut, another if a bit is."""

from __future__ import annotations

import json
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.unit.transport.digests.reference import by_definition
from weft_rl.checkpoints import digest_cache
from weft_rl.checkpoints.digest_cache import DigestCache, FileState
from weft_rl.checkpoints.files import local_model_dir, weight_files
from weft_rl.checkpoints.reader import (
    CheckpointReader,
    DigestCancelledError,
    digest_file,
    read_checkpoint,
)
from weft_rl.contract.checkpoint import Checkpoint, CheckpointState
from weft_rl.contract.errors import InvalidRequestError
from weft_rl.transport.digests.wsum64 import tensor_digest

NO_CACHE = DigestCache(None)
TENSORS = {
    "a.weight": torch.arange(70, dtype=torch.float32).view(7, 10),
    "b.weight": torch.arange(9, dtype=torch.bfloat16),
    "c.bias": torch.tensor(3, dtype=torch.int8),
    "empty": torch.empty(0, 4),
}


def read(*files: Path, cache: DigestCache = NO_CACHE) -> Checkpoint:
    return read_checkpoint(files, cache, threading.Event())


def save(path: Path, *names: str, **changes: torch.Tensor) -> Path:
    save_file({name: changes.get(name, TENSORS[name]) for name in names or TENSORS}, path)
    return path


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 9, 32768, 32769, 65536 + 13, 200_001])
def test_a_tensors_digest_is_its_definition_in_one_piece_or_many(num_bytes: int) -> None:
    content = random.Random(num_bytes).randbytes(num_bytes)
    padded = content + bytes(-num_bytes % 8)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    whole = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)[:num_bytes]
    assert tensor_digest(whole) == by_definition(words)
    pieces = [
        tensor_digest(whole[first : first + 65536], first_byte=first)
        for first in range(0, num_bytes, 65536)
    ]
    assert sum(pieces) % 2**64 == tensor_digest(whole)


def test_a_piece_far_into_its_tensor() -> None:
    """Weights are made for 1 GiB at a time: across that line pieces add up as well."""
    content = torch.randint(0, 256, (4 * 32768,), dtype=torch.uint8)
    line = 2**30
    first = line - 2 * 32768
    halves = [
        tensor_digest(content[: 2 * 32768], first_byte=first),
        tensor_digest(content[2 * 32768 :], first_byte=line),
    ]
    assert tensor_digest(content, first_byte=first) == sum(halves) % 2**64


def test_it_is_the_same_however_it_is_cut_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = read(save(tmp_path / "model.safetensors"))
    assert whole.state is CheckpointState.DIGESTED
    one = save(tmp_path / "1.safetensors", "c.bias", "a.weight")
    two = save(tmp_path / "2.safetensors", "empty", "b.weight")
    cut = read(two, one)
    assert cut.digest == whole.digest
    assert [file.name for file in cut.files] == ["1.safetensors", "2.safetensors"]
    monkeypatch.setattr("weft_rl.checkpoints.reader._CHUNK_BYTES", 32768)
    large = {"w": torch.randn(50_001)}
    save_file(large, tmp_path / "large.safetensors")
    small_chunks = read(tmp_path / "large.safetensors")
    monkeypatch.undo()
    assert read(tmp_path / "large.safetensors") == small_chunks


def test_it_is_another_if_anything_is(tmp_path: Path) -> None:
    known = {read(save(tmp_path / "model.safetensors")).digest}
    other = TENSORS["a.weight"].clone()
    other[6, 9] += 1
    for changes in (
        {"a.weight": other},
        {"a.weight": TENSORS["a.weight"].view(10, 7)},
        {"a.weight": TENSORS["a.weight"].view(torch.int32)},
        {"empty": torch.empty(4, 0)},
    ):
        known.add(read(save(tmp_path / "model.safetensors", **changes)).digest)
    known.add(read(save(tmp_path / "model.safetensors", "a.weight")).digest)
    assert len(known) == 6


@pytest.mark.parametrize(
    "content",
    [b"", b"\1", bytes(8), b"\xff" * 64, (10).to_bytes(8, "little") + b"[1,2,3,4,]" + bytes(9),
     (4).to_bytes(8, "little") + b"null", (2).to_bytes(8, "little") + b"{"],
)  # fmt: skip
def test_what_is_no_safetensors_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(InvalidRequestError, match="not a safetensors file"):
        read(path)


@pytest.mark.parametrize(
    "entry",
    [1, {}, {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
     {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 8]},
     {"dtype": "F32", "shape": [2], "data_offsets": [0]}],
)  # fmt: skip
def test_a_header_that_describes_a_tensor_wrongly(tmp_path: Path, entry: object) -> None:
    header = json.dumps({"w": entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(InvalidRequestError, match="has an invalid entry for 'w'"):
        read(path)


def test_a_file_that_was_cut_short(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors")
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(InvalidRequestError, match="is cut short"):
        read(path)


def test_a_file_that_is_known_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = save(tmp_path / "model.safetensors")
    known = read(path, cache=DigestCache.of_user())
    link = tmp_path / "link.safetensors"
    link.symlink_to(path)
    monkeypatch.setattr("weft_rl.checkpoints.reader.digest_file", None)  # would raise
    assert read(path, cache=DigestCache.of_user()) == known
    assert read(link, cache=DigestCache.of_user()).digest == known.digest
    monkeypatch.undo()
    os.utime(path, ns=(1, 1))  # touched: looked at again
    assert DigestCache(tmp_path / "cache" / "weft" / "checkpoints").get(FileState.of(path)) is None


def test_a_cache_that_is_damaged_or_of_no_use_costs_time_alone(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors")
    cache = DigestCache(tmp_path / "cache")
    known = read(path, cache=cache)
    (entry,) = (tmp_path / "cache").iterdir()
    for damage in (b"", b"{", b"[]", b"[" * 100_000, b'{"format": 1}'):
        entry.write_bytes(damage)
        assert read(path, cache=cache) == known
    file = tmp_path / "a file"
    file.write_text("")
    assert read(path, cache=DigestCache(file / "below")) == known


def test_a_file_without_tensors_is_known_by_none(tmp_path: Path) -> None:
    cache, identity = (
        DigestCache(tmp_path / "cache"),
        FileState.of(save(tmp_path / "a.safetensors")),
    )
    assert cache.get(identity) is None
    cache.put(identity, ())
    assert cache.get(identity) == ()


def test_the_cache_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_cache, "MAX_ENTRIES", 3)
    cache = DigestCache(tmp_path / "cache")
    for i in range(6):
        read(save(tmp_path / f"{i}.safetensors"), cache=cache)
    assert len([*(tmp_path / "cache").iterdir()]) == 3
    assert cache.get(FileState.of(tmp_path / "5.safetensors"))


def test_a_file_that_changes_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "model.safetensors")

    def touch(file: Path, *others: Any) -> object:
        os.utime(file, ns=(1, 1))
        return digest_file(file, *others)

    monkeypatch.setattr("weft_rl.checkpoints.reader.digest_file", touch)
    with pytest.raises(InvalidRequestError, match="changed while it was read"):
        read(path)


def test_reading_stops_when_it_is_told_to(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(DigestCancelledError):
        digest_file(save(tmp_path / "model.safetensors"), stop)


def test_the_reader_never_fails_its_process(tmp_path: Path) -> None:
    def nowhere() -> list[Path]:
        raise LookupError("there are none")

    path = save(tmp_path / "model.safetensors")
    for find, state, reason in (
        (lambda: [path], CheckpointState.DIGESTED, ""),
        (nowhere, CheckpointState.NOT_COMPARED, "there are none"),
        (lambda: [tmp_path / "gone"], CheckpointState.NOT_COMPARED, "cannot be read"),
    ):
        reader = CheckpointReader(find, NO_CACHE)
        found = reader.wait(20)
        reader.close()
        assert found.state is state
        assert reason in found.reason
        assert reader.checkpoint is found


def test_only_what_a_loader_takes_counts(tmp_path: Path) -> None:
    for name in ("x", "y"):
        save_file({f"{name}.weight": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"x.weight": "x.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_files(tmp_path) == [tmp_path / "x.safetensors"]
    assert weight_files(tmp_path / "nothing") == []
    assert local_model_dir(str(tmp_path), None) == tmp_path
    assert local_model_dir("nobody/has-this", None) is None


def test_files_that_do_not_answer_are_compared_with_nothing_until_they_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft_rl.checkpoints.reader.SILENT_SECONDS", 0.2)
    path = save(tmp_path / "model.safetensors")
    go_on = threading.Event()

    def find() -> list[Path]:
        go_on.wait(10)
        return [path]

    reader = CheckpointReader(find, NO_CACHE)
    try:
        assert reader.checkpoint.state is CheckpointState.READING
        assert reader.wait(0.4).state is CheckpointState.NOT_COMPARED
        assert "the disk has not answered for 0.2 s" in reader.checkpoint.reason
        go_on.set()
        for _ in range(500):
            if reader.wait(0.02).state is CheckpointState.DIGESTED:
                break
        assert reader.checkpoint == read(path)
    finally:
        reader.close()
