"""Interface of a transfer to the receiver's thread: receive buffers, and the end of the transfer.

One kind of transfer is staged whole and waits for its commit (``staging``); the other is loaded in
place while it is received (``in_place``). The receiver treats them alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from weft_rl.contract.errors import CapacityError
from weft_rl.contract.layout.manifest import Manifest
from weft_rl.contract.layout.send_plan import SendPlan
from weft_rl.contract.names import PolicyVersion
from weft_rl.tracing import Span
from weft_rl.transport.wire.options import IN_ITS_BUFFER, Arrived

T = TypeVar("T")


class IncomingTransfer(Protocol):
    """Prepared transfer, as the receiver uses it."""

    @property
    def manifest(self) -> Manifest:
        """Layout of its version."""

    @property
    def num_verified(self) -> int:
        """Number of buckets that need not come again."""

    def receive_buffers(
        self,
        first_bucket: int,
        device: torch.device,
        num_in_flight: int,
        check: Callable[[], None],
    ) -> ReceiveBuffers:
        """Return buffers to receive buckets in, from ``first_bucket`` on, which is at most
        ``num_verified``.

        Args:
            device: Device of the side group.
            num_in_flight: Buckets that a sender keeps: no more receives from it may be posted.
            check: Raises if the group has ended; called after ``wake``.
        """

    def finish(self, check: Callable[[], None]) -> bytes:
        """Block, after the last bucket, until the version is staged or loaded in place; return its
        content digest.

        Raises:
            TransferAbortedError: The transfer was discarded meanwhile.
            WeftError: The error for which it could not be loaded in place.
        """

    def keep(self) -> None:
        """Keep what was verified as the side group ends: the transfer may resume in another. If it
        does not, the coordinator orders it discarded."""

    def drop(self) -> None:
        """Give back the memory of a transfer that was never started."""

    def wake(self) -> None:
        """Have a waiting thread call its ``check``; from any thread."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Transfer that a side group was told to receive, and its destination."""

    transfer_id: str
    version: PolicyVersion
    nonce: int
    deadline: float
    num_in_flight: int
    plan: SendPlan | None
    """Plan of which rank sends what; None if one rank sends the manifest's buckets."""
    transfer: IncomingTransfer
    span: Span
    """Span of receiving the transfer; ended with it."""

    @property
    def num_buckets(self) -> int:
        """Number of buckets that come."""
        return len(self.plan.buckets if self.plan else self.transfer.manifest.buckets)

    def sender_of(self, index: int) -> int:
        """Return the rank that a bucket comes from."""
        return self.plan.buckets[index].sender if self.plan else 0


class ReceiveBuffers(Protocol):
    """Memory that buckets are received in, one after the other, in one side group."""

    ahead: int
    """Buckets of one sender whose receives may be posted before the first of them was
    accepted."""

    copies_lent: bool
    """True if ``accept`` verifies a copy of lent memory, and not the lent memory itself."""

    @property
    def num_kept(self) -> int:
        """Number of buckets, from the first, that need not come again, whatever becomes of this
        group."""

    def make_room(self, index: int, *, wait: bool) -> bool:
        """Return whether a receive to ``wire(index)`` may be posted now, after every one before it.
        With ``wait``, block until it may.

        Raises:
            WeftError: The error for which it never may.
        """

    def wire(self, index: int) -> torch.Tensor:
        """Return the memory that bucket ``index`` is received in."""

    def payload_bytes(self, index: int) -> int:
        """Return the bytes of a bucket before its trailer."""

    def accept(
        self, index: int, nonce: int, arrived: Arrived = IN_ITS_BUFFER
    ) -> Callable[[], None]:
        """Begin to verify a bucket that has arrived; return a function that ends the verification.
        That function puts the bucket where it is wanted, and blocks until it is there. It is called
        once, in the buckets' order.

        Args:
            arrived: How the bucket has arrived; lent memory is read until the returned function has
                ended.

        Raises:
            DigestMismatchError: Other bytes arrived than were sent; the returned function may raise
                it, too.
        """

    def is_load_due(self) -> bool:
        """Return whether to tell the replica to load now; never again after a True."""


def make_buffers(
    sizes: Sequence[int], count: int, device: torch.device, *, more: int = 0
) -> list[torch.Tensor]:
    """Make buffers that each fit any bucket; no more than there are buckets. See ``make_each``."""

    def make(num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    return make_each(make, sizes, count, device, more)


def make_each(
    make: Callable[[int], T],
    sizes: Sequence[int],
    count: int,
    device: torch.device,
    more: int = 0,
) -> list[T]:
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
