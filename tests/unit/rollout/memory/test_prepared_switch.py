"""A switch that was prepared is used only while the weights are those that it was prepared for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rollout_side.memory.segment import HostSegment
from rollout_side.memory.store import WorkerStore
from rollout_side.memory.versions import PreparedSwitch, ServedBase, StagedVersion
from tests.unit.rollout.memory.test_retained_bases import MANIFEST, SIZE
from weft_rl.contract.names import PolicyVersion

BASE = ServedBase("t1", PolicyVersion("base", 1), MANIFEST, b"d", lambda index, out: out)


def _prepared(store: WorkerStore) -> StagedVersion:
    version = PolicyVersion("base", 2)
    staged = StagedVersion("t2", version, MANIFEST, HostSegment.allocate(SIZE), b"e")
    with store.served.reading() as era:
        if era:
            staged.prepared.append(PreparedSwitch(era, lambda: None))
    return staged


def _sleep(store: WorkerStore, *, discarded: bool) -> None:
    assert store.fall_asleep()
    store.served.wake_up(discarded=discarded)


#: Steps after which the weights may be others.
CHANGES: dict[str, Callable[[WorkerStore], object]] = {
    "a load began": lambda store: store.served.set(None),
    "another base was loaded": lambda store: (
        store.served.set(None),
        store.served.set(None, is_loaded=True),
    ),
    "one that can be read": lambda store: store.served.set(replace(BASE, transfer_id="t9")),
    "asleep": lambda store: store.fall_asleep(),
    "discarded": lambda store: _sleep(store, discarded=True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("is_read_back", [True, False])
def test_it_is_of_no_use_once_the_weights_have_changed(
    change: Callable[[WorkerStore], object], is_read_back: bool
) -> None:
    store = WorkerStore(9 * SIZE, SIZE)
    store.served.set(BASE if is_read_back else None, is_loaded=True)
    staged = _prepared(store)
    assert staged.prepared
    change(store)
    assert store.served.take_prepared(staged) is None
    assert not staged.prepared  # its memory is free


def test_it_is_used_once() -> None:
    store = WorkerStore(9 * SIZE, SIZE)
    staged = _prepared(store)
    assert store.served.take_prepared(staged) is not None
    assert store.served.take_prepared(staged) is None


@pytest.mark.parametrize("change", ["a load began", "asleep", "discarded"])
def test_nothing_is_prepared_for_weights_that_are_not_whole(change: str) -> None:
    store = WorkerStore(9 * SIZE, SIZE)
    CHANGES[change](store)
    assert not _prepared(store).prepared
    store.served.wake_up(discarded=False)
    store.served.set(None, is_loaded=True)
    assert _prepared(store).prepared


def test_the_engine_does_not_fall_asleep_while_its_weights_are_read() -> None:
    store = WorkerStore(9 * SIZE, SIZE)
    with store.served.reading(), store.served.reading():
        assert not store.fall_asleep()
    assert store.fall_asleep()
    with store.served.reading() as era:
        assert era == 0
        assert store.fall_asleep()  # nobody reads them


def test_what_is_prepared_is_dropped_before_a_sleep() -> None:
    store = WorkerStore(9 * SIZE, SIZE)
    store.reserve("t2", SIZE, adapter=False)
    staged = _prepared(store)
    store.put_staged(staged)
    _sleep(store, discarded=False)
    assert not staged.prepared
