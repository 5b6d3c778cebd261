"""What a worker lets go of before its engine sleeps, and what it has again afterwards."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rollout_side.memory import segment
from rollout_side.memory.segment import MARGIN_BYTES, DeviceSegment, HostSegment, Memory
from rollout_side.memory.store import WorkerStore
from rollout_side.memory.versions import PartialTransfer, ServedBase, StagedVersion
from tests.unit.rollout.memory.test_retained_bases import MANIFEST, SIZE
from weft_rl.contract.errors import CapacityError, NotFoundError
from weft_rl.contract.names import PolicyVersion


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
    with store.lend(lambda: store.sendable(version)):
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


GPU, GIB = torch.device("cuda", 0), 2**30


class _Gpu:
    """As much of an accelerator as is asked of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free_gib: int) -> None:
        self.free_bytes, self.kept_bytes = free_gib * GIB, 0
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free_bytes, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: self.kept_bytes)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
        monkeypatch.setattr(torch.cuda, "empty_cache", self._empty_cache)
        monkeypatch.setattr(segment, "DeviceSegment", self)

    def _empty_cache(self) -> None:
        self.free_bytes, self.kept_bytes = self.free_bytes + self.kept_bytes, 0

    def allocate(self, num_bytes: int, device: torch.device) -> DeviceSegment:
        """In the place of ``DeviceSegment``'s."""
        self.free_bytes -= num_bytes
        return DeviceSegment(torch.empty(num_bytes, dtype=torch.uint8, device="meta"), owned=True)


def test_a_load_in_place_leaves_the_weights_what_they_need_to_wake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its buffers fill before the weights are woken, and of a model of 40 GiB there are 40."""
    _Gpu(monkeypatch, 50)
    memory = Memory(GPU, in_place=True)
    awake = 50 - MARGIN_BYTES // GIB - 2 - 3
    assert memory.room_for(GIB, GPU, 64 * GIB, 3) == awake
    memory.fall_asleep(40 * GIB)
    assert memory.room_for(GIB, GPU, 64 * GIB, 3) == 0
    memory.wake_weights()  # the KV cache sleeps on, in whose memory others are
    assert memory.room_for(GIB, GPU, 64 * GIB, 3) == 0
    memory.wake_up()
    assert memory.room_for(GIB, GPU, 64 * GIB, 3) == awake


def test_a_push_without_room_beside_the_sleeping_weights_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = _Gpu(monkeypatch, 42)
    memory = Memory(GPU, in_place=True)
    memory.fall_asleep(40 * GIB)
    with pytest.raises(CapacityError, match=r"42.0 GiB free.* 40.0 GiB of sleeping weights"):
        memory.room_for(GIB, GPU, 64 * GIB, 3)
    gpu.kept_bytes = GIB  # by torch, of a push before
    assert memory.room_for(GIB, GPU, 64 * GIB, 3) == 0
    assert gpu.kept_bytes == 0
    assert memory.room_for(GIB, torch.device("cpu"), 64 * GIB, 9) == 0
    gpu.free_bytes = 0
    memory.wake_weights()
    assert memory.room_for(GIB, GPU, 64 * GIB, 3) == 0


def test_a_copy_is_staged_on_the_device_beside_the_sleeping_weights_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = _Gpu(monkeypatch, 50)
    store = WorkerStore(99 * GIB, 99 * GIB, memory=Memory(GPU, base_on_device=True))
    store.memory.fall_asleep(40 * GIB)
    with pytest.raises(CapacityError, match="sleeping weights"):
        store.reserve("t1", 11 * GIB, adapter=False)
    assert store.usage().staging_bytes == 0
    store.reserve("t1", 10 * GIB, adapter=False)
    assert gpu.free_bytes == 40 * GIB


def test_what_a_push_leaves_on_the_device_is_given_back_while_it_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = _Gpu(monkeypatch, 50)
    store = WorkerStore(99 * GIB, 99 * GIB, memory=Memory(GPU, base_on_device=True))
    for asleep in (True, False):
        if asleep:
            store.memory.fall_asleep(GIB)
        segment = store.reserve("t1", GIB, adapter=False)
        store.release("t1", segment)
        assert store.usage().free_bytes == (0 if asleep else GIB)
        store.memory.wake_up()
    store.release("t2", host := HostSegment.allocate(SIZE))
    store.memory.fall_asleep(GIB)
    store.release("t3", HostSegment.allocate(SIZE))  # on the host there is room
    assert store.usage().free_bytes == GIB + 2 * host.num_bytes
    gpu.kept_bytes, free_bytes = GIB, gpu.free_bytes
    store.memory.give_back()
    assert gpu.free_bytes == free_bytes + GIB


def test_what_is_staged_or_on_its_way_stays_and_can_be_loaded() -> None:
    store = WorkerStore(9 * SIZE, 9 * SIZE)

    def on_device() -> DeviceSegment:
        data = torch.empty(SIZE, dtype=torch.uint8, device="meta")
        return DeviceSegment(data, owned=True)

    for name in ("staged", "interrupted", "under way"):
        store.reserve(name, SIZE, adapter=False)
    staged = StagedVersion("staged", PolicyVersion("base", 1), MANIFEST, on_device(), b"d")
    store.put_staged(staged)
    segment = on_device()
    store.put_partial(PartialTransfer("interrupted", "trainer", MANIFEST, segment, []))
    assert store.fall_asleep(keep_newest=True)
    assert store.usage().staging_bytes == 3 * SIZE
    assert store.staged("staged", b"d") is staged
    store.settle_partial("trainer")
    partial = store.take_partial("interrupted", "trainer")
    assert partial is not None
    assert partial.segment is segment
