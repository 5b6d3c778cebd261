"""Ranks that train with a pool, each a process that is told what to do; see ``rank.py``."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from weft_rl.cli.demo.processes import Process

_START_SECONDS = 120.0
_SECONDS = 180.0
_ENV = {
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu",
}  # fmt: skip


class Ranks:
    """The ranks of one trainer."""

    def __init__(self, processes: list[Process]) -> None:
        self._processes = processes

    def do(self, command: str, **arguments: Any) -> list[dict[str, Any]]:
        """Tell every rank; their answers, in order."""
        for process in self._processes:
            process.tell(json.dumps({"do": command, **arguments}))
        answers = [process.answer(_SECONDS) for process in self._processes]
        for process, answer in zip(self._processes, answers, strict=True):
            assert "crash" not in answer, f"{process.name}: {answer}\n{process.tail(40)}"
        return answers


@contextmanager
def running_ranks(work: Path, target: str, size: int) -> Iterator[Ranks]:
    """Ranks that wait for commands; they meet with the first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ExitStack() as stack:
        processes = []
        for rank in range(size):
            env = dict(_ENV)
            if size > 1:
                env |= {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
                    "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                }  # fmt: skip
            args = ("-m", "tests.integrations.trl.rank", target, str(work))
            process = Process(f"trainer-{size}-{rank}", args, work, env)
            stack.callback(process.stop)
            processes.append(process)
        for process in processes:
            process.line(lambda text: text == "ready", _START_SECONDS)
        yield Ranks(processes)
