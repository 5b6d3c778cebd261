"""A process that a test starts, waits for and ends by its pid."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType


class Running:
    """Started, and ready: it has printed the line that begins with ``ready``.

    Args:
        command: With arguments.
        cwd: Its working directory.
        ready: How that line begins; ``said`` is the rest of it.
    """

    def __init__(self, command: Sequence[str | Path], cwd: Path, *, ready: str) -> None:
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            command, cwd=cwd, env=kept, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ready):
                self.said = line.removeprefix(ready).strip()
                return
        raise RuntimeError(f"{command} ended with {self._process.wait()}")

    def __enter__(self) -> Running:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait(30)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
