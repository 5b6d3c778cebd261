"""Real trainers of several ranks, each a process, told what to do by a test."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.trainers.forked import ForkedRank
from weft_rl.cli.demo.processes import Process

_START_SECONDS = 120.0
#: Of a rank.
ENV = {
    "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip


class RankedTrainer:
    """The ranks of one trainer; commands go to all, see ``tests.trainers.process.Rank``."""

    def __init__(self, processes: list[Process]) -> None:
        self.processes = processes

    def do(self, command: str, *, seconds: float = 90.0, **arguments: Any) -> list[dict[str, Any]]:
        """Tell every rank; their answers, in order."""
        self.tell(command, **arguments)
        answers = [process.answer(seconds) for process in self.processes]
        for process, answer in zip(self.processes, answers, strict=True):
            assert "crash" not in answer, f"{process.name}: {answer}\n{process.tail()}"
        return answers

    def tell(self, command: str, **arguments: Any) -> None:
        """Tell every rank without waiting."""
        for process in self.processes:
            process.tell(json.dumps({"do": command, **arguments}))

    def push(self, what: str, **arguments: Any) -> int:
        """A push that must succeed, at every rank alike; its version."""
        answers = self.do("push", what=what, **arguments)
        versions = {answer.get("version") for answer in answers}
        assert len(versions) == 1, answers
        assert None not in versions, answers
        return int(answers[0]["version"])


@contextmanager
def running_ranks(
    work: Path, target: str, size: int, env: dict[int, dict[str, str]] | None = None
) -> Iterator[RankedTrainer]:
    """Ranks that have met and wait for commands.

    Args:
        env: Further environment of some ranks; each is a process from the start then, because
            some of it may be read at import.
    """
    with ExitStack() as stack:
        processes = []
        for rank in range(size):
            args = (str(rank), str(size), str(work / "store"), target)
            process = (
                ForkedRank(f"rank-{rank}", args, work, ENV)
                if env is None
                else Process(
                    f"rank-{rank}", ("-m", "tests.trainers.process", *args), work,
                    ENV | env.get(rank, {}),
                )
            )  # fmt: skip
            stack.callback(process.stop)
            processes.append(process)
        for process in processes:
            process.line(lambda text: text == "ready", _START_SECONDS)
        yield RankedTrainer(processes)
