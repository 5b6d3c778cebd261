"""Sender of a trainer: bucket sizes by backend, and sending through successive groups.

A group is replaced by another as members are lost.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from trainer_side.packing.packed_buckets import (
    PackedBuckets,
    RunBuckets,
    ShardBuckets,
    WholeBuckets,
)
from trainer_side.packing.packer import Packer
from trainer_side.packing.run_packer import RunPacker
from trainer_side.packing.shard_packer import ShardPacker
from trainer_side.pool.backend_selection import BackendSelection
from trainer_side.sharding.push import ShardPush
from trainer_side.sources.named_source import RunSource
from trainer_side.sources.source import Source
from weft_rl.contract.capabilities import NCCL, ONE_SIDED
from weft_rl.contract.errors import WeftError
from weft_rl.contract.group import GroupTicket
from weft_rl.contract.layout.manifest import DEFAULT_BUCKET_BYTES, Manifest
from weft_rl.interrupts import on_own_thread
from weft_rl.rpc.security.credentials import Credentials
from weft_rl.transport.group import same_stream
from weft_rl.transport.sender import Progress, Reformed, Sending, SendingRank

#: Between two H200s a base of 16 GB was staged in 51 ms with buckets of 1 GiB and in 62 ms
#: with 512 MiB: a bucket must take longer than the release of the one before it.
DEVICE_BUCKET_BYTES = 2**30


def packs_on_device(backend: str) -> bool:
    """Return whether buckets for a backend are packed on an accelerator; the same on every rank."""
    return backend == NCCL or (backend == ONE_SIDED and torch.cuda.is_available())


def bucket_capacity(backend: str, chosen: int | None) -> int:
    """Return the payload bytes of a bucket over a backend, or the user's choice. It is the same on
    every rank."""
    return chosen or (DEVICE_BUCKET_BYTES if packs_on_device(backend) else DEFAULT_BUCKET_BYTES)


_log = logging.getLogger(__name__)

_STAND_BY_SECONDS = 1.0

#: Finds the place in the group that a transfer continues in, if it is another than this one.
FindGroup = Callable[[str], GroupTicket | None]


class Outcome(Protocol):
    """Outcome of a push that may still be unknown: a call under way, a future."""

    def done(self) -> bool:
        """Return whether the outcome is known."""

    def add_done_callback(self, fn: Callable[[Any], None]) -> Any:
        """Call ``fn`` when the outcome is known, on any thread."""


def _is_known_or_moved(outcome: Outcome, rank: SendingRank) -> bool:
    return outcome.done() or rank.successor is not None


def _was_dropped(error: Exception) -> bool:
    return isinstance(error, WeftError) and error.reason == "EPOCH_FENCED"


class Sender:
    """Sending rank of a side group, kept across pushes while membership stays.

    Used by one thread; the group's stream has a thread of its own.

    Args:
        ticket: Place of the sender in its group.
        device: Device of its buffers.
        credentials: Credentials to show to the coordinator; by default this process's.
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
        self._shard_packer: ShardPacker | None = None
        self._buffers: list[torch.Tensor] = []
        self._last: tuple[Sending, PackedBuckets, FindGroup] | None = None
        self._rank = self._join(ticket)

    @property
    def ticket(self) -> GroupTicket:
        """Current place of the sender in its group; another one after members were lost."""
        return self._rank.ticket

    @property
    def usable(self) -> bool:
        """True if the group can carry a further push."""
        return self._rank.usable

    def suits(self, backend: str, selection: BackendSelection) -> bool:
        """Return whether the group suits a further push over a backend; an accelerator may have
        changed."""
        wanted = backend, selection.device_of(backend)
        return self.usable and (self.ticket.backend, self.device) == wanted

    def wait_attended(self) -> None:
        """See ``SendingRank``."""
        self._rank.wait_attended()

    def come_to(self, transfer_id: str) -> None:
        """Report in a kept group that this rank is at work for a transfer."""
        self._rank.come_to(transfer_id)

    def send(
        self,
        source: Source | RunSource | ShardPush,
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
            source: Source of the tensors, or of a sharded trainer this rank's part.
            manifest: Layout of the tensors.
            transfer_id, nonce: Id and nonce of the transfer.
            deadline: ``time.monotonic()`` at which to give up.
            progress: Function called after each release with buckets verified by all, and in all.
            check_finite: Check each packed bucket for NaN and infinities.
            find_group: Function asked with the id of a group that was dropped before this rank came
                to it: there it could not be told where the transfer continues.

        Returns:
            The content digest.

        Raises:
            NotFiniteError: A tensor holds NaN or infinity; the other ranks were told.
            TransferTimeoutError: The deadline passed.
            WeftError: The transfer was aborted, with its reason; or the source
                failed, and then the other ranks were told.
        """
        buckets: PackedBuckets
        if isinstance(source, RunSource):
            self._packer = None
            run_packer = RunPacker(
                manifest, source, self._buffers, self.device, self.ticket.backend
            )
            buckets = RunBuckets(run_packer, nonce, check_finite)
        elif isinstance(source, ShardPush):
            self._packer = None
            shard_packer = self._shard_packer_for(manifest, source)
            buckets = ShardBuckets(shard_packer, source, nonce, check_finite)
        else:
            packer = self._packer = self._packer_for(manifest)
            buckets = WholeBuckets(packer, source, nonce, check_finite)
        self._buffers = buckets.packer.buffers
        sending = Sending(transfer_id, buckets, deadline, progress)
        if isinstance(source, ShardPush):
            sending.plan, sending.sender = source.plan.send_plan, self.ticket.rank
        self._last = sending, buckets, find_group
        return self._carry(sending, buckets, find_group)

    def stand_by(self, outcome: Outcome) -> None:
        """Stay a member until the transfer's outcome is known; block until then.

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

    def _carry(self, sending: Sending, buckets: PackedBuckets, find_group: FindGroup) -> bytes:
        """Send the buckets that are not verified yet, in as many groups as it takes."""
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
        self, old: SendingRank, successor: GroupTicket, sending: Sending, buckets: PackedBuckets
    ) -> None:
        """Resume in the next group, with other buffers where the old ones are not safe to use."""
        released = old.num_released(sending.transfer_id)
        sending.num_released = max(sending.num_released, released)
        are_safe = on_own_thread(old.leave)
        self._rank = self._join(successor)
        if not are_safe:
            first = bisect_left(sending.indices, sending.num_released)
            held = range(first, len(sending.digests))
            buckets.move(held)
            if self.device.type == "cuda":  # they are sent as whatever was digested: at once
                torch.cuda.current_stream(self.device).synchronize()
            self._buffers = buckets.packer.buffers

    def _join(self, ticket: GroupTicket) -> SendingRank:
        """Join a group, which is left again if this is interrupted."""
        in_stream = same_stream(self.device)

        def join() -> SendingRank:
            with in_stream():
                return SendingRank(ticket, self.device, self._credentials)

        return on_own_thread(join, SendingRank.leave)

    def abort(self, error: WeftError) -> None:
        """Make ``send`` raise ``error`` soon; from any thread, never blocks."""
        self._rank.abort(error)

    def close(self) -> None:
        """Leave the group; block at most 10 s."""
        on_own_thread(self._rank.leave)
        self._packer, self._shard_packer, self._buffers = None, None, []

    def _shard_packer_for(self, manifest: Manifest, push: ShardPush) -> ShardPacker:
        """Return the packer of this layout and plan; a new one takes over the buffers."""
        plan, number = push.plan, self.ticket.rank
        kept = self._shard_packer
        if kept is None or kept.manifest is not manifest or kept.plan is not plan.send_plan:
            carried = plan.carried[number]
            kept = ShardPacker(
                manifest,
                plan.send_plan,
                number,
                carried,
                self._buffers,
                self.device,
                self.ticket.backend,
            )
            self._shard_packer = kept
        return kept

    def _packer_for(self, manifest: Manifest) -> Packer:
        """Return the packer of this layout; a new one takes over the buffers."""
        if self._packer is None or self._packer.manifest.layout_digest != manifest.layout_digest:
            self._packer = Packer(manifest, self._buffers, self.device, self.ticket.backend)
        return self._packer
