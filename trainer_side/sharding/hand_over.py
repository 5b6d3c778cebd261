"""Elements of ranks that do not send, passed bucket by bucket to ranks that send them.

A giver fills one message at a time, and only when it is asked to. So no rank holds more than a
bucket's part. A sender that must stop, because a replica or the push is lost, leaves no rank
waiting.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from trainer_side.params.params import copy_into
from trainer_side.ranks.ranks import Ranks, decode_error, encode_error
from trainer_side.sharding.plan import HandedRuns
from weft_rl.contract.errors import WeftError
from weft_rl.contract.manifest import Run

_log = logging.getLogger(__name__)

_ALIGN_BYTES = 16
# Before a message's elements: the length of the error that follows in their place, or 0.
_HEAD_BYTES = 16
_GO_ON, _STOP = 1, 0
# In the place of a rank that hands over.
_OWN = -1


class ViewFiller(Protocol):
    """Filler of views with elements."""

    def fill(self, runs: Sequence[Run], outs: Sequence[torch.Tensor]) -> None:
        """Copy or compute elements of runs.

        Args:
            runs: Runs to fill.
            outs: A view for each, 1-D, contiguous, of the dtype that travels; overwritten.
        """

    def by_reference(self, runs: Sequence[Run]) -> list[torch.Tensor | None]:
        """Return elements where they lie, 1-D, in their own dtypes; None for those to be filled."""


class GivingRanks:
    """Ranks that hand over to this one, as it takes from them; see ``ViewFiller``.

    Args:
        source: Elements that this rank holds itself.
        handed: What each rank hands over, by rank.
        dtypes: Dtypes of the tensors, as they travel.
        ranks: Ranks of the trainer.
    """

    def __init__(
        self,
        source: ViewFiller,
        handed: Mapping[int, HandedRuns],
        dtypes: Sequence[torch.dtype],
        ranks: Ranks,
    ) -> None:
        self._source, self._ranks, self._message = source, ranks, _Message(dtypes)
        #: What each is still to give, a message at a time.
        self._due = {rank: deque(each.runs) for rank, each in handed.items()}
        self._asked: set[int] = set()
        self._holders = {
            run: rank for rank, each in handed.items() for runs in each.runs for run in runs
        }

    def fill(self, runs: Sequence[Run], outs: Sequence[torch.Tensor]) -> None:
        """See ``ViewFiller``; called for one wire bucket after another.

        Raises:
            WeftError: The error of a rank that was to give some of it, or ``RANK_GONE``.
        """
        places: dict[int, list[int]] = {}
        for index, run in enumerate(runs):
            places.setdefault(self._holders.get(run, _OWN), []).append(index)
        own = places.pop(_OWN, [])
        for rank in places:
            self._ask(rank)
        self._source.fill([runs[i] for i in own], [outs[i] for i in own])
        for rank, theirs in places.items():
            self._take(rank)
            if self._due[rank]:
                self._ask(rank)  # it fills the next while this one is sent
            copy_into([outs[i] for i in theirs], self._message.views)

    def by_reference(self, runs: Sequence[Run]) -> list[torch.Tensor | None]:
        """See ``ViewFiller``."""
        is_own = not any(run in self._holders for run in runs)
        return self._source.by_reference(runs) if is_own else [None] * len(runs)

    def end(self) -> None:
        """Release ranks that still wait to be asked, whether the link lives or not."""
        for rank, due in self._due.items():
            try:
                if rank in self._asked:
                    self._take(rank)
                if due:
                    self._say(rank, _STOP)
            except WeftError as error:
                _log.info("rank %d has nothing more to give: %s", rank, error)

    def _ask(self, rank: int) -> None:
        if rank not in self._asked:
            self._say(rank, _GO_ON)
            self._asked.add(rank)

    def _say(self, rank: int, word: int) -> None:
        self._ranks.give(rank, torch.tensor([word], dtype=torch.uint8))

    def _take(self, rank: int) -> None:
        due = self._due[rank]
        self._message.lay_out(due.popleft())
        self._asked.discard(rank)
        self._ranks.take(rank, self._message.content)
        if length := int(self._message.error_bytes):
            due.clear()  # it gives no more
            text = torch.zeros(length, dtype=torch.uint8)
            self._ranks.take(rank, text)
            raise decode_error(bytes(text.numpy()), rank)


def hand_over(
    source: ViewFiller,
    handed: HandedRuns,
    dtypes: Sequence[torch.dtype],
    ranks: Ranks,
    end_reading: Callable[[], None] = lambda: None,
) -> None:
    """Give another rank the elements that it sends for this one.

    Args:
        end_reading: Called once the last message is filled, before it is given.

    Blocks until that rank has all, or no longer wants them. A failure here is told to it, and ends
    the push there.

    Raises:
        PeerUnavailableError: ``RANK_GONE``.
    """
    message, word = _Message(dtypes), torch.zeros(1, dtype=torch.uint8)
    for nth, runs in enumerate(handed.runs):
        ranks.take(handed.to, word)
        if int(word) == _STOP:
            return
        message.lay_out(runs)
        text = b""
        try:
            source.fill(runs, message.views)
            if nth + 1 == len(handed.runs):
                end_reading()
        except Exception as error:  # noqa: BLE001 (it is told)
            text = encode_error(error)
        message.error_bytes.fill_(len(text))
        ranks.give(handed.to, message.content)
        if text:
            ranks.give(handed.to, torch.frombuffer(bytearray(text), dtype=torch.uint8))
            return


class _Message:
    """Message of elements, in memory that is used again."""

    def __init__(self, dtypes: Sequence[torch.dtype]) -> None:
        self._dtypes = dtypes
        self._buffer = torch.zeros(_HEAD_BYTES, dtype=torch.uint8)
        self.content = self._buffer
        self.views: list[torch.Tensor] = []

    def lay_out(self, runs: Sequence[Run]) -> None:
        """Make room for the elements of runs: ``content`` is all, ``views`` has one for each."""
        ends, at = [], _HEAD_BYTES
        for run in runs:
            ends.append(at + run.num_elements * self._dtypes[run.tensor].itemsize)
            at = -(-ends[-1] // _ALIGN_BYTES) * _ALIGN_BYTES
        if self._buffer.numel() < at:
            # zeros, not empty: touched memory is filled and sent twice as fast
            self._buffer = torch.zeros(at, dtype=torch.uint8)
        self.content = self._buffer[:at]
        self.views = [
            self._buffer[end - run.num_elements * dtype.itemsize : end].view(dtype)
            for run, end in zip(runs, ends, strict=True)
            for dtype in (self._dtypes[run.tensor],)
        ]

    @property
    def error_bytes(self) -> torch.Tensor:
        """Length of the error that follows the message; 0 where it holds what was asked for."""
        return self.content[:_HEAD_BYTES].view(torch.int64)[0]
