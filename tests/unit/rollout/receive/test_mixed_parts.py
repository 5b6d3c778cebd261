"""Parts of a mixed plan at a receiver: which buckets it takes, which it lets pass, and how far it
says that it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_side.receive.incoming_buckets import DroppedRing, PreparedTransfer
from weft_rl.contract.manifest import SendPlan, WireBucket, make_send_plan
from weft_rl.tracing import NO_TRACER
from weft_rl.transport.group import CPU

BASE = b"12345678"


def wires(count: int, payload_bytes: int = 256) -> list[WireBucket]:
    return [WireBucket(0, index, payload_bytes, 1) for index in range(count)]


def mixed(num_changes: int, num_whole: int) -> SendPlan:
    return make_send_plan(1, [*wires(num_changes), *wires(num_whole, 512)], BASE, num_whole)


def prepared(plan: SendPlan, num_verified: int = 0, *, takes_whole: bool) -> PreparedTransfer:
    own: Any = SimpleNamespace(plan=plan.part(takes_whole=takes_whole), num_verified=num_verified)
    return PreparedTransfer(
        transfer_id="t1",
        version=None,  # type: ignore[arg-type]
        nonce=7,
        deadline=0.0,
        num_in_flight=2,
        transfer=own,
        span=NO_TRACER.start("test"),
        plan=plan,
        takes_whole=takes_whole,
    )


@given(st.integers(1, 5), st.integers(1, 5), st.booleans(), st.integers(0, 12))
def test_every_bucket_is_taken_or_dropped_once_in_the_order_of_all(
    num_changes: int, num_whole: int, takes_whole: bool, first_bucket: int
) -> None:
    plan = mixed(num_changes, num_whole)
    before, own, behind = prepared(plan, takes_whole=takes_whole).parts()
    assert (len(before), len(behind)) == ((1, 0) if takes_whole else (0, 1))
    assert own.plan == plan.part(takes_whole=takes_whole)
    come = [
        part.begin + index
        for part in (*before, own, *behind)
        for index in range(part.place(first_bucket), len(part.plan.buckets))
    ]
    assert come == list(range(min(first_bucket, len(plan.buckets)), len(plan.buckets)))


@pytest.mark.parametrize(
    ("takes_whole", "num_own", "said"),
    [
        (False, 0, 0),
        (False, 2, 2),
        (False, 3, 7),  # all elements that come behind are nothing to it
        (True, 0, 3),  # nor is the delta that comes before
        (True, 2, 5),
        (True, 4, 7),
    ],
)
def test_it_says_from_where_on_buckets_must_come_for_it(
    num_own: int, said: int, *, takes_whole: bool
) -> None:
    plan = mixed(3, 4)
    assert prepared(plan, num_own, takes_whole=takes_whole).num_verified == said


@pytest.mark.parametrize("num_own", [0, 2, 3])
def test_of_any_other_plan_all_is_its_own(num_own: int) -> None:
    for plan in (make_send_plan(1, wires(3)), make_send_plan(1, wires(3), BASE)):
        one = prepared(plan, num_own, takes_whole=False)
        before, own, behind = one.parts()
        assert (before, own.plan, own.begin, behind) == ([], plan, 0, [])
        assert one.num_verified == num_own


@pytest.mark.parametrize("is_read_there", [True, False])
def test_what_is_dropped_takes_memory_only_where_it_must_come(*, is_read_there: bool) -> None:
    plan = make_send_plan(1, wires(5, 2**20))
    ring = DroppedRing(plan, 1, CPU, 2, is_read_there=is_read_there)
    assert ring.num_kept == 1
    memory = set()
    for index in range(1, 5):
        wire = ring.wire(index)
        assert wire.numel() == plan.wire_bytes(index)
        assert ring.make_room(index, wait=False)
        memory.add(wire.untyped_storage().data_ptr())
        assert wire.untyped_storage().nbytes() == (1 if is_read_there else wire.numel())
        ring.accept(index, 7)()
        assert ring.num_kept == index + 1
    assert len(memory) == (1 if is_read_there else 2)
    assert not ring.is_load_due()
    assert torch.uint8 == ring.wire(1).dtype
