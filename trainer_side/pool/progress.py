"""Progress of a push, on a terminal or to a function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, Protocol

from weft_rl.transport.sender import Progress

UserProgress = Callable[[str, int, int], None]


class ProgressReporter(Protocol):
    """Reporter that gives each push its progress function."""

    def push(self, version: str, total_bytes: int) -> AbstractContextManager[Progress]:
        """Return the progress function of one push of ``version``, for as long as the push
        takes."""


def reporter_for(progress: Literal["auto"] | UserProgress | None) -> ProgressReporter | None:
    """Return a bar on a terminal for "auto" (if rich is installed), else the given function, or
    None."""
    if callable(progress):
        return _Calls(progress)
    if progress == "auto" and sys.stderr.isatty():
        try:
            return _ProgressBar()
        except ImportError:
            pass
    return None


class _Calls:
    def __init__(self, function: UserProgress) -> None:
        self._function = function

    @contextmanager
    def push(self, version: str, total_bytes: int) -> Iterator[Progress]:
        yield lambda done, total: self._function(version, done, total)


class _ProgressBar:
    def __init__(self) -> None:
        import rich.progress  # noqa: F401 (fail here, not in the middle of a push)

    @contextmanager
    def push(self, version: str, total_bytes: int) -> Iterator[Progress]:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TransferSpeedColumn
        from rich.progress import Progress as RichProgress

        columns = (
            "[bold]{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        )  # fmt: skip
        with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(version, total=total_bytes)
            yield lambda done, total: bar.update(task, completed=total_bytes * done / total)
