"""Receiving the wire buckets of several senders, each of which lists what it carries."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rollout_side.memory.versions import Carried, PartialTransfer, bucket_starts
from rollout_side.receive.transfer import make_buffers
from weft.contract.errors import DigestMismatchError
from weft.contract.layout.manifest import Manifest, align_up
from weft.contract.layout.runs import SLICE_ALIGN_BYTES, Run
from weft.contract.layout.send_plan import SendPlan
from weft.transport.buckets import verify_runs


class LaneBuffers:
    """Buffers for buckets of several senders: a few for those of each, used in turn.

    Args:
        plan: Who sends what.
        ahead: Buckets of one sender that may be under way.
        device: Of the side group.

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
        """Where a wire bucket is received; its buffer is that of its sender's ``ahead`` before."""
        return self._buffers[index][: self._plan.wire_bytes(index)]


class PlannedBuffers:
    """``ReceiveBuffers`` of a version that is staged: wire buckets arrive in buffers, and their
    runs are copied to their places in its segment.

    On an accelerator everything runs on the calling thread's current stream.

    Args:
        partial: What was verified so far.
        carried: Of it; grows.
        plan: Who sends what.
        device: Where the side group receives.
        ahead: See ``ReceiveBuffers``.
    """

    def __init__(
        self,
        partial: PartialTransfer,
        carried: list[Carried],
        plan: SendPlan,
        device: torch.device,
        ahead: int,
    ) -> None:
        self._partial, self._carried, self._plan = partial, carried, plan
        self._starts = bucket_starts(partial.manifest)
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

    def accept(self, index: int, nonce: int) -> None:
        """See ``ReceiveBuffers``."""
        wire, manifest = self.wire(index), self._partial.manifest
        carried = open_planned(wire, manifest, self._plan, index, nonce)
        place_runs(wire, manifest, carried.runs, self._partial.segment.data, self._starts)
        self._carried.append(carried)

    def is_load_due(self) -> bool:
        """See ``ReceiveBuffers``: it is loaded once it is committed."""
        return False


def open_planned(
    wire: torch.Tensor, manifest: Manifest, plan: SendPlan, index: int, nonce: int
) -> Carried:
    """Check a wire bucket that has arrived.

    Raises:
        DigestMismatchError: Other bytes arrived than were sent, or runs of another bucket of
            the layout than the plan says.
    """
    planned = plan.buckets[index]
    runs, digests = verify_runs(wire, planned.payload_bytes, manifest, index, nonce)
    for run in runs:
        if (bucket := manifest.tensors[run.tensor].bucket) != planned.bucket:
            raise DigestMismatchError(
                f"bucket {index} lists {run}, which lies in bucket {bucket} of the layout; its "
                f"plan says {planned.bucket}"
            )
    return Carried(runs, digests)


def place_runs(
    wire: torch.Tensor,
    manifest: Manifest,
    runs: Sequence[Run],
    data: torch.Tensor,
    starts: Sequence[int],
) -> None:
    """Copy runs to their places, and write the zeros that follow their tensors; blocks until
    ``wire`` may be written again.

    Args:
        wire: uint8, a verified payload.
        runs: What it holds, in order.
        data: uint8, of buckets of the layout.
        starts: First byte in ``data`` of each bucket of the layout.
    """
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
            rows.copy_(packed.view(run.repeats, width))
            if end == num_bytes:
                data[begin + end : begin + align_up(end)].zero_()
        else:
            skipped = first - run.begin_bytes(size)
            if end == num_bytes:
                end = align_up(end)
            data[begin + first : begin + end].copy_(wire[at + skipped : at + skipped + end - first])
        at += run.payload_bytes(size)
    if wire.is_cuda:
        torch.cuda.current_stream(wire.device).synchronize()
