"""Trainers' copies of what their pool committed last, found by tests that look at them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from trainer_side.deltas.committed_copy import CommittedCopy


class CommittedCopies:
    """Copies that are made in this process from now on, for as long as their trainer keeps them."""

    def __init__(self) -> None:
        self._made = weakref.WeakSet[CommittedCopy]()
        original = CommittedCopy.__init__

        def noted(copy: CommittedCopy, *arguments: Any, **settings: Any) -> None:
            original(copy, *arguments, **settings)
            self._made.add(copy)

        CommittedCopy.__init__ = noted  # type: ignore[method-assign]
        self._restore = lambda: setattr(CommittedCopy, "__init__", original)

    def close(self) -> None:
        """Note no more of them."""
        self._restore()

    @property
    def kept(self) -> CommittedCopy | None:
        """The one that is kept; None without one.

        Raises:
            ValueError: There are several.
        """
        gc.collect()  # an error may hold one that was given up
        copies = [*self._made]
        if not copies:
            return None
        (copy,) = copies
        return copy


def num_payloads(copy: CommittedCopy) -> int:
    """Return the number of a copy's payloads."""
    return len(copy.packing.plan.sent_by(copy.packing.sender))
