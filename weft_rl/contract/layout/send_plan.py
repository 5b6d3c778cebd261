"""Send plans: the buckets of a transfer as they travel, by sender.

A manifest lays a version out, whoever sends it. *Wire buckets* travel, each of which carries runs
of the version's tensors. Sender and receivers have the same plan before the first byte: the sizes
of the wire buckets, and their order. Receivers verify and report them in this order, and a
transfer that resumes counts in it. The runs are known with the plan, or announced with each
bucket (``Listing``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Final

from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.group import MAX_SENDERS
from weft_rl.contract.layout.manifest import ALIGN_BYTES, Manifest
from weft_rl.contract.layout.runs import Run, carried_sizes, wire_size

#: Wire buckets of one transfer.
MAX_WIRE_BUCKETS: Final = 65_536
# Bytes that a run's first and last block may hold beside it.
_MAX_LOST_BYTES: Final = 2 * ALIGN_BYTES


class Listing(Enum):
    """Way in which a receiver learns the runs of a wire bucket."""

    NONE = "none"
    """From the manifest: a wire bucket is a bucket of the layout, and no list travels."""
    WITHIN_BUCKET = "within bucket"
    """From the wire bucket, which lists them; they lie in its bucket of the layout."""
    ANYWHERE = "anywhere"
    """From the wire bucket, which lists them; they may lie anywhere in the layout."""


@dataclass(frozen=True, slots=True)
class WireBucket:
    """Part of one bucket of the layout that one sender holds."""

    sender: int
    """Rank of the sender."""
    bucket: int
    """Index of the bucket in the layout."""
    payload_bytes: int
    """Bytes of its runs and their padding, a multiple of ``ALIGN_BYTES``."""
    num_runs: int
    """Runs that it has room to list; 0 where no list travels."""

    @property
    def wire_bytes(self) -> int:
        """Bytes on the wire: payload, trailer and list of runs, up to ``ALIGN_BYTES``."""
        return wire_size(self.payload_bytes, self.num_runs).wire_bytes


@dataclass(frozen=True)
class SendPlan:
    """Wire buckets of a transfer in their order: by bucket of the layout, then by sender."""

    num_senders: int
    """Number of senders, ranks 0 and up of the side group; each sends something."""
    buckets: tuple[WireBucket, ...]
    listing: Listing = Listing.WITHIN_BUCKET

    @property
    def lists_runs(self) -> bool:
        """True if each wire bucket lists the runs that it carries."""
        return self.listing is not Listing.NONE

    def wire_bytes(self, index: int) -> int:
        """Return the bytes on the wire of a wire bucket, by its place in the order."""
        return self.buckets[index].wire_bytes

    def begin_of(self, bucket: int) -> int:
        """Return the index of the first wire bucket of a bucket of the layout: how many come before
        it."""
        return bisect_left(self.buckets, bucket, key=lambda wire: wire.bucket)

    def sent_by(self, sender: int) -> tuple[int, ...]:
        """List the wire buckets of one sender, ascending."""
        return self._by_sender[sender]

    @cached_property
    def _by_sender(self) -> tuple[tuple[int, ...], ...]:
        indices: list[list[int]] = [[] for _ in range(self.num_senders)]
        for index, wire in enumerate(self.buckets):
            indices[wire.sender].append(index)
        return tuple(map(tuple, indices))


def whole_plan(manifest: Manifest) -> SendPlan:
    """Plan a transfer in which one rank sends the buckets of the layout as they are."""
    wires = [WireBucket(0, i, b.payload_bytes, 0) for i, b in enumerate(manifest.buckets)]
    return SendPlan(1, tuple(wires), Listing.NONE)


def whole_runs(manifest: Manifest) -> tuple[tuple[Run, ...], ...]:
    """List the runs of each wire bucket of a ``whole_plan``: its tensors; O(tensors)."""
    return tuple(
        tuple([Run(i, 0, manifest.tensors[i].meta.num_elements) for i in tensors])
        for tensors in manifest.tensors_by_bucket
    )


def announced_plan(manifest: Manifest) -> SendPlan:
    """Plan a transfer in which one rank sends whole tensors in an order that it announces bucket
    by bucket; O(tensors)."""
    wires = [
        WireBucket(0, index, size.payload_bytes, size.num_runs)
        for index, size in enumerate(carried_sizes(manifest))
    ]
    return SendPlan(1, tuple(wires), Listing.ANYWHERE)


def transfer_plan(manifest: Manifest, divided: SendPlan | None, *, carries_runs: bool) -> SendPlan:
    """Return the plan that a transfer was begun with, as a receiver is told of it.

    Args:
        divided: Division among senders that travelled with the transfer; None for one sender.
        carries_runs: True if the sender announces the runs of its buckets.

    Raises:
        InvalidRequestError: As ``check_send_plan``.
    """
    if divided is not None:
        check_send_plan(divided, manifest)
        return divided
    return announced_plan(manifest) if carries_runs else whole_plan(manifest)


def make_send_plan(num_senders: int, buckets: Iterable[WireBucket]) -> SendPlan:
    """Check wire buckets, which may be anybody's claim, and plan a division among senders with
    them.

    Raises:
        InvalidRequestError: Names the first that is out of bounds or out of order.
    """
    buckets = tuple(buckets)
    if not 1 <= num_senders <= MAX_SENDERS:
        raise InvalidRequestError(
            f"a send plan of {num_senders} senders; there are 1 to {MAX_SENDERS}"
        )
    if len(buckets) > MAX_WIRE_BUCKETS:
        raise InvalidRequestError(
            f"a send plan of {len(buckets)} wire buckets; at most {MAX_WIRE_BUCKETS} are taken"
        )
    last = (-1, -1)
    for index, wire in enumerate(buckets):
        if not 0 <= wire.sender < num_senders:
            raise InvalidRequestError(
                f"wire bucket {index} is sent by rank {wire.sender}; there are {num_senders} "
                "senders"
            )
        if (wire.bucket, wire.sender) <= last:
            raise InvalidRequestError(
                f"wire bucket {index} comes after one of a later bucket or sender; they are "
                "listed by bucket of the layout, then by sender"
            )
        last = (wire.bucket, wire.sender)
        if wire.payload_bytes <= 0 or wire.payload_bytes % ALIGN_BYTES:
            raise InvalidRequestError(
                f"wire bucket {index} has {wire.payload_bytes} payload bytes; it has a multiple "
                f"of {ALIGN_BYTES}"
            )
        if not 1 <= wire.num_runs <= wire.payload_bytes // ALIGN_BYTES:
            raise InvalidRequestError(
                f"wire bucket {index} of {wire.payload_bytes} payload bytes cannot list "
                f"{wire.num_runs} runs: each has at least one block of {ALIGN_BYTES} bytes"
            )
    idle = set(range(num_senders)) - {wire.sender for wire in buckets}
    if idle:
        raise InvalidRequestError(f"sender {min(idle)} of a send plan has nothing to send")
    return SendPlan(num_senders, buckets)


def check_send_plan(plan: SendPlan, manifest: Manifest) -> None:
    """Refuse a plan whose wire buckets cannot hold a layout; O(buckets).

    Raises:
        InvalidRequestError: Names the first bucket of the layout that they cannot hold.
    """
    payloads = [0] * len(manifest.buckets)
    runs = [0] * len(manifest.buckets)
    for wire in plan.buckets:
        if wire.bucket >= len(manifest.buckets):
            raise InvalidRequestError(
                f"the send plan names bucket {wire.bucket}; the layout has {len(manifest.buckets)}"
            )
        payloads[wire.bucket] += wire.payload_bytes
        runs[wire.bucket] += wire.num_runs
    for index, bucket in enumerate(manifest.buckets):
        most = bucket.payload_bytes + _MAX_LOST_BYTES * runs[index]
        if not bucket.payload_bytes <= payloads[index] <= most:
            raise InvalidRequestError(
                f"bucket {index} has {bucket.payload_bytes} payload bytes; the send plan has "
                f"{payloads[index]} for it, in {runs[index]} runs"
            )
