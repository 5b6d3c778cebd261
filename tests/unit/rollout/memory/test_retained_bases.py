"""Which copies a worker keeps, what gives way to what, and what is never reused."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from rollout_side.memory.store import WorkerStore
from rollout_side.memory.versions import StagedVersion
from rollout_side.receive.clone_source import CopiedBuckets
from tests.doubles.wire import put_tail
from weft_rl.contract.errors import CapacityError, NotFoundError, NotReadyError
from weft_rl.contract.manifest import plan_buckets
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import DataType, TensorMeta
from weft_rl.transport.wire.buckets import verify_bucket

MANIFEST = plan_buckets(
    [TensorMeta(f"w{i}", DataType.FLOAT32, (64, 8)) for i in range(5)], capacity_bytes=4096
)
SIZE = MANIFEST.wire_bytes


def _stage(store: WorkerStore, version: str, fill: int = 1) -> str:
    parsed, transfer_id = PolicyVersion.parse(version), f"t-{version}"
    segment = store.reserve(transfer_id, SIZE, adapter=parsed.policy != "base")
    segment.data.fill_(fill)
    store.put_staged(StagedVersion(transfer_id, parsed, MANIFEST, segment, version.encode()))
    return transfer_id


def _load(store: WorkerStore, version: str, fill: int = 1) -> None:
    store.keep_base(_stage(store, version, fill))


@pytest.mark.parametrize(("retain", "kept"), [(0, ()), (1, (3,)), (2, (3, 2)), (9, (3, 2, 1))])
def test_the_newest_versions_are_kept(retain: int, kept: tuple[int, ...]) -> None:
    store = WorkerStore(100 * SIZE, SIZE, retain)
    for number in (1, 2, 3):
        _load(store, f"base@{number}")
    assert store.retained_bases() == kept
    assert store.usage().staging_bytes == len(kept) * SIZE


def test_a_copy_that_was_loaded_again_is_the_newest() -> None:
    store = WorkerStore(100 * SIZE, SIZE, 2)
    _load(store, "base@1", 1)
    _load(store, "base@2", 2)
    assert store.staged("t-base@1", b"base@1").segment.data[0] == 1
    store.keep_base("t-base@1")
    assert store.retained_bases() == (1, 2)
    _load(store, "base@3", 3)
    assert store.retained_bases() == (3, 1)
    with pytest.raises(NotReadyError):
        store.staged("t-base@2", b"base@2")


def test_copies_give_way_to_a_push_oldest_first_and_never_the_push() -> None:
    store = WorkerStore(3 * SIZE, SIZE, 3)
    for number in (1, 2, 3):
        _load(store, f"base@{number}")
    _stage(store, "base@4")
    assert store.retained_bases() == (3, 2)
    _stage(store, "base@5")
    _stage(store, "base@6")
    assert store.retained_bases() == ()
    with pytest.raises(CapacityError, match="staging-memory-gib"):
        _stage(store, "base@7")


def test_pinned_copies_are_kept_beside_the_newest() -> None:
    store = WorkerStore(100 * SIZE, SIZE, 1)
    _load(store, "base@1")
    store.pin_bases([1, 9])
    for number in (2, 3):
        _load(store, f"base@{number}")
    assert store.retained_bases() == (3, 1)
    assert (store.usage().pinned_base_bytes, store.usage().staging_bytes) == (SIZE, 2 * SIZE)
    store.pin_bases([3])
    assert store.retained_bases() == (3,)
    _load(store, "base@4")
    assert store.retained_bases() == (4, 3)


def test_a_push_takes_no_pinned_copy_and_is_told_which() -> None:
    store = WorkerStore(2 * SIZE, SIZE, 2)
    _load(store, "base@1")
    store.pin_bases([1])
    _load(store, "base@2")
    _load(store, "base@3")  # base@2 gave way
    assert store.retained_bases() == (3, 1)
    store.pin_bases([1, 3])
    with pytest.raises(CapacityError, match="base@1, base@3 pinned"):
        _stage(store, "base@4")
    assert store.retained_bases() == (3, 1)


def test_adapters_do_not_cost_a_retained_base() -> None:
    store = WorkerStore(SIZE, 2 * SIZE, 1)
    _load(store, "base@1")
    store.keep_adapter(_stage(store, "math@1"), "{}")
    assert store.retained_bases() == (1,)


def test_what_is_lent_is_neither_dropped_for_room_nor_overwritten() -> None:
    store = WorkerStore(SIZE, 4 * SIZE, 1)
    _load(store, "base@1", 1)
    store.keep_adapter(_stage(store, "math@1", 7), "{}")
    base, math = (partial(store.sendable, PolicyVersion(name, 1)) for name in ("base", "math"))
    with store.lend(base), store.lend(math) as adapter:
        with pytest.raises(CapacityError):
            _stage(store, "base@2", 2)
        store.drop_adapter(PolicyVersion("math", 1))
        store.keep_adapter(_stage(store, "math@2", 9), "{}")
        assert adapter.segment.data.eq(7).all()
        with pytest.raises(NotFoundError):
            store.held(PolicyVersion("math", 1))
    _load(store, "base@2", 2)
    assert store.retained_bases() == (2,)


def test_keeping_what_is_gone_is_no_error() -> None:
    store = WorkerStore(SIZE, SIZE, 1)
    store.keep_base("t-unknown")
    assert store.retained_bases() == ()


def test_a_clone_is_composed_anew_and_the_copy_is_only_read() -> None:
    store = WorkerStore(SIZE, SIZE, 1)
    _load(store, "base@1")
    copy = store.held(PolicyVersion("base", 1))
    copy.segment.data.copy_(torch.randint(0, 255, (SIZE,), dtype=torch.uint8))
    before = copy.segment.data.clone()
    buckets = CopiedBuckets(copy, nonce=77)
    at, digests = 0, list[int]()
    for index, bucket in enumerate(MANIFEST.buckets):
        sealed = buckets.make(index)
        wire = buckets.wire(index)
        put_tail(wire, sealed)
        assert torch.equal(wire[: bucket.payload_bytes], before[at : at + bucket.payload_bytes])
        digests += verify_bucket(wire, MANIFEST, index, 77)
        at += bucket.wire_bytes
    assert buckets.digests([]) == digests
    assert len(MANIFEST.buckets) > 2
    assert torch.equal(copy.segment.data, before)
