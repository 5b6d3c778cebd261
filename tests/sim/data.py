"""Buckets on their way: collectives that all members of a group join in one order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tests.sim.clock import Future
from weft_rl.contract.errors import WeftError
from weft_rl.contract.manifest import (
    WSUM64,
    SendPlan,
    WireBucket,
    make_send_plan,
    mixed_plan,
    plan_buckets,
    whole_plan,
)
from weft_rl.contract.names import BASE_POLICY
from weft_rl.contract.tensors import DataType, TensorMeta
from weft_rl.coordinator.decisions.state.transfer import Group
from weft_rl.coordinator.decisions.state.values import ContentDigest, VersionLayout

if TYPE_CHECKING:
    from tests.sim.sender import Epoch


def _layout(num_buckets: int, columns: int) -> VersionLayout:
    names = [f"w{i}" for i in range(num_buckets)]
    metas = [TensorMeta(name, DataType.BFLOAT16, (16, columns)) for name in names]
    layout = VersionLayout.of(plan_buckets(metas, 32 * columns))
    assert layout.num_buckets == num_buckets
    return layout


ADAPTER_LAYOUT = _layout(3, 8)
BASE_LAYOUT = _layout(4, 16)
LAYOUTS = {layout.digest: layout for layout in (ADAPTER_LAYOUT, BASE_LAYOUT)}

#: Buckets that a sender keeps.
NUM_BUFFERS = 2

#: A thread that works or waits speaks so often.
PROGRESS_SECONDS = 1.0


def layout_of(policy: str) -> VersionLayout:
    """What a policy's versions look like."""
    return BASE_LAYOUT if policy == BASE_POLICY else ADAPTER_LAYOUT


def plan_of(layout: VersionLayout) -> SendPlan:
    """Two senders: the first bucket is one's alone, the last the other's, and of those between
    each has a half."""
    assert layout.manifest is not None
    last = layout.num_buckets - 1
    wires = []
    for index, bucket in enumerate(layout.manifest.buckets):
        senders = (0,) if index == 0 else (1,) if index == last else (0, 1)
        wires += [WireBucket(sender, index, bucket.payload_bytes, 1) for sender in senders]
    return make_send_plan(2, wires)


def delta_plan(layout: VersionLayout, base: ContentDigest, num_senders: int) -> SendPlan:
    """Changes of a base: as ``plan_of``, or from one sender."""
    plan = plan_of(layout)
    if num_senders == 1:
        plan = make_send_plan(1, [WireBucket(0, i, 256, 1) for i in range(layout.num_buckets)])
    wires = [WireBucket(wire.sender, wire.bucket, 256, 1) for wire in plan.buckets]
    return make_send_plan(num_senders, wires, base.value)


def both_plans(layout: VersionLayout, base: ContentDigest, num_senders: int) -> SendPlan:
    """Changes of a base, as ``delta_plan``, and then all elements."""
    assert layout.manifest is not None
    whole = whole_plan(layout.manifest) if num_senders == 1 else plan_of(layout)
    return mixed_plan(delta_plan(layout, base, num_senders), whole)


def change_between(one: bytes, other: bytes) -> bytes:
    """What makes either content the other; of a third content it makes none of the two."""
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


def digest_over(contents: Sequence[bytes], layout: VersionLayout) -> ContentDigest:
    """Over all buckets; of buckets that belong together it is what they are of."""
    value = contents[0] if len(set(contents)) == 1 else b"mixed"
    return ContentDigest(WSUM64, value, layout.total_bytes)


def sender_name(group: Group, rank: int) -> str:
    """The process that a sender of a group is."""
    name = group.trainer_id.removeprefix("replica:")
    return f"{name}.{rank}" if rank else name


class Data:
    """The operations of one transfer in one sender's lane of a group, numbered from 0.

    Args:
        group: Whose members take part.
        sender: Who sends.
    """

    def __init__(self, group: Group, sender: str) -> None:
        self.group = group
        self.sender = sender
        self.epoch: Epoch | None = None
        self.broken = Future()
        self._operations: list[Future] = []
        self.num_sent = 0

    def operation(self, number: int) -> Future:
        """What comes with it: a bucket's index and content."""
        while len(self._operations) <= number:
            self._operations.append(Future())
        return self._operations[number]

    def send(self, bucket: int, content: bytes) -> None:
        """The sender's next operation."""
        self.operation(self.num_sent).set((bucket, content))
        self.num_sent += 1

    def break_off(self, error: WeftError) -> None:
        """The members' connections break; each learns it where it waits."""
        self.broken.set(error=error)
        if self.epoch is not None:
            self.epoch.cut_off()
