"""What the page is of: the demo, or a coordinator alone; ended by their pids."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: The environment that the product runs in; these tests have one of their own.
PYTHON = ROOT / ".venv" / "bin" / "python"
_DEMO_SECONDS = 300.0
_START_SECONDS = 60.0
_END_SECONDS = 60.0


@dataclass(frozen=True)
class Served:
    """A coordinator that serves the page."""

    page: str
    """Where, with a / at the end."""
    coordinator: str

    def told(self) -> dict[str, Any]:
        """All of the JSON, as a first answer or several."""
        whole, cursor = dict[str, Any](), ""
        while True:
            with urllib.request.urlopen(f"{self.page}v1/pool.json?since={cursor}") as answer:
                told = json.load(answer)
            for name, value in told.items():
                if isinstance(value, list) and name != "under_way":
                    whole[name] = [*whole.get(name, []), *value]
                elif name == "members":
                    whole[name] = {**whole.get(name, {}), **value}
                else:
                    whole[name] = value
            if not told["is_more"]:
                return whole
            cursor = told["cursor"]

    def weft(self, *args: str) -> str:
        """What a command of the command line prints."""
        command = [str(PYTHON), "-m", "weft_rl", *args, "-c", self.coordinator]
        return subprocess.run(
            command, cwd=ROOT, env=_environment(), check=True, capture_output=True, text=True,
            timeout=60,
        ).stdout  # fmt: skip


@contextmanager
def demo(folder: Path) -> Iterator[Served]:
    """Run ``weft demo --keep`` until it pushes on."""
    with _running(folder, "demo", "--keep") as lines:
        coordinator = _next(lines, "coordinator listens on ", _DEMO_SECONDS).split(";")[0]
        page = _next(lines, "  a page to look at", _DEMO_SECONDS).strip()
        _next(lines, "the trainers push ", _START_SECONDS)
        yield Served(page, coordinator)


@contextmanager
def coordinator(folder: Path, *options: str) -> Iterator[Served]:
    """Run a coordinator without replicas."""
    listen = ("--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0")
    catalog = ("--catalog", str(folder / "weft.db"))
    with _running(folder, "coordinator", *listen, *catalog, *options) as lines:
        target = _next(lines, "listening on ", _START_SECONDS)
        yield Served(_next(lines, "page on ", _START_SECONDS), target)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "NO_COLOR": "1"}


@contextmanager
def _running(folder: Path, *args: str) -> Iterator[queue.Queue[str | None]]:
    command = [str(PYTHON), "-m", "weft_rl", *args]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=_environment(), stdout=subprocess.PIPE, stderr=log, text=True
        )
        lines: queue.Queue[str | None] = queue.Queue()
        reading = threading.Thread(target=_read, args=(process, lines))
        reading.start()
        try:
            yield lines
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            reading.join()
            assert process.stdout is not None
            process.stdout.close()


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line.rstrip("\n"))
    lines.put(None)


def _next(lines: queue.Queue[str | None], start: str, seconds: float) -> str:
    """What follows in the next line that begins so."""
    deadline = time.monotonic() + seconds
    while (line := lines.get(timeout=max(0.1, deadline - time.monotonic()))) is not None:
        if line.startswith(start):
            return line.removeprefix(start)
    raise AssertionError(f"it ended before it said {start!r}")
