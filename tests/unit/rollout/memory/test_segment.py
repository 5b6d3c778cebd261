"""Shared memory is made in slices, and says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rollout_side.config import Staging
from rollout_side.memory import segment
from rollout_side.memory import segment as segment_module
from rollout_side.memory.segment import (
    MARGIN_BYTES,
    DeviceSegment,
    HostSegment,
    Memory,
    SegmentPool,
    stage_on_device,
)
from rollout_side.memory.store import WorkerStore
from rollout_side.memory.versions import BucketContents, PartialTransfer, StagedVersion
from rollout_side.receive.incoming_buckets import (
    ReceiveRing,
    StagingSink,
    arrival_buffers,
)
from tests.doubles.wire import seal_wire
from weft_rl.contract.errors import DigestMismatchError
from weft_rl.contract.manifest import plan_buckets, whole_plan
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import DataType, TensorMeta
from weft_rl.transport.digests.wsum64 import part_digests
from weft_rl.transport.wire.buckets import whole_parts


def test_memory_is_made_in_slices_that_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "SLICE_BYTES", 4096)
    told: list[tuple[int, int]] = []
    made = HostSegment.allocate(10_000, on_progress=lambda done, total: told.append((done, total)))
    assert told == [(4096, 10_000), (8192, 10_000), (10_000, 10_000)]
    assert made.data.numel() == 10_000
    assert not made.data.any()


class _Filling:
    """A copy from an accelerator, which has ended once it was waited for."""

    def __init__(self) -> None:
        self.num_waits = 0

    def synchronize(self) -> None:
        self.num_waits += 1


@pytest.mark.parametrize("look", [lambda s: s.data, lambda s: s.ref, lambda s: s.__del__()])
def test_who_looks_at_what_is_filled_waits_for_that(look: Callable[[HostSegment], object]) -> None:
    made, filling = HostSegment.allocate(8), _Filling()
    made._filled = filling  # type: ignore[assignment]
    assert made.num_bytes == 8
    assert not filling.num_waits
    look(made)
    look(made)
    assert filling.num_waits == 1


def test_a_segment_is_filled_from_its_beginning() -> None:
    for made in (HostSegment.allocate(8), DeviceSegment.allocate(8, torch.device("cpu"))):
        made.data.zero_()
        made.fill(torch.arange(1, 6, dtype=torch.uint8))
        assert made.data.tolist() == [1, 2, 3, 4, 5, 0, 0, 0]


MANIFEST = plan_buckets([TensorMeta(f"w{i}", DataType.FLOAT32, (64, 8)) for i in range(5)], 4096)
SIZE = MANIFEST.wire_bytes
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ELSEWHERE = torch.device("cpu", 0)  # not equal to CPU: buffers there, as on an accelerator
GIB = 2**30
NONCE = 7


@pytest.mark.parametrize(
    ("staging", "device", "free", "expected"),
    [
        ("auto", GPU, 16 * GIB + MARGIN_BYTES, True),
        ("auto", GPU, 16 * GIB, False),
        ("device", GPU, 0, True),
        ("host", GPU, 100 * GIB, False),
        ("auto", CPU, 100 * GIB, False),
        ("device", CPU, 100 * GIB, False),
        ("in-place", GPU, 100 * GIB, False),
    ],
)
def test_a_base_is_staged_on_the_device_if_it_fits(
    staging: Staging, device: torch.device, free: int, expected: bool
) -> None:
    assert stage_on_device(staging, device, 16 * GIB, free) == expected


def test_adapters_lie_on_the_host_and_nccl_receives_on_the_device() -> None:
    memory = Memory(GPU, base_on_device=True)
    assert memory.place(adapter=False) == GPU
    assert memory.place(adapter=True) == CPU
    assert memory.device_of("nccl") == GPU
    assert memory.device_of("gloo") == CPU


def stage(store: WorkerStore, version: str) -> int:
    """Stage a version; returns where its bytes lie."""
    parsed = PolicyVersion.parse(version)
    segment = store.reserve(version, SIZE, adapter=parsed.policy != "base")
    store.put_staged(StagedVersion(version, parsed, MANIFEST, segment, b""))
    return segment.data.data_ptr()


def test_the_next_adapter_finds_its_memory_made() -> None:
    store = WorkerStore(10 * SIZE, 10 * SIZE)
    store.make_spare()  # of nothing yet
    assert store.usage().free_bytes == 0
    stage(store, "math@1")
    for _ in range(2):
        store.make_spare()
        assert store.usage().free_bytes == SIZE  # one is enough
    stage(store, "math@2")
    assert store.usage().free_bytes == 0


@pytest.mark.parametrize("num_together", [1, 2])
def test_pushes_in_a_loop_use_again_what_retirement_gives_back(num_together: int) -> None:
    store = WorkerStore(10 * SIZE, 10 * SIZE)
    used: set[int] = set()
    served: list[PolicyVersion] = []
    for number in range(1, 13):
        address = stage(store, f"math@{number}")
        if number > 2 + num_together:
            assert address in used, f"math@{number} lies in new memory"
        used.add(address)
        store.keep_adapter(f"math@{number}", "{}")
        served.append(PolicyVersion("math", number))
        if len(served) == 2 + num_together:
            for version in served[:num_together]:
                store.drop_adapter(version)
            del served[:num_together]
    assert store.usage().free_bytes <= 2 * SIZE


def test_two_are_kept_of_small_sizes_one_of_large_ones_and_sizes_are_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(segment_module, "_KEPT_TWICE_BYTES", SIZE)
    pool = SegmentPool()
    made = [HostSegment.allocate(size) for size in [SIZE] * 3 + [2 * SIZE] * 2]
    pool.put(*made)
    assert list(pool) == [made[0], made[1], made[3]]
    third = HostSegment.allocate(3 * SIZE)
    pool.put(third)
    assert list(pool) == [made[3], third]  # the sizes that came back last
    pool.put(made[0], made[1])
    assert list(pool) == [third, made[0], made[1]]


def test_no_spare_is_made_for_a_base() -> None:
    store = WorkerStore(10 * SIZE, 10 * SIZE)
    stage(store, "base@1")
    store.make_spare()
    assert store.usage().free_bytes == 0


@pytest.mark.parametrize("settled", [False, True])
def test_memory_that_may_still_be_written_is_not_used_again(settled: bool) -> None:
    store = WorkerStore(10 * SIZE, 10 * SIZE)
    segment = store.reserve("t", SIZE, adapter=False)
    segment.data.fill_(3)
    store.put_partial(PartialTransfer("t", "trainer", MANIFEST, segment, [BucketContents((), [1])]))
    if settled:
        store.settle_partial("trainer")
    store.settle_partial("another")
    taken = store.take_partial("t", "trainer")
    assert taken is not None
    assert (taken.segment is segment) == settled
    assert taken.segment.data[0] == 3


def _ring(data: torch.Tensor, device: torch.device) -> ReceiveRing:
    plan = whole_plan(MANIFEST)
    partial = PartialTransfer("t", "trainer", MANIFEST, HostSegment.allocate(SIZE), [])
    buffers = arrival_buffers(plan, 2, device) if device != data.device else {}
    return ReceiveRing(MANIFEST, plan, StagingSink(partial, data, device), buffers, 2)


def _copying_ring(data: torch.Tensor) -> ReceiveRing:
    """Return a ring that copies what has arrived to the sink's memory, as to that of a GPU."""
    plan = whole_plan(MANIFEST)
    partial = PartialTransfer("t", "trainer", MANIFEST, HostSegment.allocate(SIZE), [])
    sink, buffers = StagingSink(partial, data, CPU), arrival_buffers(plan, 2, CPU)
    return ReceiveRing(MANIFEST, plan, sink, buffers, 2, CPU)


def send(buffers: ReceiveRing, index: int, nonce: int = NONCE) -> torch.Tensor:
    """Put a bucket where it is received, as its sender does; returns its payload."""
    bucket, wire = MANIFEST.buckets[index], buffers.wire(index)
    payload = wire[: bucket.payload_bytes]
    payload.copy_(torch.arange(payload.numel(), dtype=torch.int32).mul(index + 1).to(torch.uint8))
    digests = part_digests(payload.contiguous(), whole_parts(MANIFEST, index))
    seal_wire(wire, bucket.payload_bytes, nonce, index, digests)
    return payload.clone()


@pytest.mark.parametrize("device", [CPU, ELSEWHERE, None])
def test_buckets_come_to_lie_one_after_the_other(device: torch.device | None) -> None:
    data = torch.zeros(SIZE, dtype=torch.uint8)
    buffers = _copying_ring(data) if device is None else _ring(data, device)
    at = 0
    for index, bucket in enumerate(MANIFEST.buckets):
        payload = send(buffers, index)
        buffers.accept(index, NONCE)()
        assert torch.equal(data[at : at + payload.numel()], payload)
        at += bucket.wire_bytes
    assert len(MANIFEST.buckets) > buffers.ahead  # so that buffers were used again


def test_a_garbled_bucket_that_comes_again_is_copied_again() -> None:
    data = torch.zeros(SIZE, dtype=torch.uint8)
    buffers = _copying_ring(data)
    payload = send(buffers, 0)
    buffers.wire(0)[5] += 1
    with pytest.raises(DigestMismatchError):
        buffers.accept(0, NONCE)()
    assert buffers.num_kept == 0
    buffers.wire(0)[5] -= 1
    buffers.accept(0, NONCE)()
    assert buffers.num_kept == 1
    assert torch.equal(data[: payload.numel()], payload)


def test_a_bucket_of_another_transfer_does_not_land() -> None:
    data = torch.zeros(SIZE, dtype=torch.uint8)
    buffers = _ring(data, ELSEWHERE)
    send(buffers, 0, nonce=8)
    with pytest.raises(DigestMismatchError, match="nonce"):
        buffers.accept(0, NONCE)()
    assert not data.any()
