"""Ranks of an application that uses ``torch.distributed``, over a link of our own."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, BroadcastOptions, PrefixStore

from trainer_side.ranks.mapped_exchange import MappedExchange
from trainer_side.ranks.ranks import (
    ERROR_BYTES,
    FLAGS,
    SENDER,
    OneRank,
    Ranks,
    Sum,
    bring_by_host,
    decode_error,
    encode_error,
)
from weft.contract.errors import (
    InvalidManifestError,
    InvalidRequestError,
    PeerUnavailableError,
)

_log = logging.getLogger(__name__)

#: What another rank may take beyond the push's deadline to say how it ended.
GRACE_SECONDS = 10.0
# What the end of the process waits for a link to be closed, at most.
_END_SECONDS = 5.0
# What two ranks say to each other, beside what all gather.
_BETWEEN_TWO = 1
# What nobody ever says.
_NEVER_SENT = 2
# What the sender shares: two numbers, and what follows them in the same message.
_NUMBER_BYTES, _HEAD_BYTES = 16, 8192
# Publishers of one process, in the order of making, which is that of every rank.
_NUMBERS = itertools.count()

#: Which ranks push together: all of ``torch.distributed``, only this process, or those
#: of a group.
Together = Literal["all", "this"] | dist.ProcessGroup


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
        self._sum: _LinkSum | None = None
        self._over = False
        # None once it was found that not all can.
        self._mapped: MappedExchange | None = None

    def open(self, deadline: float) -> None:
        """See ``Ranks.open``."""
        self._deadline, self._over = deadline, False
        self._forget_sum()
        if self._link is not None:
            try:
                self.agree()
                return
            except PeerUnavailableError as error:
                _log.info("forming the link between the trainer's ranks anew: %s", error)
        self._over = False
        self._num_links += 1
        self._mapped = MappedExchange(self)
        # Of the application's store, under a name of our own: these ranks are one job.
        store = PrefixStore(
            f"{self._name}/{self._num_links}", dist.distributed_c10d._get_default_store()
        )
        try:
            self._link = dist.ProcessGroupGloo(store, self.rank, self.size, self._left())
        except RuntimeError as error:
            raise self._gone(error) from error
        self.agree()

    def agree(self, error: BaseException | None = None, flags: int = 0, same: bytes = b"") -> int:
        """See ``Ranks.agree``; the first time it raises ends the push for all."""
        self._check_goes_on(error)
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        options.timeout = self._left()
        # The lowest rank wins: its number is the largest. A number is the same everywhere if
        # it is the largest, and so is its complement.
        claim = 0 if error is None else self.size - self.rank
        number = _number(same)
        said = torch.tensor([claim, number, ~number, *(flags & flag for flag in FLAGS)])
        self._wait(self._start(partial(self._linked.allreduce, [said], options)))
        claim, most, least, *told = said.tolist()
        if claim:
            self._over = True
            self._raise_claimed(self.size - claim, error)
        if most != ~least:
            self._over = True
            raise InvalidManifestError(
                f"the {self.size} ranks of this trainer would push other names or shapes than one "
                "another: every rank must push the same model"
            )
        return sum(told)

    def share(self, produce: Callable[[], bytes], *, all_wait: bool = False) -> bytes:
        """See ``Ranks.share``."""
        self._check_goes_on(None)
        payload = b""
        if self.rank == SENDER:
            try:
                payload = produce()
            except Exception as error:  # kept nowhere else: see _start
                if all_wait:
                    self._over = True
                    self._tell(encode_error(error), failed=True)
                else:
                    self.agree(error)
                raise
        if not all_wait:
            self.agree()
        content, failed = self._tell(payload)
        if failed:
            self._over = True
            raise decode_error(content, SENDER)
        return content

    def _tell(self, payload: bytes, *, failed: bool = False) -> tuple[bytes, bool]:
        """What the sender says, at every rank, and whether it is an error."""
        head = torch.zeros(_HEAD_BYTES, dtype=torch.uint8)
        numbers, room = head[:_NUMBER_BYTES].view(torch.int64), head[_NUMBER_BYTES:]
        if self.rank == SENDER:
            numbers.copy_(torch.tensor([len(payload), int(failed)]))
            _put(payload[: len(room)], room)
        self._broadcast(head, SENDER)
        length, has_failed = numbers.tolist()
        rest = torch.zeros(max(0, length - len(room)), dtype=torch.uint8)
        if len(rest):
            _put(payload[len(room) :], rest)
            self._broadcast(rest, SENDER)
        return bytes(room[:length].numpy()) + bytes(rest.numpy()), bool(has_failed)

    def _check_goes_on(self, error: BaseException | None) -> None:
        if self._over:
            if error is None or (self._link is None and not _is_gone(error)):
                raise PeerUnavailableError(
                    "the push has ended at the other ranks", reason="RANK_GONE"
                ) from error
            raise error

    def collect(self, mine: torch.Tensor | None, theirs: Mapping[int, torch.Tensor]) -> None:
        """See ``Ranks.collect``."""
        if self.rank != SENDER:
            if mine is not None:
                self._wait(self._start(partial(self._linked.send, [mine], SENDER, 0)))
            return
        self._wait_all(
            [
                self._start(partial(self._linked.recv, [buffer], rank, 0))
                for rank, buffer in theirs.items()
            ]
        )

    def exchange(self, messages: Sequence[torch.Tensor]) -> None:
        """See ``Ranks.exchange``."""
        works = []
        for root, message in enumerate(messages):
            options = BroadcastOptions()
            options.rootRank = root
            options.timeout = self._left()
            if message.numel():
                works.append(self._start(partial(self._linked.broadcast, [message], options)))
        self._wait_all(works)

    def bring(
        self, sizes: Sequence[int], fill: Callable[[torch.Tensor], None], device: torch.device
    ) -> list[torch.Tensor]:
        """See ``Ranks.bring``."""
        if self._mapped is not None:
            messages = self._mapped.bring(sizes, fill, device)
            if messages is not None:
                return messages
            self._mapped = None
        return bring_by_host(self, sizes, fill)

    def add_up(self, values: torch.Tensor) -> Sum:
        """See ``Ranks.add_up``."""
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        options.timeout = self._left()
        work = self._start(partial(self._linked.allreduce, [values], options))
        self._sum = _LinkSum(self, work, values)
        return self._sum

    def give(self, rank: int, message: torch.Tensor) -> None:
        """See ``Ranks.give``."""
        self._wait(self._start(partial(self._linked.send, [message], rank, _BETWEEN_TWO)))

    def take(self, rank: int, out: torch.Tensor) -> None:
        """See ``Ranks.take``."""
        self._wait(self._start(partial(self._linked.recv, [out], rank, _BETWEEN_TWO)))

    def abandon(self) -> None:
        """See ``Ranks.abandon``."""
        link, self._link, self._over = self._link, None, True
        if self._mapped is not None:
            self._mapped.close()
        self._forget_sum()
        if link is not None:
            _close_connections(link, (self.rank + 1) % self.size)
            # Dropping it waits for what is in flight.
            doomed = [link]
            del link
            ending = threading.Thread(target=doomed.clear, name="weft-ranks-end", daemon=True)
            ending.start()
            # A thread that the end of Python overtakes in there aborts the process.
            if threading.main_thread().is_alive():
                atexit.register(ending.join, _END_SECONDS)
            else:  # the end has begun: what is registered by now is not called
                ending.join(_END_SECONDS)

    def _forget_sum(self) -> None:
        """Of a push that has ended: its error may be kept, and with it this, which keeps the
        link's connections open even when it is done."""
        if self._sum is not None:
            self._sum.work, self._sum = None, None

    def _raise_claimed(self, rank: int, own: BaseException | None) -> None:
        text = b""
        if own is not None and rank == self.rank:
            text = encode_error(own)
        buffer = torch.zeros(ERROR_BYTES, dtype=torch.uint8)
        buffer[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else 0
        said = bytes(self._broadcast(buffer, rank).numpy()).rstrip(b"\0")
        if own is not None:
            raise own
        raise decode_error(said, rank)

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

    # What is under way keeps the link's connections open, and a traceback keeps what its frames
    # know: an error that somebody holds would leave the other ranks waiting.

    def _start(self, start: Callable[[], Any]) -> Any:
        try:
            return start()
        except RuntimeError as error:
            del start
            raise self._gone(error) from error

    def _wait(self, work: Any) -> None:
        if work is None:
            raise PeerUnavailableError("this rank has left the push", reason="RANK_GONE")
        try:
            work.wait(self._left())
        except RuntimeError as error:
            del work
            raise self._gone(error) from error

    def _wait_all(self, works: list[Any]) -> None:
        try:
            while works:
                self._wait(works.pop())
        finally:
            works.clear()

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


def _close_connections(link: Any, other: int) -> None:
    """Close a link's connections at once, whatever is in flight and whoever refers to it: all who
    wait for this rank are told, all that waits here ends.

    Gloo does so when a receive times out, and at no other word (``ProcessGroupGloo.abort`` does
    nothing in torch 2.13). Without it what is in flight here may wait for a rank that waits for
    this one, until the push's deadline.

    Args:
        other: A rank that never sends what is asked for.
    """
    with contextlib.suppress(RuntimeError):
        nothing = torch.empty(1, dtype=torch.uint8)
        link.recv([nothing], other, _NEVER_SENT).wait(timedelta(milliseconds=1))


@dataclass
class _LinkSum:
    """A sum over the link."""

    ranks: TorchRanks
    work: Any
    """None once this rank has left the link."""
    values: torch.Tensor

    @property
    def done(self) -> bool:
        """See ``Sum``."""
        work = self.work
        return work is None or bool(work.is_completed())

    def result(self) -> list[int]:
        """See ``Sum``."""
        self.ranks._wait(self.work)
        return [int(value) for value in self.values.tolist()]


def _number(same: bytes) -> int:
    """Of 63 bits; another for other bytes, but for odds that nobody lives to see."""
    return int.from_bytes(hashlib.blake2b(same, digest_size=8).digest(), "little") >> 1


def _put(content: bytes, out: torch.Tensor) -> None:
    if content:
        out[: len(content)].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))


def _is_gone(error: BaseException) -> bool:
    return isinstance(error, PeerUnavailableError) and error.reason == "RANK_GONE"
