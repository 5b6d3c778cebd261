"""Progress: what it says, to whom, and how often."""

from __future__ import annotations

import gc
import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest

from tests.waits import stays, until
from weft_rl import progress as module
from weft_rl.progress import ShownProgress, Step, said, shown
from weft_rl.units import shown_bytes, shown_seconds

GB = 1_000_000_000


@pytest.mark.parametrize(
    ("step", "now", "text"),
    [
        (Step("waiting for a replica", 10.0), 22.4, "waiting for a replica (12 s)"),
        (Step(lambda: "r0 loads", 10.0), 200.0, "r0 loads (3 min)"),
        (Step("sending", 10.0, 16 * GB), 30.0, "sending 0 B of 16.0 GB"),
        (Step("sending", 10.0, 16 * GB, 4 * GB), 10.5, "sending 4.00 GB of 16.0 GB"),
        (
            Step("sending", 10.0, 16 * GB, 4 * GB),
            20.0,
            "sending 4.00 GB of 16.0 GB at 400 MB/s, 30 s left",
        ),
        (
            Step("sending", 10.0, 16 * GB, 16 * GB),
            20.0,
            "sending 16.0 GB of 16.0 GB at 1.60 GB/s, 0 s left",
        ),
    ],
)
def test_a_step_says_how_long_it_takes_or_will(step: Step, now: float, text: str) -> None:
    assert step.text(now) == text


def test_bytes_and_seconds_have_fitting_units() -> None:
    numbers = (0, 999, 1000, 9_994, 9_996, 99_960, 999_400, 999_600, 16.4e9, 1.2e12)
    assert [shown_bytes(number) for number in numbers] == [
        "0 B", "999 B", "1.00 kB", "9.99 kB", "10.0 kB", "100 kB", "999 kB", "1.00 MB", "16.4 GB",
        "1200 GB",
    ]  # fmt: skip
    assert [shown_seconds(number) for number in (0.4, 119.4, 119.6)] == ["0 s", "119 s", "2 min"]


def test_a_step_goes_on_until_another_begins() -> None:
    progress = ShownProgress("push of base@3")
    assert progress.text() == "push of base@3 (0 s)"
    progress.step("sending", GB)
    progress.done(GB // 2)
    progress.step("sending", GB)
    assert progress.share == 0.5
    assert progress.text() == "push of base@3: sending 500 MB of 1.00 GB"
    progress.step("waiting for the replicas to switch")
    assert progress.share is None


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines come often."""
    monkeypatch.setattr(module.LineView, "first_seconds", 0.2)
    monkeypatch.setattr(module.LineView, "every_seconds", 0.05)
    monkeypatch.setattr(module.TerminalView, "first_seconds", 0.05)
    monkeypatch.setattr(module.TerminalView, "every_seconds", 0.02)


@pytest.mark.usefixtures("soon")
def test_plain_lines_have_no_control_codes_and_what_is_quick_has_none() -> None:
    stream = io.StringIO()
    with shown("push of math", stream):
        pass
    assert stream.getvalue() == ""
    with shown("push of math", stream) as progress:
        progress.step("waiting for a replica")
        until(lambda: stream.getvalue().count("\n") >= 2)
    lines = stream.getvalue().splitlines()
    assert set(lines) == {"push of math: waiting for a replica (0 s)"}
    assert all(line.isprintable() for line in lines)
    # It ends with the block.
    stays(lambda: len(stream.getvalue().splitlines()) == len(lines), 0.2)


def test_plain_lines_are_seconds_apart() -> None:
    assert module.LineView.first_seconds >= 2.0
    assert module.LineView.every_seconds >= 5.0


@pytest.mark.usefixtures("soon")
def test_a_log_is_told_the_same() -> None:
    told: list[str] = []
    with said("starting", told.append) as progress:
        progress.step("importing vLLM")
        until(lambda: bool(told))
    assert told[0] == "starting: importing vLLM (0 s)"


@contextmanager
def _terminal() -> Iterator[tuple[TextIO, Callable[[], str]]]:
    """A terminal, and a function that returns what was written to it so far."""
    master, slave = os.openpty()
    os.set_blocking(master, False)
    written = bytearray()

    def read() -> str:
        try:
            while chunk := os.read(master, 65536):
                written.extend(chunk)
        except BlockingIOError:
            pass
        return written.decode()

    try:
        with open(slave, "w") as stream:
            yield stream, read
    finally:
        os.close(master)


@pytest.mark.usefixtures("soon")
def test_a_terminal_has_one_line_that_changes_and_is_gone_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    with _terminal() as (stream, read):
        with shown("push of base@3", stream) as progress:
            progress.step("sending", GB)
            progress.done(GB // 4)
            until(lambda: "250 MB of 1.00 GB" in read())
            progress.step("waiting for the replicas to switch")
            until(lambda: "to switch" in read())
        text = read()
    assert "\x1b[2K" in text.rpartition("to switch")[2], "the line is erased"
    assert "\n" not in text.replace("\r\n", "", 1), "it was one line all the time"
    assert "\x1b[?25h" in text, "the cursor is back"


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("lacking", ["rich", "TERM"])
def test_a_terminal_that_cannot_be_drawn_on_has_plain_lines(
    lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb" if lacking == "TERM" else "xterm")
    if lacking == "rich":
        monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with _terminal() as (stream, read), shown("push of math", stream) as progress:
        progress.step("waiting for a replica")
        until(lambda: "\n" in read())
        assert read().splitlines()[0] == "push of math: waiting for a replica (0 s)"


@pytest.mark.usefixtures("soon")
def test_progress_that_an_interrupt_left_behind_is_not_shown_for_ever() -> None:
    stream = io.StringIO()
    progress = ShownProgress("push of math")
    args = (module.weakref.ref(progress), module.LineView(stream.write), threading.Event())
    thread = threading.Thread(target=module._draw_on, args=args, daemon=True)
    thread.start()
    del progress
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_trainer_needs_no_rich() -> None:
    code = (
        "import sys; sys.modules['rich'] = None\n"
        "from trainer_side import Publisher\n"
        "with Publisher('127.0.0.1:1', trainer_id='a', connect_seconds=0.1) as publisher:\n"
        "    try: publisher.push_tensors({})\n"
        "    except Exception as error: print(error.reason)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stdout == "COORDINATOR_UNREACHABLE\n"
