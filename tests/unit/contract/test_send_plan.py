"""Who sends what: a plan that some senders could have is taken, any other is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.group import MAX_SENDERS
from weft_rl.contract.manifest import (
    MAX_WIRE_BUCKETS,
    Manifest,
    SendPlan,
    WireBucket,
    align_up,
    check_send_plan,
    make_send_plan,
    mixed_plan,
    plan_buckets,
    whole_plan,
)
from weft_rl.contract.tensors import DataType, TensorMeta
from weft_rl.rpc.codec import send_plan_from_proto, send_plan_to_proto


def layout(sizes: list[int]) -> Manifest:
    metas = [TensorMeta(f"t.{i}.w", DataType.UINT8, (size,)) for i, size in enumerate(sizes)]
    return plan_buckets(metas, 1024)


def in_halves(manifest: Manifest) -> SendPlan:
    """Two senders, each with a half of every tensor, cut anywhere."""
    wires: dict[tuple[int, int], WireBucket] = {}
    for slot in manifest.tensors:
        middle, end = slot.meta.num_bytes // 2, slot.meta.num_bytes
        for sender, first, last in ((0, 0, middle), (1, middle, end)):
            if first == last:
                continue
            blocks = align_up(last) - first // 256 * 256
            wire = wires.get((slot.bucket, sender), WireBucket(sender, slot.bucket, 0, 0))
            wires[slot.bucket, sender] = WireBucket(
                sender, slot.bucket, wire.payload_bytes + blocks, wire.num_runs + 1
            )
    return make_send_plan(2, [wires[key] for key in sorted(wires)])


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=20).filter(lambda s: max(s) > 1))
def test_a_plan_that_covers_its_layout_is_taken_and_travels(sizes: list[int]) -> None:
    manifest = layout(sizes)
    plan = in_halves(manifest)
    check_send_plan(plan, manifest)
    assert send_plan_from_proto(send_plan_to_proto(plan)) == plan
    assert sorted(plan.sent_by(0) + plan.sent_by(1)) == list(range(len(plan.buckets)))
    for index, wire in enumerate(plan.buckets):
        assert plan.wire_bytes(index) % 256 == 0
        assert 0 <= plan.wire_bytes(index) - wire.payload_bytes - 40 - 40 * wire.num_runs < 256


@pytest.mark.parametrize(
    ("num_senders", "wires", "message"),
    [
        (0, [(0, 0, 256, 1)], "0 senders"),
        (MAX_SENDERS + 1, [(0, 0, 256, 1)], "1 to 256"),
        (2, [(0, 0, 256, 1), (2, 0, 256, 1)], "sent by rank 2"),
        (2, [(1, 0, 256, 1), (0, 0, 256, 1)], "listed by bucket"),
        (2, [(0, 1, 256, 1), (1, 0, 256, 1)], "listed by bucket"),
        (2, [(0, 0, 256, 1), (0, 0, 256, 1)], "listed by bucket"),
        (1, [(0, 0, 0, 1)], "payload bytes"),
        (1, [(0, 0, 100, 1)], "payload bytes"),
        (1, [(0, 0, 256, 0)], "cannot list 0 runs"),
        (1, [(0, 0, 256, 2)], "cannot list 2 runs"),
        (2, [(1, 0, 256, 1)], "sender 0 of a send plan has nothing to send"),
        (1, [(0, i, 256, 1) for i in range(MAX_WIRE_BUCKETS + 1)], "at most 65536"),
    ],
)
def test_what_is_no_plan_is_refused(
    num_senders: int, wires: list[tuple[int, int, int, int]], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        make_send_plan(num_senders, [WireBucket(*wire) for wire in wires])


@pytest.mark.parametrize(
    ("wires", "message"),
    [
        ([(0, 0, 512, 1)], "bucket 1 has 256 payload bytes; the send plan has 0"),
        ([(0, 0, 256, 1), (0, 1, 256, 1)], "bucket 0 has 512 payload bytes"),
        ([(0, 0, 1024 + 256, 1), (0, 1, 256, 1)], "bucket 0 has 512 payload bytes"),
        ([(0, 0, 512, 1), (0, 1, 256, 1), (0, 2, 256, 1)], "names bucket 2; the layout has 2"),
    ],
)
def test_a_plan_of_another_layout_is_refused(
    wires: list[tuple[int, int, int, int]], message: str
) -> None:
    manifest = plan_buckets(
        [TensorMeta(f"t.{i}.w", DataType.UINT8, (size,)) for i, size in enumerate((500, 100))],
        512,
    )
    assert [bucket.payload_bytes for bucket in manifest.buckets] == [512, 256]
    plan = make_send_plan(1, [WireBucket(*wire) for wire in wires])
    with pytest.raises(InvalidRequestError, match=message):
        check_send_plan(plan, manifest)


def test_lists_of_different_lengths_are_refused() -> None:
    plan = send_plan_to_proto(make_send_plan(1, [WireBucket(0, 0, 256, 1)]))
    plan.num_runs.append(1)
    with pytest.raises(InvalidRequestError, match="different lengths"):
        send_plan_from_proto(plan)


def test_a_delta_may_be_shorter_than_its_layout_and_not_much_longer() -> None:
    manifest = layout([300, 500])
    (bucket,) = manifest.buckets
    base = b"12345678"

    def plan(payload_bytes: int, num_runs: int) -> SendPlan:
        return make_send_plan(1, [WireBucket(0, 0, payload_bytes, num_runs)], base)

    assert send_plan_from_proto(send_plan_to_proto(plan(256, 2))) == plan(256, 2)
    check_send_plan(plan(256, 2), manifest)
    check_send_plan(plan(bucket.payload_bytes + 1024, 2), manifest)
    for wrong in (plan(bucket.payload_bytes + 1280, 2), plan(256, bucket.payload_bytes // 256 + 1)):
        with pytest.raises(InvalidRequestError, match="of changes for it"):
            check_send_plan(wrong, manifest)
    with pytest.raises(InvalidRequestError, match="a content digest has 8"):
        make_send_plan(1, [WireBucket(0, 0, 256, 1)], b"short")


BASE = b"12345678"


def delta_of(whole: SendPlan) -> SendPlan:
    wires = [WireBucket(w.sender, w.bucket, 256, max(1, w.num_runs)) for w in whole.buckets]
    return make_send_plan(whole.num_senders, wires, BASE)


@given(st.lists(st.integers(600, 2000), min_size=1, max_size=20), st.booleans())
def test_a_mixed_plan_is_its_two_parts_in_one_order(sizes: list[int], is_shared: bool) -> None:
    manifest = layout(sizes)
    whole = in_halves(manifest) if is_shared else whole_plan(manifest)
    delta = delta_of(whole)
    plan = mixed_plan(delta, whole)
    check_send_plan(plan, manifest)
    told = send_plan_from_proto(send_plan_to_proto(plan))
    assert told == plan
    assert told.parts == (delta, whole)
    assert told.part(takes_whole=False) == delta
    assert told.part(takes_whole=True) == whole
    assert (told.num_changes, told.num_whole) == (len(delta.buckets), len(whole.buckets))
    for sender in range(plan.num_senders):
        behind = [told.num_changes + index for index in whole.sent_by(sender)]
        assert told.sent_by(sender) == (*delta.sent_by(sender), *behind)
    for each in (delta, whole):
        assert each.parts == (each,)
        assert each.part(takes_whole=True) is each.part(takes_whole=False) is each
    assert (delta.num_changes, whole.num_changes) == (len(delta.buckets), 0)


@pytest.mark.parametrize(
    ("base", "num_whole", "message"),
    [
        (b"", 1, "has some of each kind, and a delta_from"),
        (BASE, 3, "has some of each kind"),
        (BASE, 2, "cannot list 0 runs"),
    ],
)
def test_what_is_no_mixed_plan_is_refused(base: bytes, num_whole: int, message: str) -> None:
    wires = [(0, 0, 256, 1), (0, 0, 512, 0), (0, 1, 256, 1)]
    with pytest.raises(InvalidRequestError, match=message):
        make_send_plan(1, [WireBucket(*wire) for wire in wires], base, num_whole)


def test_a_mixed_plan_in_which_a_sender_has_but_one_part_is_refused() -> None:
    wires = [WireBucket(0, 0, 256, 1), WireBucket(1, 0, 256, 1), WireBucket(0, 0, 512, 1)]
    with pytest.raises(InvalidRequestError, match="sender 1 of a send plan has nothing to send"):
        make_send_plan(2, wires, BASE, 1)


@pytest.mark.parametrize(
    ("whole", "message"),
    [
        ([(0, 0, 512, 0)], "must be those of the layout"),
        ([(0, 0, 512, 0), (0, 1, 512, 0)], "must be those of the layout"),
        ([(0, 0, 512, 1)], "bucket 1 has 256 payload bytes; the send plan has 0"),
    ],
)
def test_each_part_must_fit_the_layout(
    whole: list[tuple[int, int, int, int]], message: str
) -> None:
    manifest = plan_buckets(
        [TensorMeta(f"t.{i}.w", DataType.UINT8, (size,)) for i, size in enumerate((500, 100))],
        512,
    )
    wires = [WireBucket(0, 0, 256, 2), *(WireBucket(*wire) for wire in whole)]
    plan = make_send_plan(1, wires, BASE, len(whole))
    with pytest.raises(InvalidRequestError, match=message):
        check_send_plan(plan, manifest)
