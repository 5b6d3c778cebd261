"""Ranks of an application that uses ``torch.distributed``, over a link of our own.

One file: what is exchanged between GPUs is offered over the link, and ends with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from trainer_side.ranks.link import LinkError, RankLink, TrafficKind, meet
from trainer_side.ranks.meeting_place import CallEndedError, MeetingPlace
from trainer_side.ranks.ranks import (
    NO_ARGUMENTS,
    SENDER,
    OneRank,
    Ranks,
    RankSum,
    bring_by_host,
    decode_error,
    encode_error,
    is_told,
    told,
)
from weft_rl.contract.errors import (
    CapacityError,
    InvalidManifestError,
    InvalidRequestError,
    PeerUnavailableError,
    WeftError,
    error_from_reason,
)
from weft_rl.ipc.connection import PeerError
from weft_rl.transport.one_sided.memory import (
    DeviceMapping,
    allocate_block,
    export_of,
    record_event,
    synchronize,
)
from weft_rl.transport.one_sided.messages import MESSAGES, ExportDevice, OneSidedError

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

#: What another rank may take beyond the push's deadline to say how it ended.
GRACE_SECONDS = 10.0
#: Whether a rank can continue, the digest of what must be the same everywhere, its flags; after
#: it, its error.
_CLAIM: Final = struct.Struct("<?8sB")
#: The rank whose error it is or -1, whether ``same`` differs, all ranks' flags; then the error.
_VERDICT: Final = struct.Struct("<i?B")
# How much longer than rank 0 the others wait for a rank that does not come.
_COMING_SECONDS: Final = 0.5
# Between attempts to connect, where all have come and one cannot.
_PAUSES: Final = (0.05, 0.2, 0.5, 1.0)
# By store and name of what ranks do together, which of several of this process are not closed.
_SLOTS: WeakKeyDictionary[Any, dict[str, set[int]]] = WeakKeyDictionary()

# What is said of a call that differs.
_MAX_ARGUMENT_CHARS: Final = 200
_MAX_RANKS_SHOWN: Final = 8

#: Which ranks push together: all of ``torch.distributed``, only this process, or those
#: of a group.
Together = Literal["all", "this"] | dist.ProcessGroup


class _Call(IntEnum):
    """Call that a message belongs to."""

    AGREE, TELL, COLLECT, EXCHANGE, ADD_UP, OPEN = range(1, 7)


def ranks_of(together: Together, name: str = "") -> Ranks:
    """Return the ranks that push with this process.

    Args:
        name: Name of what they do together, the same on every rank.

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
    return OneRank() if dist.get_world_size(group) == 1 else TorchRanks(group, name)


class TorchRanks:
    """``Ranks`` of an application that has initialised ``torch.distributed``.

    Rank 0 is in the middle: the others send to it, and it sends to all.

    Args:
        group: Group of the application that lists the ranks; None is all. It is not used otherwise.
        name: Name of what they do together, the same on every rank. Of several that are not closed
            in one process, the first to be used is the first on every rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, name: str = "") -> None:
        #: The application's rank of each of ours.
        self.members = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._name = f"weft/{self.members}/{name}"
        self._slots, self._slot = set[int](), 0
        self._at: MeetingPlace | None = None
        self._is_at_call = False
        self._num_links = 0
        self._deadline = 0.0
        self._link: RankLink | None = None
        self._sum: _LinkSum | None = None
        self._over = False
        #: What a rank has left with, this one or another that has said so.
        self._ended_by: BaseException | None = None
        # None once it was found that not all can.
        self._mapped: ExchangeMemory | None = None

    @property
    def number(self) -> int:
        return self._place.number

    def open(self, deadline: float, arguments: Mapping[str, object] = NO_ARGUMENTS) -> None:
        self._deadline, self._over, self._ended_by = deadline, False, None
        at = self._place
        at.number += 1
        self._is_at_call = True
        pauses = iter(_PAUSES)
        if self.rank != SENDER:  # rank 0 says at the deadline who has not come
            deadline += _COMING_SECONDS
        while True:
            link = self._link
            try:
                self._form_link(deadline)
                self._compare(arguments, deadline)
                return
            except CallEndedError as error:
                raise self._end(_ended_at(error), error) from error
            except LinkError as error:
                # One has left: at the end of a former call, or now, which the store tells.
                self.abandon()
                pause = next(pauses, None) if link is None else 0.0
                if time.monotonic() >= deadline:
                    missing = at.missing if link is None else link.silent
                    raise self._give_up(self._gone(error), missing) from error
                if pause is None:
                    raise self._end(self._gone(error), error) from error
                _log.info("forming the link between the trainer's ranks anew: %s", error)
                time.sleep(pause)

    def close_call(self) -> None:
        self._is_at_call = False

    def _form_link(self, deadline: float) -> None:
        """Connect to the other ranks once all are at a call, unless they are linked."""
        if self._link is not None:
            return
        self._over, self._ended_by, self._sum = False, None, None
        store = self._place.come(deadline)
        self._mapped = ExchangeMemory(self)
        check = self._place.check
        self._link = meet(store, self.rank, self.size, deadline, check, encode_error)
        self._num_links += 1
        self._place.go_away()

    def _compare(self, arguments: Mapping[str, object], deadline: float) -> None:
        """Compare a call with those of the other ranks, once all are at it; agree on its number."""
        at, link, others = self._place, self._linked, self._others
        own = {"number": at.number, "by": at.by, "arguments": _as_text(arguments)}
        message = memoryview(json.dumps(own).encode())
        if self.rank == SENDER:
            heard = link.swap(TrafficKind.STAR, _Call.OPEN, {}, dict.fromkeys(others), deadline)
            link.check(TrafficKind.STAR)
            claims = [own, *(json.loads(bytes(heard[rank])) for rank in others)]
            verdict = json.dumps(
                {
                    "number": max(claim["number"] for claim in claims),
                    "by": [claim["by"] for claim in claims],
                    "difference": _difference([claim["arguments"] for claim in claims]),
                }
            ).encode()
            to_all = dict.fromkeys(others, memoryview(verdict))
            link.swap(TrafficKind.STAR, _Call.OPEN, to_all, {}, self._until, whoever_is_there=True)
        else:
            link.swap(TrafficKind.STAR, _Call.OPEN, {SENDER: message}, {}, deadline)
            heard = link.swap(TrafficKind.STAR, _Call.OPEN, {}, {SENDER: None}, deadline)
            verdict = bytes(heard[SENDER])
        agreed = json.loads(verdict)
        at.met(agreed["number"], agreed["by"])
        if agreed["difference"]:
            self._over = True
            raise told(
                InvalidRequestError(
                    f"the ranks of this trainer make different calls: {agreed['difference']}. "
                    "Every rank must make the same calls, in the same order"
                )
            )

    def _give_up(self, error: WeftError, missing: Sequence[int]) -> WeftError:
        """Tell the ranks that have come that others have not, and return the error to raise."""
        with contextlib.suppress(LinkError):
            if self.rank == SENDER:
                self._place.give_up(encode_error(error), missing)
            else:
                self._place.go_away()
        return told(error)

    def _end(self, error: WeftError, cause: LinkError) -> WeftError:
        """Tell the other ranks that this one does not wait at the call any more, and return the
        error for it to raise."""
        reason = cause.reason or encode_error(error)
        with contextlib.suppress(LinkError):
            self._place.leave(reason, is_at_call=True)
        self.abandon(error)
        return told(error)

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
        failed, differs, flags_of_all = _VERDICT.unpack_from(verdict)
        if failed >= 0:
            self._over = True
            raise told(error or decode_error(verdict[_VERDICT.size :], failed))
        if differs:
            self._over = True
            others = verdict[_VERDICT.size :].decode()
            raise told(
                InvalidManifestError(
                    f"{others} of this trainer would push other names or shapes than rank 0: every "
                    "rank must push the same model"
                )
            )
        return int(flags_of_all)

    def share(self, produce: Callable[[], bytes], *, all_wait: bool = False) -> bytes:
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
                told(error)
                raise
        if not all_wait:
            self.agree()
        said = self._say_to_all(_Call.TELL, _GOES_ON + payload)
        if said[:1] == _FAILED:
            self._over = True
            raise told(decode_error(said[1:], SENDER))
        return said[1:]

    def collect(self, mine: torch.Tensor | None, theirs: Mapping[int, torch.Tensor]) -> None:
        if self.rank == SENDER:
            outs = {rank: _bytes_of(buffer) for rank, buffer in theirs.items()}
            self._swap(TrafficKind.STAR, _Call.COLLECT, {}, outs)
        elif mine is not None:
            self._swap(TrafficKind.STAR, _Call.COLLECT, {SENDER: _bytes_of(mine)}, {})

    def exchange(self, messages: Sequence[torch.Tensor]) -> None:
        contents = {rank: _bytes_of(each) for rank, each in enumerate(messages) if each.numel()}
        own = contents.pop(self.rank, None)
        to_all = {} if own is None else dict.fromkeys(self._others, own)
        self._swap(TrafficKind.PAIRS, _Call.EXCHANGE, to_all, contents)

    def bring(
        self, sizes: Sequence[int], fill: Callable[[torch.Tensor], None], device: torch.device
    ) -> list[torch.Tensor]:
        if self._mapped is not None:
            messages = self._mapped.bring(sizes, fill, device)
            if messages is not None:
                return messages
            self._mapped = None
        return bring_by_host(self, sizes, fill)

    def add_up(self, values: torch.Tensor) -> RankSum:
        self._sum = _LinkSum(self._linked, self, values, after=self._sum)
        return self._sum

    def abandon(self, error: BaseException | None = None) -> None:
        link, self._link, self._over = self._link, None, True
        self._ended_by = self._ended_by or error
        if self._mapped is not None:
            self._mapped.close()
        if link is not None:
            link.close(reason=b"" if error is None else encode_error(error))

    def leave(self, error: BaseException) -> None:
        """See ``Ranks.leave``; other threads of this rank must not be at a call."""
        if is_told(error):
            return
        told(error)
        try:
            self._place.leave(encode_error(error), is_at_call=self._is_at_call)
        except LinkError as failure:
            _log.warning("the other ranks learn late why this one has left: %s", failure)
        self._is_at_call = False
        self.abandon(error)

    def close(self) -> None:
        self.abandon()
        if self._at is None:
            return
        with contextlib.suppress(LinkError):
            self._at.close()
        self._slots.discard(self._slot)
        self._at = None

    @property
    def _place(self) -> MeetingPlace:
        if self._at is None:
            # The application's store, under a name of our own: these ranks are one job.
            whole = dist.distributed_c10d._get_default_store()
            self._slots = _SLOTS.setdefault(whole, {}).setdefault(
                f"{self._name}/{self.rank}", set()
            )
            # Publishers come one after the other, or are used beside each other.
            self._slot = next(slot for slot in itertools.count() if slot not in self._slots)
            self._slots.add(self._slot)
            store = PrefixStore(f"{self._name}/{self._slot}", whole)
            self._at = MeetingPlace(store, self.rank, self.size)
        return self._at

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
            raise told(self._ended_by) from error

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


def _ended_at(ended: CallEndedError) -> WeftError:
    """Return the error of a call that another rank does not come to."""
    error = decode_error(ended.reason, ended.rank)
    if error.reason == "RANK_GONE" or error.message.startswith("rank "):
        return error
    text = f"rank {ended.rank} of this trainer has ended the call: {error.message}"
    return error_from_reason(error.reason, text, error.metadata)


def _as_text(arguments: Mapping[str, object]) -> dict[str, str]:
    return {name: repr(value)[:_MAX_ARGUMENT_CHARS] for name, value in arguments.items()}


def _difference(calls: Sequence[Mapping[str, str]]) -> str:
    """Return in what calls differ from that of rank 0, and at which ranks; empty if in nothing."""
    ours, found = calls[SENDER], dict[str, list[int]]()
    for rank, theirs in enumerate(calls):
        for name in [name for name in ours if name in theirs]:
            own, other = ours[name], theirs[name]
            if own != other:
                found.setdefault(f"{name}={other} where rank 0 has {name}={own}", []).append(rank)
                break  # what follows from it differs, too
    return "; ".join(f"{_ranks(ranks)} {_has(ranks)} {what}" for what, ranks in found.items())


def _ranks(ranks: Sequence[int]) -> str:
    """Return a text that names ranks."""
    shown = ", ".join(map(str, ranks[:_MAX_RANKS_SHOWN]))
    more = len(ranks) - _MAX_RANKS_SHOWN
    return f"rank{'s' * (len(ranks) > 1)} {shown}" + (f" and {more} more" if more > 0 else "")


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _verdict(claims: Sequence[bytes]) -> bytes:
    """Return the verdict on all ranks' claims, in their order; the error of the lowest rank
    wins."""
    failed, flags_of_all, text = -1, 0, b""
    numbers = list[bytes]()
    for rank, claim in enumerate(claims):
        fails, number, flags = _CLAIM.unpack_from(claim)
        if fails and failed < 0:
            failed, text = rank, claim[_CLAIM.size :]
        numbers.append(number)
        flags_of_all |= flags
    unlike = [rank for rank, number in enumerate(numbers) if number != numbers[SENDER]]
    if unlike and failed < 0:
        text = _ranks(unlike).encode()
    return _VERDICT.pack(failed, bool(unlike), flags_of_all) + text


class _LinkSum:
    """``RankSum`` over the link, on a separate thread; it goes on, read or not.

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
        return self._link.closed or not self._thread.is_alive()

    def result(self) -> list[int]:
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
    return tensor.view(-1).view(torch.uint8).numpy().data


def _is_gone(error: BaseException) -> bool:
    return isinstance(error, PeerUnavailableError) and error.reason == "RANK_GONE"


# -- exchange of bytes between GPUs -------------------------------------------------

# Said in an offer's place by a rank that can make none.
_OFFER, _NO_OFFER = MESSAGES.encode(ExportDevice(0, 0, b"", b""))
_CANNOT = 1


class ExchangeMemory:
    """Memory for exchanges between the GPUs of one host, mapped once and used again by every push.

    Each rank puts its bytes into memory that the others have mapped, and they copy them from there.

    Args:
        link: Ranks, which agree and exchange their offers over the host.
    """

    def __init__(self, link: Ranks) -> None:
        self._link = link
        self._room = [0] * link.size
        self._own: torch.Tensor | None = None
        self._mappings: dict[int, DeviceMapping] = {}

    def bring(
        self, sizes: Sequence[int], fill: Callable[[torch.Tensor], None], device: torch.device
    ) -> list[torch.Tensor] | None:
        """See ``Ranks.bring``; return None, on every rank, if one cannot map another's memory."""
        own, can = self._link.rank, True
        if any(size > room for size, room in zip(sizes, self._room, strict=True)):
            can = self._make_room(sizes, device)
        if can and sizes[own]:
            assert self._own is not None
            fill(self._own[: sizes[own]])
            synchronize(device)
        # From here on all have filled theirs; nobody fills it again before all have come to the
        # next agreement, which is after their copies.
        if self._link.agree(flags=0 if can else _CANNOT):
            self.close()
            return None
        messages = []
        for rank, size in enumerate(sizes):
            if rank == own and self._own is not None:
                messages.append(self._own[:size])
                continue
            messages.append(torch.empty(size, dtype=torch.uint8, device=device))
            if size:
                self._mappings[rank].copy(0, messages[-1], lambda: None, record_event(device))
        return messages

    def close(self) -> None:
        """Unmap the others' memory, and free this rank's."""
        for mapping in self._mappings.values():
            with contextlib.suppress(OneSidedError):
                mapping.close()
        self._mappings, self._own, self._room = {}, None, [0] * self._link.size

    def _make_room(self, sizes: Sequence[int], device: torch.device) -> bool:
        """Allocate and map memory anew; return whether this rank could."""
        former = self._own  # freed once nobody has it mapped any more
        self.close()
        offer = _NO_OFFER
        try:
            if not is_gpu(device):
                raise OneSidedError(f"what it has lies on {device}")
            if sizes[self._link.rank]:
                self._own = allocate_block(sizes[self._link.rank], device)
                synchronize(device)
                _, offer = MESSAGES.encode(export_of(self._own)[0].offer()[0])
        except (OneSidedError, CapacityError, OSError) as error:
            _log.info("this rank can map no memory to others: %s", error)
        offers = [torch.zeros(len(offer), dtype=torch.uint8) for _ in range(self._link.size)]
        offers[self._link.rank] = torch.frombuffer(bytearray(offer), dtype=torch.uint8)
        self._link.exchange(offers)
        del former
        self._room = list(sizes)
        if (sizes[self._link.rank] and offer == _NO_OFFER) or not is_gpu(device):
            return False
        try:
            for rank, (size, each) in enumerate(zip(sizes, offers, strict=True)):
                if rank != self._link.rank and size:
                    self._mappings[rank] = DeviceMapping(_export(each, f"rank {rank}"), device)
        except PeerError as error:
            _log.info("this rank cannot map another's memory: %s", error)
            return False
        return True


def _export(offer: torch.Tensor, peer: str) -> ExportDevice:
    export = MESSAGES.decode(_OFFER, bytes(offer.numpy()), peer=peer)
    if not isinstance(export, ExportDevice) or not export.num_bytes:
        raise OneSidedError(f"{peer} cannot export device memory")
    return export


def is_gpu(device: torch.device) -> bool:
    """Return whether CUDA's IPC can map the device's memory."""
    return device.type == "cuda"
