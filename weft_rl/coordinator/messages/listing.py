"""Lists of messages in which a broken entry does not spoil the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

_log = logging.getLogger(__name__)
_Value = TypeVar("_Value")
_Entry = TypeVar("_Entry")

_WHY = "it cannot be shown; the coordinator's log says why"


def each(
    values: Iterable[_Value],
    make: Callable[[_Value], _Entry],
    instead: Callable[[_Value, str], _Entry] | None = None,
) -> list[_Entry]:
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
    value: _Value, make: Callable[[_Value], _Entry], instead: Callable[[_Value, str], _Entry]
) -> _Entry:
    """Return the entry of one value, as ``each`` makes it."""
    return each([value], make, instead)[0]
