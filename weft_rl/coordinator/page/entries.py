"""Entries of a listing as JSON, each made anew only where what it shows has changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, TypeVar

from google.protobuf.message import Message

from weft_rl.rpc.codec import as_dict

#: Entries whose end is remembered; who has not heard of older ones begins anew.
MAX_GONE: Final = 1000

_V = TypeVar("_V")


def dumps(value: Any) -> str:
    """Encode a value as JSON without spaces."""
    return json.dumps(value, separators=(",", ":"))


class Entries(Generic[_V]):
    """Entries for the values of a mapping that is replaced and never mutated.

    Used on one thread. A look at all values may take several calls.

    Args:
        seen: Returns the part of a value that is shown, to be compared; quick.
        make: Makes the entry of a value.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        seen: Callable[[_V], Any],
        make: Callable[[_V], Message],
        clock: Callable[[], float],
    ) -> None:
        self._seen, self._make, self._clock = seen, make, clock
        self._known: dict[str, tuple[Any, str, int]] = {}
        """Shown part, entry and revision, by name, in the order of their changes."""
        self._gone: dict[str, int] = {}
        self._to_see: list[str] = []
        self.revision = 0
        self.forgotten = 0
        """Lowest revision whose readers can still be told what is gone."""

    def look(self, values: Mapping[str, _V], seconds: float) -> bool:
        """Look for changed values, for ``seconds`` at most; the next call continues.

        Returns:
            True if there is likely more: some changes were found, and not all values seen.
        """
        until, before = self._clock() + seconds, self.revision
        for name in self._known.keys() - values.keys():
            self._forget(name)
        if not self._to_see:
            self._to_see = list(values)
        while self._to_see:
            name = self._to_see.pop()
            if name in values:
                self._see(name, values[name])
            if self._clock() >= until:
                break
        return bool(self._to_see) and self.revision > before

    def since(self, revision: int) -> list[str]:
        """Return the entries newer than ``revision``; O(these)."""
        found = []
        for _, text, changed in reversed(self._known.values()):
            if changed <= revision:
                break
            found.append(text)
        return found

    def gone_since(self, revision: int) -> list[str]:
        """Return the names that are gone since ``revision``."""
        return [name for name, gone in self._gone.items() if gone > revision]

    def _see(self, name: str, value: _V) -> None:
        seen = self._seen(value)
        known = self._known.get(name)
        if known is not None and known[0] == seen:
            return
        text = dumps(as_dict(self._make(value)))
        self.revision += 1
        self._known.pop(name, None)
        self._gone.pop(name, None)
        self._known[name] = (seen, text, self.revision)

    def _forget(self, name: str) -> None:
        del self._known[name]
        self.revision += 1
        self._gone[name] = self.revision
        while len(self._gone) > MAX_GONE:
            self.forgotten = self._gone.pop(next(iter(self._gone)))
