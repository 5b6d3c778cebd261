"""Ranks of an application that uses ``torch.distributed``, over a link of our own."""

from __future__ import annotations

import hashlib
import itertools
import logging
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Final, Literal, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from trainer_side.ranks.link import LinkError, RankLink, TrafficKind, meet
from trainer_side.ranks.mapped_exchange import ExchangeMemory
from trainer_side.ranks.ranks import (
    SENDER,
    OneRank,
    Ranks,
    RankSum,
    bring_by_host,
    decode_error,
    encode_error,
)
from weft_rl.contract.errors import (
    InvalidManifestError,
    InvalidRequestError,
    PeerUnavailableError,
    WeftError,
)

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

#: What another rank may take beyond the push's deadline to say how it ended.
GRACE_SECONDS = 10.0
#: Whether a rank can continue, the digest of what must be the same everywhere, its flags; after
#: it, its error.
_CLAIM: Final = struct.Struct("<?8sB")
#: The rank whose error it is or -1, whether ``same`` differs, all ranks' flags; then the error.
_VERDICT: Final = struct.Struct("<i?B")
# Publishers of one process, in the order of making, which is that of every rank.
_NUMBERS = itertools.count()

#: Which ranks push together: all of ``torch.distributed``, only this process, or those
#: of a group.
Together = Literal["all", "this"] | dist.ProcessGroup


class _Call(IntEnum):
    """Call that a message belongs to."""

    AGREE, TELL, COLLECT, EXCHANGE, GIVE, ADD_UP = range(1, 7)


def ranks_of(together: Together) -> Ranks:
    """Return the ranks that push with this process.

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

    Rank 0 is in the middle: the others send to it, and it sends to all.

    Args:
        group: Group of the application that lists the ranks; None is all. It is not used otherwise.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        #: The application's rank of each of ours.
        self.members = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._name = f"weft/{self.members}/{next(_NUMBERS)}"
        self._num_links = 0
        self._deadline = 0.0
        self._link: RankLink | None = None
        self._sum: _LinkSum | None = None
        self._over = False
        #: What a rank has left with, this one or another that has said so.
        self._ended_by: BaseException | None = None
        # None once it was found that not all can.
        self._mapped: ExchangeMemory | None = None

    def open(self, deadline: float) -> None:
        """See ``Ranks.open``."""
        self._deadline, self._over, self._ended_by = deadline, False, None
        if self._link is not None:
            try:
                self.agree()
                return
            except WeftError as error:  # one has left, with an error of the former push or not
                _log.info("forming the link between the trainer's ranks anew: %s", error)
        self._over, self._ended_by = False, None
        self._num_links += 1
        self._sum = None
        self._mapped = ExchangeMemory(self)
        # Of the application's store, under a name of our own: these ranks are one job.
        store = PrefixStore(
            f"{self._name}/{self._num_links}", dist.distributed_c10d._get_default_store()
        )
        try:
            self._link = meet(store, self.rank, self.size, self._until)
        except LinkError as error:
            self.abandon()
            raise self._gone(error) from error
        self.agree()

    def go_on(self) -> None:
        """See ``Ranks.go_on``; uses the existing link, or fails."""
        if self._link is not None:
            self._over, self._ended_by = False, None
        self.agree()

    def agree(self, error: BaseException | None = None, flags: int = 0, same: bytes = b"") -> int:
        """See ``Ranks.agree``; the first error ends the push for all."""
        self._check_goes_on(error)
        number = hashlib.blake2b(same, digest_size=8).digest()
        text = b"" if error is None else encode_error(error)
        own = _CLAIM.pack(error is not None, number, flags) + text
        said = self._gather(_Call.AGREE, own)
        verdict = _verdict([said[rank] for rank in sorted(said)]) if said else b""
        verdict = self._say_to_all(_Call.AGREE, verdict)
        failed, differs, told = _VERDICT.unpack_from(verdict)
        if failed >= 0:
            self._over = True
            raise error or decode_error(verdict[_VERDICT.size :], failed)
        if differs:
            self._over = True
            raise InvalidManifestError(
                f"the {self.size} ranks of this trainer would push other names or shapes than one "
                "another: every rank must push the same model"
            )
        return int(told)

    def share(self, produce: Callable[[], bytes], *, all_wait: bool = False) -> bytes:
        """See ``Ranks.share``."""
        self._check_goes_on(None)
        payload = b""
        if self.rank == SENDER:
            try:
                payload = produce()
            except Exception as error:
                if all_wait:
                    self._over = True
                    self._say_to_all(_Call.TELL, _FAILED + encode_error(error))
                else:
                    self.agree(error)
                raise
        if not all_wait:
            self.agree()
        said = self._say_to_all(_Call.TELL, _GOES_ON + payload)
        if said[:1] == _FAILED:
            self._over = True
            raise decode_error(said[1:], SENDER)
        return said[1:]

    def collect(self, mine: torch.Tensor | None, theirs: Mapping[int, torch.Tensor]) -> None:
        """See ``Ranks.collect``."""
        if self.rank == SENDER:
            outs = {rank: _bytes_of(buffer) for rank, buffer in theirs.items()}
            self._swap(TrafficKind.STAR, _Call.COLLECT, {}, outs)
        elif mine is not None:
            self._swap(TrafficKind.STAR, _Call.COLLECT, {SENDER: _bytes_of(mine)}, {})

    def exchange(self, messages: Sequence[torch.Tensor]) -> None:
        """See ``Ranks.exchange``."""
        contents = {rank: _bytes_of(each) for rank, each in enumerate(messages) if each.numel()}
        own = contents.pop(self.rank, None)
        to_all = {} if own is None else dict.fromkeys(self._others, own)
        self._swap(TrafficKind.PAIRS, _Call.EXCHANGE, to_all, contents)

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

    def add_up(self, values: torch.Tensor) -> RankSum:
        """See ``Ranks.add_up``."""
        self._sum = _LinkSum(self._linked, self, values, after=self._sum)
        return self._sum

    def give(self, rank: int, message: torch.Tensor) -> None:
        """See ``Ranks.give``."""
        self._swap(TrafficKind.PAIRS, _Call.GIVE, {rank: _bytes_of(message)}, {})

    def take(self, rank: int, out: torch.Tensor) -> None:
        """See ``Ranks.take``."""
        self._swap(TrafficKind.PAIRS, _Call.GIVE, {}, {rank: _bytes_of(out)})

    def abandon(self, error: BaseException | None = None) -> None:
        """See ``Ranks.abandon``."""
        link, self._link, self._over = self._link, None, True
        self._ended_by = self._ended_by or error
        if self._mapped is not None:
            self._mapped.close()
        if link is not None:
            link.close(reason=b"" if error is None else encode_error(error))

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    @property
    def _until(self) -> float:
        return max(self._deadline, time.monotonic()) + GRACE_SECONDS

    def _check_goes_on(self, error: BaseException | None) -> None:
        if self._over:
            if self._ended_by is not None:
                raise self._ended_by from (None if error is self._ended_by else error)
            if error is None or (self._link is None and not _is_gone(error)):
                raise PeerUnavailableError(
                    "the push has ended at the other ranks", reason="RANK_GONE"
                ) from error
            raise error

    def _gather(self, call: _Call, own: bytes) -> dict[int, bytes]:
        """Return what every rank says, at the sender; elsewhere nothing. A rank that has died since
        it spoke is reported as gone, too."""
        if self.rank != SENDER:
            self._swap(TrafficKind.STAR, call, {SENDER: memoryview(own)}, {})
            return {}
        said = self._swap(TrafficKind.STAR, call, {}, dict.fromkeys(self._others))
        self._guarded(lambda link: link.check(TrafficKind.STAR))
        return {SENDER: own} | {rank: bytes(each) for rank, each in said.items()}

    def _say_to_all(self, call: _Call, content: bytes) -> bytes:
        """Return the sender's bytes at every rank. A rank that has died does not stop them: the
        others have them, and come to the next agreement without it."""
        if self.rank == SENDER:
            to_all = dict.fromkeys(self._others, memoryview(content))
            self._swap(TrafficKind.STAR, call, to_all, {}, whoever_is_there=True)
            return content
        return bytes(self._swap(TrafficKind.STAR, call, {}, {SENDER: None})[SENDER])

    def _swap(
        self,
        traffic: TrafficKind,
        call: _Call,
        outgoing: Mapping[int, memoryview],
        incoming: Mapping[int, memoryview | None],
        *,
        whoever_is_there: bool = False,
    ) -> dict[int, memoryview]:
        """See ``RankLink.swap``."""
        return self._guarded(
            lambda link: link.swap(
                traffic, call, outgoing, incoming, self._until, whoever_is_there=whoever_is_there
            )
        )

    def _guarded(self, use: Callable[[RankLink], _T]) -> _T:
        try:
            return use(self._linked)
        except LinkError as error:
            self.abandon()
            self._ended_by = self._gone(error)
            raise self._ended_by from error

    @property
    def _linked(self) -> RankLink:
        if self._link is None:
            raise PeerUnavailableError("this rank has left the push", reason="RANK_GONE")
        return self._link

    def _gone(self, error: LinkError) -> WeftError:
        if error.reason:
            return decode_error(error.reason, error.rank)
        return PeerUnavailableError(
            f"another of this trainer's {self.size} ranks is gone or did not take part in the "
            "push in time: every rank must call it (or none but one, with "
            f"Publisher(ranks='this')): {error}",
            reason="RANK_GONE",
        )


_GOES_ON, _FAILED = b"\0", b"\1"


def _verdict(claims: Sequence[bytes]) -> bytes:
    """Return the verdict on all ranks' claims, in their order; the error of the lowest rank
    wins."""
    failed, told, text = -1, 0, b""
    numbers = set()
    for rank, claim in enumerate(claims):
        fails, number, flags = _CLAIM.unpack_from(claim)
        if fails and failed < 0:
            failed, text = rank, claim[_CLAIM.size :]
        numbers.add(number)
        told |= flags
    return _VERDICT.pack(failed, len(numbers) > 1, told) + text


class _LinkSum:
    """Sum over the link, on a separate thread; it goes on whether its result is read or not.

    Args:
        link: Link that the sum belongs to, whatever becomes of the push.
        ranks: Ranks that add up.
        values: Values that this rank adds; overwritten by the sum.
        after: Sum before this one over the same link, if any.
    """

    def __init__(
        self, link: RankLink, ranks: TorchRanks, values: torch.Tensor, after: _LinkSum | None
    ) -> None:
        self._link, self._ranks, self._values = link, ranks, values
        self._until = ranks._until
        self._error: LinkError | None = None
        self._thread = threading.Thread(
            target=self._run, args=(after,), name="weft-ranks-sum", daemon=True
        )
        self._thread.start()

    @property
    def done(self) -> bool:
        """See ``RankSum``."""
        return self._link.closed or not self._thread.is_alive()

    def result(self) -> list[int]:
        """See ``RankSum``."""
        self._thread.join()
        if self._error is not None:
            raise self._ranks._gone(self._error) from self._error
        return [int(value) for value in self._values.tolist()]

    def _run(self, after: _LinkSum | None) -> None:
        if after is not None:
            after._thread.join()
        try:
            self._add_up(_bytes_of(self._values))
        except LinkError as error:  # the link is closed: all others are told
            self._error = error

    def _add_up(self, own: memoryview) -> None:
        if self._ranks.rank != SENDER:
            self._swap({SENDER: own}, {})
            self._swap({}, {SENDER: own})
            return
        theirs = {rank: torch.empty_like(self._values) for rank in self._ranks._others}
        self._swap({}, {rank: _bytes_of(each) for rank, each in theirs.items()})
        for each in theirs.values():
            self._values += each
        self._swap(dict.fromkeys(theirs, own), {})

    def _swap(
        self, outgoing: Mapping[int, memoryview], incoming: Mapping[int, memoryview | None]
    ) -> None:
        self._link.swap(TrafficKind.SUM, _Call.ADD_UP, outgoing, incoming, self._until)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _is_gone(error: BaseException) -> bool:
    return isinstance(error, PeerUnavailableError) and error.reason == "RANK_GONE"
