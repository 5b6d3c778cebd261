"""What a worker lets go of before its engine sleeps, and what it has again afterwards."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rollout_side.memory.segment import DeviceSegment, HostSegment
from rollout_side.memory.store import WorkerStore
from rollout_side.memory.versions import ServedBase, StagedVersion
from tests.unit.rollout.memory.test_retained import MANIFEST, SIZE
from weft.contract.errors import CapacityError, NotFoundError
from weft.contract.names import PolicyVersion


def _on_device(store: WorkerStore, number: int) -> None:
    """Retain a base on an accelerator, which torch's meta device stands for."""
    version, name = PolicyVersion("base", number), f"t{number}"
    store.reserve(name, SIZE, adapter=False)
    segment = DeviceSegment(torch.empty(SIZE, dtype=torch.uint8, device="meta"), owned=True)
    store.put_staged(StagedVersion(name, version, MANIFEST, segment, b"d"))
    store.keep_base(name)


def _on_host(store: WorkerStore, number: int) -> None:
    version, name = PolicyVersion("base", number), f"t{number}"
    segment = store.reserve(name, SIZE, adapter=False)
    store.put_staged(StagedVersion(name, version, MANIFEST, segment, b"d"))
    store.keep_base(name)


def test_copies_on_the_device_go_unless_they_are_pinned() -> None:
    store = WorkerStore(9 * SIZE, SIZE, 3)
    for number in (1, 2):
        _on_device(store, number)
    _on_host(store, 3)
    store.pin_bases([1])
    assert store.fall_asleep()
    assert store.retained_bases() == (3, 1)
    assert store.usage().staging_bytes == 2 * SIZE
    store.served.wake_up(discarded=False)
    assert store.retained_bases() == (3, 1)


def test_free_memory_of_the_device_is_given_back() -> None:
    store = WorkerStore(9 * SIZE, SIZE, 1)
    _on_device(store, 1)
    _on_device(store, 2)  # the first one's memory is free
    assert store.usage().free_bytes == SIZE
    assert store.fall_asleep()
    assert store.usage().free_bytes == 0


def test_the_engine_s_own_weights_are_read_by_nobody_meanwhile() -> None:
    store = WorkerStore(9 * SIZE, SIZE)
    version = PolicyVersion("base", 1)
    served = ServedBase("t1", version, MANIFEST, b"d", lambda index, out: out)
    store.served.set(served)
    with store.lend(version):
        assert not store.fall_asleep()
        assert store.sendable(version) is served
    assert store.fall_asleep()
    with pytest.raises(NotFoundError):
        store.sendable(version)
    assert store.fall_asleep()  # again
    store.served.wake_up(discarded=False)
    assert store.sendable(version) is served


def test_weights_that_were_loaded_once_awake_are_those_that_are_read() -> None:
    store = WorkerStore(9 * SIZE, SIZE)
    former = ServedBase("t1", PolicyVersion("base", 1), MANIFEST, b"d", lambda index, out: out)
    store.served.set(former)
    assert store.fall_asleep()
    store.served.wake_up(discarded=False)
    store.served.set(replace(former, version=PolicyVersion("base", 2)))
    store.served.wake_up(discarded=False)
    assert store.retained_bases() == (2,)


def test_weights_that_were_discarded_are_read_by_nobody_any_more() -> None:
    store = WorkerStore(9 * SIZE, SIZE)
    version = PolicyVersion("base", 1)
    store.served.set(ServedBase("t1", version, MANIFEST, b"d", lambda index, out: out))
    assert store.fall_asleep(keep_newest=True)
    store.served.wake_up(discarded=True)
    assert store.retained_bases() == ()
    assert not store.served.is_of("t1", b"d")


def _bytes_on_device(store: WorkerStore, number: int) -> None:
    """Retain a base whose bytes can be copied, on what says that it is an accelerator."""
    version, name = PolicyVersion("base", number), f"t{number}"
    store.reserve(name, SIZE, adapter=False)
    store.put_staged(StagedVersion(name, version, MANIFEST, _Device(number), b"d"))
    store.keep_base(name)


class _Device(DeviceSegment):
    def __init__(self, value: int) -> None:
        super().__init__(_OnDevice(value), owned=True)  # type: ignore[arg-type]


class _OnDevice:
    """As much of a tensor as is asked of one that is not here."""

    device = torch.device("meta")

    def __init__(self, value: int) -> None:
        self._value = value

    def numel(self) -> int:
        return SIZE

    def __getitem__(self, part: slice) -> torch.Tensor:
        return torch.full((SIZE,), self._value, dtype=torch.uint8)[part]


def test_the_copy_of_the_served_base_moves_to_the_host() -> None:
    store = WorkerStore(9 * SIZE, SIZE, 2)
    for number in (1, 2):
        _bytes_on_device(store, number)
    assert store.fall_asleep(keep_newest=True)
    assert store.retained_bases() == (2,)
    data = store.held(PolicyVersion("base", 2)).segment.data
    assert data.device.type == "cpu"
    assert data.tolist() == [2] * SIZE
    assert store.held(PolicyVersion("base", 2)).transfer_id == "t2"
    assert store.fall_asleep(keep_newest=True)  # again: it lies there
    assert store.held(PolicyVersion("base", 2)).segment.data is data


def test_a_host_without_room_keeps_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise CapacityError("this machine has no room")

    store = WorkerStore(9 * SIZE, SIZE, 1)
    _bytes_on_device(store, 1)
    monkeypatch.setattr(HostSegment, "allocate", full)
    assert store.fall_asleep(keep_newest=True)
    assert store.retained_bases() == ()
