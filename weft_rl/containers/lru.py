"""A bounded mapping: what was used last stays."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")


class LruMapping(Generic[_K, _V]):
    """A mapping that drops the least recently used beyond its bound; not thread-safe.

    Args:
        max_size: The bound, in entries.
        on_drop: Called with each value that is dropped, after it has left.
    """

    def __init__(self, max_size: int, on_drop: Callable[[_V], object] | None = None) -> None:
        self._max_size, self._on_drop = max_size, on_drop
        self._kept: OrderedDict[_K, _V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: _K) -> bool:
        return key in self._kept

    def get(self, key: _K) -> _V | None:
        """Return the value of a key, which counts as used now; None if there is none."""
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key]

    def put(self, key: _K, value: _V) -> None:
        """Add or replace a value, which counts as used now, and drop what is beyond the bound."""
        self._kept[key] = value
        self._kept.move_to_end(key)
        while len(self._kept) > self._max_size:
            self.drop_oldest()

    def items(self) -> list[tuple[_K, _V]]:
        """List all entries, the least recently used first."""
        return list(self._kept.items())

    def drop_oldest(self) -> None:
        """Drop the least recently used entry.

        Raises:
            KeyError: There is none.
        """
        _, value = self._kept.popitem(last=False)
        if self._on_drop is not None:
            self._on_drop(value)
