"""Ring of buffers that a transfer's buckets arrive in, and the sink that each is verified into.

A bucket that travels whole is verified where it arrives: in the sink's own memory if that lies on
the side group's device, else in a buffer of the ring. A bucket that lists its runs arrives in a
buffer, and its runs are copied to their places in the sink's memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch

from rollout_side.memory.versions import Carried
from weft_rl.contract.errors import CapacityError
from weft_rl.contract.layout.manifest import Manifest, align_up
from weft_rl.contract.layout.runs import SLICE_ALIGN_BYTES, Run
from weft_rl.contract.layout.send_plan import Listing, SendPlan
from weft_rl.transport.wire.buckets import Assembly, start_bucket, start_runs
from weft_rl.transport.wire.options import IN_ITS_BUFFER, Arrived

_T = TypeVar("_T")


class Sink(Protocol):
    """Destination of a transfer's verified buckets."""

    @property
    def num_kept(self) -> int:
        """Number of buckets, from the first, that need not come again, whatever becomes of this
        group."""

    def make_room(self, bucket: int, *, wait: bool) -> bool:
        """Return whether ``place`` of a bucket of the layout may be written now, after every one
        before it. With ``wait``, block until it may.

        Raises:
            WeftError: The error for which it never may.
        """

    def place(self, bucket: int) -> torch.Tensor | None:
        """Return the memory, on the side group's device, that a bucket of the layout may arrive in
        as it travels; None if there is none."""

    def assembly(self, bucket: int) -> Assembly | None:
        """Return the memory that runs of a bucket of the layout have their places in; None if the
        bucket comes again and is dropped."""

    def put(self, index: int, wire: torch.Tensor, carried: Carried) -> None:
        """Take a verified bucket; blocks until ``wire`` may be written again.

        Args:
            index: Place in the plan; called in its order.
            wire: Memory that the bucket arrived in; its runs, if it lists them, are in their
                places.
            carried: Its runs, if it lists them, and digests.
        """

    def is_load_due(self) -> bool:
        """Return whether to tell the replica to load now; never again after a True."""


class Ring:
    """Memory that a transfer's buckets are received in, one after the other, in one side group.

    On an accelerator everything runs on the calling thread's current stream.

    Args:
        manifest: Layout of the version.
        plan: Plan of the buckets.
        sink: Destination of the verified buckets.
        buffers: Result of ``arrival_buffers``; empty where buckets arrive in the sink's memory.
        ahead: Buckets of one sender whose receives may be posted before the first of them was
            accepted.
    """

    def __init__(
        self,
        manifest: Manifest,
        plan: SendPlan,
        sink: Sink,
        buffers: Mapping[int, torch.Tensor],
        ahead: int,
    ) -> None:
        self._manifest, self._plan, self._buffers = manifest, plan, buffers
        self.sink, self.ahead = sink, ahead

    @property
    def copies_lent(self) -> bool:
        """True if ``accept`` verifies a copy of lent memory, and not the lent memory itself."""
        return not self._plan.lists_runs

    def make_room(self, index: int, *, wait: bool) -> bool:
        """Return whether a receive to ``wire(index)`` may be posted now; see ``Sink.make_room``."""
        return self.sink.make_room(self._plan.buckets[index].bucket, wait=wait)

    def wire(self, index: int) -> torch.Tensor:
        """Return the memory that a bucket is received in."""
        planned = self._plan.buckets[index]
        place = self._buffers.get(index) if self._buffers else self.sink.place(planned.bucket)
        assert place is not None
        return place[: planned.wire_bytes]

    def payload_bytes(self, index: int) -> int:
        """Return the bytes of a bucket before its trailer."""
        return self._plan.buckets[index].payload_bytes

    def accept(
        self, index: int, nonce: int, arrived: Arrived = IN_ITS_BUFFER
    ) -> Callable[[], None]:
        """Begin to verify a bucket that has arrived; return a function that ends the verification.
        That function puts the bucket into the sink. It is called once, in the buckets' order.

        Args:
            arrived: How the bucket has arrived; lent memory is read until the returned function has
                ended.

        Raises:
            DigestMismatchError: Other bytes arrived than were sent; the returned function may raise
                it, too.
        """
        wire = self.wire(index)
        if self._plan.lists_runs:
            verified = self._start_runs(index, wire, nonce, arrived)
        else:
            digests = start_bucket(wire, self._manifest, index, nonce, arrived)

            def verified() -> Carried:
                return Carried((), digests())

        def end() -> None:
            self.sink.put(index, wire, verified())

        return end

    def _start_runs(
        self, index: int, wire: torch.Tensor, nonce: int, arrived: Arrived
    ) -> Callable[[], Carried]:
        planned, manifest = self._plan.buckets[index], self._manifest
        into = self.sink.assembly(planned.bucket)
        verified = start_runs(
            wire,
            planned.payload_bytes,
            manifest,
            index,
            nonce,
            bucket=planned.bucket if self._plan.listing is Listing.WITHIN_BUCKET else None,
            into=into,
            arrived=arrived,
        )

        def end() -> Carried:
            runs, digests, is_placed = verified()
            if into is not None and not is_placed:
                place_runs(wire, manifest, runs, into)
            return Carried(runs, digests)

        return end


def arrival_buffers(plan: SendPlan, ahead: int, device: torch.device) -> dict[int, torch.Tensor]:
    """Make a few buffers for each sender, which its buckets arrive in in turn.

    Args:
        ahead: Buckets of one sender that may be under way.
        device: Device of the side group.

    Returns:
        The buffer of each bucket, by its place in the plan.

    Raises:
        CapacityError: The accelerator has no room for them.
    """
    found: dict[int, torch.Tensor] = {}
    for sender in range(plan.num_senders):
        indices = plan.sent_by(sender)
        buffers = make_buffers([plan.wire_bytes(i) for i in indices], ahead, device)
        for nth, index in enumerate(indices):
            found[index] = buffers[nth % len(buffers)]
    return found


def make_buffers(
    sizes: Sequence[int], count: int, device: torch.device, *, more: int = 0
) -> list[torch.Tensor]:
    """Make buffers that each fit any bucket; no more than there are buckets. See ``make_each``."""

    def make(num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    return make_each(make, sizes, count, device, more)


def make_each(
    make: Callable[[int], _T],
    sizes: Sequence[int],
    count: int,
    device: torch.device,
    more: int = 0,
) -> list[_T]:
    """Make buffers as ``make_buffers`` does, but of any kind.

    Args:
        make: Makes a buffer of so many bytes, on ``device``.
        sizes: Bytes on the wire of each bucket.
        more: Further buffers to make at most, as far as there is memory.

    Raises:
        CapacityError: The accelerator has no room for ``count`` of them.
    """
    need, count = max(sizes), min(count, len(sizes))
    try:
        made = [make(need) for _ in range(count)]
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"{device} has no room for the {count} buffers of {need:,} bytes that a push is "
            "received in: push smaller buckets (bucket_bytes), or start the replica with a "
            "smaller --gpu-memory-utilization"
        ) from error
    with contextlib.suppress(torch.OutOfMemoryError):
        for _ in range(min(more, len(sizes) - count)):
            made.append(make(need))
    return made


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
