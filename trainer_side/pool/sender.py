"""The trainer's sender: which backend carries the bytes, the buckets that are packed for it, and
rank 0 in one group after another, as members are lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import torch

from trainer_side.pool.finite import check_finite
from trainer_side.sources.source import Source
from weft.contract.capabilities import GLOO, NCCL, BackendChoice
from weft.contract.errors import NotReadyError, WeftError
from weft.contract.group import GroupTicket
from weft.contract.manifest import (
    ALIGN_BYTES,
    DEFAULT_BUCKET_BYTES,
    WSUM64,
    XXH3_64,
    Manifest,
    align_up,
    pack_trailer,
)
from weft.rpc.security.credentials import Credentials
from weft.transport.backends import available_backends
from weft.transport.digest import payload_digest
from weft.transport.group import CPU, window
from weft.transport.sender import Progress, Reformed, Sending, SendingRank

#: Between two H200s a base of 16 GB was staged in 51 ms with buckets of 1 GiB and in 62 ms
#: with 512 MiB: a bucket must take longer than the release of the one before it.
DEVICE_BUCKET_BYTES = 2**30


@dataclass(frozen=True)
class BucketSettings:
    """How payloads are cut and digested for a backend; the same on every rank."""

    bucket_bytes: int
    digest_algorithm: int


def bucket_settings(backend: str, bucket_bytes: int | None) -> BucketSettings:
    """The settings of a backend; with ``bucket_bytes`` where the user chose them."""
    if backend == NCCL:
        return BucketSettings(bucket_bytes or DEVICE_BUCKET_BYTES, WSUM64)
    return BucketSettings(bucket_bytes or DEFAULT_BUCKET_BYTES, XXH3_64)


@dataclass(frozen=True)
class BackendSelection:
    """Which backends the sender may use, and the accelerator that they need.

    Args:
        choice: The best that both sides have, or this one and no other.
        device: A CUDA device for NCCL; None is the current one when a push begins.
    """

    choice: BackendChoice = "auto"
    device: torch.device | None = None

    def backend(self, offered: Sequence[str]) -> str:
        """The backend to use with a pool that offers these, best first.

        Raises:
            NotReadyError: None is shared, or not the one that was asked for.
        """
        have = available_backends(self.device_of(NCCL))
        usable = [name for name in offered or (GLOO,) if name in have]
        if self.choice != "auto":
            usable = [name for name in usable if name == self.choice]
        if not usable:
            raise NotReadyError(
                f"no side-group backend to push over: the pool offers {', '.join(offered)}, this "
                f"process has {', '.join(have)}"
                + (f" and may use {self.choice} only" if self.choice != "auto" else ""),
                reason="BACKEND_MISMATCH",
            )
        return usable[0]

    def device_of(self, backend: str) -> torch.device:
        """Where the buckets of a backend are packed."""
        if backend != NCCL or not torch.cuda.is_available():
            return CPU
        if self.device is not None:
            return self.device
        return torch.device("cuda", torch.cuda.current_device())


class Packer:
    """Two reused buffers (three on an accelerator), and the views into them for one layout.

    Views are made once a layout: making them anew costs more than copying into
    them for models of many small tensors.

    Args:
        manifest: The layout to pack.
        buffers: Of an earlier packer; those that are large enough are used again.
        device: Where buffers lie. On an accelerator all work is that of the calling
            thread's current stream.
    """

    def __init__(
        self,
        manifest: Manifest,
        buffers: list[torch.Tensor] | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.manifest = manifest
        self._device = device
        need = max(bucket.wire_bytes for bucket in manifest.buckets)
        num_buffers = min(window(device), len(manifest.buckets))
        kept = [b for b in buffers or [] if b.numel() >= need][:num_buffers]
        # zeros, not empty: touched memory is sent and filled more than twice as fast
        fresh = range(num_buffers - len(kept))
        kept += [torch.zeros(need, dtype=torch.uint8, device=device) for _ in fresh]
        self.buffers = kept
        self._firsts: list[int] = []
        self._views: list[list[torch.Tensor]] = []
        self._paddings: list[list[torch.Tensor]] = []
        position = 0
        for index, bucket in enumerate(manifest.buckets):
            buffer = self._buffer(index)
            self._firsts.append(position)
            slots = manifest.tensors[position : position + bucket.num_tensors]
            position += bucket.num_tensors
            self._views.append(
                [
                    buffer[slot.offset_bytes : slot.offset_bytes + slot.meta.num_bytes]
                    .view(getattr(torch, slot.meta.dtype.torch_name))
                    .view(slot.meta.shape)
                    for slot in slots
                ]
            )
            ends = [slot.offset_bytes + slot.meta.num_bytes for slot in slots]
            self._paddings.append([buffer[e : align_up(e)] for e in ends if e % ALIGN_BYTES])

    def pack(
        self, index: int, source: Source, nonce: int, finite: bool = False
    ) -> tuple[torch.Tensor, int]:
        """Fill bucket ``index`` and seal it with its trailer.

        Blocks for the copies and the digesting. The buffer is that of bucket
        ``index - len(buffers)``, which must have been released.

        Args:
            index: Which bucket.
            source: What fills it.
            nonce: Of the transfer.
            finite: Read it once more, and refuse NaN and infinities.

        Returns:
            The uint8 wire bytes (owned by the packer, valid until bucket
            ``index + len(buffers)`` is packed) and the payload's digest.

        Raises:
            NotFiniteError: Names the tensor.
            WeftError: The source's own.
        """
        bucket = self.manifest.buckets[index]
        buffer = self._buffer(index)
        first = self._firsts[index]
        source.read(first, bucket.num_tensors, self._views[index])
        payload = buffer[: bucket.payload_bytes]
        # Padding is part of the digest: equal weights must digest equally.
        if self._paddings[index]:
            torch._foreach_zero_(self._paddings[index])
        if finite:
            check_finite(payload, self.manifest.tensors[first : first + bucket.num_tensors])
        digest = payload_digest(payload, self.manifest.digest_algorithm)
        trailer = pack_trailer(digest, nonce, index, bucket.payload_bytes)
        end = bucket.payload_bytes + len(trailer)
        buffer[bucket.payload_bytes : end] = torch.frombuffer(bytearray(trailer), dtype=torch.uint8)
        return buffer[: bucket.wire_bytes], digest

    def wire(self, index: int) -> torch.Tensor:
        """The wire bytes of a bucket that was packed and is still held; no copy."""
        return self._buffer(index)[: self.manifest.buckets[index].wire_bytes]

    def moved(self, held: range) -> Packer:
        """A packer with fresh buffers that hold the same buckets.

        For a transfer that continues after its group was abandoned: the old buffers
        may still be read by operations that nobody can stop.
        """
        packer = Packer(self.manifest, device=self._device)
        for index in held:
            packer.wire(index).copy_(self.wire(index))
        return packer

    def _buffer(self, index: int) -> torch.Tensor:
        return self.buffers[index % len(self.buffers)]


_log = logging.getLogger(__name__)

_STAND_BY_SECONDS = 1.0

#: Finds the place in the group that a transfer continues in, if it is another than this one.
FindGroup = Callable[[str], GroupTicket | None]


class _PackedBuckets:
    """A source's buckets, packed for one push; see ``Buckets``."""

    def __init__(self, packer: Packer, source: Source, nonce: int, check_finite: bool) -> None:
        self.packer = packer
        self.manifest = packer.manifest
        self.num_buffers = len(packer.buffers)
        #: Whether the source has failed, or gave what must not be sent: no other group helps.
        self.spoiled = False
        self._source, self._nonce, self._check_finite = source, nonce, check_finite

    def make(self, index: int) -> int:
        """Read a bucket's tensors from the source, digest and seal it."""
        try:
            return self.packer.pack(index, self._source, self._nonce, self._check_finite)[1]
        except BaseException:
            self.spoiled = True
            raise

    def wire(self, index: int) -> torch.Tensor:
        """The wire bytes of a bucket that was made and is still held."""
        return self.packer.wire(index)


def _is_known_or_moved(outcome: grpc.Future[Any], rank: SendingRank) -> bool:
    return outcome.done() or rank.successor is not None


def _was_dropped(error: Exception) -> bool:
    return isinstance(error, WeftError) and error.reason == "EPOCH_FENCED"


class Sender:
    """Rank 0 of one side group, kept across pushes while membership stays.

    Used by one thread; the group's stream has a thread of its own.

    Args:
        ticket: The sender's place.
        device: Where its buffers lie.
        credentials: What it shows to the coordinator; by default this process's.
    """

    def __init__(
        self,
        ticket: GroupTicket,
        device: torch.device,
        credentials: Credentials | None = None,
    ) -> None:
        self.device = device
        self._credentials = credentials
        self._packer: Packer | None = None
        self._last: tuple[Sending, _PackedBuckets, FindGroup] | None = None
        self._rank = SendingRank(ticket, device, credentials)

    @property
    def ticket(self) -> GroupTicket:
        """The sender's place now; another one after members were lost."""
        return self._rank.ticket

    @property
    def usable(self) -> bool:
        """Whether the group can carry a further push."""
        return self._rank.usable

    def send(
        self,
        source: Source,
        manifest: Manifest,
        *,
        transfer_id: str,
        nonce: int,
        deadline: float,
        progress: Progress | None = None,
        check_finite: bool = False,
        find_group: FindGroup = lambda group_id: None,
    ) -> bytes:
        """Send every bucket, each kept until all receivers have verified it.

        Blocks until the last bucket was released. The source is read once, in
        order, whatever happens; extra memory is the packer's buffers, and as many
        more while a group is replaced that cannot be aborted (gloo's).

        Args:
            source: What is sent.
            manifest: Its layout.
            transfer_id, nonce: Of the transfer.
            deadline: ``time.monotonic()`` at which to give up.
            progress: Called after each release with buckets verified by all, and in all.
            check_finite: Look at each bucket as it was packed for NaN and infinities.
            find_group: Asked with the id of a group that was dropped before this rank came
                to it: nobody could tell it there where the transfer continues.

        Returns:
            The content digest.

        Raises:
            NotFiniteError: A tensor holds one; the other ranks were told.
            TransferTimeoutError: The deadline passed.
            WeftError: The transfer was aborted, with its reason; or the source
                failed, and then the other ranks were told.
        """
        self._packer = self._packer_for(manifest)
        buckets = _PackedBuckets(self._packer, source, nonce, check_finite)
        sending = Sending(transfer_id, buckets, deadline, progress)
        self._last = sending, buckets, find_group
        return self._carry(sending, buckets, find_group)

    def stand_by(self, outcome: grpc.Future[Any]) -> None:
        """Stay a member until the transfer's outcome is known; blocks until then.

        A replica may be lost after the last bucket: the survivors then agree once
        more in another group, which needs its sender.

        Args:
            outcome: AwaitTransfer under way; its failure is for the caller to see.
        """
        outcome.add_done_callback(lambda _: self._rank.wake())
        while not outcome.done():
            rank = self._rank
            # Bounded, since the callback may have woken a former rank.
            rank.wait(partial(_is_known_or_moved, outcome, rank), _STAND_BY_SECONDS)
            if rank.successor is not None and self._last is not None:
                try:
                    self._carry(*self._last)
                except WeftError as error:
                    _log.info("could not resume in another group: %s", error)
                    return

    def _carry(self, sending: Sending, buckets: _PackedBuckets, find_group: FindGroup) -> bytes:
        """Send what is not verified yet, in as many groups as it takes."""
        while True:
            rank = self._rank
            try:
                return rank.send(sending)
            except Exception as error:
                moves = isinstance(error, Reformed | WeftError) and not buckets.spoiled
                if moves and rank.successor is None and _was_dropped(error):
                    rank.successor = find_group(rank.ticket.group_id)
                if not moves or rank.successor is None:
                    rank.give_up(sending.transfer_id, error)
                    raise
                self._rejoin(rank, rank.successor, sending, buckets)

    def _rejoin(
        self, old: SendingRank, successor: GroupTicket, sending: Sending, buckets: _PackedBuckets
    ) -> None:
        """Resume in the next group; with other buffers where these are not safe to use."""
        released = old.num_released(sending.transfer_id)
        sending.num_released = max(sending.num_released, released)
        are_safe = old.leave()
        self._rank = SendingRank(successor, self.device, self._credentials)
        if not are_safe:
            held = range(sending.num_released, len(sending.digests))
            buckets.packer = self._packer = buckets.packer.moved(held)

    def close(self) -> None:
        """Leave the group; blocks at most 10 s."""
        self._rank.leave()
        self._packer = None

    def _packer_for(self, manifest: Manifest) -> Packer:
        """The packer of this layout; its buffers are handed on to another layout's."""
        if self._packer is None or self._packer.manifest.layout_digest != manifest.layout_digest:
            buffers: list[torch.Tensor] = self._packer.buffers if self._packer else []
            self._packer = Packer(manifest, buffers, self.device)
        return self._packer
