"""Receive buffers for wire buckets of several senders, each of which lists what it carries."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rollout_side.memory.versions import Carried
from rollout_side.receive.transfer import make_buffers
from weft_rl.contract.layout.manifest import Manifest, align_up
from weft_rl.contract.layout.runs import SLICE_ALIGN_BYTES, Run
from weft_rl.contract.layout.send_plan import SendPlan
from weft_rl.transport.wire.buckets import Assembly, start_runs
from weft_rl.transport.wire.options import IN_ITS_BUFFER, Arrived


class LaneBuffers:
    """Receive buffers of several senders: a few for each sender, used in turn.

    Args:
        plan: Plan of which rank sends what.
        ahead: Buckets of one sender that may be under way.
        device: Device of the side group.

    Raises:
        CapacityError: The accelerator has no room for them.
    """

    def __init__(self, plan: SendPlan, ahead: int, device: torch.device) -> None:
        self._plan = plan
        self._buffers: dict[int, torch.Tensor] = {}
        for sender in range(plan.num_senders):
            indices = plan.sent_by(sender)
            buffers = make_buffers([plan.wire_bytes(i) for i in indices], ahead, device)
            for nth, index in enumerate(indices):
                self._buffers[index] = buffers[nth % len(buffers)]

    def wire(self, index: int) -> torch.Tensor:
        """Return the memory for a wire bucket; the sender's bucket ``ahead`` before it had the same
        buffer."""
        return self._buffers[index][: self._plan.wire_bytes(index)]


class PlannedBuffers:
    """``ReceiveBuffers`` of a staged version from several senders: wire buckets arrive in buffers,
    and their runs are copied to their places.

    On an accelerator everything runs on the calling thread's current stream.

    Args:
        manifest: Manifest of the version.
        carried: Contents of the wire buckets verified so far; grows.
        into: Assembly that puts the version's buckets together.
        plan: Plan of which rank sends what.
        device: Device on which the side group receives.
        ahead: See ``ReceiveBuffers``.
    """

    copies_lent = False

    def __init__(
        self,
        manifest: Manifest,
        carried: list[Carried],
        into: Assembly,
        plan: SendPlan,
        device: torch.device,
        ahead: int,
    ) -> None:
        self._manifest, self._carried, self._into, self._plan = manifest, carried, into, plan
        self._lanes = LaneBuffers(plan, ahead, device)
        self.ahead = ahead

    @property
    def num_kept(self) -> int:
        """See ``ReceiveBuffers``."""
        return len(self._carried)

    def make_room(self, index: int, *, wait: bool) -> bool:
        """See ``ReceiveBuffers``: what was accepted is done with."""
        return True

    def wire(self, index: int) -> torch.Tensor:
        """See ``ReceiveBuffers``."""
        return self._lanes.wire(index)

    def payload_bytes(self, index: int) -> int:
        """See ``ReceiveBuffers``."""
        return self._plan.buckets[index].payload_bytes

    def accept(
        self, index: int, nonce: int, arrived: Arrived = IN_ITS_BUFFER
    ) -> Callable[[], None]:
        """See ``ReceiveBuffers``."""
        planned = self._plan.buckets[index]
        size, bucket = planned.payload_bytes, planned.bucket
        wire = self.wire(index)
        taken = take_runs(wire, size, self._manifest, index, nonce, self._into, bucket, arrived)

        def end() -> None:
            self._carried.append(taken())

        return end

    def is_load_due(self) -> bool:
        """See ``ReceiveBuffers``: it is loaded once it is committed."""
        return False


def take_runs(
    wire: torch.Tensor,
    payload_bytes: int,
    manifest: Manifest,
    index: int,
    nonce: int,
    into: Assembly,
    bucket: int | None = None,
    arrived: Arrived = IN_ITS_BUFFER,
) -> Callable[[], Carried]:
    """Begin to check a wire bucket that has arrived, and to copy its runs to their places. Returns
    a function that ends both. See ``start_runs`` and ``place_runs``."""
    verified = start_runs(
        wire, payload_bytes, manifest, index, nonce, bucket=bucket, into=into, arrived=arrived
    )

    def end() -> Carried:
        runs, digests, is_placed = verified()
        if not is_placed:
            place_runs(wire, manifest, runs, into)
        return Carried(runs, digests)

    return end


def place_runs(
    wire: torch.Tensor,
    manifest: Manifest,
    runs: Sequence[Run],
    into: Assembly,
) -> None:
    """Copy runs to their places, and write the zeros that follow their tensors. Blocks until
    ``wire`` may be written again.

    Args:
        wire: uint8, a verified payload.
        runs: Runs that the payload holds, in order.
        into: Assembly that the runs have their places in.
    """
    data, starts = into
    at = 0
    for run in runs:
        slot = manifest.tensors[run.tensor]
        size = slot.meta.dtype.itemsize_bytes
        begin = starts[slot.bucket] + slot.offset_bytes
        first, end, num_bytes = run.first * size, run.end * size, slot.meta.num_bytes
        if run.repeats > 1:
            width, stride = run.count * size // SLICE_ALIGN_BYTES, run.stride * size
            rows = data[begin + first : begin + end].view(torch.int64)
            rows = rows.as_strided((run.repeats, width), (stride // SLICE_ALIGN_BYTES, 1))
            packed = wire[at : at + run.num_elements * size].view(torch.int64)
            rows.copy_(packed.view(run.repeats, width), non_blocking=True)
            if end == num_bytes:
                data[begin + end : begin + align_up(end)].zero_()
        else:
            skipped = first - run.begin_bytes(size)
            if end == num_bytes:
                end = align_up(end)
            run_bytes = wire[at + skipped : at + skipped + end - first]
            data[begin + first : begin + end].copy_(run_bytes, non_blocking=True)
        at += run.payload_bytes(size)
    if wire.is_cuda:
        torch.cuda.current_stream(wire.device).synchronize()
