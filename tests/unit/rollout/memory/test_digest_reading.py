"""Digests of what is held: the same in whatever layout it came, as its files have them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from rollout_side.memory import digest_reading
from rollout_side.memory.digest_reading import DigestReader
from rollout_side.memory.store import WorkerStore
from rollout_side.memory.versions import ServedBase, StagedVersion, tensors_in
from tests.waits import until
from weft_rl.checkpoints.reader import digest_file
from weft_rl.contract.checkpoint import StoredTensor, checkpoint_digest
from weft_rl.contract.errors import LoadFailedError, NotFoundError
from weft_rl.contract.manifest import Manifest, plan_buckets
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import DataType, TensorMeta

MATH = PolicyVersion("math", 1)
DTYPES = (DataType.FLOAT32, DataType.BFLOAT16, DataType.INT8)
Tensors = Mapping[str, torch.Tensor]


def tensors_of(seed: int, sizes: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for i, (dtype, count) in enumerate(sizes):
        kind = getattr(torch, DTYPES[dtype].torch_name)
        made[f"t{i}"] = torch.randint(-90, 90, (count, 2), generator=generator).to(kind)
    return made


def layout(tensors: Tensors, capacity_bytes: int, seed: int = 0) -> Manifest:
    metas = [
        TensorMeta(name, DataType[str(t.dtype).removeprefix("torch.").upper()], tuple(t.shape))
        for name, t in tensors.items()
    ]
    random.Random(seed).shuffle(metas)
    return plan_buckets(metas, capacity_bytes)


def hold(tensors: Tensors, manifest: Manifest, content: bytes = b"d") -> WorkerStore:
    """A store that holds them as ``math@1``."""
    store = WorkerStore(2**24, 2**24)
    segment = store.reserve("t1", manifest.wire_bytes, adapter=True)
    segment.data.fill_(0xEE)  # trailers, and padding that nobody zeroed
    for name, view in tensors_in(manifest, segment.data):
        view.copy_(tensors[name])
    store.put_staged(StagedVersion("t1", MATH, manifest, segment, content))
    store.keep_adapter("t1", "{}")
    return store


def read(store: WorkerStore, version: PolicyVersion = MATH) -> dict[str, StoredTensor]:
    reading, found = DigestReader(store, version), list[StoredTensor]()

    def take() -> bool:
        part = reading.take()
        found.extend(part.tensors)
        return part.is_all

    until(take)
    assert len({t.name for t in found}) == len(found)
    return {t.name: t for t in found}


SIZES = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 300)), min_size=1, max_size=6)


@settings(max_examples=40)
@given(SIZES, st.integers(0, 9), st.sampled_from([256, 1024, 4096]))
def test_neither_buckets_nor_their_order_have_a_part_in_it(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[tuple[int, int]],
    seed: int,
    capacity_bytes: int,
) -> None:
    tensors = tensors_of(seed, sizes)
    path = tmp_path_factory.getbasetemp() / "tensors.safetensors"
    save_file(tensors, path)
    in_file = {t.name: t for t in digest_file(path, threading.Event())}
    for manifest in (layout(tensors, capacity_bytes, seed), layout(tensors, 2**20)):
        assert read(hold(tensors, manifest)) == in_file


def _swap_values(tensors: dict[str, torch.Tensor]) -> None:
    flat = tensors["a"].view(-1)
    flat[0], flat[70_000] = flat[70_000].clone(), flat[0].clone()


def _swap_tensors(tensors: dict[str, torch.Tensor]) -> None:
    tensors["a"], tensors["b"] = tensors["b"], tensors["a"]


def _move_bytes(tensors: dict[str, torch.Tensor]) -> None:
    tensors["a"] = tensors["a"].view(-1).roll(1).view(tensors["a"].shape)


def _other_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["a"] = tensors["a"].view(-1)


def _other_type(tensors: dict[str, torch.Tensor]) -> None:
    tensors["a"] = tensors["a"].view(torch.int32)


def _other_name(tensors: dict[str, torch.Tensor]) -> None:
    tensors["c"] = tensors.pop("a")


def _one_bit(tensors: dict[str, torch.Tensor]) -> None:
    tensors["a"].view(torch.int32).view(-1)[-1] ^= 1


@pytest.mark.parametrize(
    "change",
    [
        _swap_values, _swap_tensors, _move_bytes, _other_shape, _other_type, _other_name, _one_bit,
    ],
)  # fmt: skip
def test_what_is_changed_is_seen(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(300, 300, generator=generator) for name in "ab"}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    before = checkpoint_digest(digest_file(path, threading.Event()))
    change(tensors)
    save_file(tensors, path)
    assert checkpoint_digest(digest_file(path, threading.Event())) != before


def test_a_base_is_read_back_from_the_engine_that_has_it() -> None:
    tensors = tensors_of(1, [(0, 100), (1, 31), (2, 5)])
    manifest = layout(tensors, 256)
    expected = read(hold(tensors, manifest))
    segment = hold(tensors, manifest).held(MATH)
    store, version = WorkerStore(0, 0), PolicyVersion("base", 3)
    store.served.set(ServedBase("t", version, manifest, b"d", segment.payload))
    assert read(store, version) == expected


def test_what_is_not_held_is_not_read() -> None:
    with pytest.raises(NotFoundError, match="no copy of math@1"):
        DigestReader(WorkerStore(0, 0), MATH)


def _fails(reading: DigestReader) -> Exception:
    with pytest.raises((NotFoundError, LoadFailedError)) as failed:
        until(lambda: reading.take() is None)
    return failed.value


def test_memory_that_another_version_may_have_by_now_is_not_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = tensors_of(1, [(0, 100), (0, 100)])
    store = hold(tensors, layout(tensors, 256))
    real = digest_reading.tensor_digest

    def drop_meanwhile(content: torch.Tensor, **settings: Any) -> int:
        store.drop_adapter(MATH)
        return real(content, **settings)

    monkeypatch.setattr(digest_reading, "tensor_digest", drop_meanwhile)
    error = _fails(DigestReader(store, MATH))
    assert isinstance(error, NotFoundError)
    assert "was dropped while it was read" in str(error)


def test_what_nobody_asks_for_any_more_ends_and_holds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(digest_reading, "PART_TENSORS", 1)
    monkeypatch.setattr(digest_reading, "IDLE_SECONDS", 0.05)
    tensors = tensors_of(1, [(0, 100)] * 5)
    store = hold(tensors, layout(tensors, 256))
    reading = DigestReader(store, MATH)
    (thread,) = [t for t in threading.enumerate() if t.name == "weft-digest-math@1"]
    thread.join(10)
    assert not thread.is_alive()
    assert len(reading._found) <= 2
    assert "not taken in time" in str(_fails(reading))


def test_one_that_is_closed_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_reading, "PART_TENSORS", 1)
    tensors = tensors_of(1, [(0, 100)] * 5)
    reading = DigestReader(hold(tensors, layout(tensors, 256)), MATH)
    (thread,) = [t for t in threading.enumerate() if t.name == "weft-digest-math@1"]
    reading.close()
    thread.join(10)
    assert not thread.is_alive()
