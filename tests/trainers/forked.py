"""Ranks that are forked from a process that has imported their frameworks.

Torch, DeepSpeed, transformers and PEFT take 5 s of a core to import, at each rank of each test.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from weft_rl.cli.demo.processes import Process

_KILLED_SECONDS = 8.0


class ForkedRank(Process):
    """``python -m tests.trainers.process``, but for the imports: a forked process, with the methods
    of ``subprocess.Popen`` that its users call."""

    def __init__(self, name: str, args: Sequence[str], log_dir: Path, env: dict[str, str]) -> None:
        self._open_log(name, log_dir)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.trainers.preloaded"])
        theirs, self.stdin = (os.fdopen(fd, at) for fd, at in zip(os.pipe(), "rw", strict=True))
        self.stdout, ours = (os.fdopen(fd, at) for fd, at in zip(os.pipe(), "rw", strict=True))
        with theirs, ours:
            ends = [_passed(fd, read=fd == theirs.fileno()) for fd in
                    (theirs.fileno(), ours.fileno(), self._log.fileno())]  # fmt: skip
            self._process = context.Process(
                target=_run, args=(list(args), dict(env), ends), daemon=True
            )
            self._process.start()
            for end in ends:
                end.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        threading.Thread(target=self._read, daemon=True).start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = _KILLED_SECONDS) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


def _passed(fd: int, *, read: bool) -> Connection:
    """A file that can be given to a process."""
    return Connection(os.dup(fd), readable=read, writable=not read)


def _run(args: list[str], env: dict[str, str], ends: Sequence[Connection]) -> None:
    os.setsid()
    os.environ.update(env)
    sys.argv = ["process", *args]
    for at, end in enumerate(ends):
        os.dup2(end.fileno(), at)
        end.close()
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1)
    from tests.trainers.process import main

    main()
