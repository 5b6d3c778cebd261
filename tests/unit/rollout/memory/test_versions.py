"""What was received of a clone waits for its turn, and gives way to a push."""

from __future__ import annotations

import threading

import pytest

from rollout_side.memory.store import WorkerStore
from rollout_side.memory.versions import BucketContents, PartialTransfer
from weft_rl.contract.errors import CapacityError
from weft_rl.contract.manifest import plan_buckets
from weft_rl.contract.tensors import DataType, TensorMeta

MANIFEST = plan_buckets([TensorMeta(f"w{i}", DataType.FLOAT32, (64,)) for i in range(4)], 256)
SIZE = MANIFEST.wire_bytes


def _interrupted(store: WorkerStore, name: str, trainer_id: str, *, adapter: bool = False) -> None:
    is_clone = trainer_id.startswith("replica:")
    segment = store.reserve(name, SIZE, adapter=adapter, clone=is_clone)
    store.put_partial(
        PartialTransfer(
            name, trainer_id, MANIFEST, segment, [BucketContents((), [1]), BucketContents((), [2])]
        )
    )
    store.settle_partial(trainer_id)


def _digests(store: WorkerStore, name: str, trainer_id: str) -> list[BucketContents] | None:
    partial = store.take_partial(name, trainer_id)
    return partial and partial.verified


def test_what_a_clone_has_brought_outlasts_the_pushes_of_trainers() -> None:
    store = WorkerStore(2 * SIZE, SIZE)
    _interrupted(store, "clone", "replica:r0")
    segment = store.reserve("push", SIZE, adapter=False)
    store.release("push", segment)
    assert store.usage().staging_bytes == SIZE
    assert store.usage().staged_transfer_ids == ("clone",)
    assert _digests(store, "clone", "replica:r0") == [
        BucketContents((), [1]),
        BucketContents((), [2]),
    ]


@pytest.mark.parametrize("adapter", [False, True])
def test_it_gives_way_where_a_push_needs_its_room(adapter: bool) -> None:
    store = WorkerStore(SIZE, SIZE)
    _interrupted(store, "clone", "replica:r0", adapter=adapter)
    store.reserve("push", SIZE, adapter=adapter)
    assert store.usage().staged_transfer_ids == ()
    assert _digests(store, "clone", "replica:r0") is None


def test_it_does_not_give_way_to_another_clone_nor_do_pushes_to_it() -> None:
    store = WorkerStore(SIZE, SIZE)
    _interrupted(store, "push", "trainer")
    with pytest.raises(CapacityError):
        store.reserve("clone", SIZE, adapter=False, clone=True)
    with pytest.raises(CapacityError):
        store.reserve("second", SIZE, adapter=False)
    assert _digests(store, "push", "trainer") == [BucketContents((), [1]), BucketContents((), [2])]


def test_of_clones_one_is_kept() -> None:
    store = WorkerStore(9 * SIZE, SIZE)
    for name, source in (("first", "replica:r0"), ("second", "replica:r1")):
        _interrupted(store, name, source)
    assert store.usage().staged_transfer_ids == ("second",)
    assert store.usage().staging_bytes == SIZE


def test_a_push_waits_for_a_clone_that_has_still_to_hear_that_it_was_ended() -> None:
    store = WorkerStore(SIZE, SIZE)
    segment = store.reserve("clone", SIZE, adapter=False, clone=True)
    got = threading.Event()

    def push() -> None:
        store.reserve("push", SIZE, adapter=False)
        got.set()

    thread = threading.Thread(target=push)
    thread.start()
    assert not got.is_set()
    store.put_partial(
        PartialTransfer("clone", "replica:r0", MANIFEST, segment, [BucketContents((), [1])])
    )
    assert got.wait(10)
    thread.join()
    assert store.usage().staged_transfer_ids == ()
