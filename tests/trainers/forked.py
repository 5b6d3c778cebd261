"""Ranks that are forked from a process that has imported their frameworks.

Torch, DeepSpeed, transformers and PEFT take 5 s of a core to import, at each rank of each test.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection

from weft_rl.cli.demo.processes import Process

_KILLED_SECONDS = 8.0


class ForkedRank(Process):
    """``python -m tests.trainers.process``, but for the imports."""

    def _launch(self, args: Sequence[str], env: Mapping[str, str]) -> None:
        fork = _Fork(args, env, self._log.fileno())
        self.stdin, self.stdout, self.pid = fork.stdin, fork.stdout, fork.pid
        self.poll, self.wait = fork.poll, fork.wait  # type: ignore[method-assign, assignment]
        self.send_signal = fork.send_signal  # type: ignore[method-assign]


class _Fork:
    """The part that ``Process`` uses of ``subprocess.Popen``."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], log: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.trainers.preloaded"])
        theirs, stdin = (os.fdopen(fd, mode) for fd, mode in zip(os.pipe(), "rw", strict=True))
        stdout, ours = (os.fdopen(fd, mode) for fd, mode in zip(os.pipe(), "rw", strict=True))
        self.stdin, self.stdout = stdin, stdout
        with theirs, ours:
            ends = [_passed(fd, read=fd == theirs.fileno()) for fd in
                    (theirs.fileno(), ours.fileno(), log)]  # fmt: skip
            self._process = context.Process(
                target=_run, args=(list(args), dict(env), ends), daemon=True
            )
            self._process.start()
            for end in ends:
                end.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float = _KILLED_SECONDS) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a rank", timeout)
        return self._process.exitcode

    def send_signal(self, signum: int) -> None:
        os.kill(self.pid, signum)


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
