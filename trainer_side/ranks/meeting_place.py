"""Meeting place of one trainer's ranks: what they tell each other in the application's store.

Ranks that are linked need no store. Where they are not, each writes here that it has come to a
call, or why it does not, and looks what the others have written. Nothing is counted by one rank
alone: the number of a call is the highest that any rank has for it, and rank 0 takes the number of
each meeting from the store. So a rank that has left a call out, or was interrupted, is in step
again as soon as it comes to the next.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from torch._C._distributed_c10d import PrefixStore

from trainer_side.ranks.link import CHECK_SECONDS, LinkError
from trainer_side.ranks.ranks import SENDER, encode_error
from weft_rl.contract.errors import PeerUnavailableError

#: Between the first two looks at the store.
_FIRST_PAUSE_SECONDS: Final = 0.001
#: By how much the clocks of two hosts may differ where a rank has met no other yet.
_CLOCK_SECONDS: Final = 1.0
_MEETING: Final = "meeting"
_MEETINGS: Final = "meetings"
_NOTE: Final = "note"


class CallEndedError(LinkError):
    """Error of a call that another rank does not come to; ``rank`` and ``reason`` say which, and
    why."""


@dataclass(frozen=True)
class _Record:
    """Record of one rank: whether it is at a call."""

    state: Literal["here", "away", "closed"]
    number: int
    """Number of that call, or of the last one."""
    by: str
    """Publisher that wrote it: a process may have several, one after the other."""
    attempt: str = ""
    """Random name of this coming to a call."""


@dataclass(frozen=True)
class _Note:
    """Note of a rank that does not come to a call, or has left it."""

    rank: int
    number: int
    by: str
    at: float
    """``time.time()`` of its writing."""
    reason: str
    missing: list[int] = field(default_factory=list)
    """Ranks that it is not for: those that had not come to the call, and come to the next."""


@dataclass(frozen=True)
class _MeetingRecord:
    """Meeting that rank 0 has called once all were there."""

    number: int
    attempts: list[str]
    """Attempt of each rank."""


class MeetingPlace:
    """Place where the ranks of one Publisher meet; used by one thread at a time.

    Args:
        store: Store of the application, under a prefix that all ranks have.
        rank: This rank.
        size: How many there are.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        #: Name of this Publisher among those that this process has made.
        self.by = secrets.token_hex(8)
        #: Number of the call that this rank is at, or was at last.
        self.number = 0
        #: Names of the Publishers that this one was linked with, of every rank.
        self._known: frozenset[str] = frozenset()
        self._made_at = time.time()
        self._attempt = ""
        self._meeting = 0
        #: Ranks that had not come when ``come`` was given up.
        self.missing: list[int] = []

    def met(self, number: int, known: Iterable[str]) -> None:
        """Note what all ranks have agreed on: the number of the call, and who they are."""
        self.number, self._known = number, frozenset(known)

    def come(self, deadline: float) -> Any:
        """Block until every rank is at a call; return a store, under a prefix that was never used,
        to connect by.

        Raises:
            CallEndedError: A rank does not come, and has said why.
            LinkError: A rank did not come in time, or the store is gone.
        """
        if not self._attempt:
            self._attempt = secrets.token_hex(8)
            self._write(str(self._rank), self._record("here"))
        call = self._call if self._rank == SENDER else self._await_call
        pause = _FIRST_PAUSE_SECONDS
        while not call():
            if time.monotonic() >= deadline:
                self.missing = self._absent() or [SENDER]
                who = ", ".join(map(str, self.missing))
                raise LinkError(f"rank {who} did not come in time")
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(1.5 * pause, CHECK_SECONDS)
        return PrefixStore(f"{_MEETINGS}/{self._meeting}", self._store)

    def check(self) -> None:
        """Check, while the ranks connect, that this meeting is still the one to come to.

        Raises:
            CallEndedError: A rank has left, and has said why.
            LinkError: A rank has left, or came again: all meet anew.
        """
        self._check_note()
        found = self._read(_MEETING, _MeetingRecord)
        if found is None or found.number != self._meeting:
            raise LinkError("the ranks meet anew")
        if self._rank == SENDER and self._attempts() != found.attempts:
            raise LinkError("a rank has left, or came again")

    def go_away(self) -> None:
        """Note that this rank is at no meeting any more, whether it is linked now or has failed."""
        if self._attempt:
            self._attempt = ""
            self._write(str(self._rank), self._record("away"))

    def give_up(self, reason: bytes, missing: Sequence[int]) -> None:
        """Tell the ranks that have come to the call that it has ended, since others have not.

        Raises:
            LinkError: The store is gone.
        """
        self._write(
            _NOTE,
            _Note(self._rank, self.number, self.by, time.time(), reason.decode(), list(missing)),
        )
        self._attempt = ""
        self._write(str(self._rank), self._record("away"))

    def leave(self, reason: bytes, *, is_at_call: bool) -> None:
        """Tell the other ranks that this one does not come to a call, or leaves it.

        Args:
            reason: Reason, as ``encode_error`` makes it.
            is_at_call: True if this rank has come to the call; else it would be its next.

        Raises:
            LinkError: The store is gone.
        """
        if not is_at_call:
            self.number = max([self.number + 1, *(self._next_of(each) for each in self._others())])
        told = self._note()
        if told is None or told.number < self.number:
            note = _Note(self._rank, self.number, self.by, time.time(), reason.decode())
            self._write(_NOTE, note)
        self._attempt = ""
        self._write(str(self._rank), self._record("away"))

    def close(self) -> None:
        """Note that this rank comes to no further call."""
        self._write(str(self._rank), self._record("closed"))

    def _call(self) -> bool:
        """Call the meeting if all ranks are there, at rank 0; return whether they are."""
        self._check_note()
        for rank in self._others_ranks:
            record = self._read(str(rank), _Record)
            if record is not None and record.state == "closed" and record.by in self._known:
                raise _closed(rank)
            if record is None or record.state != "here":
                return False
        attempts = self._attempts()
        if not all(attempts):
            return False
        try:
            self._meeting = int(self._store.add(_MEETINGS, 1))
        except RuntimeError as error:
            raise _gone(error) from error
        self._write(_MEETING, _MeetingRecord(self._meeting, attempts))
        return True

    def _await_call(self) -> bool:
        """Return whether rank 0 has called a meeting with this rank that it was not at yet."""
        self._check_note()
        found = self._read(_MEETING, _MeetingRecord)
        is_new = found is not None and found.number != self._meeting
        if is_new and found.attempts[self._rank] == self._attempt:
            self._meeting = found.number
            return True
        sender = self._read(str(SENDER), _Record)
        if sender is not None and sender.state == "closed" and sender.by in self._known:
            raise _closed(SENDER)
        return False

    def _check_note(self) -> None:
        note = self._note()
        if note is None or note.number < self.number:
            return
        record = self._read(str(note.rank), _Record)
        if record is not None and record.state == "here" and record.number > note.number:
            return  # it is at its next call, where this rank is awaited
        self.number = note.number
        raise CallEndedError(f"rank {note.rank} has left", note.rank, note.reason.encode())

    def _note(self) -> _Note | None:
        """Return the newest note of another rank, if it is of the Publishers that belong to this
        one."""
        note: _Note | None = self._read(_NOTE, _Note)
        if note is None or note.rank == self._rank or self._rank in note.missing:
            return None
        if note.by in self._known:
            return note
        if note.at < self._made_at - _CLOCK_SECONDS:
            return None
        # Of a Publisher that this one has not met: of one before it, if its rank has another now.
        record = self._read(str(note.rank), _Record)
        is_there = record is not None and record.by == note.by and record.state != "closed"
        return note if is_there else None

    @property
    def _others_ranks(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]

    def _absent(self) -> list[int]:
        """Return the other ranks that are at no call."""
        return [
            rank
            for rank, attempt in enumerate(self._attempts())
            if not attempt and rank != self._rank
        ]

    def _attempts(self) -> list[str]:
        records = [self._read(str(rank), _Record) for rank in range(self._size)]
        return [each.attempt if each and each.state == "here" else "" for each in records]

    def _others(self) -> list[_Record]:
        records = [self._read(str(rank), _Record) for rank in self._others_ranks]
        return [each for each in records if each is not None and each.by in self._known]

    @staticmethod
    def _next_of(record: _Record) -> int:
        """Return the number of the call that a rank is at, or comes to next."""
        return record.number + (record.state != "here")

    def _record(self, state: Literal["here", "away", "closed"]) -> _Record:
        return _Record(state, self.number, self.by, self._attempt)

    def _write(self, key: str, value: _Record | _Note | _MeetingRecord) -> None:
        try:
            self._store.set(key, json.dumps(asdict(value)))
        except RuntimeError as error:
            raise _gone(error) from error

    def _read(self, key: str, kind: type[Any]) -> Any:
        """Return what stands at a key, None if nothing does; never waits for it."""
        try:
            if not self._store.check([key]):
                return None
            return kind(**json.loads(self._store.get(key)))
        except RuntimeError as error:
            raise _gone(error) from error
        except (TypeError, ValueError) as error:
            raise LinkError(f"the store holds what no rank wrote, at {key}: {error}") from error


def _closed(rank: int) -> CallEndedError:
    error = PeerUnavailableError(
        f"rank {rank} of this trainer has closed its Publisher: close it on every rank, and make "
        "another on each",
        reason="RANK_GONE",
    )
    return CallEndedError(f"rank {rank} has closed its Publisher", rank, encode_error(error))


def _gone(error: RuntimeError) -> LinkError:
    return LinkError(f"the store of torch.distributed fails: {error}")
