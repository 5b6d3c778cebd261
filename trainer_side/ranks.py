"""The ranks of one trainer, which push together: who speaks, and how all learn of a failure.

Every rank calls the publisher. Rank 0, the sender, alone speaks to the coordinator and
to the replicas; the others help to gather. Before each step in which ranks depend on
each other they *agree*: each says whether it can continue, and if one cannot, all raise
its error instead of waiting in a gather for a rank that will never come.

A gloo group of our own carries this, so that the application's groups are not used,
every wait ends with the push's deadline, and a push may run beside a training step.
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, BroadcastOptions, PrefixStore

from weft.contract.errors import (
    InvalidRequestError,
    PeerUnavailableError,
    WeftError,
    error_from_reason,
)

_log = logging.getLogger(__name__)

#: Rank that speaks for the trainer.
SENDER = 0
#: What another rank may take beyond the push's deadline to say how it ended.
GRACE_SECONDS = 10.0
#: What ranks may tell each other as they agree.
FLAGS = (1, 2)
# What the end of the process waits for a link to be closed, at most.
_END_SECONDS = 5.0
_ERROR_BYTES = 8192
# Publishers of one process, in the order of making, which is that of every rank.
_NUMBERS = itertools.count()

#: Which ranks push together: all of ``torch.distributed``, only this process, or those
#: of a group.
Together = Literal["all", "this"] | dist.ProcessGroup


class Sum(Protocol):
    """A sum under way."""

    @property
    def done(self) -> bool:
        """Whether ``result`` returns or raises at once."""

    def result(self) -> list[int]:
        """Blocks for it.

        Raises:
            PeerUnavailableError: ``RANK_GONE``.
        """


class Ranks(Protocol):
    """The ranks that push together. Methods are collective unless they say otherwise,
    and are called by one thread at a time, in the same order on every rank."""

    rank: int
    size: int

    def open(self, deadline: float) -> None:
        """Begin a push that every wait ends with; ``time.monotonic()`` seconds.

        Raises:
            PeerUnavailableError: ``RANK_GONE``: not every rank came.
        """

    def agree(self, error: BaseException | None = None, flags: int = 0) -> int:
        """Continue only if every rank can.

        Args:
            error: Why this one cannot.
            flags: Of ``FLAGS``, told to all.

        Returns:
            Those that any rank told.

        Raises:
            BaseException: Here, ``error`` itself; elsewhere that of the lowest rank that
                has one, as the same type if it is a WeftError.
            PeerUnavailableError: ``RANK_GONE``.
        """

    def share(self, produce: Callable[[], bytes]) -> bytes:
        """What ``produce`` returns at the sender, which alone calls it; raises as
        ``agree`` if it fails."""

    def collect(self, mine: torch.Tensor | None, theirs: Mapping[int, torch.Tensor]) -> None:
        """Bring bytes to the sender.

        Args:
            mine: Elsewhere than at the sender: contiguous uint8 CPU bytes to give; None
                gives nothing.
            theirs: At the sender: where to put each other rank's, of equal size.
        """

    def exchange(self, messages: Sequence[torch.Tensor]) -> None:
        """Bring every rank's bytes to all.

        Args:
            messages: One of each rank: contiguous uint8 CPU bytes, as long on every rank; its
                own is given, the others are overwritten. Empty ones are left out.
        """

    def add_up(self, values: torch.Tensor) -> Sum:
        """Begin to add up every rank's values; returns at once.

        Args:
            values: int64, 1-D, as long on every rank; sums wrap around. The caller must leave
                it alone until the sum is done.
        """

    def abandon(self) -> None:
        """Leave, so that whoever waits for this rank fails at once; not collective."""


def ranks_of(together: Together) -> Ranks:
    """The ranks that push with this process.

    Raises:
        InvalidRequestError: This process is not in the group given.
    """
    if together == "this" or not (dist.is_available() and dist.is_initialized()):
        return OneRank()
    group = None if together == "all" else together
    assert not isinstance(group, str)
    if dist.get_rank(group) < 0:
        raise InvalidRequestError(
            "this process is not in the group given as `ranks`: only its members make a Publisher"
        )
    return OneRank() if dist.get_world_size(group) == 1 else TorchRanks(group)


@contextmanager
def agreeing(ranks: Ranks) -> Iterator[None]:
    """Let all ranks continue after this block, or all raise the error of one."""
    try:
        yield
    except Exception as error:
        ranks.agree(error)
        raise
    ranks.agree()


class OneRank:
    """A trainer of one process, or of one that speaks for replicated others."""

    rank, size = SENDER, 1

    def open(self, deadline: float) -> None:
        """See ``Ranks.open``."""

    def agree(self, error: BaseException | None = None, flags: int = 0) -> int:
        """See ``Ranks.agree``."""
        if error is not None:
            raise error
        return flags

    def share(self, produce: Callable[[], bytes]) -> bytes:
        """See ``Ranks.share``."""
        return produce()

    def collect(self, mine: torch.Tensor | None, theirs: Mapping[int, torch.Tensor]) -> None:
        """See ``Ranks.collect``."""

    def exchange(self, messages: Sequence[torch.Tensor]) -> None:
        """See ``Ranks.exchange``."""

    def add_up(self, values: torch.Tensor) -> Sum:
        """See ``Ranks.add_up``."""
        return _OwnSum(values)

    def abandon(self) -> None:
        """See ``Ranks.abandon``."""


@dataclass(frozen=True)
class _OwnSum:
    """Of one rank: what it gave."""

    values: torch.Tensor
    done = True

    def result(self) -> list[int]:
        """See ``Sum``."""
        return [int(value) for value in self.values.tolist()]


class TorchRanks:
    """Ranks of an application that has initialised ``torch.distributed``.

    Args:
        group: Of the application, to take the ranks from; None is all. It is not used
            otherwise.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        #: The application's rank of each of ours.
        self.members = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._name = f"weft/{self.members}/{next(_NUMBERS)}"
        self._num_links = 0
        self._deadline = 0.0
        self._link: Any = None
        self._over = False

    def open(self, deadline: float) -> None:
        """See ``Ranks.open``."""
        self._deadline, self._over = deadline, False
        if self._link is not None:
            try:
                self.agree()
                return
            except PeerUnavailableError as error:
                _log.info("forming the link between the trainer's ranks anew: %s", error)
        self._over = False
        self._num_links += 1
        # Of the application's store, under a name of our own: these ranks are one job.
        store = PrefixStore(
            f"{self._name}/{self._num_links}", dist.distributed_c10d._get_default_store()
        )
        try:
            self._link = dist.ProcessGroupGloo(store, self.rank, self.size, self._left())
        except RuntimeError as error:
            raise self._gone(error) from error
        self.agree()

    def agree(self, error: BaseException | None = None, flags: int = 0) -> int:
        """See ``Ranks.agree``; the first time it raises ends the push for all."""
        if self._over:
            if error is not None:
                raise error
            raise PeerUnavailableError("the push has ended at the other ranks", reason="RANK_GONE")
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        options.timeout = self._left()
        # The lowest rank wins: its number is the largest.
        claim = 0 if error is None else self.size - self.rank
        said = torch.tensor([claim, *(flags & flag for flag in FLAGS)])
        self._wait(self._start(partial(self._linked.allreduce, [said], options)))
        claim, *told = said.tolist()
        if claim:
            self._over = True
            self._raise_claimed(self.size - claim, error)
        return sum(told)

    def share(self, produce: Callable[[], bytes]) -> bytes:
        """See ``Ranks.share``."""
        payload = b""
        if self.rank == SENDER:
            with agreeing(self):
                payload = produce()
        else:
            self.agree()
        length = self._broadcast(torch.tensor([len(payload)]), SENDER)
        content = torch.zeros(int(length), dtype=torch.uint8)
        if payload:
            content = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        return bytes(self._broadcast(content, SENDER).numpy()) if int(length) else b""

    def collect(self, mine: torch.Tensor | None, theirs: Mapping[int, torch.Tensor]) -> None:
        """See ``Ranks.collect``."""
        if self.rank != SENDER:
            if mine is not None:
                self._wait(self._start(partial(self._linked.send, [mine], SENDER, 0)))
            return
        works = [
            self._start(partial(self._linked.recv, [buffer], rank, 0))
            for rank, buffer in theirs.items()
        ]
        for work in works:
            self._wait(work)

    def exchange(self, messages: Sequence[torch.Tensor]) -> None:
        """See ``Ranks.exchange``."""
        works = []
        for root, message in enumerate(messages):
            options = BroadcastOptions()
            options.rootRank = root
            options.timeout = self._left()
            if message.numel():
                works.append(self._start(partial(self._linked.broadcast, [message], options)))
        for work in works:
            self._wait(work)

    def add_up(self, values: torch.Tensor) -> Sum:
        """See ``Ranks.add_up``."""
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        options.timeout = self._left()
        work = self._start(partial(self._linked.allreduce, [values], options))
        return _LinkSum(work, values, self._wait)

    def abandon(self) -> None:
        """See ``Ranks.abandon``."""
        link, self._link, self._over = self._link, None, True
        if link is not None:
            # Dropping it closes its connections, and waits for what is in flight.
            doomed = [link]
            del link
            ending = threading.Thread(target=doomed.clear, name="weft-ranks-end", daemon=True)
            ending.start()
            # A thread that the end of Python overtakes in there aborts the process.
            if threading.main_thread().is_alive():
                atexit.register(ending.join, _END_SECONDS)
            else:  # the end has begun: what is registered by now is not called
                ending.join(_END_SECONDS)

    def _raise_claimed(self, rank: int, own: BaseException | None) -> None:
        text = b""
        if own is not None and rank == self.rank:
            text = _encode(own)
        buffer = torch.zeros(_ERROR_BYTES, dtype=torch.uint8)
        buffer[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else 0
        said = bytes(self._broadcast(buffer, rank).numpy()).rstrip(b"\0")
        if own is not None:
            raise own
        raise _decode(said, rank)

    def _broadcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        options = BroadcastOptions()
        options.rootRank = root
        options.timeout = self._left()
        self._wait(self._start(partial(self._linked.broadcast, [tensor], options)))
        return tensor

    @property
    def _linked(self) -> Any:
        if self._link is None:
            raise PeerUnavailableError("this rank has left the push", reason="RANK_GONE")
        return self._link

    def _start(self, start: Callable[[], Any]) -> Any:
        try:
            return start()
        except RuntimeError as error:
            raise self._gone(error) from error

    def _wait(self, work: Any) -> None:
        try:
            work.wait(self._left())
        except RuntimeError as error:
            raise self._gone(error) from error

    def _left(self) -> timedelta:
        return timedelta(seconds=max(0.0, self._deadline - time.monotonic()) + GRACE_SECONDS)

    def _gone(self, error: RuntimeError) -> PeerUnavailableError:
        self.abandon()
        return PeerUnavailableError(
            f"another of this trainer's {self.size} ranks is gone or did not take part in the "
            "push in time: every rank must call it (or none but one, with "
            f"Publisher(ranks='this')): {str(error).partition('. This is typically')[0]}",
            reason="RANK_GONE",
        )


@dataclass(frozen=True)
class _LinkSum:
    """A sum over the link."""

    work: Any
    values: torch.Tensor
    wait: Callable[[Any], None]

    @property
    def done(self) -> bool:
        """See ``Sum``."""
        return bool(self.work.is_completed())

    def result(self) -> list[int]:
        """See ``Sum``."""
        self.wait(self.work)
        return [int(value) for value in self.values.tolist()]


def _encode(error: BaseException) -> bytes:
    if isinstance(error, WeftError):
        said: dict[str, Any] = {
            "reason": error.reason,
            "message": error.message[: _ERROR_BYTES // 4],
            "metadata": {k[:100]: v[:200] for k, v in list(error.metadata.items())[:8]},
        }
    else:
        said = {"other": repr(error)[:1000]}
    text = json.dumps(said, ensure_ascii=True).encode()
    return text if len(text) <= _ERROR_BYTES else json.dumps({"other": repr(error)[:200]}).encode()


def _decode(text: bytes, rank: int) -> WeftError:
    said = json.loads(text)
    if "reason" in said:
        return error_from_reason(said["reason"], said["message"], said["metadata"])
    return WeftError(f"rank {rank} of this trainer failed: {said['other']}")
