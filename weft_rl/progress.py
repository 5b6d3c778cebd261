"""Progress of what takes long, for whoever waits for it: a line that changes on a terminal, plain
lines elsewhere."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol, TextIO

from weft_rl.units import shown_bytes, shown_seconds

#: A terminal's line is drawn as often, and first after so long: what is quick draws nothing.
_DRAW_SECONDS: Final = 0.25
#: The first plain line comes after so long, and then one at most in so long.
_FIRST_LINE_SECONDS, _LINE_SECONDS = 5.0, 10.0
#: An estimate of the time that is left needs this much of a step.
_LEAST_SECONDS: Final = 1.0

#: What a step that takes long calls, often, with how far it is and of how much.
OnProgress = Callable[[int, int], None]


def ignore_progress(done: int, total: int) -> None:
    """Ignore progress: an ``OnProgress`` for steps that nobody watches."""


#: Title of a replica's start in its log, where ``weft demo`` reads how far it is.
STARTING: Final = "the replica starts"

#: Name of a step, or a function that returns it whenever it is shown.
StepName = str | Callable[[], str]


@dataclass(frozen=True)
class Step:
    """A step of what is waited for, as far as it is known."""

    name: StepName
    began: float
    total_bytes: int = 0
    """Bytes of the step; 0 where they are not known."""
    done_bytes: float = 0.0

    def text(self, now: float) -> str:
        """Describe the step: its name, its bytes and the time that is left, or how long it takes.

        Args:
            now: Time, by the clock of ``began``.
        """
        name = self.name if isinstance(self.name, str) else self.name()
        seconds = now - self.began
        if not self.total_bytes:
            return f"{name} ({shown_seconds(seconds)})"
        done = f"{shown_bytes(self.done_bytes)} of {shown_bytes(self.total_bytes)}"
        if not self.done_bytes or seconds < _LEAST_SECONDS:
            return f"{name} {done}"
        rate = self.done_bytes / seconds
        left = max(0.0, self.total_bytes - self.done_bytes) / rate
        return f"{name} {done} at {shown_bytes(rate)}/s, {shown_seconds(left)} left"


class ShownProgress:
    """Progress of one thing that takes long.

    Args:
        title: Name of the thing, before each step.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._step = Step("", time.monotonic())

    def step(self, name: StepName, total_bytes: int = 0) -> None:
        """Go on to another step; nothing changes if it is the same one."""
        if (name, total_bytes) != (self._step.name, self._step.total_bytes):
            self._step = Step(name, time.monotonic(), total_bytes)

    def done(self, num_bytes: float) -> None:
        """Note how many bytes of the step are done."""
        step = self._step
        self._step = Step(step.name, step.began, step.total_bytes, num_bytes)

    def text(self) -> str:
        """Describe the step under way."""
        between = ": " if self._step.name else ""
        return f"{self.title}{between}{self._step.text(time.monotonic())}"

    @property
    def share(self) -> float | None:
        """Part of the step's bytes that is done; None where they are not known."""
        step = self._step
        return min(1.0, step.done_bytes / step.total_bytes) if step.total_bytes else None


class _View(Protocol):
    """Way to show progress."""

    first_seconds: float
    every_seconds: float

    def draw(self, progress: ShownProgress) -> None:
        """Show it as it is now; called on a thread of its own."""

    def end(self) -> None:
        """Remove what is not to stay; called once, after the last ``draw``."""


class LineView:
    """Plain lines to a function."""

    first_seconds, every_seconds = _FIRST_LINE_SECONDS, _LINE_SECONDS

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def draw(self, progress: ShownProgress) -> None:
        self._say(progress.text())

    def end(self) -> None:
        pass


class TerminalView:
    """Last line of a terminal, drawn by rich; gone at the end."""

    first_seconds = every_seconds = _DRAW_SECONDS

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live: Any = None

    def draw(self, progress: ShownProgress) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        line = Table.grid(padding=(0, 1))
        text = Text(progress.text(), no_wrap=True, overflow="ellipsis")
        share = progress.share
        line.add_row(*([] if share is None else [ProgressBar(1.0, share, width=10)]), text)
        if self._live is None:
            console = Console(file=self._stream)
            self._live = Live(line, console=console, transient=True, auto_refresh=False)
            self._live.start()
        self._live.update(line, refresh=True)

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()


@contextlib.contextmanager
def shown(title: str, stream: TextIO | None = None) -> Iterator[ShownProgress]:
    """Show the progress of what is done inside the ``with``; what is quick shows nothing.

    Args:
        title: Name of the thing.
        stream: Standard error by default. A terminal gets a line that changes, if rich is
            installed; anything else a plain line every 10 s, without control codes.
    """
    with _drawn(
        ShownProgress(title), _view_on(sys.stderr if stream is None else stream)
    ) as progress:
        yield progress


def _view_on(stream: TextIO | None) -> _View:
    """Return the way to show progress on a stream; there is none where a program has no standard
    error, or has put an object of its own in its place that can only be written to."""
    if stream is None:
        return LineView(lambda text: None)
    try:
        is_terminal = stream.isatty()
    except Exception:  # noqa: BLE001 (closed, or an object without that method)
        is_terminal = False
    can_draw = is_terminal and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
    if can_draw and importlib.util.find_spec("rich") is not None:
        return TerminalView(stream)
    return LineView(lambda text: print(text, file=stream, flush=True))


@contextlib.contextmanager
def said(title: str, say: Callable[[str], None]) -> Iterator[ShownProgress]:
    """Say, as ``shown`` does where there is no terminal, how far it is; for logs."""
    with _drawn(ShownProgress(title), LineView(say)) as progress:
        yield progress


@contextlib.contextmanager
def _drawn(progress: ShownProgress, view: _View) -> Iterator[ShownProgress]:
    stop = threading.Event()
    # An interrupt just before the ``try`` leaves the thread behind: it ends with the progress.
    args = (weakref.ref(progress), view, stop)
    thread = threading.Thread(target=_draw_on, args=args, name="weft-progress", daemon=True)
    thread.start()
    try:
        yield progress
    finally:
        stop.set()
        thread.join()
        with contextlib.suppress(Exception):  # as in ``_draw_on``
            view.end()


def _draw_on(progress: weakref.ref[ShownProgress], view: _View, stop: threading.Event) -> None:
    """Draw until told to stop, or nobody has the progress any more."""
    seconds = view.first_seconds
    while not stop.wait(seconds) and (found := progress()) is not None:
        seconds = view.every_seconds
        # A stream that is closed, or an object of the program's that lacks what files have: what
        # is shown must not fail because of that.
        with contextlib.suppress(Exception):
            view.draw(found)
        del found
