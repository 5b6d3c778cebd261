"""Lists in messages: as much as one message may hold, and no entry that spoils the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from google.protobuf.message import Message

from weft_rl.contract.errors import InvalidRequestError
from weft_rl.contract.names import VersionVector
from weft_rl.rpc.codec import vector_to_proto
from weft_rl.v1 import types_pb2

_log = logging.getLogger(__name__)

#: Bound of a list in one message. Messages may have 4 MiB; lists stay far below, since a reader
#: decodes them at once, and the coordinator makes them between two decisions.
PAGE_BYTES: Final = 512 * 1024
# The tag and the length of an entry.
_ENTRY_BYTES = 6
_WHY = "it cannot be shown; the coordinator's log says why"

_Value = TypeVar("_Value")
_Any = TypeVar("_Any")
_Entry = TypeVar("_Entry", bound=Message)


class SharedVectors:
    """The distinct version vectors of one message, which its entries refer to.

    Args:
        most: Most adapters that each lists; None for all.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self.messages: list[types_pb2.VersionVector] = []
        self.num_bytes = 0
        self._places: dict[object, int] = {}

    def index(self, vector: VersionVector) -> int:
        """Return the index of a vector in ``messages``; add it if it is not there."""
        place = self._places.setdefault(vector.key, len(self.messages))
        if place == len(self.messages):
            self.messages.append(vector_to_proto(vector, self._most))
            self.num_bytes += self.messages[-1].ByteSize() + _ENTRY_BYTES
        return place


@dataclass(frozen=True)
class EntryPage(Generic[_Value, _Entry]):
    """The entries of a message, and the last value among them if more follow."""

    entries: list[_Entry]
    last: _Value | None


def cut(
    values: Sequence[_Value],
    make: Callable[[_Value], _Entry],
    *,
    max_bytes: int = PAGE_BYTES,
    page_size: int = 0,
    vectors: SharedVectors | None = None,
) -> EntryPage[_Value, _Entry]:
    """Return the first page of ``values``: at least one entry, else at most ``max_bytes``.

    Args:
        make: Returns the entry of a value.
        page_size: Most entries of the page; 0 for as many as there is room for.
        vectors: Vectors that ``make`` refers to; their bytes count, too.
    """
    entries: list[_Entry] = []
    num_bytes = 0
    for i, value in enumerate(values):
        if page_size and i == page_size:
            return EntryPage(entries, values[i - 1])
        entry = make(value)
        num_bytes += entry.ByteSize() + _ENTRY_BYTES
        if i and num_bytes + (vectors.num_bytes if vectors else 0) > max_bytes:
            return EntryPage(entries, values[i - 1])
        entries.append(entry)
    return EntryPage(entries, None)


def check_request(request: Any) -> None:
    """Refuse a request with a negative page size.

    Raises:
        InvalidRequestError: ``INVALID_PAGE``.
    """
    if request.page_size < 0:
        raise InvalidRequestError("page_size is negative", reason="INVALID_PAGE")


def invalid_token() -> InvalidRequestError:
    """Return the error for a page token that came from no response."""
    return InvalidRequestError("page_token is not from a response", reason="INVALID_PAGE")


def number_of(token: str) -> int | None:
    """Return the number that a page token holds; None for an empty token.

    Raises:
        InvalidRequestError: ``INVALID_PAGE``.
    """
    if not token:
        return None
    if not (token.isascii() and token.isdigit()):
        raise invalid_token()
    return int(token)


# -- entries that cannot be shown ------------------------------------------------


def each(
    values: Iterable[_Value],
    make: Callable[[_Value], _Any],
    instead: Callable[[_Value, str], _Any] | None = None,
) -> list[_Any]:
    """Return the entries of all values, whatever some of them hold.

    Args:
        make: Makes an entry; if it raises, the value is logged.
        instead: Makes the entry then, from the value and the reason why it is not whole;
            without it the entry is left out.
    """
    entries = []
    for value in values:
        try:
            entries.append(make(value))
        except Exception:  # noqa: BLE001 (whatever is wrong with one is no reason to hide all)
            _log.exception("an entry of a list cannot be shown: %.500r", value)
            if instead is not None:
                entries.append(instead(value, _WHY))
    return entries


def entry_of(
    value: _Value, make: Callable[[_Value], _Any], instead: Callable[[_Value, str], _Any]
) -> _Any:
    """Return the entry of one value, as ``each`` makes it."""
    return each([value], make, instead)[0]
