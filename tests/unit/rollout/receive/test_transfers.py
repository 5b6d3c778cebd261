"""When generation is to pause for a base that is loaded in place."""

from __future__ import annotations

import time

import pytest
import torch

from rollout_side.memory.handoff import HandoffQueue
from rollout_side.memory.segment import MARGIN_BYTES, Memory
from rollout_side.receive.incoming_buckets import (
    PAUSE_SECONDS,
    LoadingSink,
    ReceiveRing,
    is_load_due,
    make_buffers,
)
from tests.doubles.wire import seal_wire
from weft_rl.contract.errors import CapacityError
from weft_rl.contract.manifest import plan_buckets, whole_plan
from weft_rl.contract.names import PolicyVersion
from weft_rl.contract.tensors import DataType, TensorMeta
from weft_rl.transport.group import CPU

METAS = [TensorMeta(f"w{i}", DataType.BFLOAT16, (16, 8)) for i in range(8)]
MANIFEST = plan_buckets(METAS, 256)

IN_FLIGHT = 2


@pytest.mark.parametrize(
    ("received", "buffers", "buckets", "each", "due"),
    [
        (0, 3, 16, 0.0, False),  # nothing is known yet
        (2, 3, 16, 1.0, True),  # the last buffer is being filled
        (1, 8, 16, 1.0, False),
        (6, 8, 16, 1.0, False),
        (7, 8, 16, 1.0, True),
        (1, 10, 16, PAUSE_SECONDS / 8, True),  # fast: eight more while the engine stops
        (1, 10, 16, PAUSE_SECONDS / 7, False),
        (15, 99, 16, 1.0, True),  # the last bucket is on its way
        (14, 99, 16, 1.0, False),
        (0, 1, 1, 0.0, True),
        (1, 1, 1, 0.0, True),
    ],
)
def test_as_late_as_receiving_allows(
    received: int, buffers: int, buckets: int, each: float, due: bool
) -> None:
    assert is_load_due(received, buffers, buckets, received * each) is due


def _land(buffers: ReceiveRing, index: int) -> None:
    """A bucket of zeros arrives."""
    size = MANIFEST.buckets[index].payload_bytes
    wire = buffers.wire(index).zero_()
    seal_wire(wire, size, 7, index, [0] * len(MANIFEST.tensors_by_bucket[index]))
    buffers.accept(index, 7)()


def _handoff() -> HandoffQueue:
    return HandoffQueue("t1", PolicyVersion("base", 1), MANIFEST, time.monotonic() + 20)


def _ring(handoff: HandoffQueue, num_more: int = 0) -> ReceiveRing:
    plan = whole_plan(MANIFEST)
    sink = LoadingSink(handoff, plan, CPU, IN_FLIGHT, lambda: None, num_more)
    return ReceiveRing(MANIFEST, plan, sink, {}, IN_FLIGHT)


def test_with_as_few_buffers_as_there_must_be_at_once() -> None:
    buffers = _ring(_handoff())
    assert buffers.sink.is_load_due()
    assert not buffers.sink.is_load_due()  # said once


def test_with_more_of_them_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    buffers = _ring(_handoff(), 3)
    said = []
    for index in range(IN_FLIGHT + 3):
        assert buffers.make_room(index, wait=False)
        now[0] += 1.0
        _land(buffers, index)
        said.append(buffers.sink.is_load_due())
    assert said == [False, False, False, True, False]
    assert not buffers.make_room(IN_FLIGHT + 3, wait=False)


def test_where_it_goes_on_in_another_group_at_once() -> None:
    handoff = _handoff()
    _land(_ring(handoff, 6), 0)
    assert _ring(handoff, 6).sink.is_load_due()


def test_room_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (12 * gib, 99 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * gib)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4 * gib)
    device = torch.device("cuda", 0)
    memory = Memory(device, in_place=True)
    assert 13 * gib - MARGIN_BYTES == 11 * gib
    assert memory.room_for(gib, device, 64 * gib, 3) == 6  # but for five
    assert memory.room_for(gib, device, 5 * gib, 3) == 2  # but for three
    assert memory.room_for(gib, device, 1, 3) == 0
    assert memory.room_for(4 * gib, device, 64 * gib, 3) == 0
    assert memory.room_for(gib, CPU, 64 * gib, 3) == 0


def test_no_room_at_all_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def empty(size: int, **settings: object) -> torch.Tensor:
        if len(made) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        made.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    monkeypatch.setattr(torch, "empty", empty)
    sizes = [bucket.wire_bytes for bucket in MANIFEST.buckets]
    with pytest.raises(CapacityError, match="push smaller buckets"):
        make_buffers(sizes, 2, CPU)
    made.clear()
    assert len(make_buffers(sizes, 1, CPU, more=5)) == 1  # as many as there is room for
