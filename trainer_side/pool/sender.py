"""Sender of a trainer, through successive groups: one replaces another as members are lost."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from trainer_side.packing.packer import PackedBuckets, Packer, Packing, Reader
from trainer_side.pool.backend_selection import BackendSelection
from weft_rl.contract.errors import WeftError
from weft_rl.contract.group import GroupTicket
from weft_rl.interrupts import on_own_thread
from weft_rl.rpc.security.credentials import Credentials
from weft_rl.transport.group import same_stream
from weft_rl.transport.sender import Progress, Reformed, Sending, SendingRank

_log = logging.getLogger(__name__)

_STAND_BY_SECONDS = 1.0
# Layouts whose views are kept: a base, its merged form, some adapters.
_MAX_PACKERS = 4

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
        #: Packers of the last pushes, in the same buffers.
        self._packers: list[Packer] = []
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
        reader: Reader,
        *,
        transfer_id: str,
        nonce: int,
        deadline: float,
        progress: Progress | None = None,
        check_finite: bool = False,
        find_group: FindGroup = lambda group_id: None,
    ) -> bytes:
        """Send every bucket, each kept until all receivers have verified it.

        Blocks until the last bucket was released. The push is read once, in
        order, whatever happens; extra memory is the packer's buffers, and as many
        more while a group is replaced that cannot be aborted (gloo's).

        Args:
            reader: Content of the push as this rank sends it.
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
            WeftError: The transfer was aborted, with its reason; or the reader
                failed, and then the other ranks were told.
        """
        packer = self._packer_for(reader.packing)
        buckets = PackedBuckets(packer, reader, nonce, check_finite)
        sending = Sending(transfer_id, buckets, deadline, progress)
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
            self._packers = [buckets.packer]

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
        self._packers = []

    def _packer_for(self, packing: Packing) -> Packer:
        """Return the packer of a packing; a new one uses the buffers of the former ones. Those of
        which it cannot use every buffer are dropped, and their memory with them."""
        for kept in self._packers:
            if kept.packing is packing:
                return kept
        largest = max((packer.buffers for packer in self._packers), key=len, default=[])
        made = Packer(packing, largest, self.device, self.ticket.backend)
        most = largest if _are_among(made.buffers, largest) else made.buffers
        former = [p for p in self._packers[1 - _MAX_PACKERS :] if _are_among(p.buffers, most)]
        self._packers = [*former, made]
        return made


def _are_among(some: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> bool:
    return all(any(own is buffer for buffer in buffers) for own in some)
