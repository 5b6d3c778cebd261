"""Containers of the standard library's kind: copies of frozen dataclasses with some fields changed,
in a fifth of the time, and a bounded mapping in which what was used last stays."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from dataclasses import replace as replace  # whose arguments mypy knows
else:
    from dataclasses import fields

    _T = TypeVar("_T")

    def replace(old: _T, /, **changes: Any) -> _T:
        """Copy an object with changed fields: ``dataclasses.replace`` for classes without ``slots``
        and ``__post_init__``.

        A push is some fifty steps of the coordinator's state, which has thirty fields: the
        standard library's way through ``__init__`` took a tenth of the coordinator's time.

        Raises:
            TypeError: There is no such field.
        """
        names = _names(type(old))
        before = old.__dict__  # with what ``cached_property`` keeps there, which is not copied
        new = object.__new__(type(old))
        after = new.__dict__
        for name in names:
            after[name] = before[name]
        after.update(changes)
        if len(after) != len(names):
            unknown = ", ".join(sorted(changes.keys() - set(names)))
            raise TypeError(f"{type(old).__name__} has no field {unknown}")
        return new

    @cache
    def _names(cls: type) -> tuple[str, ...]:
        has_slots = any(base.__dict__.get("__slots__") for base in cls.__mro__)  # ABC has none
        if hasattr(cls, "__post_init__") or has_slots:
            raise TypeError(f"{cls.__name__} is not replaced without its __init__")
        return tuple(field.name for field in fields(cls))


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
