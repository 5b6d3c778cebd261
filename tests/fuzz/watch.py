"""What no request may cause, seen from inside: a refusal that changes something, a
traceback."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from weft_rl.contract.errors import WeftError
from weft_rl.coordinator.decisions import step
from weft_rl.coordinator.decisions.state import effects, events
from weft_rl.coordinator.decisions.state.pool import PoolState
from weft_rl.coordinator.runtime import driver
from weft_rl.coordinator.runtime.key_value_store import KeyValueStore

#: Of the state: what was asked meanwhile, and is remembered whoever asked for it.
_CACHES = {"fits": {}, "fits_under_way": frozenset()}
_NOBODY = events.CallerGone(-1)


class Tracebacks(logging.Handler):
    """Keeps what is logged with a traceback, or as an error."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Take one record."""
        if record.exc_info or record.levelno >= logging.ERROR:
            self.found.append(logging.Formatter().format(record)[:4_000])


@contextmanager
def watching(found: list[str]) -> Iterator[None]:
    """Add to ``found`` whatever goes wrong inside the coordinator of this process."""
    tracebacks = Tracebacks()
    root = logging.getLogger()
    root.addHandler(tracebacks)
    changed = [
        mock.patch.object(KeyValueStore, name, _checked(getattr(KeyValueStore, name), found))
        for name in ("set", "add", "append", "compare_set", "delete")
    ]
    with ExitStack() as stack:
        stack.callback(root.removeHandler, tracebacks)
        stack.enter_context(mock.patch.object(driver, "step", _checked_step(found)))
        for patch in changed:
            stack.enter_context(patch)
        tracebacks.found = found
        yield


def _checked_step(found: list[str]) -> Callable[..., Any]:
    """``step``; a call that it refuses must leave what it would have been without it."""

    def checked(
        state: PoolState, event: events.Event, now: float
    ) -> tuple[PoolState, list[effects.Effect]]:
        after, todo = step.step(state, event, now)
        ticket = getattr(event, "ticket", None)
        is_refused = any(isinstance(e, effects.Refuse) and e.ticket == ticket for e in todo)
        if ticket is not None and is_refused:
            without, _ = step.step(state, _NOBODY, now)
            if _settled(after) != _settled(without):
                found.append(f"a refusal changed the state: {event}\n{_difference(after, without)}")
        return after, todo

    return checked


def _settled(state: PoolState) -> PoolState:
    return dataclasses.replace(state, **_CACHES)  # type: ignore[arg-type]


def _difference(left: PoolState, right: PoolState) -> str:
    names = [field.name for field in dataclasses.fields(PoolState) if field.name not in _CACHES]
    different = [name for name in names if getattr(left, name) != getattr(right, name)]
    return "\n".join(f"{n}: {getattr(left, n)} != {getattr(right, n)}"[:2_000] for n in different)


def _checked(method: Callable[..., Any], found: list[str]) -> Callable[..., Any]:
    """A method of a group's store; one that fails must leave its values."""

    def checked(self: KeyValueStore, *args: Any) -> Any:
        before = dict(self._values)
        try:
            return method(self, *args)
        except WeftError as error:
            if self._closed is None and dict(self._values) != before:
                found.append(f"a refusal changed a store: {method.__name__}{args}: {error}")
            raise

    return checked
