"""What the receiver's thread needs of a transfer: where its buckets are received, and what
becomes of them.

One kind of transfer is staged whole and waits for its commit (``staging``); the other is
loaded in place while it is received (``in_place``). The receiver treats them alike.
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
    """What the receiver needs of a prepared transfer."""

    @property
    def manifest(self) -> Manifest:
        """The layout of its version."""

    @property
    def num_verified(self) -> int:
        """Buckets that need not come again."""

    def receive_buffers(
        self,
        first_bucket: int,
        device: torch.device,
        num_in_flight: int,
        check: Callable[[], None],
    ) -> ReceiveBuffers:
        """Where buckets from ``first_bucket`` on, at most ``num_verified``, are received.

        Args:
            device: Of the side group.
            num_in_flight: Buckets that a sender keeps: no more receives from it may be posted.
            check: Raises if the group has ended; asked after ``wake``.
        """

    def finish(self, check: Callable[[], None]) -> bytes:
        """After the last bucket: blocks until the version is staged, or loaded in place;
        returns its content digest.

        Raises:
            TransferAbortedError: It was discarded meanwhile.
            WeftError: It could not be loaded in place: why.
        """

    def keep(self) -> None:
        """The side group ends: keep what was verified, the transfer may resume in another.
        If it does not, the coordinator orders it discarded."""

    def drop(self) -> None:
        """Give back the memory of a transfer that was never started."""

    def wake(self) -> None:
        """Let a wait ask its ``check``; from any thread."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a side group was told to receive, and where that goes."""

    transfer_id: str
    version: PolicyVersion
    nonce: int
    deadline: float
    num_in_flight: int
    plan: SendPlan | None
    """Who sends what; None where one rank sends the manifest's buckets."""
    transfer: IncomingTransfer
    span: Span
    """Of receiving it; ended with it."""

    @property
    def num_buckets(self) -> int:
        """Buckets that come."""
        return len(self.plan.buckets if self.plan else self.transfer.manifest.buckets)

    def sender_of(self, index: int) -> int:
        """The rank that a bucket comes from."""
        return self.plan.buckets[index].sender if self.plan else 0


class ReceiveBuffers(Protocol):
    """Memory that buckets are received in, one after the other, in one side group."""

    ahead: int
    """Buckets of one sender whose receives may be posted before the first of them was
    accepted."""

    copies_lent: bool
    """Whether ``accept`` verifies a copy of what is lent, and not that."""

    @property
    def num_kept(self) -> int:
        """Buckets, from the first, that need not come again, whatever becomes of this group."""

    def make_room(self, index: int, *, wait: bool) -> bool:
        """Whether a receive to ``wire(index)`` may be posted now, every one before it having
        been posted; with ``wait`` it blocks until one may.

        Raises:
            WeftError: It never may: why.
        """

    def wire(self, index: int) -> torch.Tensor:
        """Where bucket ``index`` is received."""

    def payload_bytes(self, index: int) -> int:
        """Bytes of it before its trailer."""

    def accept(
        self, index: int, nonce: int, arrived: Arrived = IN_ITS_BUFFER
    ) -> Callable[[], None]:
        """Begin to verify a bucket that has arrived; what is returned ends that, and puts it
        where it is wanted: it blocks till it is, and is called once, in the buckets' order.

        Args:
            arrived: How; what was lent is read until what is returned has ended.

        Raises:
            DigestMismatchError: Other bytes arrived than were sent; or what is returned does.
        """

    def is_load_due(self) -> bool:
        """Whether the replica is to be told to load now; never again after a True."""


def make_buffers(
    sizes: Sequence[int], count: int, device: torch.device, *, more: int = 0
) -> list[torch.Tensor]:
    """Buffers, each for any bucket; no more than there are buckets. See ``make_each``."""

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
    """As ``make_buffers``, of whatever kind.

    Args:
        make: A buffer of so many bytes, on ``device``.
        sizes: Bytes on the wire of each bucket.
        more: As many further ones as there is memory for, at most.

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
