"""Progress of a publisher's pushes, on a terminal or to a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from weft_rl.progress import ShownProgress, shown
from weft_rl.transport.sender import Progress

UserProgress = Callable[[str, int, int], None]


class PushReporter:
    """Reporter of what the push under way waits for and of what it has sent; shows nothing."""

    @contextmanager
    def push(self, policy: str) -> Iterator[None]:
        """Report a push of ``policy`` inside the ``with``."""
        yield

    def waits_for(self, what: str) -> None:
        """Report what the push waits for now."""

    def reads(self, name: str, read_bytes: int, total_bytes: int) -> None:
        """Report how far a base, or the files of a checkpoint, are read to know its version by."""

    def sends(self, version: str, total_bytes: int) -> Progress | None:
        """Report that ``version`` was begun; return the function that its sender tells which part
        of its buckets is released, if anybody wants to know."""
        return None


def reporter_for(progress: Literal["auto"] | UserProgress | None) -> PushReporter:
    """Return a reporter to standard error for "auto", or to the given function, or to nobody."""
    if callable(progress):
        return _FunctionReporter(progress)
    return _StreamReporter() if progress == "auto" else PushReporter()


class _FunctionReporter(PushReporter):
    def __init__(self, function: UserProgress) -> None:
        self._function = function

    def reads(self, name: str, read_bytes: int, total_bytes: int) -> None:
        self._function(f"reading {name}", read_bytes, total_bytes)

    def sends(self, version: str, total_bytes: int) -> Progress:
        return lambda done, total: self._function(version, done, total)


class _StreamReporter(PushReporter):
    def __init__(self) -> None:
        self._progress = ShownProgress("")

    @contextmanager
    def push(self, policy: str) -> Iterator[None]:
        with shown(f"push of {policy}") as self._progress:
            yield

    def waits_for(self, what: str) -> None:
        self._progress.step(f"waiting for {what}")

    def reads(self, name: str, read_bytes: int, total_bytes: int) -> None:
        self._progress.step(f"reading {name}, to know the base's version by (once)", total_bytes)
        self._progress.done(read_bytes)

    def sends(self, version: str, total_bytes: int) -> Progress:
        progress = self._progress
        progress.title = f"push of {version}"

        def released(done: int, total: int) -> None:
            progress.step("sending", total_bytes)
            progress.done(total_bytes * done / total)

        return released
