"""Ranks of one trainer, which push together: who speaks, and how all learn of a failure.

Every rank calls the publisher. Rank 0, the sender, speaks for all: it has the lease, begins and
learns the outcome. The others send the shards that they hold, over streams of their own to the
coordinator, or help to gather. Before each step in which ranks depend
on each other they *agree*: each says whether it can continue, and if one cannot, all raise its
error instead of waiting in a gather for a rank that will never come.

Connections of our own carry this (``torch_ranks``, ``link``), so that the application's groups are
not used, a rank that is gone is noticed at once, every wait ends with the push's deadline, and a
push may run beside a training step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import torch

from weft_rl.contract.errors import PeerUnavailableError, WeftError, error_from_reason

_E = TypeVar("_E", bound=BaseException)

#: Rank that speaks for the trainer.
SENDER = 0
#: What ranks may tell each other as they agree.
FLAGS = (1, 2)
#: What a rank is told of another's error, at most.
ERROR_BYTES = 8192
#: Of a call that has none, or compares none.
NO_ARGUMENTS: Final[Mapping[str, object]] = MappingProxyType({})
# Errors that are looked at of those that one was raised from.
_MAX_CAUSES: Final = 16


class RankSum(Protocol):
    """Sum over the ranks that is under way."""

    @property
    def done(self) -> bool:
        """True if ``result`` returns or raises at once."""

    def result(self) -> Sequence[int]:
        """Block for the sum and return it.

        Raises:
            PeerUnavailableError: ``RANK_GONE``.
        """


class Ranks(Protocol):
    """Ranks that push together.

    Methods are collective unless they say otherwise, and are called by one thread at a time, in the
    same order on every rank.
    """

    rank: int
    size: int

    @property
    def number(self) -> int:
        """Number of the call that the ranks are at, or were at last, as they have agreed."""

    def open(self, deadline: float, arguments: Mapping[str, object] = NO_ARGUMENTS) -> None:
        """Begin a call, once every rank has come to it; every wait ends at its deadline, in
        ``time.monotonic()`` seconds.

        Ranks that have come apart (one was interrupted, or has left a call out) are in step from
        here on.

        Args:
            arguments: Arguments of the call that must be the same on every rank, by name.

        Raises:
            InvalidRequestError: They are not; names the ranks and what differs.
            PeerUnavailableError: ``RANK_GONE``: not every rank came.
            WeftError: The reason for which another rank does not come.
        """

    def close_call(self) -> None:
        """End the call at this rank: what it leaves from now on is its next one. Not collective."""

    def go_on(self) -> None:
        """Continue a push after an error that all ranks have raised, until the push's deadline.

        Raises:
            PeerUnavailableError: ``RANK_GONE``: a rank has left the push.
        """

    def agree(self, error: BaseException | None = None, flags: int = 0, same: bytes = b"") -> int:
        """Continue only if every rank can; costs one message.

        Args:
            error: Error of this rank, if it cannot continue.
            flags: Flags of ``FLAGS``, told to all.
            same: Bytes that must be equal on every rank: the layout and plan of what is pushed.

        Returns:
            Flags that any rank told.

        Raises:
            BaseException: At this rank ``error`` itself; at others the error of the lowest rank
                that has one, as the same type if it is a WeftError.
            InvalidManifestError: ``same`` is not equal; raised at every rank.
            PeerUnavailableError: ``RANK_GONE``.
        """

    def share(self, produce: Callable[[], bytes], *, all_wait: bool = False) -> bytes:
        """Return the result of ``produce``, called at the sender alone, at every rank.

        Raises as ``agree`` does if it fails.

        Args:
            all_wait: True if the other ranks come here whatever happens, and none of them waits in
                ``agree`` meanwhile. All agree on something soon afterwards, and then notice a rank
                that is gone. So one message is enough.
        """

    def collect(self, mine: torch.Tensor | None, theirs: Mapping[int, torch.Tensor]) -> None:
        """Bring bytes to the sender.

        Args:
            mine: At ranks other than the sender: contiguous uint8 CPU bytes to give; None gives
                nothing.
            theirs: At the sender: memory for each other rank's bytes, of equal size.
        """

    def exchange(self, messages: Sequence[torch.Tensor]) -> None:
        """Bring every rank's bytes to all.

        Args:
            messages: One of each rank: contiguous uint8 CPU bytes, of the same length on every
                rank. This rank's own is given, the others are overwritten. Empty ones are left out.
        """

    def bring(
        self, sizes: Sequence[int], fill: Callable[[torch.Tensor], None], device: torch.device
    ) -> list[torch.Tensor]:
        """Bring every rank's bytes to all, on GPUs where ranks can map each other's memory.

        Args:
            sizes: Size of each rank's message; the same on every rank.
            fill: Function that fills this rank's message: uint8, contiguous, on any device.
            device: Device on which the messages are wanted.

        Returns:
            One message of each rank, on ``device`` or the host; to be read before the next
            agreement.
        """

    def add_up(self, values: torch.Tensor) -> RankSum:
        """Begin to add up every rank's values; return at once.

        Args:
            values: int64, 1-D, of one length on every rank; sums wrap around. The caller must not
                touch it until the sum is done.
        """

    def abandon(self, error: BaseException | None = None) -> None:
        """Leave, so that every rank that waits for this one fails at once; not collective.

        Args:
            error: Reason to leave. A rank that hears of it raises the same type if it is a
                WeftError, else ``RANK_GONE``; this rank's own ``agree`` raises it.
        """

    def leave(self, error: BaseException) -> None:
        """Tell the other ranks that this one ends a call with ``error``, so that none of them waits
        for it: the call that it is at, or its next one, to which it does not come. Not collective;
        does nothing where they know the error.
        """

    def close(self) -> None:
        """Leave for good; the other ranks are told. Not collective."""


_KNOWN: Final = "_weft_ranks_know"


def told(error: _E) -> _E:
    """Return ``error``, marked as one that all ranks raise, or were told of."""
    error.__dict__[_KNOWN] = True
    return error


def is_told(error: BaseException) -> bool:
    """Return whether all ranks raise an error, or the one that it was explicitly raised from."""
    cause: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if cause is None:
            return False
        if _KNOWN in cause.__dict__:
            return True
        cause = cause.__cause__
    return False


@dataclass
class RankDeclaration:
    """Declaration of a rank in a block of ``agreeing``; see ``Ranks.agree``."""

    flags: int = 0
    same: bytes = b""
    told: int = 0
    """Flags of all ranks; set after the block."""


@contextmanager
def agreeing(ranks: Ranks) -> Iterator[RankDeclaration]:
    """Let all ranks continue after this block, or all raise the error of one."""
    agreement = RankDeclaration()
    try:
        yield agreement
    except Exception as error:
        ranks.agree(error)
        raise
    agreement.told = ranks.agree(flags=agreement.flags, same=agreement.same)


@dataclass
class SharedBytes:
    """Bytes of rank 0 for every rank; see ``sharing``."""

    payload: bytes = b""
    """Set at rank 0 in the block; set at every rank after it."""


@contextmanager
def sharing(ranks: Ranks) -> Iterator[SharedBytes]:
    """Share the payload that rank 0 sets in this block, or the error that it raises there, with
    every rank. The other ranks do nothing in the block; see ``Ranks.share``."""
    shared = SharedBytes()
    try:
        yield shared
    except Exception as error:
        if ranks.rank == SENDER:
            ranks.agree(error)  # the others come to agree in ``share``
        raise
    shared.payload = ranks.share(lambda: shared.payload)


def bring_by_host(
    ranks: Ranks, sizes: Sequence[int], fill: Callable[[torch.Tensor], None]
) -> list[torch.Tensor]:
    """Bring every rank's bytes to all by way of ``exchange``; see ``Ranks.bring``."""
    messages = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    fill(messages[ranks.rank])
    ranks.exchange(messages)
    return messages


class OneRank:
    """``Ranks`` of a trainer of one process, or of one that speaks for replicated others."""

    rank, size = SENDER, 1
    number = 0

    def open(self, deadline: float, arguments: Mapping[str, object] = NO_ARGUMENTS) -> None:
        self.number += 1

    def close_call(self) -> None:
        pass

    def go_on(self) -> None:
        pass

    def agree(self, error: BaseException | None = None, flags: int = 0, same: bytes = b"") -> int:
        if error is not None:
            raise error
        return flags

    def share(self, produce: Callable[[], bytes], *, all_wait: bool = False) -> bytes:
        return produce()

    def collect(self, mine: torch.Tensor | None, theirs: Mapping[int, torch.Tensor]) -> None:
        pass

    def exchange(self, messages: Sequence[torch.Tensor]) -> None:
        pass

    def bring(
        self, sizes: Sequence[int], fill: Callable[[torch.Tensor], None], device: torch.device
    ) -> list[torch.Tensor]:
        return bring_by_host(self, sizes, fill)

    def add_up(self, values: torch.Tensor) -> RankSum:
        return OwnSum(values.tolist())

    def abandon(self, error: BaseException | None = None) -> None:
        pass

    def leave(self, error: BaseException) -> None:
        pass

    def close(self) -> None:
        pass


class OwnSum(NamedTuple):
    """``RankSum`` of a rank that has all values."""

    values: Sequence[int]

    @property
    def done(self) -> bool:
        return True

    def result(self) -> Sequence[int]:
        return self.values


def encode_error(error: BaseException) -> bytes:
    """Encode an error for other ranks, in at most ``ERROR_BYTES``."""
    if isinstance(error, WeftError):
        said: dict[str, Any] = {
            "reason": error.reason,
            "message": error.message[: ERROR_BYTES // 4],
            "metadata": {k[:100]: v[:200] for k, v in list(error.metadata.items())[:8]},
        }
    else:
        said = {"other": repr(error)[:1000], "is_interrupt": not isinstance(error, Exception)}
    text = json.dumps(said, ensure_ascii=True).encode()
    return text if len(text) <= ERROR_BYTES else json.dumps({"other": repr(error)[:200]}).encode()


def decode_error(text: bytes, rank: int) -> WeftError:
    """Decode the error of ``rank``, as the same type if it was a WeftError."""
    said = json.loads(text)
    if "reason" in said:
        return error_from_reason(said["reason"], said["message"], said["metadata"])
    if said.get("is_interrupt"):
        return PeerUnavailableError(
            f"rank {rank} of this trainer was interrupted: {said['other']}", reason="RANK_GONE"
        )
    return WeftError(f"rank {rank} of this trainer failed: {said['other']}")
