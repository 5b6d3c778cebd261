"""The demo's processes: each with a log file, each ended by its pid."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from weft_rl.contract.errors import TransferTimeoutError, WeftError

_STOP_SECONDS = 8.0
#: Lines that are shown of a process that a signal has ended: a trace of native calls is long.
_CRASH_LINES = 100
#: First code of a child. It asks for SIGTERM when the thread that started it ends (prctl(2),
#: PR_SET_PDEATHSIG), and ends at once if that has happened already. The child asks itself: Python
#: code between fork and exec may hang or crash where gRPC has threads.
_LAUNCH = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def interrupt_once(signum: int, frame: object) -> None:
    """Handle a signal as Ctrl-C, and ignore it from then on.

    Linux sends one for each thread of a parent that ends: the second would interrupt the stopping
    of children.
    """
    signal.signal(signum, signal.SIG_IGN)
    raise KeyboardInterrupt


class Process(subprocess.Popen[str]):
    """Child process whose output goes to a log file and is read line by line.

    It gets SIGTERM when the thread that made it ends, even by SIGKILL.

    Args:
        within: Words of a command that becomes Python, for example in a network namespace.
    """

    def __init__(
        self,
        name: str,
        args: Sequence[str],
        log_dir: Path,
        env: dict[str, str],
        within: Sequence[str] = (),
    ) -> None:
        self._open_log(name, log_dir)
        super().__init__(
            [*within, sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *args],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env={**os.environ, **env}, start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _open_log(self, name: str, log_dir: Path) -> None:
        self.name = name
        self.log_path = log_dir / f"{name}.log"
        self._log = self.log_path.open("w")
        self._lines: queue.Queue[str] = queue.Queue()

    def line(self, wanted: Callable[[str], bool], timeout_seconds: float) -> str:
        """Return the next wanted line of its output.

        Raises:
            WeftError: It ended first; shows the end of its log.
            TransferTimeoutError: It did not print one in time.
        """
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            try:
                line = self._lines.get(timeout=0.1)
            except queue.Empty:
                if (code := self.poll()) is not None:
                    end = self.tail() if code >= 0 else self.tail(_CRASH_LINES)
                    raise WeftError(f"{self.name} ended early:\n{end}") from None
                continue
            if wanted(line):
                return line
        raise TransferTimeoutError(
            f"{self.name} was not ready in {timeout_seconds:.0f} s:\n{self.tail()}"
        )

    def line_after(self, prefix: str, timeout_seconds: float) -> str:
        """Return the rest of the next line that begins with ``prefix``."""
        line = self.line(lambda text: text.startswith(prefix), timeout_seconds)
        return line.removeprefix(prefix)

    def answer(self, timeout_seconds: float) -> dict[str, Any]:
        """Return the object in its next line of JSON."""
        line = self.line(lambda text: text.startswith("{"), timeout_seconds)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def tell(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self.stdin is not None
        self.stdin.write(line + "\n")
        self.stdin.flush()

    def ask(self, line: str, timeout_seconds: float) -> dict[str, Any]:
        """Write a line to its standard input and return its answer."""
        self.tell(line)
        return self.answer(timeout_seconds)

    def tail(self, num_lines: int = 15) -> str:
        """Return the end of its log."""
        self._log.flush()
        return "\n".join(self.log_path.read_text().splitlines()[-num_lines:])

    def last_after(self, text: str) -> str:
        """Return the rest of the last log line that has ``text``; empty if none."""
        lines = [line for line in self.log_path.read_text().splitlines() if text in line]
        return lines[-1].partition(text)[2] if lines else ""

    def signal(self, signum: int, timeout_seconds: float) -> int:
        """Send a signal and wait for the end; returns the exit code."""
        self.send_signal(signum)
        return self.wait(timeout_seconds)

    def kill(self) -> None:
        """End it by SIGKILL."""
        self.signal(signal.SIGKILL, _STOP_SECONDS)
        self.stop()

    def stop(self) -> None:
        """End it and, if need be, what it started: TERM first, KILL after 8 s."""
        if self.poll() is None:
            self.send_signal(signal.SIGTERM)
            try:
                self.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self.pid, signal.SIGKILL)
                self.wait()
        for stream in (self.stdin, self.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # it ended before it read all
                    stream.close()

    def _read(self) -> None:
        assert self.stdout is not None
        for line in self.stdout:
            self._log.write(line)
            self._lines.put(line.rstrip("\n"))
